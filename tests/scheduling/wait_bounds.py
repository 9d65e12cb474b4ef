"""Invariant 7, the bounded wait: plays a flood on a scheduler and measures every clause as a part of its bound.

Every clause is measured from the moment at which its condition begins to hold until it no longer does, at every event
between: a scheduler that never admits a ticket is found out, too. D is the longest lease, R the reserve of a tier
(`floods.floor_of`), k the number of tiers with one, t_max the largest ticket that the tier was sent.

inside        (a) D, for a head of a tier, or a ticket that passes a larger head, from when it is inside its reserve
small         (b) 2 D, for a head that is no larger than the reserve, from when it is the head
large         (c) (k + 1) D, for a larger head, from when it is the head and its tier owes nothing more
any_inside, any_small, any_large
              the same three for the tier, whichever tickets are its heads meanwhile, from its last admission
owes          D * t_max / R, what a tier owes, for each of its leases by a turn that ran at once
one_tenant    (d) 2 D (ceil(S / (R - t_max + 1)) + the same in requests - 1), for one tenant and sizes up to R
all_of_tier   (e) 2 D or (k + 1 + t / R) D for every ticket admitted while it waited, and itself, plus D and what may be
              owed; the larger of the two, too, where a ticket larger than R was head before the admission, and left
share         tokens of the tier admitted while the ticket waited, and itself, without those that passed a larger head:
              A + t_max + for every other tenant w_j / w * (A + t_max) + t_max, and t_max more once the tier was sent
              tickets larger than R, and once again for every such ticket in A

With `_page`: as the clause was first stated. Where that is less, `test_bounded_wait` has the counterexample.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from floods import Request, floor_of

from sidecar.policy.rules import UNLIMITED
from sidecar.scheduling import Scheduler, Ticket
from sidecar.scheduling.tier import TierState

PAGE = ("owes_page", "one_tenant_page", "all_of_tier_page", "share_page")
CLAUSES = (
    "inside",
    "small",
    "large",
    "any_inside",
    "any_small",
    "any_large",
    "owes",
    "one_tenant",
    "all_of_tier",
    "share",
)


@dataclass
class Measured:
    """The worst part of every bound so far, and how much was played."""

    worst: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLAUSES + PAGE, 0.0))
    submitted: int = 0
    admitted: int = 0
    canceled: int = 0
    left: int = 0

    def note(self, clause: str, value: int, bound: int) -> None:
        if value > self.worst[clause] * bound:
            self.worst[clause] = value / bound

    def add(self, other: Measured) -> None:
        for clause, part in other.worst.items():
            self.worst[clause] = max(self.worst[clause], part)
        self.submitted += other.submitted
        self.admitted += other.admitted
        self.canceled += other.canceled
        self.left += other.left


class _Then(NamedTuple):
    """What a tier had admitted when a ticket arrived, and what of its own tenant waited before it, with itself."""

    tokens: int
    requests: int
    cost_us: int
    page_cost_us: int
    passing_tokens: int
    own_tokens: int
    own_large: int


class _TierWatch:
    """One tier with a reserve: since when which condition holds, and what was admitted."""

    def __init__(
        self, tier: TierState, floor: tuple[int, int], longest_us: int, reserves: int, measured: Measured
    ) -> None:
        self.tier, self.longest_us, self.reserves, self.measured = tier, longest_us, reserves, measured
        self.floor_tokens, self.floor_requests = floor
        self.head: Ticket | None = None
        self.head_us = self.quiet_us = self.small_us = 0
        self.any_inside_us: int | None = None
        self.inside_us: dict[str, int] = {}
        self.has_admitted = self.saw_large = False
        self.tokens = self.requests = self.cost_us = self.page_cost_us = self.passing_tokens = 0
        self.most_tokens = self.most_requests = 0
        self.tenants: dict[str, int] = {}
        self.own_tokens: dict[str, int] = {}
        self.own_large: dict[str, int] = {}
        self.by_turn: list[Ticket] = []
        self.most_by_turn = 1
        self.then: dict[str, _Then] = {}

    # What happens to the tier.

    def arrived(self, ticket: Ticket) -> None:
        self.most_tokens = max(self.most_tokens, ticket.tokens)
        self.most_requests = max(self.most_requests, ticket.requests)
        self.tenants[ticket.tenant] = ticket.weight
        own = self.own_tokens[ticket.tenant] = self.own_tokens.get(ticket.tenant, 0) + ticket.tokens
        own_large = self.own_large[ticket.tenant] = self.own_large.get(ticket.tenant, 0) + (not self._is_small(ticket))
        self.then[ticket.id] = _Then(
            self.tokens, self.requests, self.cost_us, self.page_cost_us, self.passing_tokens, own, own_large
        )

    def admitted(self, ticket: Ticket, now_us: int, *, passed: bool) -> None:
        self.waited(ticket, now_us)
        cost_us = self._cost_us(ticket, is_large=not self._is_small(ticket))
        self.page_cost_us += cost_us
        self.cost_us += self._cost_us(ticket, is_large=True) if self.saw_large else cost_us
        self.tokens += ticket.tokens
        self.requests += ticket.requests
        self.passing_tokens += ticket.tokens if passed else 0
        self.has_admitted, self.saw_large = True, False
        if ticket.excess:
            self.by_turn = [lease for lease in self.by_turn if lease.excess] + [ticket]
            self.most_by_turn = max(self.most_by_turn, len(self.by_turn))
        if self.head is not None and (ticket.start, ticket.sequence) < (self.head.start, self.head.sequence):
            self.inside_us.pop(self.head.id, None)
            self.head_us = now_us  # a newcomer went before it: the head's time begins again

    def waited(self, ticket: Ticket, now_us: int) -> None:
        """A ticket was admitted, or has left, or waits still at the end: its whole wait."""
        then, wait_us, is_large = self.then.pop(ticket.id), now_us - ticket.arrived_us, not self._is_small(ticket)
        self.own_tokens[ticket.tenant] -= ticket.tokens
        self.own_large[ticket.tenant] -= is_large
        owed_us = self._owed_us(self.most_tokens, self.most_requests)
        page_us = self.page_cost_us - then.page_cost_us + self._cost_us(ticket, is_large=is_large)
        cost_us = self.cost_us - then.cost_us + self._cost_us(ticket, is_large=is_large or self.saw_large)
        self.measured.note("all_of_tier_page", wait_us, page_us + self.longest_us + owed_us)
        self.measured.note("all_of_tier", wait_us, cost_us + self.longest_us + self.most_by_turn * owed_us)
        self._share(ticket, then)
        if len(self.tenants) == 1 and self._has_only_small():
            requests = self.requests - then.requests + ticket.requests
            self._one_tenant(wait_us, self.tokens - then.tokens + ticket.tokens, requests)

    def _has_only_small(self) -> bool:
        return self.most_tokens <= self.floor_tokens and self.most_requests <= self.floor_requests

    def _share(self, ticket: Ticket, then: _Then) -> None:
        tokens = self.tokens - then.tokens + ticket.tokens
        reached = then.own_tokens + self.most_tokens
        others = [weight for tenant, weight in self.tenants.items() if tenant != ticket.tenant]
        closed_form = reached + sum(weight * reached // ticket.weight + self.most_tokens for weight in others)
        self.measured.note("share_page", tokens, closed_form)
        if not self._has_only_small():
            closed_form += len(others) * self.most_tokens * (1 + then.own_large)
        self.measured.note("share", tokens - self.passing_tokens + then.passing_tokens, closed_form)

    def _one_tenant(self, wait_us: int, tokens: int, requests: int) -> None:
        by_tokens = -(-tokens // (self.floor_tokens - self.most_tokens + 1))
        by_requests = -(-requests // (self.floor_requests - self.most_requests + 1))
        self.measured.note("one_tenant_page", wait_us, 2 * self.longest_us * max(by_tokens, by_requests))
        self.measured.note("one_tenant", wait_us, 2 * self.longest_us * (by_tokens + by_requests - 1))

    def _is_small(self, ticket: Ticket) -> bool:
        return ticket.tokens <= self.floor_tokens and ticket.requests <= self.floor_requests

    def _is_inside(self, ticket: Ticket) -> bool:
        return (
            self.tier.held_tokens + ticket.tokens <= self.floor_tokens
            and self.tier.held_requests + ticket.requests <= self.floor_requests
        )

    def _owed_us(self, tokens: int, requests: int) -> int:
        by_requests = 0 if self.floor_requests == UNLIMITED else self.longest_us * requests // self.floor_requests
        return max(self.longest_us * tokens // self.floor_tokens, by_requests)

    def _cost_us(self, ticket: Ticket, *, is_large: bool) -> int:
        if not is_large:
            return 2 * self.longest_us
        return (self.reserves + 1) * self.longest_us + self._owed_us(ticket.tokens, ticket.requests)

    # What time brings.

    def look_back(self, now_us: int) -> None:
        """Measures what has held until now."""
        if self.head is None:
            return
        note, longest_us = self.measured.note, self.longest_us
        for since_us in self.inside_us.values():
            note("inside", now_us - since_us, longest_us)
        if self.any_inside_us is not None:
            note("any_inside", now_us - self.any_inside_us, longest_us)
        owing_us = self.tier.owes_until_us
        note("any_large", now_us - max(self.quiet_us, owing_us), (self.reserves + 1) * longest_us)
        if self._is_small(self.head):
            note("small", now_us - self.head_us, 2 * longest_us)
            note("any_small", now_us - self.small_us, 2 * longest_us)
        else:
            note("large", now_us - max(self.head_us, owing_us), (self.reserves + 1) * longest_us)

    def look(self, now_us: int) -> None:
        """Notes which conditions hold from now on."""
        owed_us = self.tier.owes_until_us - now_us
        if owed_us > 0:
            most_us = self._owed_us(self.most_tokens, self.most_requests)
            self.measured.note("owes_page", owed_us, most_us)
            self.measured.note("owes", owed_us, self.most_by_turn * most_us)
        head, had_none = self.tier.queue.head(), self.head is None
        if self.has_admitted or had_none:
            self.quiet_us = self.small_us = now_us
        if self.has_admitted:
            self.any_inside_us = None
        self.has_admitted = False
        if head is not self.head:
            self.head, self.head_us = head, now_us
        if head is None:
            self.inside_us, self.any_inside_us, self.saw_large = {}, None, False
            return
        if not self._is_small(head):
            self.small_us, self.saw_large = now_us, True
        heads = self.tier.heads(now_us)
        self.inside_us = {t.id: self.inside_us.get(t.id, now_us) for t in heads if self._is_inside(t)}
        self.any_inside_us = (now_us if self.any_inside_us is None else self.any_inside_us) if self.inside_us else None


class _Play:
    """A flood on a scheduler, event by event."""

    SETTLE, SHRINK, CANCEL, SUBMIT = range(4)

    def __init__(self, scheduler: Scheduler, longest_us: int) -> None:
        self.scheduler, self.measured = scheduler, Measured()
        reserves = sum(tier.reserve_tokens > 0 for tier in scheduler.rules.tiers)
        self.watches = {
            level: _TierWatch(tier, floor_of(rules), longest_us, reserves, self.measured)
            for level, (tier, rules) in enumerate(zip(scheduler._tiers, scheduler.rules.tiers, strict=True))
            if rules.reserve_tokens > 0
        }
        self.events: list[tuple[int, int, int, str | Request]] = []
        self.order = count()
        self.waiting: dict[str, tuple[Request, Ticket]] = {}
        self.first = next((level for level, tier in enumerate(scheduler.rules.tiers) if tier.always_first), None)
        self.first_holds = [0, 0]
        self.first_sizes: dict[str, tuple[int, int]] = {}

    def push(self, at_us: int, kind: int, what: str | Request) -> None:
        heapq.heappush(self.events, (at_us, kind, next(self.order), what))

    def run(self, flood: Iterable[Request], until_us: int | None) -> Measured:
        for request in flood:
            self.push(request.at_us, self.SUBMIT, request)
        change_us, now_us = None, 0
        while self.events or change_us is not None:
            moments = [
                moment for moment in (change_us, self.events[0][0] if self.events else None) if moment is not None
            ]
            if until_us is not None and min(moments) > until_us:
                break
            now_us = min(moments)
            self.step(now_us)
            change_us = self.scheduler.next_change_us(now_us)
        for _, ticket in self.waiting.values():
            if (watch := self.watches.get(ticket.tier)) is not None:
                watch.waited(ticket, now_us)
        self.measured.left = len(self.waiting)
        return self.measured

    def step(self, now_us: int) -> None:
        for watch in self.watches.values():
            watch.look_back(now_us)
        while self.events and self.events[0][0] == now_us:
            _, kind, _, what = heapq.heappop(self.events)
            self.happen(kind, what, now_us)
        for ticket, passed in self.with_passing([admission.ticket for admission in self.scheduler.dispatch(now_us)]):
            self.admitted(ticket, now_us, passed=passed)
        for watch in self.watches.values():
            watch.look(now_us)

    def with_passing(self, tickets: list[Ticket]) -> list[tuple[Ticket, bool]]:
        """Whether each ticket of one dispatch passed one of its tier: that one left later, or waits still."""
        heads = [tier.queue.head() for tier in self.scheduler._tiers]
        firsts = [(float("inf"), 0) if head is None else (head.start, head.sequence) for head in heads]
        found = []
        for ticket in reversed(tickets):
            place = ticket.start, ticket.sequence
            found.append((ticket, firsts[ticket.tier] < place))
            firsts[ticket.tier] = min(firsts[ticket.tier], place)
        return found[::-1]

    def happen(self, kind: int, what: str | Request, now_us: int) -> None:
        if isinstance(what, Request):
            self.submit(what, now_us)
        elif kind == self.SETTLE:
            self.scheduler.settle(what, now_us)
            self.left_first(what)
        elif kind == self.SHRINK:
            ticket_id, _, tokens = what.partition(" ")
            self.scheduler.resize(ticket_id, int(tokens))
        elif what in self.waiting:
            self.cancel(what, now_us)

    def submit(self, request: Request, now_us: int) -> None:
        ticket_id = f"r{next(self.order)}"
        if request.tier == self.first and not self.may_join_first(ticket_id, request):
            return
        ticket = self.scheduler.submit(
            ticket_id,
            tier=request.tier,
            tokens=request.tokens,
            requests=request.requests,
            tenant=request.tenant,
            weight=request.weight,
            now_us=now_us,
        )
        self.measured.submitted += 1
        self.waiting[ticket_id] = (request, ticket)
        if (watch := self.watches.get(request.tier)) is not None:
            watch.arrived(ticket)
        if request.patience_us is not None:
            self.push(now_us + request.patience_us, self.CANCEL, ticket_id)

    def may_join_first(self, ticket_id: str, request: Request) -> bool:
        """An always_first tier stays within its reserve, by its limit or else because its clients know their part."""
        rules = self.scheduler.rules.tiers[request.tier]
        if rules.limit_tokens <= rules.reserve_tokens and rules.limit_requests <= rules.reserve_requests:
            return True
        tokens, requests = self.first_holds[0] + request.tokens, self.first_holds[1] + request.requests
        if tokens > rules.reserve_tokens or requests > rules.reserve_requests:
            return False
        self.first_holds = [tokens, requests]
        self.first_sizes[ticket_id] = (request.tokens, request.requests)
        return True

    def left_first(self, ticket_id: str) -> None:
        tokens, requests = self.first_sizes.pop(ticket_id, (0, 0))
        self.first_holds = [self.first_holds[0] - tokens, self.first_holds[1] - requests]

    def cancel(self, ticket_id: str, now_us: int) -> None:
        request, ticket = self.waiting.pop(ticket_id)
        self.scheduler.cancel(ticket_id, now_us)
        self.measured.canceled += 1
        self.left_first(ticket_id)
        if (watch := self.watches.get(request.tier)) is not None:
            watch.waited(ticket, now_us)
        if request.retries:
            again = request._replace(at_us=now_us + request.pause_us + 1, retries=request.retries - 1)
            self.push(again.at_us, self.SUBMIT, again)

    def admitted(self, ticket: Ticket, now_us: int, *, passed: bool) -> None:
        request, _ = self.waiting.pop(ticket.id)
        self.measured.admitted += 1
        if (watch := self.watches.get(request.tier)) is not None:
            watch.admitted(ticket, now_us, passed=passed)
        self.push(now_us + request.held_us, self.SETTLE, ticket.id)
        if request.shrinks_after_us is not None:
            self.push(now_us + request.shrinks_after_us, self.SHRINK, f"{ticket.id} {request.shrinks_to}")


def measure(scheduler: Scheduler, flood: Iterable[Request], longest_us: int, until_us: int | None = None) -> Measured:
    """Plays a flood until no ticket is left, or until a moment. No lease of it lasts longer than `longest_us`."""
    return _Play(scheduler, longest_us).run(flood, until_us)
