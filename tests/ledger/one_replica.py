"""Plays a program on one replica over a ledger in the process."""

from sidecar.pools import calls
from sidecar.pools.ledger import Ledger
from sidecar.pools.member import Member
from sidecar.pools.member_events import Entered, TakeBack
from sidecar.scheduling.amounts import UNBOUNDED
from tests.ledger.player import views_of
from tests.scheduling.player import rules_of, ticket_of, us


class OneReplica:
    """`near`: the class of a replica whose ledger serves it alone; None: the ledger is as a store's."""

    def __init__(self, scenario, most_bids=32, near=None):
        rules = rules_of(scenario)
        self.names = [t.name for t in rules.tiers]
        self.ledger = Ledger()
        alone = {"heartbeat_us": UNBOUNDED, "lazy_us": UNBOUNDED, "near": self.ledger} if near else {}
        self.member = (near or Member)("one", calls.LedgerRules.of(rules), most_bids=most_bids, **alone)
        self.tickets, self.entered, self.count = {}, [], 0
        self.set_engines(scenario.get("engines", [{"id": "pool#1", **scenario.get("capacity", {})}]), 0)
        self.member.pool.knew = 1
        self.member._guard.answered = lambda *_: None  # the program decides
        self.pump(0)

    def set_engines(self, offers, now):
        self.member.view(views_of(offers, now), now)

    def pump(self, now):
        """Calls now, and what is due after that."""
        self.member._due_us = now
        return self.call(now)

    def call(self, now):
        """The calls that are due."""
        admitted, chosen, self.entered = self.entered, [], []
        while (call := self.member.poll(now)) is not None:
            reply, _ = self.ledger.execute(call, now)
            self.member.answered(reply, now)
        for event in self.member.take_events():
            if isinstance(event, Entered):
                admitted.append((event.lease.ticket.id, event.lease.engine))
            elif isinstance(event, TakeBack):
                chosen.append(event.lease.ticket.id)
        return admitted, chosen

    def do(self, step, now):
        m, what, name = self.member, step["do"], step.get("id")
        lease, ticket = m.leases.get(name), self.tickets.get(name)
        waits = ticket is not None and lease is None
        tier = self.names.index(step["tier"]) if "tier" in step else 0
        if what == "submit":
            ticket = ticket_of(step, tier, now, self.count)
            self.count += 1
            self.tickets[name] = ticket
            if (held := m.enter(ticket, now)) is None:
                m.submit(ticket, now)
            else:
                self.entered.append((name, held.engine))
        elif what == "cancel" and waits:
            m.cancel(self.tickets.pop(name), now)
        elif what == "settle" and lease:
            m.end(lease, now)
            del self.tickets[name]
        elif what == "prefilled" and lease:
            m.first_byte(lease, now)
        elif what == "resize" and lease:
            growth = step["tokens"] - lease.ticket.tokens
            m.resize(lease, step["tokens"], now)
            if growth > 0:
                m.charge(lease, growth, now)
        elif what == "keep" and lease:
            m.keep(lease, now)
        elif (what == "requeue" and lease and lease.is_chosen) or (what == "hand_back" and lease):
            m.hand_back(lease, step.get("barred", ()) if what == "hand_back" else (), now)
        elif what == "engines":
            self.set_engines(step["engines"], now)
        elif what == "guard":
            guard = next(of.guard for of in m.pool.reply.tiers if of.tier == step["tier"])
            share = round(step["share"] * calls.PPM)
            m._guard._decided.append(calls.GuardDecided(step["tier"], guard.decided_us, share, 0, 0, []))
            m._call_by(now)  # as a replica that has decided
        elif what == "cap":
            m.tell(calls.Cap(step["engine"], step["requests"], us(step["until"]) - now), now)
