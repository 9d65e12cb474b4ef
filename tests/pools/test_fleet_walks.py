"""The script begins a walk anew a bounded number of times, and decides as one process does where it is cut short."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import redis

from sidecar.scheduling.claims import MOST_CLAIMANTS, MOST_NEW_CLAIMANTS
from tests.pools.fleet_scripted import GainTriplets, ScriptedFleet, ScriptedGainFleet, Triplets
from tests.pools.test_fleet_differential import everything_ends
from tests.pools.test_gain_fleet_differential import run
from tests.support.redis_servers import RedisServer

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduling"))

import scattered
from fleets import operate
from scattered import TENTHS, WithoutOracle, crowd, fill, let_wait, scatter
from test_fleet_walks import CUT_SHORT
from test_gain_oracle import by_gain

WALKS = "the-tests-walks"
BEGINS, COUNTS = "    pool.begin_walk()\n", f"    pool.begin_walk()\n    call('INCR', '{WALKS}')\n"
BOUND = "local MOST_NEW_CLAIMANTS = 4"
SCRIPTS: dict[str, type[ScriptedFleet]] = {"level": ScriptedFleet, "gain": ScriptedGainFleet}


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        yield client


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts that count their walks, and figures that fall."""
    monkeypatch.setattr("test_gain_fleet.figures", scattered.falling)
    for script in SCRIPTS.values():
        assert script.source is not None
        assert BEGINS in script.source
        monkeypatch.setattr(script, "source", script.source.replace(BEGINS, COUNTS))


class Decided(WithoutOracle):
    """A decision of the scheduler and the script, who admit the same."""

    def dispatch(self: Any) -> list[Any]:
        self.clock.us = self.now_us
        said, self.said = self.said, []
        ours = self.scheduler.dispatch(self.now_us)
        self.reply = self.replica.call(*said)
        assert [it.ticket.id for it in ours] == [str(lease_id) for lease_id, _ in self.reply.grants]
        return ours


def play(client: Any, order: str, seed: int, steps: int) -> int:
    """Room that is scattered, then random operations. How many walks the call began that had the room first."""
    client.flushall()
    luck = random.Random(seed)
    kind = GainTriplets(by_gain(TENTHS, Fraction(1, 4)), seed=seed) if order == "gain" else Triplets(TENTHS)
    triplets = kind.open(client)
    crowd(triplets, luck, charged=order == "level")
    client.delete(WALKS)
    triplets.dispatch()
    walks = int(client.get(WALKS))
    for _ in range(3):
        triplets.dispatch()
    for _ in range(steps):
        operate(triplets, luck)
        triplets.dispatch()
    everything_ends(triplets)
    return walks


class Alone(Decided, GainTriplets):
    """A scheduler and the script by gain."""


class AloneByLevel(Decided, Triplets):
    """The same by level."""


@pytest.mark.parametrize("order", SCRIPTS)
def test_a_call_begins_no_more_walks_however_many_wait(client: Any, order: str) -> None:
    began = {}
    for waiting in (100, 400):
        client.flushall()
        alone = (Alone(by_gain(TENTHS, Fraction(1, 4))) if order == "gain" else AloneByLevel(TENTHS)).open(client)
        fill(alone, random.Random(1))
        let_wait(alone, random.Random(1), waiting, charged=order == "level")
        scatter(alone)
        client.delete(WALKS)
        alone.dispatch()
        began[waiting] = int(client.get(WALKS))
    assert began == dict.fromkeys(began, began[100])
    assert began[100] <= (1 + MOST_NEW_CLAIMANTS) * (1 + MOST_CLAIMANTS // MOST_NEW_CLAIMANTS)


@pytest.mark.parametrize(("order", "seeds"), CUT_SHORT.items())
def test_it_decides_as_one_process_does_where_a_walk_is_cut_short(
    client: Any, order: str, seeds: tuple[int, ...]
) -> None:
    assert MOST_CLAIMANTS < play(client, order, seeds[-1], 10) <= 3 * MOST_CLAIMANTS


@pytest.mark.parametrize("most", [0, 2])
def test_it_decides_as_one_process_does_where_nearly_every_walk_is_cut_short(
    client: Any, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    for module in ("fleet_oracle", "sidecar.scheduling.fleet_scheduler"):
        monkeypatch.setattr(f"{module}.MOST_NEW_CLAIMANTS", most)
    for script in SCRIPTS.values():
        assert script.source is not None
        assert BOUND in script.source
        monkeypatch.setattr(script, "source", script.source.replace(BOUND, f"local MOST_NEW_CLAIMANTS = {most}"))
    assert run(client, "any" if most else "hot", 1, 80).admitted


@pytest.mark.long
@pytest.mark.parametrize(
    ("right", "wrong", "first"),
    [
        (BOUND, "local MOST_NEW_CLAIMANTS = 3", ("gain", 2)),
        (BOUND, "local MOST_NEW_CLAIMANTS = 1000000", ("gain", 3)),
        ("if place then new_claimants = new_claimants + 1 end", "new_claimants = new_claimants + 1", ("level", 7)),
        ("looks_further = not is_full and", "looks_further = false and", ("level", 2)),
        ("pool.has_too_many = is_full", "pool.has_too_many = false", ("gain", 3)),
    ],
)
def test_another_bound_in_the_script_is_noticed(
    client: Any, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str, first: tuple[str, int]
) -> None:
    """The negative controls, each with the run that notices it at present; else another must."""
    for script in SCRIPTS.values():
        assert script.source is not None
        assert right in script.source
        monkeypatch.setattr(script, "source", script.source.replace(right, wrong))
    with pytest.raises(AssertionError):  # noqa: PT012
        for order, seed in (first, *product(SCRIPTS, range(8))):
            play(client, order, seed, 10)
