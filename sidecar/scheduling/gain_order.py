"""The order by gain: which of the tickets beyond their tiers' floors comes first.

A tier's floor is `fair` of its reserve. It is filled in fair order and counted apart: classes ALWAYS_FIRST, INSIDE and
TURN of `order` are as ever, but with the floor in place of the reserve, and with what the leases hold that were
admitted in one of these classes in place of all that the tier holds. In class OTHER a tier has two candidates: its
heads, and the best ticket of its queue (`gain_queue`). Their ranks:

0. Tickets inside their tier's headroom, by aged level: no other ticket could have that room.
1. Urgent tickets, the densest first. A ticket is urgent from the moment when its deadline is nearer than half of the
   time that the engines need for all that waits.
2. Other tickets, the earliest deadline first.
3. Tickets that can earn nothing: without figures, too late, or of a tenant that is ahead. By aged level.

Equal tickets go by arrival. In class OTHER no ticket is before another by its level, so `yields_to` is 0 there.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from sidecar.policy.rules import UNLIMITED, PoolRules, TierRules
from sidecar.scheduling.gain import GainTicket
from sidecar.scheduling.gain_queue import GainQueue
from sidecar.scheduling.order import Candidate, LevelOrder, OrderClass
from sidecar.scheduling.ticket import Demand, Rule, Ticket
from sidecar.scheduling.tier import MOST_EXCESS, TierState

_ALWAYS_FIRST, _INSIDE, _TURN, _OTHER = OrderClass


class Rank(IntEnum):
    """The ranks in class OTHER, in order. A candidate of that class has its rank as its `turn`."""

    HEADROOM = 0
    URGENT = 1
    CALM = 2
    NO_GAIN = 3


# Looked up once: an enumeration's attribute costs as much as a call.
_HEADROOM, _URGENT, _CALM, _NO_GAIN = Rank
_new = tuple.__new__  # as in `order`


class GainTier(TierState):
    """A tier that counts apart what its leases in its floor hold."""

    __slots__ = ("floor_requests", "floor_tokens", "may_come_first")

    queue: GainQueue
    _queue_type: type[GainQueue] = GainQueue

    def __init__(self, rules: TierRules) -> None:
        self.floor_tokens = 0
        self.floor_requests = 0
        super().__init__(rules)

    def change_rules(self, rules: TierRules) -> None:
        """See `TierState.change_rules`."""
        super().change_rules(rules)
        self._look_at_floor()

    def _look_at_floor(self) -> None:
        """Whether any of its tickets may come before all tickets of other tiers, whatever those earn."""
        rules = self.rules
        self.may_come_first = (
            rules.always_first
            or rules.headroom_tokens > 0
            or rules.headroom_requests > 0
            or (self.floor_tokens < rules.reserve_tokens and self.floor_requests < rules.reserve_requests)
        )

    def book_floor(self, tokens: int, requests: int) -> None:
        """Books tokens and requests, of either sign, with the floor."""
        self.floor_tokens += tokens
        self.floor_requests += requests
        self._look_at_floor()

    def excess(self, demand: Demand) -> int:
        """See `TierState.excess`, of the floor."""
        rules = self.rules
        tokens = (self.floor_tokens + demand.tokens - rules.reserve_tokens) // rules.reserve_tokens
        requests = (self.floor_requests + demand.requests - rules.reserve_requests) // rules.reserve_requests
        return min(MOST_EXCESS, max(0, tokens, requests))

    def has_its_reserve_without(self, lease: Ticket) -> bool:
        """Whether the floor is full. A lease in the floor is never taken."""
        assert isinstance(lease, GainTicket)
        return not self.rules.always_first and not lease.in_floor and not self.is_below_floor()

    def is_below_floor(self) -> bool:
        """Whether its floor has room left, in each dimension."""
        return self.floor_tokens < self.rules.reserve_tokens and self.floor_requests < self.rules.reserve_requests

    def has_floor_for(self, ticket: Ticket) -> bool:
        """Whether its floor has room for a ticket."""
        return (
            self.floor_tokens + ticket.tokens <= self.rules.reserve_tokens
            and self.floor_requests + ticket.requests <= self.rules.reserve_requests
        )


class GainOrder(LevelOrder):
    """See the module. The aged level still decides whose headroom a ticket respects, and what the engine receives.

    `queues` are those of the tiers whose tickets go by gain.
    """

    _tiers: Sequence[GainTier]

    def __init__(self, rules: PoolRules, tiers: Sequence[GainTier]) -> None:
        super().__init__(rules, tiers)

    def change_rules(self, rules: PoolRules) -> None:
        """See `LevelOrder.change_rules`."""
        super().change_rules(rules)
        self.queues = [tier.queue for tier, own in zip(self._tiers, rules.tiers, strict=True) if not own.always_first]
        self._bounds_tokens = rules.tokens != UNLIMITED
        self._bounds_requests = rules.requests != UNLIMITED

    def candidate(self, tier: TierState, ticket: Ticket, now_us: int) -> Candidate:
        """See `LevelOrder.candidate`: the place of a tier's head."""
        assert isinstance(tier, GainTier)
        turn = 0
        if tier.rules.always_first:
            order_class = _ALWAYS_FIRST
        elif tier.has_floor_for(ticket):
            order_class = _INSIDE
        elif now_us >= tier.owes_until_us and tier.is_below_floor():
            order_class, turn = _TURN, tier.latest_admission
        else:
            return self.beyond(tier, ticket, now_us)
        precedence, level = self._aged(ticket, now_us)
        return Candidate(order_class, turn, precedence, ticket.arrived_us, ticket.sequence, ticket, level, level, level)

    def beyond(self, tier: GainTier, ticket: Ticket, now_us: int) -> Candidate:
        """The place of any ticket beyond its tier's floor. A lease is as dense as it would be now."""
        assert isinstance(ticket, GainTicket)
        precedence, level = self._aged(ticket, now_us)
        rank = _NO_GAIN
        if self._is_in_headroom(tier, ticket):
            rank = _HEADROOM
        elif ticket.gain is not None and not (ticket.queued and tier.queue.is_ahead(ticket)):
            if not ticket.is_urgent:
                rank, precedence = _CALM, ticket.deadline_us
            elif density := ticket.density if ticket.is_waiting else ticket.density_at(now_us):
                rank, precedence = _URGENT, -density
        return Candidate(_OTHER, rank, precedence, ticket.arrived_us, ticket.sequence, ticket, level, 0, level)

    def in_order(self, now_us: int) -> list[Candidate]:
        """See `LevelOrder.in_order`: of each tier its heads, and its best ticket."""
        found: list[Candidate] = []
        for tier in self._tiers:
            if not tier.queue.count:
                continue
            heads = tier.heads(now_us)
            found += [self.candidate(tier, head, now_us) for head in heads if not tier.is_at_limit(head)]
            best = None if tier.rules.always_first else tier.queue.best()
            if best is not None and best not in heads and not tier.is_at_limit(best):
                found.append(self.beyond(tier, best, now_us))
        found.sort()
        return found

    def first_of_all(self, best: GainTicket | None, now_us: int) -> Candidate | None:
        """The first candidate in order, where it is found without the others. `best` is the best ticket of all tiers.

        None says nothing: a ticket may be in its tier's headroom, or the best one is at its tier's limit.
        """
        in_floors: list[Candidate] = []
        for tier in self._tiers:
            if not (tier.may_come_first and tier.queue.count):
                continue
            if self._may_be_in_headroom(tier):
                return None
            if tier.rules.always_first or tier.is_below_floor():
                heads = tier.heads(now_us)
                in_floors += [self.candidate(tier, head, now_us) for head in heads if not tier.is_at_limit(head)]
        if in_floors:
            in_floors = [candidate for candidate in in_floors if candidate.order_class is not _OTHER]
            if in_floors:
                return min(in_floors)
        if best is None:
            return None
        tier = self._tiers[best.tier]
        if tier.rules.limited and tier.is_at_limit(best):
            return None
        _, level = self._aged(best, now_us)
        rank, key = (_URGENT, -best.density) if best.is_urgent else (_CALM, best.deadline_us)
        return _new(Candidate, (_OTHER, rank, key, best.arrived_us, best.sequence, best, level, 0, level))

    def comes_before(self, ticket: Ticket, candidate: Candidate, now_us: int) -> bool:
        """See `LevelOrder.comes_before`."""
        return self.beyond(self._tiers[ticket.tier], ticket, now_us)[:5] < candidate[:5]

    def rule_beyond(self, candidate: Candidate) -> Rule:
        """The rule by which a candidate of class OTHER is admitted before any that it comes before."""
        if candidate.turn == Rank.HEADROOM:
            return Rule.RESERVE
        return Rule.LEVEL if candidate.turn == Rank.NO_GAIN else Rule.GAIN

    def rule(self, candidate: Candidate, head: Candidate) -> Rule:
        """See `LevelOrder.rule`."""
        if candidate.order_class is not _OTHER or head < candidate:
            return super().rule(candidate, head)
        return self.rule_beyond(candidate)

    def _aged(self, ticket: Ticket, now_us: int) -> tuple[int, int]:
        """The aged level as a precedence, and rounded up to a whole one."""
        level = ticket.tier
        precedence = self._precedences[level]
        if level > self._ceiling:
            precedence = max(precedence - (now_us - ticket.arrived_us), self._ceiling_precedence)
            level = -(-precedence // self._promote_after_us)
        return precedence, level

    def _may_be_in_headroom(self, tier: GainTier) -> bool:
        rules = tier.rules
        tokens, requests = rules.headroom_tokens, rules.headroom_requests
        return bool(
            (tokens or requests)
            and (not self._bounds_tokens or tier.held_tokens < tokens)
            and (not self._bounds_requests or tier.held_requests < requests)
        )

    def _is_in_headroom(self, tier: GainTier, ticket: Ticket) -> bool:
        rules = tier.rules
        return (
            (rules.headroom_tokens > 0 or rules.headroom_requests > 0 or rules.headroom_prefill > 0)
            and (not self._bounds_tokens or tier.held_tokens + ticket.tokens <= rules.headroom_tokens)
            and (not self._bounds_requests or tier.held_requests + ticket.requests <= rules.headroom_requests)
        )
