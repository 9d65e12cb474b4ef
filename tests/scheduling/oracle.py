"""A slow, literal reading of the admission rules: lists and exact fractions, no queue, no counter that is kept.

Nothing of `sidecar.scheduling` is used here. Every figure is computed anew from the list of all requests, so that a
mistake in a running figure of the scheduler cannot be repeated here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

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
        return self.rules_of(*self.capacity)

    def rules_of(self, tokens: int | None, requests: int | None, prefill: int | None = None) -> PoolRules:
        """The rules of a pool of this size, for the scheduler under test."""
        return pool_rules(
            tokens=tokens,
            requests=requests,
            prefill=prefill,
            tiers=self.tiers,
            promote_after_us=self.promote_after_us,
            ceiling=self.ceiling,
            max_preemptions=self.max_preemptions,
            **self.order(),
        )

    def order(self) -> dict[str, Any]:
        """What the rules say of the order, where it is not that by level."""
        return {}


@dataclass
class Request:
    """One request, from its submission to the end of time. `state` is waiting, held, settled or canceled.

    `start` is None until it is its tenant's first. `excess` is how many whole reserves too much a turn gave it.
    `returns` are the moments at which it waited again; `chosen` is so from the choice of a victim until then.
    `preempted_us` is its first preemption. `handed_back` is the number of admissions before the last time that no
    engine took it, with its overtaking up to then; None where there was no such time.
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
    start: Fraction | float | None = None
    state: str = "waiting"
    held_tokens: int = 0
    admitted_us: int = 0
    excess: int = 0
    kept: bool = False
    chosen: bool = False
    returns: tuple[int, ...] = ()
    preempted_us: int | None = None
    handed_back: tuple[int, int | None] | None = None


ALWAYS_FIRST, INSIDE, TURN, OTHER = range(4)
"""The classes of rule 1, the first first."""

MOST_EXCESS = 1_000


class Answer(NamedTuple):
    """The report of an admission."""

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
        self.admitted: list[tuple[Request, int, int]] = []  # the request, the moment, and its tokens
        self.virtual: dict[int, Fraction | float] = {}
        self.finish: dict[tuple[int, str], Fraction | float] = {}
        self.owes_until_us: dict[int, int] = {}
        self.held_back_until_us = 0
        self.went_while_held_back: str | None = None
        self.is_paused = False
        self._shares: dict[tuple[str, int, Any], tuple[int | None, ...]] = {}

    # Operations.

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
        number, before = len(self.submitted), len(self.admitted)
        request = Request(id, tier, tenant, weight, tokens, requests, now_us, number, before)
        self.submitted.append(request)
        self._tag_firsts(tier)
        return request

    def settle(self, id: str, now_us: int) -> bool:
        request = self._move(id, "held", "settled")
        if request is not None:
            self._ended(request, now_us)
        return request is not None

    def cancel(self, id: str) -> bool:
        request = self._move(id, "waiting", "canceled")
        if request is not None:
            self._queue_changed(request.tier)
        return request is not None

    def hold_back(self, until_us: int) -> None:
        self.held_back_until_us = until_us

    def resize(self, id: str, tokens: int) -> bool:
        for request in self.held():
            if request.id == id:
                request.held_tokens = tokens
                return True
        return False

    def charge(self, tier: int, tenant: str, weight: int, tokens: int) -> None:
        """A lease of a tenant uses so many tokens more: its finish rises, from V at least. Without a ticket that waits
        in the tier there are no tags. The first ticket of the tenant has its start already.
        """
        if self.waiting(tier):
            from_tag = max(self.virtual.get(tier, 0), self.finish.get((tier, tenant), 0))
            self.finish[tier, tenant] = from_tag + self.divide(tokens, weight)

    def dispatch(self, now_us: int) -> list[Answer]:
        answers: list[Answer] = []
        while not self.is_paused and (chosen := self.next_admission(now_us)) is not None:
            answers.append(self.admit(chosen.id, now_us))
        return answers

    def admit(self, id: str, now_us: int) -> Answer:
        """Makes a waiting request a lease, even where the rules would not."""
        request = next(request for request in self.waiting() if request.id == id)
        answer = self.answer(request, now_us)
        request.excess = self._excess(request) if self.class_of(request, now_us) == TURN else 0
        if self.is_held_back(now_us):
            self.went_while_held_back = id
        request.state, request.held_tokens, request.admitted_us = "held", request.tokens, now_us
        virtual = self.virtual.get(request.tier, 0)
        request.start = virtual if request.start is None else request.start
        self.virtual[request.tier] = max(virtual, request.start)
        if not request.returns:  # a preempted request was charged when it was first admitted
            from_tag = max(request.start, self.finish.get((request.tier, request.tenant), 0))
            self.finish[request.tier, request.tenant] = from_tag + self.divide(request.tokens, request.weight)
        self.admitted.append((request, now_us, request.tokens))
        self._queue_changed(request.tier)
        return answer

    def keep(self, id: str) -> bool:
        """A lease is never preempted any more. Whether it had been chosen."""
        request = next((request for request in self.held() if request.id == id), None)
        if request is None:
            return False
        request.kept, was_chosen, request.chosen = True, request.chosen, False
        return was_chosen

    def requeue(self, id: str, now_us: int) -> bool:
        """A victim waits again, before all of its tier that came later."""
        if not any(request.id == id and request.chosen for request in self.held()):
            return False
        request = self._return(id, now_us)
        request.preempted_us = now_us if request.preempted_us is None else request.preempted_us
        return True

    def hand_back(self, id: str, now_us: int) -> bool:
        """A lease that no engine took waits again, before all of its tier that came later."""
        found = next((request for request in self.held() if request.id == id), None)
        if found is None:
            return False
        found.handed_back = len(self.admitted), self.overtaken_at_us(found)
        self._return(id, now_us)
        return True

    def _return(self, id: str, now_us: int) -> Request:
        request = self._move(id, "held", "waiting")
        if self.went_while_held_back == id:
            self.went_while_held_back = None
        request.tokens, request.chosen, request.returns = request.held_tokens, False, (*request.returns, now_us)
        others = [other.start for other in self.firsts(request.tier) if other is not request]
        request.start = min([self.virtual.get(request.tier, 0), *others])  # others are below V where they were passed
        self._ended(request, now_us)
        return request

    # Definitions.

    def capacity(self) -> tuple[int | None, ...]:
        """C, in every dimension. None is unbounded."""
        return self.policy.capacity

    def sizes(self, request: Request) -> tuple[int, ...]:
        """t of a ticket, in every dimension."""
        return request.tokens, request.requests

    def waiting(self, tier: int | None = None) -> list[Request]:
        return [r for r in self.submitted if r.state == "waiting" and tier in (None, r.tier)]

    def held(self) -> list[Request]:
        return [request for request in self.submitted if request.state == "held"]

    def used(self, tier: int | None = None) -> tuple[int, int]:
        """U of a tier, or the sum over all of them, in tokens and in requests."""
        mine = [request for request in self.held() if tier in (None, request.tier)]
        return sum(request.held_tokens for request in mine), sum(request.requests for request in mine)

    def reserve(self, tier: int) -> tuple[int | None, ...]:
        share = self.policy.tiers[tier].reserve
        if not share:
            return (0,) * len(self.capacity())
        return self._of_capacity("reserve", tier, lambda c: math.ceil(share * c))

    def headroom(self, tier: int) -> tuple[int | None, int | None]:
        shares = self.policy.tiers[tier]
        return self._of_capacity("headroom", tier, lambda c: math.floor((1 - shares.lend) * shares.reserve * c))

    def limit(self, tier: int) -> tuple[int | None, int | None]:
        return self._of_capacity("limit", tier, lambda c: math.floor(self.policy.tiers[tier].limit * c))

    def is_below_its_reserve(self, tier: int) -> bool:
        return all(r is None or u < r for u, r in zip(self.used(tier), self.reserve(tier), strict=True))

    def aged_level(self, request: Request, now_us: int) -> Fraction:
        level = Fraction(request.tier)
        if self.policy.promote_after_us is None or level <= self.policy.ceiling:
            return level
        risen = Fraction(now_us - request.arrived_us, self.policy.promote_after_us)
        return max(level - risen, Fraction(self.policy.ceiling))

    def is_inside(self, request: Request) -> bool:
        sizes = zip(self.used(request.tier), self.sizes(request), self.reserve(request.tier), strict=True)
        return all(r is None or u + t <= r for u, t, r in sizes)

    def is_within_a_reserve(self, request: Request) -> bool:
        """Whether it is no larger than its tier's whole reserve."""
        sizes = zip(self.sizes(request), self.reserve(request.tier), strict=True)
        return all(r is None or t <= r for t, r in sizes)

    def owes(self, tier: int, now_us: int) -> bool:
        return now_us < self.owes_until_us.get(tier, 0)

    def is_held_back(self, now_us: int) -> bool:
        return now_us < self.held_back_until_us

    def last_admission(self, tier: int) -> int:
        """The number of a tier's latest admission among all of them, -1 where there was none."""
        return max((n for n, (request, *_) in enumerate(self.admitted) if request.tier == tier), default=-1)

    # The four rules.

    def heads(self, now_us: int) -> list[Request]:
        """The next ticket of every tier. Where the tier owes, and that ticket is larger than the reserve, also the next
        that is not.
        """
        heads = []
        for tier in range(len(self.policy.tiers)):
            firsts = sorted(self.firsts(tier), key=lambda r: (r.start, r.arrived_us, r.number))
            heads += firsts[:1]
            if firsts and self.owes(tier, now_us) and not self.is_within_a_reserve(firsts[0]):
                heads += [request for request in firsts if self.is_within_a_reserve(request)][:1]
        return heads

    def firsts(self, tier: int) -> list[Request]:
        """The oldest ticket of every tenant that waits in a tier, and whatever was preempted."""
        waiting = self.waiting(tier)
        tenants = {request.tenant for request in waiting}
        new = [[r for r in waiting if r.tenant == tenant and not r.returns] for tenant in sorted(tenants)]
        return [r for r in waiting if r.returns] + [min(of, key=lambda r: r.number) for of in new if of]

    def class_of(self, request: Request, now_us: int) -> int:
        if self.policy.tiers[request.tier].always_first:
            return ALWAYS_FIRST
        if self.is_inside(request):
            return INSIDE
        if self.is_below_its_reserve(request.tier) and not self.owes(request.tier, now_us):
            return TURN
        return OTHER

    def is_candidate(self, request: Request) -> bool:
        if self.policy.tiers[request.tier].limit >= 1:
            return True
        wanted = zip(self.used(request.tier), self.sizes(request), self.limit(request.tier), strict=True)
        return all(most is None or used + size <= most for used, size, most in wanted)

    def in_order(self, now_us: int) -> list[Request]:
        """Rule 1: the candidates, the first first."""
        candidates = [head for head in self.heads(now_us) if self.is_candidate(head)]
        return sorted(candidates, key=lambda head: self.place(head, now_us))

    def next_admission(self, now_us: int) -> Request | None:
        """The first in order that fits, unless one before it holds its place."""
        for request in self._allowed(now_us):
            if self.fits(request, now_us):
                return request
            if self.holds_its_place(request, now_us):
                return None
        return None

    def _allowed(self, now_us: int) -> list[Request]:
        order = self.in_order(now_us)
        if not self.is_held_back(now_us):
            return order
        if any(request.id == self.went_while_held_back for request in self.held()):
            return []
        least = OTHER if not self.held() else TURN
        found = [request for request in order if self.class_of(request, now_us) <= least]
        return sorted(found, key=lambda r: self._turn_while_held_back(r, now_us))

    def _turn_while_held_back(self, request: Request, now_us: int) -> tuple:
        order = {ALWAYS_FIRST: 0, INSIDE: 1, TURN: 1, OTHER: 2}[self.class_of(request, now_us)]
        return order, self.last_admission(request.tier), *self.place(request, now_us)

    def holds_its_place(self, request: Request, now_us: int, order_class: int | None = None) -> bool:
        """Rule 3: whether it would fit once everything after it had released what it holds beyond its reserve."""
        order_class = self.class_of(request, now_us) if order_class is None else order_class
        if order_class == ALWAYS_FIRST:
            return True
        for dimension, size in enumerate(self.sizes(request)):
            capacity = self.capacity()[dimension]
            others = [q for q in range(len(self.policy.tiers)) if q != request.tier]
            kept = sum(self._kept(q, request, order_class, dimension, now_us) for q in others)
            if capacity is not None and size > capacity - kept:
                return False
        return True

    def _kept(self, tier: int, request: Request, order_class: int, dimension: int, now_us: int) -> int:
        used, reserve = self.used(tier)[dimension], self.reserve(tier)[dimension]
        is_better = tier < self.aged_level(request, now_us)
        keeps_all = self.policy.tiers[tier].always_first or (order_class == OTHER and is_better)
        kept = used if keeps_all or reserve is None else min(used, reserve)
        return max(kept, self.headroom(tier)[dimension] or 0) if is_better else kept

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
            for dimension, capacity in enumerate(self.capacity())
        )

    def fits(self, request: Request, now_us: int) -> bool:
        sizes = zip(self.sizes(request), self.room(request, now_us), strict=True)
        return all(room is None or size <= room for size, room in sizes)

    # Preemption.

    def preempt(self, now_us: int) -> list[str]:
        """The leases whose room the first that may preempt takes, beside those that were chosen before."""
        order = self.in_order(now_us)
        asking = self.preempting(now_us)
        if asking is None or self.is_held_back(now_us) or self.is_paused:
            return []
        before = order[: order.index(asking) + 1]
        leaving = [request for request in self.held() if request.chosen]
        chosen: list[Request] = []
        with self._without(leaving):
            takeable = self.takeable_for(asking, now_us)
        for lease in takeable:
            if self.would_fit_without([*leaving, *chosen], before, now_us):
                break
            if self.may_be_taken(lease, asking, [*leaving, *chosen], now_us):
                chosen.append(lease)
        if not self.would_fit_without([*leaving, *chosen], before, now_us):
            return []
        for lease in reversed(chosen):
            others = [other for other in chosen if other is not lease]
            if self.would_fit_without([*leaving, *others], before, now_us):
                chosen = others
        if self.policy.tiers[asking.tier].always_first:
            with self._without([*leaving, *chosen]):
                takeable = self.takeable_for(asking, now_us)
            chosen += self.taken_for_burst(asking, takeable, [*leaving, *chosen], now_us)
        for lease in chosen:
            lease.chosen = True
        return [lease.id for lease in chosen]

    def taken_for_burst(
        self, asking: Request, takeable: list[Request], gone: list[Request], now_us: int
    ) -> list[Request]:
        """The leases without which more of the asking tier's tickets would fit, each of the mean size."""
        chosen: list[Request] = []
        spare: list[Request] = []
        for lease in takeable:
            fitting = self.fitting_of_burst(asking, [*gone, *chosen], now_us)
            if fitting == self.size_of_burst(asking):
                break
            if lease in gone or not self.may_be_taken(lease, asking, [*gone, *chosen, *spare], now_us):
                continue
            spare.append(lease)
            if self.fitting_of_burst(asking, [*gone, *chosen, *spare], now_us) > fitting:
                chosen, spare = [*chosen, *spare], []
        return chosen

    def burst(self, asking: Request, number: int) -> Request:
        """So many tickets of the mean size as one."""
        waiting = self.waiting(asking.tier)
        tokens, requests = (
            math.ceil(Fraction(number * sum(sizes), len(waiting)))
            for sizes in ([one.tokens for one in waiting], [one.requests for one in waiting])
        )
        return replace(asking, tokens=tokens, requests=requests)

    def size_of_burst(self, asking: Request) -> int:
        """How many tickets wait in the tier, or as many of the mean size as its limit admits; one at least."""
        numbers = range(2, len(self.waiting(asking.tier)) + 1)
        return max([1, *(number for number in numbers if self.is_candidate(self.burst(asking, number)))])

    def fitting_of_burst(self, asking: Request, gone: list[Request], now_us: int) -> int:
        """How many tickets of the burst would fit without these leases; the one that asks always does."""
        numbers = range(2, self.size_of_burst(asking) + 1)
        with self._without(gone):
            return max([1, *(number for number in numbers if self.fits(self.burst(asking, number), now_us))])

    def preempting(self, now_us: int) -> Request | None:
        """The first in order that has waited `preempt_after`."""
        return next((r for r in self.in_order(now_us) if self.has_waited_long_enough(r, now_us)), None)

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
            and not any(self._is_before(other, first, now_us) for other in self.next_of(lease.tier, now_us))
        ]
        return sorted(found, key=lambda lease: (lease.tier, order[lease.id]), reverse=True)

    def may_be_taken(self, lease: Request, asking: Request, gone: list[Request], now_us: int) -> bool:
        """Whether its tier keeps its reserve, and it would not come first in its turn, with these gone before it."""
        with self._without(gone):
            comes_first = self._is_before(lease, asking, now_us)
        return not comes_first and not self.gives_up_its_reserve([*gone, lease], lease.tier)

    def next_of(self, tier: int, now_us: int) -> list[Request]:
        return [head for head in self.heads(now_us) if head.tier == tier]

    def could_come_back(self, lease: Request) -> bool:
        """Whether it could be admitted to the pool if nothing else was in it, as important as it could ever be."""
        sizes = zip((lease.held_tokens, lease.requests), self.admissible(lease.tier), strict=True)
        return all(most is None or size <= most for size, most in sizes)

    def admissible(self, tier: int) -> tuple[int | None, int | None]:
        """The most that rule 2 could ever let in of a tier."""
        best = tier
        if self.policy.promote_after_us is not None:
            best = min(tier, self.policy.ceiling)
        return tuple(
            None if capacity is None else min(most, capacity - sum(self.headroom(q)[dimension] for q in range(best)))
            for dimension, (capacity, most) in enumerate(zip(self.capacity(), self.limit(tier), strict=True))
        )

    def size_limit(self, tier: int) -> tuple[int | None, int | None]:
        """The largest request that a tier accepts."""
        found = []
        for dimension, (capacity, most) in enumerate(zip(self.capacity(), self.admissible(tier), strict=True)):
            reserves = [self.reserve(q)[dimension] for q in range(len(self.policy.tiers))]
            if capacity is not None:  # by gain the headroom may be more than the floor
                reserves[:tier] = [max(reserves[q], self.headroom(q)[dimension]) for q in range(tier)]
            beside = most
            if capacity is not None and reserves[tier] > 0:
                beside = min(most, max(reserves[tier], capacity - sum(reserves) + reserves[tier]))
            found.append(beside)
        return tuple(found)

    def would_fit_without(self, gone: list[Request], before: list[Request], now_us: int) -> bool:
        """Whether the last of `before` would fit without some leases, and every ticket of it that fits or holds its
        place, one after the other.
        """
        classes = {request.id: self.class_of(request, now_us) for request in before}
        held_tokens = {request.id: request.held_tokens for request in before}
        fitted = []
        with self._without(gone):
            for request in before:
                is_in = self.fits(request, now_us)
                if is_in:
                    request.state, request.held_tokens = "held", request.tokens
                    fitted.append(request)
                elif self.holds_its_place(request, now_us, classes[request.id]):
                    break
            for request in fitted:
                request.state, request.held_tokens = "waiting", held_tokens[request.id]
        return is_in and request is before[-1]

    def gives_up_its_reserve(self, gone: list[Request], tier: int) -> bool:
        if self.policy.tiers[tier].always_first:
            return True
        with self._without(gone):
            return self.is_below_its_reserve(tier)

    @contextmanager
    def _without(self, gone: list[Request]) -> Iterator[None]:
        for request in gone:
            request.state = "gone"
        yield
        for request in gone:
            request.state = "held"

    def _is_before(self, other: Request, asking: Request, now_us: int) -> bool:
        """Whether another, whose tier has its reserve, is before a ticket in order."""
        return self._place(other, OTHER, now_us) < self.place(asking, now_us)

    # Reports of waits.

    def overtaken_at_us(self, request: Request) -> int | None:
        """The first admission of a ticket that arrived later while it waited, or the moment it was first preempted.

        Once it was handed back, only a ticket overtakes it that arrived after all that had been admitted until then.
        """
        since, earlier = (0, None) if request.handed_back is None else request.handed_back
        if earlier is not None:
            return earlier
        latest = max([request.number, *(other.number for other, *_ in self.admitted[:since])])
        places = [place for place, (other, *_) in enumerate(self.admitted) if other is request and place >= since]
        mine = places[0] if places else len(self.admitted)
        before = [at_us for other, at_us, _ in self.admitted[since:mine] if other.number > latest]
        return min([*before[:1], *([] if request.preempted_us is None else [request.preempted_us])], default=None)

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
        """The other tiers whose head had come before a request that is admitted now, and the rule that let it pass."""
        before = (request.arrived_us, request.number)
        heads = {}
        for head in self.heads(now_us):
            heads.setdefault(head.tier, head)
        passed = [h for h in heads.values() if h.tier != request.tier and (h.arrived_us, h.number) < before]
        return {head.tier: self._why_first(request, head, now_us) for head in passed}

    def _why_first(self, request: Request, head: Request, now_us: int) -> str:
        if not self.is_candidate(head):
            return "limit"
        order_class, other = self.class_of(request, now_us), self.class_of(head, now_us)
        if self.is_held_back(now_us):
            return "always_first" if order_class == ALWAYS_FIRST else "reserve_turn"
        if self.place(head, now_us) < self.place(request, now_us):
            return "passed_over"
        if order_class < other:
            return {ALWAYS_FIRST: "always_first", INSIDE: "reserve", TURN: "reserve_turn"}[order_class]
        return "reserve_turn" if order_class == TURN else "level"

    def place(self, head: Request, now_us: int) -> tuple:
        return self._place(head, self.class_of(head, now_us), now_us)

    def _place(self, head: Request, order_class: int, now_us: int) -> tuple:
        turn = self.last_admission(head.tier) if order_class == TURN else -1
        return (order_class, turn, self.aged_level(head, now_us), head.arrived_us, head.number)

    def _excess(self, request: Request) -> int:
        """The whole reserves too much that a turn gives, in the dimension in which they are most."""
        sizes = zip(self.used(request.tier), self.sizes(request), self.reserve(request.tier), strict=True)
        return min(MOST_EXCESS, max(0, *((u + t - r) // r for u, t, r in sizes if r is not None)))

    def _ended(self, request: Request, now_us: int) -> None:
        owed_from_us = max(now_us, self.owes_until_us.get(request.tier, 0))
        self.owes_until_us[request.tier] = owed_from_us + request.excess * (now_us - request.admitted_us)
        request.excess = 0

    def _of_capacity(self, what: str, tier: int, share: Callable[[int], int]) -> tuple[int | None, ...]:
        """A share of the present capacity. Fractions are slow: it is computed once for a size."""
        capacity = self.capacity()
        if (what, tier, capacity) not in self._shares:
            self._shares[what, tier, capacity] = tuple(None if c is None else share(c) for c in capacity)
        return self._shares[what, tier, capacity]

    def _move(self, id: str, before: str, after: str) -> Request | None:
        for request in self.submitted:
            if request.id == id and request.state == before:
                request.state = after
                return request
        return None

    def _queue_changed(self, tier: int) -> None:
        if self.waiting(tier):
            self._tag_firsts(tier)
        else:
            self.virtual.pop(tier, None)
            self.finish = {key: tag for key, tag in self.finish.items() if key[0] != tier}

    def _tag_firsts(self, tier: int) -> None:
        for request in self.firsts(tier):
            if request.start is None:
                request.start = max(self.virtual.get(tier, 0), self.finish.get((tier, request.tenant), 0))
