"""Requests in virtual time before the product's decisions: clients give up, retry, are preempted; engines abort late.

The ledger knows no clock, so an hour of attacks takes seconds. `Simulation` does what a pool does around it: it refuses
what is larger than the tier accepts, decides after every change, takes back, and wakes at `next_change_us`.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import count
from typing import Protocol

from benchmarks.decisions import ENGINE, Decided, Decisions
from sidecar.policy.rules import UNLIMITED, PoolRules, Shares, TierRules, largest_request
from sidecar.pools import calls
from sidecar.pools.calls import EngineView
from sidecar.pools.engines import NORMAL_SPEED, WEIGHT_PERCENT
from sidecar.scheduling.amounts import UNBOUNDED
from sidecar.scheduling.figures import Rules
from sidecar.scheduling.tickets import Ticket

SECOND_US = 1_000_000
ABORT_US = 100_000
"""How long an engine takes to release a preempted request: vLLM's figure."""


class Decides(Protocol):
    """See `Decisions`. Tests play schedulers that must not pass."""

    def submit(self, ticket: Ticket) -> None: ...
    def cancel(self, ticket_id: str, now_us: int) -> None: ...
    def settle(self, ticket_id: str, now_us: int) -> None: ...
    def requeue(self, ticket_id: str, now_us: int) -> None: ...
    def cap(self, requests: int, for_us: int, now_us: int) -> None: ...
    def decide(self, now_us: int) -> Decided: ...
    def next_change_us(self) -> int | None: ...


@dataclass(slots=True)
class Request:
    """One request, and how it went. Times in microseconds of virtual time; None where that never happened.

    Its client gives up after `patience_us` without an admission. `waited_us` ends at the first admission.
    """

    tier: int
    tokens: int
    held_us: int
    tenant: str = "someone"
    requests: int = 1
    patience_us: int | None = None
    came_us: int = -1
    admitted_us: int | None = None
    ended_us: int | None = None
    gave_up_us: int | None = None
    preemptions: int = 0
    on_admitted: Callable[[], None] | None = None
    on_over: Callable[[], None] | None = None

    def waited_us(self, now_us: int) -> int:
        """How long it waited for its first admission, or has waited so far."""
        ends = (self.admitted_us, self.gave_up_us, now_us)
        return next(end for end in ends if end is not None) - self.came_us


class Overfilled(Exception):
    """More is held than the pool has."""


@dataclass(slots=True)
class Use:
    """How much of the pool is held over time: the larger of both dimensions' shares, in steps.

    Raises Overfilled where that is more than the pool: a scheduler that admits everything lets no one wait.
    """

    rules: PoolRules
    steps: list[tuple[int, float]] = field(default_factory=lambda: [(0, 0.0)])
    tokens: int = 0
    requests: int = 0

    def hold(self, now_us: int, tokens: int, requests: int) -> None:
        """Books a change."""
        self.tokens += tokens
        self.requests += requests
        share = max(_share(self.tokens, self.rules.tokens), _share(self.requests, self.rules.requests))
        if share > 1:
            raise Overfilled(f"{self.tokens} tokens and {self.requests} requests are held, more than the pool has")
        self.steps.append((now_us, share))

    def mean(self, from_us: int, until_us: int) -> float:
        """The mean share that was held in a stretch of time."""
        return mean_of_steps(self.steps, from_us, until_us)


def _share(held: int, whole: int) -> float:
    return 0.0 if whole == UNLIMITED else held / whole


def mean_of_steps(steps: list[tuple[int, float]], from_us: int, until_us: int) -> float:
    """The mean over time of a value that changes in steps, which come in order of time."""
    total = 0.0
    ends = [at_us for at_us, _ in steps[1:]] + [until_us]
    for (begin_us, value), end_us in zip(steps, ends, strict=True):
        total += value * max(0, min(end_us, until_us) - max(begin_us, from_us))
    return total / (until_us - from_us)


class Simulation:
    """One pool in virtual time. Actions run at their moments; all of one moment run before the pool decides."""

    def __init__(self, rules: PoolRules, scheduler: Decides | None = None) -> None:
        self.rules = rules
        self.scheduler: Decides = scheduler or decisions(rules)
        self.use = Use(rules)
        self.now_us = 0
        self.sent: list[Request] = []
        self._by_id: dict[str, Request] = {}
        self._actions: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self._ids = count(1)
        self._change_us: int | None = None

    def at(self, at_us: int, action: Callable[[], None]) -> None:
        """Has something happen at a moment, not before now."""
        heapq.heappush(self._actions, (max(at_us, self.now_us), next(self._order), action))

    def send(self, request: Request) -> Callable[[], None] | None:
        """Sends a request now. What gives it up while it waits; None where it is larger than its tier accepts."""
        if not fits(self.rules, request):
            return None
        request.came_us = self.now_us
        self.sent.append(request)
        number = next(self._ids)
        ticket_id = str(number)
        self._by_id[ticket_id] = request
        self.scheduler.submit(
            Ticket(
                ticket_id,
                request.tier,
                request.tenant,
                request.tokens,
                request.requests,
                arrived_us=self.now_us,
                number=number,
            )
        )
        if request.patience_us is not None:
            self.at(self.now_us + request.patience_us, lambda: self._give_up(ticket_id))
        return lambda: self._give_up(ticket_id)

    def run(self, until_us: int) -> None:
        """Goes on to a moment."""
        while (next_us := self._next_us()) is not None and next_us <= until_us:
            self.now_us = next_us
            while self._actions and self._actions[0][0] <= next_us:
                heapq.heappop(self._actions)[2]()
            self._decide()
        self.now_us = until_us

    def waits_s(self, tier: int, from_us: int, until_us: int) -> list[float]:
        """The waits of a tier's requests that came in a stretch of time; one that still waits counts as it is now."""
        return [
            request.waited_us(self.now_us) / SECOND_US
            for request in self.sent
            if request.tier == tier and from_us <= request.came_us < until_us
        ]

    def _next_us(self) -> int | None:
        moments = [self._actions[0][0]] if self._actions else []
        if self._change_us is not None:
            moments.append(self._change_us)
        return min(moments, default=None)

    def _decide(self) -> None:
        decided = self.scheduler.decide(self.now_us)
        for lease in decided.admitted:
            self._admitted(lease.ticket.id)
        for lease in decided.taken_back:
            self._abort(lease.ticket.id)
        self._change_us = self.scheduler.next_change_us()

    def _admitted(self, ticket_id: str) -> None:
        request = self._by_id[ticket_id]
        if request.admitted_us is None:
            request.admitted_us = self.now_us
        self.use.hold(self.now_us, request.tokens, request.requests)
        turn = request.preemptions
        self.at(self.now_us + request.held_us, lambda: self._end(ticket_id, turn))
        if request.on_admitted is not None:
            request.on_admitted()

    def _end(self, ticket_id: str, turn: int) -> None:
        request = self._by_id[ticket_id]
        if request.preemptions == turn:
            self.scheduler.settle(ticket_id, self.now_us)
            self.use.hold(self.now_us, -request.tokens, -request.requests)
            request.ended_us = self.now_us
            if request.on_over is not None:
                request.on_over()

    def _abort(self, ticket_id: str) -> None:
        request = self._by_id[ticket_id]
        turn = request.preemptions

        def released() -> None:
            if request.ended_us is None and request.preemptions == turn:
                request.preemptions += 1
                self.scheduler.requeue(ticket_id, self.now_us)
                self.use.hold(self.now_us, -request.tokens, -request.requests)

        self.at(self.now_us + ABORT_US, released)

    def _give_up(self, ticket_id: str) -> None:
        request = self._by_id[ticket_id]
        if request.admitted_us is None and request.gave_up_us is None:
            self.scheduler.cancel(ticket_id, self.now_us)
            request.gave_up_us = self.now_us
            if request.on_over is not None:
                request.on_over()


def decisions(rules: PoolRules) -> Decisions:
    """Those of the product, for one engine as large as the pool."""
    shares = tuple(_shares(rules, tier) for tier in rules.tiers)
    stated = Rules(
        shares, rules.promote_after_us, rules.ceiling, rules.max_preemptions, WEIGHT_PERCENT, rules.is_by_gain
    )
    engine = EngineView(ENGINE, rules.tokens, rules.requests, UNBOUNDED, NORMAL_SPEED, is_reachable=True)
    return Decisions(calls.LedgerRules.of(stated), [engine])


def _shares(rules: PoolRules, tier: TierRules) -> Shares:
    """A tier's shares of the pool, from its tokens."""
    return Shares(
        tier.name,
        Fraction(tier.reserve[0], rules.tokens),
        1 - Fraction(tier.headroom[0], tier.reserve[0] or 1),
        Fraction(tier.limit[0], rules.tokens),
        tier.always_first,
        tier.preemptible,
        tier.preempt_after_us,
    )


def fits(rules: PoolRules, request: Request) -> bool:
    """Whether its tier accepts a request of that size at all."""
    tokens, requests = largest_request(rules, request.tier)
    return request.tokens <= tokens and request.requests <= requests


@dataclass(frozen=True, slots=True)
class Traffic:
    """Ordinary requests of one tier: Poisson arrivals, log-normal sizes, leases between two times."""

    tier: int
    load: float
    median_tokens: int = 2_000
    sigma: float = 1.0
    most_tokens: int = 16_000
    held_s: tuple[float, float] = (2.0, 10.0)
    tenants: int = 4

    def sizes(self, luck: random.Random) -> int:
        """One request's tokens."""
        return max(50, min(self.most_tokens, round(self.median_tokens * luck.lognormvariate(0, self.sigma))))

    def gaps_s(self, capacity: int, luck: random.Random) -> Iterator[float]:
        """The times between arrivals that ask for `load` of a pool of that many tokens."""
        sample = random.Random(1)
        mean_tokens = sum(self.sizes(sample) for _ in range(4_000)) / 4_000
        per_s = self.load * capacity / (mean_tokens * sum(self.held_s) / 2)
        while True:
            yield luck.expovariate(per_s)

    def start(self, simulation: Simulation, seed: int) -> None:
        """Sends them from now on, for as long as the simulation runs."""
        luck = random.Random(f"{seed}-{self.tier}")
        gaps_s = self.gaps_s(simulation.rules.tokens, luck)

        def arrive() -> None:
            held_us = round(luck.uniform(*self.held_s) * SECOND_US)
            tenant = f"{self.tier}-{luck.randrange(self.tenants)}"
            simulation.send(Request(self.tier, self.sizes(luck), held_us, tenant))
            simulation.at(simulation.now_us + round(next(gaps_s) * SECOND_US), arrive)

        simulation.at(simulation.now_us + round(next(gaps_s) * SECOND_US), arrive)


def us(seconds: float) -> int:
    """Whole microseconds."""
    return round(seconds * SECOND_US)
