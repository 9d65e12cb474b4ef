"""Room that is short, and what is taken back already, as the ledger sends it to the replica that has the leases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sidecar.pools.calls import Cell, Needed, ReportedShortage
from sidecar.scheduling.engines import Gone
from sidecar.scheduling.preemption import Shortage
from sidecar.scheduling.tickets import Ticket


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
