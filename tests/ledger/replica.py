"""A replica of the world: a `Member`, with the world's timers, network and engines."""

import copy

from sidecar.pools import calls
from sidecar.pools.calls import EngineView
from sidecar.pools.member import Member
from sidecar.pools.member_events import TicketRefused
from sidecar.scheduling.tickets import Ticket


def pool_rules(tiers):
    rules = [
        calls.LedgerTierRules(name, round(share * 1e6), 1_000_000, 1_000_000, False, False, None)
        for name, share in tiers
    ]
    return calls.LedgerRules(rules, None, 0, 0, 200, False, 1_000_000)


class Request:
    def __init__(self, number, tier, tenant, *, tokens, prompt, hits, arrived, weight):
        self.id, self.tier, self.tenant, self.tokens, self.prompt, self.hits = (
            number,
            tier,
            tenant,
            tokens,
            prompt,
            hits,
        )
        self.arrived, self.weight, self.ticket, self.lease, self.engine = arrived, weight, None, None, None
        self.status, self.outcome, self.runs, self.sent = "queued", None, 0, 0


class ModelReplica:
    def __init__(self, world, name, layout, rules, *, most_bids, divides, takes_over):
        self.world, self.name, self.layout, self.rules, self.most_bids = world, name, layout, rules, most_bids
        self.member = Member(
            name, pool_rules(rules[0]), layout=layout, most_bids=most_bids, divides=divides, takes_over=takes_over
        )
        self.levels = {tier: level for level, (tier, _) in enumerate(rules[0])}
        self.requests, self.connection, self.timer = {}, 0, 0
        self.paused, self.backlog, self.dead = False, [], False
        self.view = {}
        self.covered, self.uncovered_why = True, ""

    mode = property(lambda self: self.member.mode.value)
    number = property(lambda self: self.member._number)
    is_foreign = property(lambda self: self.member.is_foreign)
    last_answer = property(lambda self: self.member.pool.last_answer_us)
    open = property(lambda self: {bid: self.requests[t.id] for bid, t in self.member._bids.shown.items()})

    @property
    def closing(self):
        return self.member.is_closing

    @closing.setter
    def closing(self, value):
        self.member.close(self.world.now)

    def waiting(self):
        return {r.id: r for r in self.requests.values() if r.status == "queued"}

    def can_use(self, request):
        return True

    def start(self):
        self.tell_view()
        self.world.at(0, self.world.for_replica, self, self.send_timer, ())

    def want(self, _):
        self.pump()

    def send_timer(self, *_):
        self.pump()

    heartbeat = admit_alone = timeout = send_timer

    def pump(self):
        """Everything that the member has to do and to say now."""
        while not self.dead:
            before = self.member._in_flight
            call = self.member.poll(self.world.now)
            self.take_events()
            if call is None:
                if before is not None and self.member._in_flight is None:
                    self.connection += 1
                    continue
                break
            if before is not None and before is not call:
                self.connection += 1
            self.world.send_call(self, copy.deepcopy(call))
        if self.member.is_gone and not self.dead:
            self.dead = True
            self.world.gone(self)
        due = self.member.due_us()
        if due is not None and not self.dead:
            self.timer += 1
            self.world.at(max(1, due - self.world.now), self.world.for_replica, self, self.timed, (self.timer,))

    def timed(self, timer):
        if timer == self.timer:
            self.pump()

    def take_events(self):
        for event in self.member.take_events():
            if isinstance(event, TicketRefused):
                request = self.requests[event.ticket.id]
                request.status, request.outcome = "done", "refused"
                self.world.ended(request)
                continue
            request = self.requests[event.lease.ticket.id]
            request.status, request.lease, request.engine, request.sent = (
                "leased",
                event.lease,
                event.lease.engine,
                event.lease.sent,
            )
            if self.mode == "alone":
                self.world.admitted_alone(self, request, event.lease.engine)
            self.world.engine_start(self, request, event.lease.engine)

    def answered(self, reply, connection):
        if connection == self.connection:
            self.member.answered(reply, self.world.now)
            self.pump()

    def woken(self, wake):
        self.member.woken(wake, self.world.now)
        self.pump()

    def broken(self, connection):
        if connection == self.connection:
            self.connection += 1
            self.member.unanswered(self.world.now)
            self.pump()

    def arrive(self, request):
        if self.closing or self.is_foreign:
            request.status, request.outcome = "done", "refused"
            self.world.ended(request)
            return
        request.ticket = Ticket(
            str(request.id),
            self.levels[request.tier],
            request.tenant,
            request.tokens,
            1,
            request.prompt,
            request.weight,
            request.hits,
            frozenset(),
            self.world.now,
            self.name,
            request.id,
            user=f"{request.id % 5}" if request.id % 2 else None,
        )
        self.requests[str(request.id)] = request
        self.member.submit(request.ticket, self.world.now)
        self.pump()

    def is_running(self, request, run):
        return request.runs == run and request.status == "leased"

    def first_byte(self, request, run):
        if self.is_running(request, run):
            self.member.first_byte(request.lease, self.world.now)
            self.pump()

    def resize(self, request, run, tokens):
        if self.is_running(request, run):
            if (growth := tokens - request.lease.ticket.tokens) > 0:
                self.member.charge(request.lease, growth, self.world.now)
            self.member.resize(request.lease, tokens, self.world.now)
            self.pump()

    def release(self, request, outcome):
        request.status, request.outcome = "done", outcome
        self.member.end(request.lease, self.world.now)
        self.world.ended(request)

    def ended_at_engine(self, request, run, outcome):
        if self.is_running(request, run):
            self.release(request, outcome)
            self.pump()

    def refused_by_engine(self, request, run, engine):
        if self.is_running(request, run):
            request.status = "queued"
            lease = request.lease
            self.member.resize(lease, request.tokens, self.world.now)  # it begins anew
            self.member.hand_back(lease, [engine.rpartition("#")[0]], self.world.now)
            if len(lease.ticket.barred) >= len(self.view):
                lease.ticket.barred = frozenset()
            self.pump()

    def client_left(self, request):
        if request.status == "queued" and request.ticket is not None:
            self.member.cancel(request.ticket, self.world.now)
            request.status, request.outcome = "done", "left"
            self.world.ended(request)
        elif request.status == "leased":
            self.world.engine_stop(self, request)
            self.release(request, "left")
        self.pump()

    def engine_seen(self, engine, capacity, prefill, reachable):
        if self.view.get(engine) != [capacity, prefill, reachable]:
            self.view[engine] = [capacity, prefill, reachable]
            self.tell_view()
            self.pump()

    def tell_view(self):
        self.member.view([EngineView(name, c, c, p, 1000, r) for name, (c, p, r) in self.view.items()], self.world.now)

    def drain(self, engine, is_drained):
        self.member.tell(calls.Drain(engine.rpartition("#")[0], is_drained), self.world.now)
        self.pump()
