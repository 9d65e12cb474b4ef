"""Room that is short, and what is taken back already, as the ledger sends it to the replica that has the leases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sidecar.pools.calls import Call, Cell, Needed, Reply, ReportedShortage
from sidecar.pools.known_pool import sum_cells
from sidecar.scheduling.engines import Gone
from sidecar.scheduling.figures import Rules
from sidecar.scheduling.preemption import Returnable, Shortage, leases_to_take_back
from sidecar.scheduling.scheduler import Scheduler
from sidecar.scheduling.tickets import ScheduledLease, Ticket


def new_gone(cells: Iterable[Cell], levels: Mapping[str, int]) -> Gone:
    """Amounts of leases that are taken back, of the tiers that are known."""
    gone = Gone()
    for cell in cells:
        if cell.tier in levels:
            amount = cell.tokens, cell.requests, cell.prompt
            gone.add(levels[cell.tier], cell.engine, amount, cell.sent)
    return gone


def report_shortage(found: Shortage, names: Sequence[str]) -> ReportedShortage:
    """The shortage as the ledger tells it. `names` are the tiers by level."""

    def needed(t: Ticket) -> Needed:
        cached, cached_there = max(t.hits.values(), default=0), [t.hits.get(engine, 0) for engine in found.engines]
        amount = t.tokens, t.requests, t.prompt
        return Needed(int(t.id), names[t.tier], *amount, cached, cached_there, t.arrived_us, t.number)

    order_class, before, key, _ = found.place
    return ReportedShortage(
        list(found.engines),
        order_class,
        before,
        key,
        needed(found.served),
        [[needed(ticket) for ticket in before] for before in found.engines.values()],
        [needed(ticket) for ticket in found.burst],
        sorted(names[level] for level in found.closed),
    )


def read_shortage(found: ReportedShortage, levels: Mapping[str, int], ahead_us: int) -> Shortage:
    """The shortage, with tickets of this replica's time, which is so much behind the ledger's."""

    def new_ticket(bid: Needed) -> Ticket:
        hits = {"": bid.cached, **dict(zip(found.engines, bid.cached_there, strict=True))}
        amount, arrived_us = (bid.tokens, bid.requests, bid.prompt), bid.arrived_us - ahead_us
        return Ticket("", levels[bid.tier], "", *amount, hits=hits, arrived_us=arrived_us, number=bid.number)

    served = new_ticket(found.served)
    return Shortage(
        {engine: [new_ticket(bid) for bid in bids] for engine, bids in zip(found.engines, found.before, strict=True)},
        served,
        (found.order_class, found.before_key, found.key, served.arrival),
        [new_ticket(bid) for bid in found.burst],
        frozenset(levels[tier] for tier in found.closed),
    )


# -- Leases of one replica that its ledger may ask it to take back (rule 7), and those that are on their way.


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
