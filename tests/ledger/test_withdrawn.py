"""Bids whose clients left: a tenant that gives up often is shown as much as one that waits."""

from __future__ import annotations

from sidecar.pools.calls import EngineView, LedgerRules, LedgerTierRules
from sidecar.pools.ledger import Ledger
from sidecar.pools.member import Member
from sidecar.scheduling.amounts import UNBOUNDED
from sidecar.scheduling.tickets import Ticket


def test_withdrawn_bids_cost_their_tenant_no_place_among_those_that_are_shown() -> None:
    tier = LedgerTierRules("only", 0, 10**6, 10**6, False, False, None)
    ledger = Ledger()
    member = Member(
        "", LedgerRules([tier], None, 0, 0, 200, False, 10**6), heartbeat_us=UNBOUNDED, most_bids=8, near=ledger
    )
    member.view([EngineView("pool#1", 2, UNBOUNDED, UNBOUNDED, 1_000, True)], 0)
    for number in range(100):
        member.submit(Ticket(str(number), 0, ("hasty", "patient")[number % 2], 1, number=number), 0)

    def shown() -> dict[str, list[Ticket]]:
        while (call := member.poll(0)) is not None:
            member.answered(ledger.execute(call, 0)[0], 0)
        tickets = member._bids.shown.values()
        return {tenant: [t for t in tickets if t.tenant == tenant] for tenant in ("hasty", "patient")}

    for each in (3, 4, 4):  # of the first eight two enter, and half of the bids are enough until others are withdrawn
        found = shown()
        assert [len(tickets) for tickets in found.values()] == [each, each]
        for ticket in found["hasty"]:
            member.cancel(ticket, 0)
