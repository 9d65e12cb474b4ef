"""Requests over virtual time: an event loop of arrivals, leases that end and aging, in front of any scheduler."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from sidecar.scheduling import Admission, Scheduler


class Arrival(NamedTuple):
    at_us: int
    id: str
    tier: int
    tokens: int
    held_us: int


@dataclass
class Outcome:
    """What became of everybody. A wait is known once a ticket is admitted; `left` had still to wait at the end.

    `ahead_tokens` is what waited in a ticket's own tier when it arrived.
    """

    waits_us: dict[str, int] = field(default_factory=dict)
    ahead_tokens: dict[str, int] = field(default_factory=dict)
    admitted: dict[int, list[Arrival]] = field(default_factory=dict)
    left: list[Arrival] = field(default_factory=list)
    ended_us: int = 0

    def waits_s(self, tier: int) -> list[float]:
        """The waits of a tier, shortest first."""
        return sorted(self.waits_us[arrival.id] / 1e6 for arrival in self.admitted.get(tier, []))

    def percentile_s(self, tier: int, percent: int) -> float:
        waits = self.waits_s(tier)
        return waits[min(len(waits) - 1, len(waits) * percent // 100)]

    def token_seconds(self, tier: int) -> float:
        """Tokens times the time they were held: a tier's share of the pool."""
        return sum(arrival.tokens * arrival.held_us / 1e6 for arrival in self.admitted.get(tier, []))


def simulate(scheduler: Scheduler, arrivals: Iterable[Arrival], until_us: int | None = None) -> Outcome:
    """Plays arrivals until no one is left, or until a moment."""
    todo = sorted(arrivals, key=lambda arrival: arrival.at_us)
    by_id = {arrival.id: arrival for arrival in todo}
    ends: list[tuple[int, str]] = []
    outcome = Outcome()
    position, change_us = 0, None
    while True:
        moments = [todo[position].at_us] if position < len(todo) else []
        moments += [ends[0][0]] if ends else []
        moments += [change_us] if change_us is not None else []
        if not moments or (until_us is not None and min(moments) > until_us):
            break
        now_us = outcome.ended_us = min(moments)
        while ends and ends[0][0] == now_us:
            scheduler.settle(heapq.heappop(ends)[1], now_us)
        while position < len(todo) and todo[position].at_us == now_us:
            arrival = todo[position]
            outcome.ahead_tokens[arrival.id] = scheduler.queued(arrival.tier)[0]
            scheduler.submit(arrival.id, tier=arrival.tier, tokens=arrival.tokens, now_us=now_us)
            position += 1
        for admission in scheduler.dispatch(now_us):
            _note(outcome, admission, by_id[admission.ticket.id], ends, now_us)
        change_us = scheduler.next_change_us(now_us)
    outcome.left = [arrival for arrival in todo[:position] if arrival.id not in outcome.waits_us]
    return outcome


def _note(outcome: Outcome, admission: Admission, arrival: Arrival, ends: list[tuple[int, str]], now_us: int) -> None:
    outcome.waits_us[arrival.id] = admission.wait.queue_wait_us
    outcome.admitted.setdefault(arrival.tier, []).append(arrival)
    heapq.heappush(ends, (now_us + arrival.held_us, arrival.id))
