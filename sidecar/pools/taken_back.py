"""Leases of one replica that its ledger may ask it to take back (rule 7), and those that are on their way."""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.pools.calls import Call, Reply
from sidecar.pools.reported_shortage import new_gone, read_shortage
from sidecar.pools.row import sum_cells
from sidecar.scheduling.figures import Rules
from sidecar.scheduling.preemption import Returnable, leases_to_take_back
from sidecar.scheduling.scheduler import Scheduler
from sidecar.scheduling.tickets import ScheduledLease


class TakenBack:
    """`names`: the tiers. `is_new`: the ledger does not know all that are on their way."""

    def __init__(self, names: Sequence[str]) -> None:
        self.is_new = False
        self._names = names
        self._leaving: dict[str, ScheduledLease] = {}
        self._returnable = Returnable()

    def start_over(self) -> None:
        """Forgets what may be taken back: `may_return` says it anew."""
        self._returnable = Returnable()

    def may_return(self, lease: ScheduledLease, rules: Rules) -> None:
        """One that is held, by the rules of now."""
        if rules.tiers[lease.ticket.tier].preemptible and not (lease.is_kept or lease.is_chosen):
            self._returnable.add(lease)

    def ended(self, lease: ScheduledLease, rules: Rules) -> None:
        """One that is held no more."""
        if self._leaving:
            self._leaves_no_more(lease)
        if rules.tiers[lease.ticket.tier].preemptible and not lease.is_kept:
            self._returnable.remove(lease)

    def kept(self, lease: ScheduledLease) -> bool:
        """One whose first byte is on its way stays. Whether it had been chosen."""
        was_chosen, lease.is_kept, lease.is_chosen = lease.is_chosen, True, False
        self._returnable.remove(lease)
        if was_chosen:
            self._leaves_no_more(lease)
        return was_chosen

    def put(self, call: Call) -> None:
        """Puts what is on its way into a call, where that is news."""
        if self.is_new or call.whole:
            call.leaving, self.is_new = sum_cells(self._names, self._leaving.values()), False

    def choose(self, reply: Reply, ahead_us: int, pool: Scheduler, now_us: int) -> list[ScheduledLease]:
        """Leases that give their room for what the ledger is short of, by the sums of its reply."""
        if reply.shortage is None:
            return []
        levels = {name: level for level, name in enumerate(self._names)}
        found, gone = read_shortage(reply.shortage, levels, ahead_us), new_gone(reply.leaving, levels)
        chosen = leases_to_take_back(pool, found, self._returnable, now_us, gone)
        for lease in chosen:
            lease.is_chosen = self.is_new = True
            self._returnable.remove(lease)
            self._leaving[lease.ticket.id] = lease
        return chosen

    def _leaves_no_more(self, lease: ScheduledLease) -> None:
        if self._leaving.pop(lease.ticket.id, None) is not None:
            self.is_new = True
