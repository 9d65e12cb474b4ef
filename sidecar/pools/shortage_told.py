"""Room that is short, and what is taken back already, as the ledger tells it to the replica that has the leases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sidecar.pools.calls import Cell, Needed, ShortageTold
from sidecar.scheduling.preemption import Shortage
from sidecar.scheduling.scheduler import Gone
from sidecar.scheduling.tickets import Ticket


def gone_of(cells: Iterable[Cell], levels: Mapping[str, int]) -> Gone:
    """What leases that are taken back hold, of the tiers that are known."""
    gone = Gone()
    for cell in cells:
        if cell.tier in levels:
            amount = cell.tokens, cell.requests, cell.prompt
            on_floor = cell.floor_tokens, cell.floor_requests, cell.floor_prompt
            gone.add(levels[cell.tier], cell.engine, amount, cell.sent, on_floor)
    return gone


def shortage_of(told: ShortageTold, levels: Mapping[str, int], ahead_us: int) -> Shortage:
    """The shortage, with tickets of this replica's time, which is so much behind the ledger's."""

    def ticket_of(bid: Needed) -> Ticket:
        hits, arrived_us = {"": bid.cached, told.engine: bid.cached_there}, bid.arrived_us - ahead_us
        amount = bid.tokens, bid.requests, bid.prompt
        return Ticket("", levels[bid.tier], "", *amount, hits=hits, arrived_us=arrived_us, number=bid.number)

    served = ticket_of(told.served)
    return Shortage(
        told.engine,
        served,
        (told.order_class, told.before_key, told.key, served.arrival),
        [ticket_of(bid) for bid in told.before],
        [ticket_of(bid) for bid in told.burst],
        frozenset(levels[tier] for tier in told.closed),
    )
