"""Plays a program on a ledger: one replica, which shows all that waits."""

from __future__ import annotations

from typing import Any

from sidecar.pools import calls
from sidecar.pools.calls import Call
from sidecar.pools.known_pool import Row, sum_cells
from sidecar.scheduling.amounts import UNBOUNDED
from sidecar.scheduling.engines import ScheduledEngine
from sidecar.scheduling.preemption import Returnable, Shortage, leases_to_take_back
from sidecar.scheduling.scheduler import Scheduler
from sidecar.scheduling.tickets import ScheduledLease, Ticket
from tests.scheduling.player import gone_of_chosen, rules_of, ticket_of, us

Step = dict[str, Any]


def rules_told(program: dict[str, Any]) -> calls.LedgerRules:
    return calls.LedgerRules.of(rules_of(program))


def views_of(offers: list[dict[str, Any]], now: int) -> list[calls.EngineView]:
    return [
        calls.EngineView(
            o["id"], *(o.get(size, UNBOUNDED) for size in ("tokens", "requests", "prefill")), o.get("speed", 1000),
            o.get("takes_new", True) and o.get("known", True), now - us(o.get("since_s", 0)), us(o.get("ramp_s", 0)),
        )
        for o in offers
    ]  # fmt: skip


class LedgerPlayer:
    """`ledger` answers calls (`execute`); it must not take a gap between two steps for silence.

    No call can say that one in line is of another size: after that step (`is_beyond`) its answers are others.
    """

    def __init__(self, program: dict[str, Any], ledger: Any) -> None:
        self.ledger, self.rules, self.told = ledger, rules_of(program), rules_told(program)
        self.names = [tier.name for tier in self.rules.tiers]
        self.row = Row(self.names)
        self.bids: dict[int, Ticket] = {}
        self.waiting: dict[str, tuple[int, Ticket]] = {}
        self.leases: dict[str, ScheduledLease] = {}
        self.returns: dict[str, int] = {}
        self.count = self.made = self.entered = self.number = 0
        self.is_beyond = False
        self.leaving: list[calls.Cell] = []
        self.news, self.acks = Call(1, "r", 0, "call"), []
        self.set_engines(program.get("engines", [{"id": "pool#1", **program.get("capacity", {})}]), 0)
        self.news.kind, self.news.whole, self.news.rules, self.news.knew = "state", True, self.told, 1
        self.reply, self.config = None, {}
        self.dispatch(0)

    def set_engines(self, offers: list[dict[str, Any]], now: int) -> None:
        self.news.engines = views_of(offers, now)

    def show(self, ticket: Ticket, now: int) -> None:
        self.made += 1
        self.bids[self.made] = ticket
        self.waiting[ticket.id] = self.made, ticket
        self.news.bids.append(
            calls.Bid(
                self.made, self.names[ticket.tier], ticket.tenant, ticket.tokens, ticket.requests, ticket.prompt,
                ticket.weight, dict(ticket.hits), sorted(ticket.barred), now - ticket.arrived_us, ticket.number,
                ticket.gain, ticket.has_returned, None, ticket.user, ticket.cost,
            )
        )  # fmt: skip

    def change(self, lease: ScheduledLease, what: Any) -> None:
        self.row.add(lease, -1)
        owed = what()
        self.row.add(lease, 1)
        self.owe(lease, owed)

    def owe(self, lease: ScheduledLease, owed: int | None) -> None:
        if owed:
            self.news.owes.append(calls.Owed(self.names[lease.ticket.tier], owed, UNBOUNDED))

    def do(self, step: Step, now: int) -> None:
        what, name = step["do"], step.get("id", "")
        lease, (bid, ticket) = self.leases.get(name), self.waiting.get(name, (0, None))
        if what == "submit":
            made = ticket_of(step, self.names.index(step["tier"]), now, self.count)
            self.count += 1
            self.show(made, now)
        elif ticket and (what == "cancel" or (what == "settle" and self.is_in_line(bid))):
            del self.waiting[name]
            self.news.withdrawn.append(calls.Withdrawn(bid, self.names[ticket.tier]))
        elif what == "settle" and lease:
            self.row.add(lease, -1)
            self.owe(lease, lease.end(now))
            del self.leases[name]
        elif what == "prefilled" and lease:
            self.change(lease, lambda: lease.first_byte(now))
        elif what == "resize" and lease:
            self.change(lease, lambda: setattr(lease.ticket, "tokens", step["tokens"]))
        elif what == "resize" and ticket and self.is_in_line(bid):
            self.is_beyond = True
        elif what == "keep" and lease:
            lease.is_kept, lease.is_chosen = True, False
        elif lease and (what == "hand_back" or (what == "requeue" and lease.is_chosen)):
            self.row.add(lease, -1)
            self.owe(lease, lease.end(now))
            del self.leases[name]
            lease.ticket.come_back()
            lease.ticket.barred |= frozenset(step.get("barred", ()) if what == "hand_back" else ())
            self.returns[name] = self.returns.get(name, 0) + 1
            self.show(lease.ticket, now)
        elif what == "charge":
            self.news.charges.append(
                calls.LeaseGrowth(
                    step["tier"],
                    step.get("tenant", ""),
                    step["tokens"],
                    step.get("weight", 1),
                    UNBOUNDED,
                    step.get("user"),
                )
            )
        elif what == "engines":
            self.set_engines(step["engines"], now)
        elif what == "guard":
            guard = self.reply.tiers[self.names.index(step["tier"])].guard
            self.news.guards.append(
                calls.GuardDecided(step["tier"], guard.decided_us, round(step["share"] * calls.PPM), 0, 0, [])
            )
        elif what == "cap" and step["engine"] in self.config:
            self.news.caps.append(calls.Cap(step["engine"], step["requests"], us(step["until"]) - now))

    def is_in_line(self, bid: int) -> bool:
        state = self.ledger.state
        return state.members["r"].bids[bid].is_in_line

    def dispatch(self, now: int) -> list[tuple[str, str]]:
        self.number += 1
        call, self.news = self.news, Call(1, "r", 0, "call")
        call.number, call.cells, call.acks, self.acks = self.number, self.row.state(call.whole), self.acks, []
        leaving = sum_cells(self.names, (lease for lease in self.leases.values() if lease.is_chosen))
        if leaving != self.leaving:
            self.leaving = call.leaving = leaving
        self.reply, _ = self.ledger.execute(call, now)
        assert self.reply.kind == "ok", self.reply
        if self.reply.config is not None:
            self.config = {engine.id: engine for engine in self.reply.config}
        found = []
        for grant in self.reply.grants:
            ticket = self.bids.pop(grant.bid)
            del self.waiting[ticket.id]
            ticket.count, ticket.excess, ticket.excess_prompt = grant.prompt, grant.excess, grant.excess_prompt
            ticket.is_in_floor, ticket.counted_us = grant.is_in_floor, grant.counted_us
            returns = self.returns.get(ticket.id, 0)
            lease = ScheduledLease(ticket, grant.engine, self.entered, grant.sent, returns)
            self.entered += 1
            self.leases[ticket.id] = lease
            self.row.add(lease, 1)
            self.acks.append(grant.bid)
            found.append((ticket.id, grant.engine))
        return found

    def preempt(self, now: int) -> list[str]:
        told = self.reply.shortage
        if told is None:
            return []

        def shown(needed: calls.Needed) -> Ticket:
            return self.bids[needed.bid]

        place = (told.order_class, told.before_key, told.key, shown(told.served).arrival)
        closed = frozenset(self.names.index(tier) for tier in told.closed)
        found = Shortage(
            {engine: [*map(shown, bids)] for engine, bids in zip(told.engines, told.before, strict=True)},
            shown(told.served), place, [*map(shown, told.burst)], closed,
        )  # fmt: skip
        leases = list(self.leases.values())
        gone = gone_of_chosen(leases)
        returnable = Returnable()
        for lease in sorted(leases, key=lambda lease: lease.entered):
            returnable.add(lease)
        chosen = leases_to_take_back(self.mirror(now), found, returnable, now, gone)
        for lease in chosen:
            lease.is_chosen = True
        return [lease.ticket.id for lease in chosen]

    def mirror(self, now: int) -> Scheduler:
        scheduler = Scheduler(self.rules)
        for e, held in zip(self.config.values(), self.reply.held, strict=False):
            engine = ScheduledEngine(e.id, e.tokens, e.requests, e.prefill, e.speed, e.is_ready, e.since_us, e.ramp_us)
            engine.held, engine.sent = (held.tokens, held.requests, held.prompt), held.sent
            engine.cap_requests, engine.cap_until_us = held.cap_requests, held.cap_until_us
            scheduler.engines[e.id] = engine
        for state, tier in zip(scheduler.tiers, self.reply.tiers, strict=True):
            state.on_engines, state.in_line = tier.on_engines, tier.in_line
            state.on_floor, state.in_line_on_floor = tier.on_floor, tier.in_line_on_floor
        scheduler.look(now)
        return scheduler
