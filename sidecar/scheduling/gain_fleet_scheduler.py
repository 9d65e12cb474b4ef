"""The scheduler of a pool with several engines that orders by gain: `fleet_scheduler` with the order of `gain_order`.

A walk looks at the heads of the tiers, at the claimants, and at the best ticket of each tier, in the order by gain. A
best ticket that claims an engine becomes a claimant: the next best of its tier is a candidate then. A best ticket is
known by a density that was computed earlier, and that of a claimant is up to date, so one that claims may fall back in
the order. The walk begins anew then, and no more often than `fleet_scheduler` says, however many such tickets wait.

A ticket is urgent when its deadline is nearer than half of the time that all engines which take new work need for all
that waits.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from sidecar.scheduling.fleet_scheduler import FleetScheduler, RulesOf
from sidecar.scheduling.gain import GainFigures, GainTicket
from sidecar.scheduling.gain_fleet import GainFleetOrder, GainFleetTier
from sidecar.scheduling.gain_scheduler import Deadline, GainScheduler
from sidecar.scheduling.heaps import Sweep
from sidecar.scheduling.order import Candidate, OrderClass
from sidecar.scheduling.placement import WEIGHT_PERCENT, EngineLedger
from sidecar.scheduling.ticket import Admission, Ticket

_ALWAYS_FIRST, _INSIDE, _TURN, _ = OrderClass


class GainFleetScheduler(GainScheduler, FleetScheduler):
    """See `FleetScheduler` and `GainScheduler`."""

    _tiers: tuple[GainFleetTier, ...]
    _order: GainFleetOrder
    _tier_type = GainFleetTier
    _order_type = GainFleetOrder
    _prefill_in_reserve = attrgetter("floor_prefill")

    def __init__(self, rules_of: RulesOf, weight_percent: int = WEIGHT_PERCENT) -> None:
        self._deadlines: list[Deadline] = []
        self._sweep_deadlines = Sweep()
        FleetScheduler.__init__(self, rules_of, weight_percent)

    def submit(self, ticket_id: str, *, tier: int, **ticket: Any) -> Ticket:
        """See `FleetScheduler.submit`. After the largest ticket so far no tenant may be ahead that was."""
        queue = self._tiers[tier].queue
        largest = queue.largest
        submitted = super().submit(ticket_id, tier=tier, **ticket)
        if queue.largest != largest:
            self._changed()
        return submitted

    def appraise(self, ticket: Ticket, gain: GainFigures) -> None:
        """See `GainScheduler.appraise`."""
        super().appraise(ticket, gain)
        if self._tiers[ticket.tier].queue.best() is ticket:
            self._changed()

    def charge(self, tier: int, tenant: str, weight: int, tokens: int) -> None:
        """See `Scheduler.charge`. The tenant's first ticket that waits starts later, too."""
        self._changed()
        super().charge(tier, tenant, weight, tokens)

    def _claim(self, ticket: Ticket, now_us: int) -> None:
        super()._claim(ticket, now_us)
        self._refresh_densities(now_us)  # else another decision at the same time would do it, and change the order

    def dispatch(self, now_us: int, most: int | None = None) -> list[Admission]:
        """See `Scheduler.dispatch`."""
        if not self.is_paused:
            self._make_urgent(now_us)
            self._refresh_densities(now_us)
        return FleetScheduler.dispatch(self, now_us, most)

    def _make_urgent(self, now_us: int) -> int:
        made = super()._make_urgent(now_us)
        if made:
            self._changed()
        return made

    def _refresh_densities(self, now_us: int) -> GainTicket | None:
        """See `GainScheduler._refresh_densities`. Those of claimants are brought up to date, too."""
        for tier in self._tiers:
            for ticket in tier.queue.claimants.values():
                assert isinstance(ticket, GainTicket)
                if ticket.is_urgent and ticket.density != (density := ticket.density_at(now_us)):
                    ticket.stored_density = density
                    self._changed()
        return super()._refresh_densities(now_us)

    def _note_refreshed(self) -> None:
        self._changed()

    def _engines_that_work(self) -> int:
        return max(1, len(self.placement.taking))

    def _admit_to(self, candidate: Candidate, ledger: EngineLedger, now_us: int) -> Admission:
        admission = super()._admit_to(candidate, ledger, now_us)
        ticket = candidate.ticket
        assert isinstance(ticket, GainTicket)
        if ticket.in_floor:
            self._tiers[ticket.tier].floor_prefill += ticket.placing.prefill
        self._refresh_densities(now_us)
        return admission

    def _release(self, lease: Ticket, now_us: int) -> None:
        self._give_floor_back(lease)
        super()._release(lease, now_us)

    def _give_prefill_back(self, lease: Ticket, now_us: int) -> None:
        self._give_floor_back(lease)
        super()._give_prefill_back(lease, now_us)

    def _give_floor_back(self, lease: Ticket) -> None:
        """What is un-prefilled of a lease does not count in its tier's floor any more."""
        assert isinstance(lease, GainTicket)
        if lease.in_floor:
            self._tiers[lease.tier].floor_prefill -= lease.placing.prefill
