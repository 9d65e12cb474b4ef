"""A slow, literal reading of the admission rules: lists and exact fractions, no queue, no counter that is kept.

Nothing of `sidecar.scheduling` is used here. Whatever the page says is computed anew from the list of all requests ever
submitted, so that a mistake in one of the scheduler's running figures cannot be repeated here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from sidecar.policy.rules import PoolRules, Shares, pool_rules


@dataclass(frozen=True)
class Policy:
    """A pool as an operator states it. None is an unbounded dimension, or no aging."""

    capacity: tuple[int | None, int | None]
    tiers: tuple[Shares, ...]
    promote_after_us: int | None = None
    ceiling: int = 0
    max_preemptions: int = 0

    def rules(self) -> PoolRules:
        tokens, requests = self.capacity
        return pool_rules(
            tokens=tokens,
            requests=requests,
            tiers=self.tiers,
            promote_after_us=self.promote_after_us,
            ceiling=self.ceiling,
            max_preemptions=self.max_preemptions,
        )


@dataclass
class Request:
    """One request, from its submission to the end of time. `state` is waiting, held, settled or canceled.

    `returns` are the moments at which it was preempted and waited again; `chosen` is so from the choice until then.
    """

    id: str
    tier: int
    tenant: str
    weight: int
    tokens: int
    requests: int
    arrived_us: int
    number: int
    admissions_before: int
    start: Fraction | float
    finish: Fraction | float
    state: str = "waiting"
    held_tokens: int = 0
    kept: bool = False
    chosen: bool = False
    returns: tuple[int, ...] = ()


class Answer(NamedTuple):
    """What an admission must be reported as."""

    id: str
    queue_wait_us: int
    starvation_us: int
    served_ahead: tuple[int, ...]
    level: int


class Oracle:
    """The rules by the page. `divide` is Fraction for exact tags, or division of doubles as the pools do it."""

    def __init__(self, policy: Policy, divide: Callable[[int, int], Fraction | float] = Fraction) -> None:
        self.policy = policy
        self.divide = divide
        self.submitted: list[Request] = []
        self.admitted: list[tuple[Request, int, int]] = []  # who, when, and how many tokens
        self.virtual: dict[int, Fraction | float] = {}
        self.finish: dict[tuple[int, str], Fraction | float] = {}

    # What happens to a pool.

    def submit(
        self,
        id: str,
        *,
        tier: int,
        tokens: int,
        now_us: int,
        requests: int = 1,
        tenant: str = "",
        weight: int = 1,
    ) -> Request:
        start = max(self.virtual.get(tier, 0), self.finish.get((tier, tenant), 0))
        finish = start + self.divide(tokens, weight)
        self.finish[tier, tenant] = finish
        number, before = len(self.submitted), len(self.admitted)
        request = Request(id, tier, tenant, weight, tokens, requests, now_us, number, before, start, finish)
        self.submitted.append(request)
        return request

    def settle(self, id: str) -> bool:
        return self._move(id, "held", "settled") is not None

    def cancel(self, id: str) -> bool:
        request = self._move(id, "waiting", "canceled")
        if request is not None:
            self._start_afresh_where_nobody_waits(request.tier)
        return request is not None

    def resize(self, id: str, tokens: int) -> bool:
        for request in self.held():
            if request.id == id:
                request.held_tokens = tokens
                return True
        return False

    def dispatch(self, now_us: int) -> list[Answer]:
        answers = []
        while (first := self.first(now_us)) is not None and self.fits(first, now_us):
            answers.append(self.admit(first.id, now_us))
        return answers

    def admit(self, id: str, now_us: int) -> Answer:
        """Makes a waiting request a lease, whether the rules would or not."""
        request = next(request for request in self.waiting() if request.id == id)
        answer = self.answer(request, now_us)
        request.state, request.held_tokens = "held", request.tokens
        self.virtual[request.tier] = request.start
        self.admitted.append((request, now_us, request.tokens))
        self._start_afresh_where_nobody_waits(request.tier)
        return answer

    def keep(self, id: str) -> bool:
        """A lease is never preempted any more. Whether it had been chosen."""
        request = next((request for request in self.held() if request.id == id), None)
        if request is None:
            return False
        request.kept, was_chosen, request.chosen = True, request.chosen, False
        return was_chosen

    def requeue(self, id: str, now_us: int) -> bool:
        """A victim waits again, before everybody of its tier who came after it."""
        if not any(request.id == id and request.chosen for request in self.held()):
            return False
        request = self._move(id, "held", "waiting")
        request.tokens, request.chosen, request.returns = request.held_tokens, False, (*request.returns, now_us)
        request.start = request.finish = self.virtual.get(request.tier, 0)
        return True

    # The words of the page.

    def waiting(self, tier: int | None = None) -> list[Request]:
        return [r for r in self.submitted if r.state == "waiting" and tier in (None, r.tier)]

    def held(self) -> list[Request]:
        return [request for request in self.submitted if request.state == "held"]

    def used(self, tier: int | None = None) -> tuple[int, int]:
        """U of a tier, or the sum over all of them, in tokens and in requests."""
        mine = [request for request in self.held() if tier in (None, request.tier)]
        return sum(request.held_tokens for request in mine), sum(request.requests for request in mine)

    def reserve(self, tier: int) -> tuple[int | None, int | None]:
        return self._of_capacity(lambda c: math.ceil(self.policy.tiers[tier].reserve * c))

    def headroom(self, tier: int) -> tuple[int | None, int | None]:
        shares = self.policy.tiers[tier]
        return self._of_capacity(lambda c: math.floor((1 - shares.lend) * shares.reserve * c))

    def limit(self, tier: int) -> tuple[int | None, int | None]:
        return self._of_capacity(lambda c: math.floor(self.policy.tiers[tier].limit * c))

    def is_below_its_reserve(self, tier: int) -> bool:
        if self.policy.tiers[tier].always_first:
            return True
        return all(r is None or u < r for u, r in zip(self.used(tier), self.reserve(tier), strict=True))

    def aged_level(self, request: Request, now_us: int) -> Fraction:
        level = Fraction(request.tier)
        if self.policy.promote_after_us is None or level <= self.policy.ceiling:
            return level
        risen = Fraction(now_us - request.arrived_us, self.policy.promote_after_us)
        return max(level - risen, Fraction(self.policy.ceiling))

    # The four rules.

    def heads(self) -> list[Request]:
        """The next ticket of every tier where one waits: smallest start tag, then arrival, then submission."""
        tiers = [self.waiting(tier) for tier in range(len(self.policy.tiers))]
        return [min(tier, key=lambda r: (r.start, r.arrived_us, r.number)) for tier in tiers if tier]

    def is_candidate(self, request: Request) -> bool:
        if self.policy.tiers[request.tier].limit >= 1:
            return True
        wanted = zip(self.used(request.tier), (request.tokens, request.requests), self.limit(request.tier), strict=True)
        return all(most is None or used + size <= most for used, size, most in wanted)

    def first(self, now_us: int) -> Request | None:
        candidates = [head for head in self.heads() if self.is_candidate(head)]
        return min(candidates, default=None, key=lambda head: self._place(head, now_us))

    def room(self, request: Request, now_us: int) -> tuple[int | None, int | None]:
        """What rule 2 leaves for a ticket, in each dimension. None where the pool is unbounded."""
        level = self.aged_level(request, now_us)
        owed_to = [q for q in range(len(self.policy.tiers)) if q < level and q != request.tier]
        return tuple(
            capacity
            if capacity is None
            else capacity
            - self.used()[dimension]
            - sum(max(0, self.headroom(q)[dimension] - self.used(q)[dimension]) for q in owed_to)
            for dimension, capacity in enumerate(self.policy.capacity)
        )

    def fits(self, request: Request, now_us: int) -> bool:
        sizes = (request.tokens, request.requests)
        return all(room is None or size <= room for size, room in zip(sizes, self.room(request, now_us), strict=True))

    # Preemption.

    def preempt(self, now_us: int) -> list[str]:
        """Whom the first in order takes room from, beside those who were chosen before."""
        first = self.first(now_us)
        if first is None or not self.has_waited_long_enough(first, now_us):
            return []
        leaving = [request for request in self.held() if request.chosen]
        chosen: list[Request] = []
        for lease in self.takeable_for(first, now_us):
            if self.fits_without([*leaving, *chosen], first, now_us):
                break
            if not self.is_below_without([*leaving, *chosen, lease], lease.tier):
                chosen.append(lease)
        if not self.fits_without([*leaving, *chosen], first, now_us):
            return []
        for lease in reversed(chosen):
            others = [other for other in chosen if other is not lease]
            if self.fits_without([*leaving, *others], first, now_us):
                chosen = others
        for lease in chosen:
            lease.chosen = True
        return [lease.id for lease in chosen]

    def has_waited_long_enough(self, request: Request, now_us: int) -> bool:
        preempt_after_us = self.policy.tiers[request.tier].preempt_after_us
        return preempt_after_us is not None and now_us >= request.arrived_us + preempt_after_us

    def takeable_for(self, first: Request, now_us: int) -> list[Request]:
        """Leases that may be preempted for a ticket if their tier can spare them, in the order they are asked."""
        order = {request.id: place for place, (request, *_) in enumerate(self.admitted)}  # the latest place counts
        found = [
            lease
            for lease in self.held()
            if lease.tier > first.tier
            and self.policy.tiers[lease.tier].preemptible
            and not lease.kept
            and not lease.chosen
            and len(lease.returns) < self.policy.max_preemptions
            and self.could_come_back(lease)
            and not any(self._is_before(other, first, now_us) for other in (lease, *self.next_of(lease.tier)))
        ]
        return sorted(found, key=lambda lease: (lease.tier, order[lease.id]), reverse=True)

    def next_of(self, tier: int) -> list[Request]:
        return [head for head in self.heads() if head.tier == tier]

    def could_come_back(self, lease: Request) -> bool:
        """Whether it could be admitted to the pool if nobody else was in it, as important as it could ever be."""
        highest = lease.tier
        if self.policy.promote_after_us is not None and self.policy.ceiling < lease.tier:
            highest = self.policy.ceiling
        for dimension, size in enumerate((lease.held_tokens, lease.requests)):
            capacity = self.policy.capacity[dimension]
            owed = sum(self.headroom(q)[dimension] or 0 for q in range(highest))
            if capacity is not None and size > min(capacity - owed, self.limit(lease.tier)[dimension]):
                return False
        return True

    def fits_without(self, gone: list[Request], request: Request, now_us: int) -> bool:
        with self._without(gone):
            return self.fits(request, now_us)

    def is_below_without(self, gone: list[Request], tier: int) -> bool:
        with self._without(gone):
            return self.is_below_its_reserve(tier)

    @contextmanager
    def _without(self, gone: list[Request]) -> Iterator[None]:
        for request in gone:
            request.state = "gone"
        yield
        for request in gone:
            request.state = "held"

    def _is_before(self, other: Request, first: Request, now_us: int) -> bool:
        """Whether another, whose tier has its reserve, is before a ticket in order."""
        return (1, *self._place(other, now_us)[1:]) < self._place(first, now_us)

    # What a wait is reported as.

    def overtaken_at_us(self, request: Request) -> int | None:
        """The first admission of a ticket that arrived later while it waited, or the moment it was first preempted."""
        mine = next((place for place, (other, *_) in enumerate(self.admitted) if other is request), len(self.admitted))
        before = [at_us for other, at_us, _ in self.admitted[:mine] if other.number > request.number]
        return min([*before[:1], *request.returns[:1]], default=None)

    def answer(self, request: Request, now_us: int) -> Answer:
        overtaken_at_us = self.overtaken_at_us(request)
        since = self.admitted[request.admissions_before :]
        meanwhile = [(other.tier, tokens) for other, _, tokens in since if other is not request]
        return Answer(
            id=request.id,
            queue_wait_us=now_us - request.arrived_us,
            starvation_us=0 if overtaken_at_us is None else now_us - overtaken_at_us,
            served_ahead=tuple(
                sum(tokens for of, tokens in meanwhile if of == tier) for tier in range(len(self.policy.tiers))
            ),
            level=math.ceil(self.aged_level(request, now_us)),
        )

    def overtakes(self, request: Request, now_us: int) -> dict[int, str]:
        """The other tiers whose head had come before a request that is first in order now, and why it is first."""
        before = (request.arrived_us, request.number)
        heads = [h for h in self.heads() if h.tier != request.tier and (h.arrived_us, h.number) < before]
        return {head.tier: self._why_first(request, head, now_us) for head in heads}

    def _why_first(self, request: Request, head: Request, now_us: int) -> str:
        if not self.is_candidate(head):
            return "limit"
        if self.is_below_its_reserve(request.tier) and not self.is_below_its_reserve(head.tier):
            return "always_first" if self.policy.tiers[request.tier].always_first else "reserve"
        return "level" if self.aged_level(request, now_us) < self.aged_level(head, now_us) else "nothing"

    def _place(self, head: Request, now_us: int) -> tuple:
        below = self.is_below_its_reserve(head.tier)
        return (0 if below else 1, self.aged_level(head, now_us), head.arrived_us, head.number)

    def _of_capacity(self, share: Callable[[int], int]) -> tuple[int | None, int | None]:
        return tuple(None if capacity is None else share(capacity) for capacity in self.policy.capacity)

    def _move(self, id: str, before: str, after: str) -> Request | None:
        for request in self.submitted:
            if request.id == id and request.state == before:
                request.state = after
                return request
        return None

    def _start_afresh_where_nobody_waits(self, tier: int) -> None:
        if not self.waiting(tier):
            self.virtual.pop(tier, None)
            self.finish = {key: tag for key, tag in self.finish.items() if key[0] != tier}
