"""Closed loops are found, and nothing else is taken for one."""

from __future__ import annotations

import heapq
import random

import pytest

from sidecar.admission.dry_run.engine_times import Arrivals
from sidecar.cluster.dry_run import FEWEST_ARRIVALS, MOST_BY_CHANCE


def played(arrivals_us: list[int], lasts_us: int) -> Arrivals:
    found = Arrivals()
    events = [(at_us, True) for at_us in arrivals_us] + [(at_us + lasts_us, False) for at_us in arrivals_us]
    for at_us, is_arrival in sorted(events):
        if is_arrival:
            found.arrived(at_us, is_crowded=True)
        else:
            found.ended(at_us)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_independent_clients_are_no_closed_loop(seed: int) -> None:
    luck, at_us, arrivals_us = random.Random(seed), 0.0, []
    for _ in range(300):
        at_us += luck.expovariate(8 / 1e6)
        arrivals_us.append(round(at_us))
    found = played(arrivals_us, 1_000_000)
    assert found.counted > FEWEST_ARRIVALS
    assert found.followed / found.counted < 0.4 < MOST_BY_CHANCE


@pytest.mark.parametrize("clients", [2, 10, 40])
def test_clients_that_send_when_they_were_answered_are_found(clients: int) -> None:
    luck, found = random.Random(clients), Arrivals()
    ends = [luck.randrange(100_000) for _ in range(clients)]
    heapq.heapify(ends)
    for number in range(400):
        end_us = heapq.heappop(ends)
        if number >= clients:
            found.ended(end_us)
        sent_us = end_us + luck.randrange(500, 3_000)
        found.arrived(sent_us, is_crowded=True)
        heapq.heappush(ends, sent_us + luck.randrange(500_000, 1_500_000))
    assert found.followed > MOST_BY_CHANCE * found.counted


def test_quiet_times_say_nothing() -> None:
    quiet = Arrivals()
    for number in range(200):
        quiet.ended(number * 1000)
        quiet.arrived(number * 1000 + 1, is_crowded=False)
    assert (quiet.counted, quiet.followed) == (0, 0)
