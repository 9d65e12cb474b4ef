"""The order by gain in a pool of several engines: floors in three dimensions, and claimants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sidecar.policy.rules import UNLIMITED, PoolRules, TierRules
from sidecar.scheduling.fleet_tier import FleetOrder, FleetTier
from sidecar.scheduling.gain import GainTicket
from sidecar.scheduling.gain_claims import GainClaimQueue
from sidecar.scheduling.gain_order import GainOrder, GainTier
from sidecar.scheduling.order import Candidate
from sidecar.scheduling.ticket import Ticket
from sidecar.scheduling.tier import MOST_EXCESS, TierState


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

    def is_below_floor(self) -> bool:
        """See `GainTier.is_below_floor`."""
        return super().is_below_floor() and self.floor_prefill < self.rules.reserve_prefill

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
        """See `GainOrder.candidate`. A claimant that was no head of its tier is beyond the floor."""
        assert isinstance(tier, GainTier)
        assert isinstance(ticket, GainTicket)
        if ticket.is_by_gain and not tier.rules.always_first:
            return self.beyond(tier, ticket, now_us)
        return super().candidate(tier, ticket, now_us)

    def candidates(self, tier: FleetTier, tickets: Iterable[Ticket], now_us: int) -> list[Candidate]:
        """See `FleetOrder.candidates`."""
        return [self.candidate(tier, ticket, now_us) for ticket in tickets]

    def _is_in_headroom(self, tier: GainTier, ticket: Ticket) -> bool:
        assert isinstance(tier, GainFleetTier)
        has_prefill = (
            not self._bounds_prefill or tier.held_prefill + tier.prefill(ticket) <= tier.rules.headroom_prefill
        )
        return has_prefill and super()._is_in_headroom(tier, ticket)
