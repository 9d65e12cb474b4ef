"""Plays a program on the scheduler: a pool that keeps the leases, as an owner does."""

from __future__ import annotations

from fractions import Fraction

from sidecar.policy.rules import Shares
from sidecar.scheduling.amounts import UNBOUNDED, minus
from sidecar.scheduling.engines import Gone, ScheduledEngine
from sidecar.scheduling.figures import Rules
from sidecar.scheduling.preemption import Returnable, leases_to_take_back, shortage
from sidecar.scheduling.scheduler import Scheduler
from sidecar.scheduling.tickets import ScheduledLease, Ticket, TicketGain
from tests.scheduling.programs import expected


def gone_of_chosen(leases):
    """What leases hold that are taken back."""
    gone = Gone()
    for lease in leases:
        if lease.is_chosen:
            gone.add(lease.ticket.tier, lease.engine, lease.amount, lease.sent)
    return gone


def us(seconds):
    return None if seconds is None else round(seconds * 1e6)


def rules_of(scenario):
    def part(of, key, default):
        return Fraction(str(of.get(key, default)))

    tiers = tuple(
        Shares(
            t["name"],
            part(t, "reserve", 0),
            part(t, "lend", 1),
            part(t, "limit", 1),
            bool(t.get("always_first")),
            bool(t.get("preemptible")),
            us(t.get("preempt_after_s")),
            part(t, "hold", 0),
        )
        for t in scenario["tiers"]
    )
    aging, names = scenario.get("aging") or {}, [t.name for t in tiers]
    return Rules(
        tiers,
        us(aging.get("promote_after_s")),
        names.index(aging["ceiling"]) if aging else 0,
        scenario.get("max_preemptions", 0),
        scenario.get("weight_percent", 200),
        scenario.get("order") == "gain",
        part(scenario, "fair", 1),
    )


def ticket_of(step, tier, now, number):
    """What a `submit` says; `number` is its place in the order of arrival."""
    gain = None
    if "gain" in step:
        g = step["gain"]
        gain = TicketGain(g["weight"], g["tokens"], us(g["cost"]), us(g["start_by"]), us(g["slack"]))
    return Ticket(
        step["id"],
        tier,
        step.get("tenant", ""),
        step["tokens"],
        step.get("requests", 1),
        step.get("prompt", 0),
        step.get("weight", 1),
        dict(step.get("hits", ())),
        frozenset(step.get("barred", ())),
        now,
        "",
        number,
        gain,
        user=step.get("user"),
        cost=step.get("cost"),
    )


class SchedulerPlayer:
    is_beyond = False  # see `LedgerPlayer`

    def __init__(self, scenario):
        self.rules = rules_of(scenario)
        self.names = [t.name for t in self.rules.tiers]
        self.scheduler = Scheduler(self.rules)
        self.tickets, self.leases, self.entered, self.returns, self.arrivals = {}, {}, [], {}, []
        self.set_engines(scenario.get("engines", [{"id": "pool#1", **scenario.get("capacity", {})}]))

    def set_engines(self, offers):
        self.scheduler.set_engines(
            ScheduledEngine(
                o["id"],
                *(o.get(key, UNBOUNDED) for key in ("tokens", "requests", "prefill")),
                o.get("speed", 1000),
                o.get("takes_new", True) and o.get("known", True),
                us(o.get("since_s", 0)),
                us(o.get("ramp_s", 0)),
            )
            for o in offers
        )

    def release(self, lease, now):
        before, sent, tier = lease.amount, lease.sent, lease.ticket.tier
        on_floor = lease.ticket.on_floor
        owed = lease.end(now)
        self.scheduler.hold(tier, lease.engine, minus((0, 0, 0), before), -sent, minus((0, 0, 0), on_floor))
        self.scheduler.owe(tier, owed, now)
        del self.leases[lease.ticket.id]

    def do(self, step, now):
        what, name = step["do"], step.get("id")
        lease, ticket = self.leases.get(name), self.tickets.get(name)
        tier = self.names.index(step["tier"]) if "tier" in step else 0
        if what == "submit":
            ticket = ticket_of(step, tier, now, len(self.arrivals))
            self.arrivals.append(ticket)
            self.tickets[name] = ticket
            self.scheduler.add(ticket)
        elif what in ("cancel", "settle") and ticket:
            if what == "cancel" or ticket.is_in_line:
                self.scheduler.remove(self.tickets.pop(name), now)
        elif what == "settle" and lease:
            self.release(lease, now)
        elif what == "prefilled" and lease:
            before, sent = lease.amount, lease.sent
            owed = lease.first_byte(now)
            change = minus(lease.amount, before)
            self.scheduler.hold(
                lease.ticket.tier, lease.engine, change, -sent, change if lease.ticket.is_in_floor else (0, 0, 0)
            )
            self.scheduler.owe(lease.ticket.tier, owed, now)
        elif what == "resize" and lease:
            change = (step["tokens"] - lease.ticket.tokens, 0, 0)
            lease.ticket.tokens = step["tokens"]
            self.scheduler.hold(
                lease.ticket.tier, lease.engine, change, 0, change if lease.ticket.is_in_floor else (0, 0, 0)
            )
        elif what == "resize" and ticket and ticket.is_in_line:
            if ticket.is_for_floor:
                self.scheduler._hold_in_line(ticket, (step["tokens"] - ticket.tokens, 0, 0))
            ticket.tokens = step["tokens"]
        elif what == "keep" and lease:
            lease.is_kept, lease.is_chosen = True, False
        elif (what == "requeue" and lease and lease.is_chosen) or (what == "hand_back" and lease):
            self.release(lease, now)
            back = lease.ticket
            back.come_back()
            if what == "hand_back":
                back.barred |= frozenset(step.get("barred", ()))
            self.returns[name] = self.returns.get(name, 0) + 1
            self.tickets[name] = back
            self.scheduler.add(back)
        elif what == "charge":
            self.scheduler.tiers[tier].queue.charge(
                step.get("tenant", ""), step["tokens"], step.get("weight", 1), step.get("user")
            )
        elif what == "engines":
            self.set_engines(step["engines"])
        elif what == "guard" and (guarded := self.scheduler.guards.of(tier)):
            self.scheduler.guards.decide(guarded, Fraction(str(step["share"])), now, ())
        elif what == "cap" and step["engine"] in self.scheduler.engines:
            self.scheduler.engines[step["engine"]].set_cap(step["requests"], us(step["until"]), now)

    def dispatch(self, now):
        found = []
        self.grants = self.scheduler.decide(now)
        for ticket, engine, sent, *_ in self.grants:
            del self.tickets[ticket.id]
            self.leases[ticket.id] = ScheduledLease(
                ticket, engine, len(self.entered), sent, self.returns.get(ticket.id, 0)
            )
            self.entered.append((ticket, now))
            found.append((ticket.id, engine))
        return found

    def preempt(self, now):
        leases = list(self.leases.values())
        gone = gone_of_chosen(leases)
        found = shortage(self.scheduler, now, gone)
        returnable = Returnable()
        for lease in sorted(leases, key=lambda lease: lease.entered):
            returnable.add(lease)
        chosen = leases_to_take_back(self.scheduler, found, returnable, now, gone) if found else []
        for lease in chosen:
            lease.is_chosen = True
        return [lease.ticket.id for lease in chosen]


def first_difference(program, player_of=SchedulerPlayer):
    """The first step whose answer is another than the program's, in words for a reader."""
    player = player_of(program)
    for number, step in enumerate(program["steps"], 1):
        now = round(step["at"] * 1e6)
        player.do(step, now)
        found = player.dispatch(now), player.preempt(now)
        if player.is_beyond:
            break
        if found != expected(step):
            return f"{program['name']}, step {number}: {found}, not {expected(step)}; {step}"
    return None
