"""The state of one tier and the order of its tickets in a pool of several engines: three dimensions, and claimants.

A tier's floor is filled in fair order, by claimants and heads alike. For a ticket counts as filled what those before it
need, too: so no later ticket takes the room of the floor that an earlier one waits for, whichever engine it waits for.
Only the first may have a turn. While the tier owes, tickets larger than its floor are left out.

The next ticket of a tier is looked at as soon as the first claims an engine, and what is admitted beyond the floor
fills it, too. So a first that is no larger than the floor would never be inside it while others of its tier got in, and
tickets of other floors would enter the engine that it claims. They pass it beyond the floor only while it is a claimant
with patience, or no engine could hold it, or no other tier has anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sidecar.policy.rules import UNLIMITED, PoolRules, TierRules, largest_prefill
from sidecar.scheduling.claims import ClaimQueue
from sidecar.scheduling.order import Candidate, LevelOrder, OrderClass
from sidecar.scheduling.placement import NEVER_US, Placement
from sidecar.scheduling.ticket import Ticket
from sidecar.scheduling.tier import LATEST_US, MOST_EXCESS, TierState

_ALWAYS_FIRST, _INSIDE, _TURN, _OTHER = OrderClass
_new = tuple.__new__  # as in `order`


class FleetTier(TierState):
    """One tier. `held_prefill` are the un-prefilled prompt tokens that its leases count for.

    `most_prefill` is what one prompt counts for at most: no more than the tier's size limit, and than one engine may
    have. A larger prompt still enters an empty engine, so it must fit the pool, too.
    """

    queue: ClaimQueue
    _queue_type = ClaimQueue

    def __init__(self, rules: TierRules) -> None:
        self.held_prefill = 0
        self.most_prefill = UNLIMITED
        super().__init__(rules)

    def change_pool(self, rules: PoolRules, most_prefill: int) -> None:
        """Applies the rules of a pool of another size, in which one engine may have so much un-prefilled."""
        own = rules.tiers[self.rules.level]
        self.most_prefill = min(most_prefill, largest_prefill(rules, own.level))
        is_bounded = self.most_prefill > own.reserve_prefill
        self.queue.change_small_prefill(own.reserve_prefill if is_bounded else UNLIMITED)
        self.change_rules(own)

    def prefill(self, ticket: Ticket) -> int:
        """The un-prefilled tokens that a ticket counts for in the pool."""
        return min(ticket.placing.uncached, self.most_prefill)

    def heads(self, now_us: int) -> Sequence[Ticket]:
        """See `TierState.heads`. Claimants are candidates like them."""
        claimants = self.queue.claimants
        return [*claimants.values(), *super().heads(now_us)] if claimants else super().heads(now_us)

    def filled(self) -> tuple[int, int, int]:
        """What its floor has: tokens, requests and un-prefilled tokens."""
        return self.held_tokens, self.held_requests, self.held_prefill

    def is_below_floor(self) -> bool:
        """Whether its floor has room left, in each dimension."""
        rules = self.rules
        tokens, requests, prefill = self.filled()
        return tokens < rules.reserve_tokens and requests < rules.reserve_requests and prefill < rules.reserve_prefill

    def in_fair_order(self, now_us: int) -> Sequence[Ticket]:
        """The heads, and the claimants that no head is before."""
        heads = TierState.heads(self, now_us)
        claimants = self.queue.claimants
        if not claimants:
            return heads
        last = max(map(_fair_place, heads), default=None)
        before = (it for it in claimants.values() if last is None or _fair_place(it) < last)
        return sorted([*before, *heads], key=_fair_place)

    def for_floor(self, now_us: int) -> Iterator[tuple[Ticket, OrderClass]]:
        """The tickets that may be admitted for the floor, in fair order, each with its class."""
        rules, owes = self.rules, now_us < self.owes_until_us
        tokens, requests, prefill = self.filled()
        if tokens >= rules.reserve_tokens or requests >= rules.reserve_requests:
            return  # every ticket needs some of both
        is_first = not owes and prefill < rules.reserve_prefill
        for ticket in self.in_fair_order(now_us):
            if owes and not self.queue.is_small(ticket):
                continue
            tokens += ticket.tokens
            requests += ticket.requests
            prefill += self.prefill(ticket)
            if tokens > rules.reserve_tokens or requests > rules.reserve_requests or prefill > rules.reserve_prefill:
                if is_first:
                    yield ticket, _TURN
                return
            yield ticket, _INSIDE
            is_first = False

    def kept_from_being_passed(self, now_us: int) -> Ticket | None:
        """The first ticket in fair order, where it is no larger than the floor and no claimant with patience."""
        owes, is_small = now_us < self.owes_until_us, self.queue.is_small
        first = next((it for it in self.in_fair_order(now_us) if not owes or is_small(it)), None)
        if first is None or not is_small(first):
            return None
        placing = first.placing
        return None if placing.is_claimant and now_us < placing.patient_until_us else first

    def excess_prefill(self, ticket: Ticket) -> int:
        """How many whole reserves more are too much in un-prefilled tokens than in the other dimensions."""
        reserve = self.rules.reserve_prefill
        prefill = (self.held_prefill + self.prefill(ticket) - reserve) // reserve
        return max(0, min(MOST_EXCESS, prefill) - self.excess(ticket))

    def owe_prefill(self, lease: Ticket, now_us: int) -> None:
        """A lease has its first byte: what was too much in un-prefilled tokens alone is owed for the time until now."""
        owed_us = lease.placing.excess_prefill * max(0, now_us - lease.admitted_us)
        self.owes_until_us = min(LATEST_US, max(now_us, self.owes_until_us) + owed_us)
        lease.placing.excess_prefill = 0

    def has_its_reserve_without(self, lease: Ticket) -> bool:
        """See `TierState.has_its_reserve_without`."""
        rules = self.rules
        return super().has_its_reserve_without(lease) or (
            not rules.always_first and self.held_prefill - lease.placing.prefill >= rules.reserve_prefill
        )

    def is_at_limit(self, ticket: Ticket) -> bool:
        """See `TierState.is_at_limit`."""
        rules = self.rules
        return super().is_at_limit(ticket) or (
            rules.limited and self.held_prefill + self.prefill(ticket) > rules.limit_prefill
        )


def _fair_place(ticket: Ticket) -> tuple[float, int]:
    return ticket.start, ticket.sequence


def place_in_walk(candidate: Candidate) -> int:
    """The place of a candidate in a walk (`fleet_scheduler`). Equal ones stay in order."""
    if candidate.order_class is _ALWAYS_FIRST:
        return -1
    placing = candidate.ticket.placing
    claimed_us = placing.claimed_us if placing.is_claimant and candidate.order_class in (_INSIDE, _TURN) else None
    return NEVER_US if claimed_us is None else claimed_us


class FleetOrder(LevelOrder):
    """The order by aged level, where being inside a reserve and having a turn count un-prefilled tokens, too."""

    _tiers: Sequence[FleetTier]

    def candidate(self, tier: TierState, ticket: Ticket, now_us: int) -> Candidate:
        """See `LevelOrder.candidate`."""
        return self.candidates(tier, (ticket,), now_us)[0]  # type: ignore[arg-type]  # a FleetTier

    def candidates(self, tier: FleetTier, tickets: Iterable[Ticket], now_us: int) -> list[Candidate]:
        """The places and the levels of tickets of one tier. Every walk looks at all claimants, so it calls little."""
        rules = tier.rules
        outside = _ALWAYS_FIRST if rules.always_first else _OTHER
        may_be_inside = not rules.always_first and tier.held_tokens < rules.reserve_tokens
        classes = dict(tier.for_floor(now_us)) if may_be_inside else None
        level = rules.level
        precedence = self._precedences[level]
        is_aging = level > self._ceiling
        found = []
        for ticket in tickets:
            arrived_us = ticket.arrived_us
            if is_aging:
                precedence = self._precedences[rules.level] - (now_us - arrived_us)
                if precedence < self._ceiling_precedence:  # noqa: PLR1730  # `max` is one call more
                    precedence = self._ceiling_precedence
                level = -(-precedence // self._promote_after_us)
            order_class, turn = outside, 0
            if classes and ticket in classes:
                order_class = classes[ticket]
                turn = tier.latest_admission if order_class is _TURN else 0
            place = (order_class, turn, precedence, arrived_us, ticket.sequence, ticket, level, level, level)
            found.append(_new(Candidate, place))
        return found

    def without_passing(self, order: list[Candidate], placement: Placement, now_us: int) -> list[Candidate]:
        """The candidates, but for those that would pass the first of their tier beyond the floor, and may not."""
        for tier in self._tiers:
            if not tier.queue.claimants or not self._is_shared():
                continue
            first = tier.kept_from_being_passed(now_us)
            if first is not None and placement.usable(first.tokens, first.requests, first.placing):
                place, level = _fair_place(first), first.tier
                order = [
                    it
                    for it in order
                    if it.order_class is not _OTHER or it.ticket.tier != level or _fair_place(it.ticket) <= place
                ]
        return order

    def _is_shared(self) -> bool:
        """Whether more than one tier has tickets or leases."""
        return sum(bool(tier.queue.count or tier.held_requests) for tier in self._tiers) > 1

    def in_order(self, now_us: int) -> list[Candidate]:
        """See `LevelOrder.in_order`."""
        found: list[Candidate] = []
        for tier in self._tiers:
            if tier.queue.count:
                heads = tier.heads(now_us)
                if tier.rules.limited:
                    heads = [head for head in heads if not tier.is_at_limit(head)]
                found += self.candidates(tier, heads, now_us)
        if len(found) > 1:
            found.sort()
        return found
