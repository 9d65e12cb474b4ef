"""The order by gain in a pool of several engines: floors in three dimensions, and claimants.

A tier's floor is filled as by level (`fleet_tier`). A ticket that claimed by gain has its place there like every other,
from the moment when no head is before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sidecar.policy.rules import UNLIMITED, PoolRules, TierRules
from sidecar.scheduling.fleet_tier import FleetOrder, FleetTier
from sidecar.scheduling.gain_claims import GainClaimQueue
from sidecar.scheduling.gain_order import GainOrder, GainTier
from sidecar.scheduling.order import Candidate, OrderClass
from sidecar.scheduling.ticket import Ticket
from sidecar.scheduling.tier import MOST_EXCESS, TierState

_ALWAYS_FIRST, _INSIDE, _TURN, _ = OrderClass


class GainFleetTier(FleetTier, GainTier):
    """A tier that counts apart what its leases in its floor hold, in un-prefilled tokens, too."""

    queue: GainClaimQueue
    _queue_type = GainClaimQueue

    def __init__(self, rules: TierRules) -> None:
        self.floor_prefill = 0
        super().__init__(rules)

    def excess_prefill(self, ticket: Ticket) -> int:
        """See `FleetTier.excess_prefill`, of the floor."""
        reserve = self.rules.reserve_prefill
        prefill = (self.floor_prefill + self.prefill(ticket) - reserve) // reserve
        return max(0, min(MOST_EXCESS, prefill) - self.excess(ticket))

    def has_its_reserve_without(self, lease: Ticket) -> bool:
        """See `GainTier.has_its_reserve_without`."""
        return GainTier.has_its_reserve_without(self, lease)

    def filled(self) -> tuple[int, int, int]:
        """See `FleetTier.filled`: what is counted apart."""
        return self.floor_tokens, self.floor_requests, self.floor_prefill

    def is_below_floor(self) -> bool:
        """See `FleetTier.is_below_floor`."""
        return FleetTier.is_below_floor(self)

    def kept_from_being_passed(self, now_us: int) -> None:
        """See `FleetTier.kept_from_being_passed`. What is admitted beyond the floor is not counted in it."""

    def has_floor_for(self, ticket: Ticket) -> bool:
        """See `GainTier.has_floor_for`."""
        return super().has_floor_for(ticket) and self.floor_prefill + self.prefill(ticket) <= self.rules.reserve_prefill


class GainFleetOrder(GainOrder, FleetOrder):
    """See `GainOrder` and `FleetOrder`."""

    _tiers: Sequence[GainFleetTier]

    def __init__(self, rules: PoolRules, tiers: Sequence[GainFleetTier]) -> None:
        super().__init__(rules, tiers)

    def change_rules(self, rules: PoolRules) -> None:
        """See `LevelOrder.change_rules`."""
        super().change_rules(rules)
        self._bounds_prefill = rules.prefill != UNLIMITED

    def candidate(self, tier: TierState, ticket: Ticket, now_us: int) -> Candidate:
        """See `GainOrder.candidate`."""
        assert isinstance(tier, GainFleetTier)
        return self.candidates(tier, (ticket,), now_us)[0]

    def candidates(self, tier: FleetTier, tickets: Iterable[Ticket], now_us: int) -> list[Candidate]:
        """See `FleetOrder.candidates`."""
        assert isinstance(tier, GainFleetTier)
        if tier.rules.always_first:
            return [self._placed(ticket, _ALWAYS_FIRST, 0, now_us) for ticket in tickets]
        found, classes = [], dict(tier.for_floor(now_us))
        for ticket in tickets:
            order_class = classes.get(ticket)
            if order_class is None:
                found.append(self.beyond(tier, ticket, now_us))
            else:
                turn = tier.latest_admission if order_class is _TURN else 0
                found.append(self._placed(ticket, order_class, turn, now_us))
        return found

    def in_order(self, now_us: int) -> list[Candidate]:
        """See `GainOrder.in_order`."""
        found: list[Candidate] = []
        for tier in self._tiers:
            if not tier.queue.count:
                continue
            heads = tier.heads(now_us)
            found += self.candidates(tier, [head for head in heads if not tier.is_at_limit(head)], now_us)
            best = None if tier.rules.always_first else tier.queue.best()
            if best is not None and best not in heads and not tier.is_at_limit(best):
                found.append(self.beyond(tier, best, now_us))
        found.sort()
        return found

    def _placed(self, ticket: Ticket, order_class: OrderClass, turn: int, now_us: int) -> Candidate:
        precedence, level = self._aged(ticket, now_us)
        return Candidate(order_class, turn, precedence, ticket.arrived_us, ticket.sequence, ticket, level, level, level)

    def _is_in_headroom(self, tier: GainTier, ticket: Ticket) -> bool:
        assert isinstance(tier, GainFleetTier)
        has_prefill = (
            not self._bounds_prefill or tier.held_prefill + tier.prefill(ticket) <= tier.rules.headroom_prefill
        )
        return has_prefill and super()._is_in_headroom(tier, ticket)
