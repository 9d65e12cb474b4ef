"""A replica's side of the ledger: its bids and leases, and when it calls. No I/O; its owner carries calls and replies.

`poll` gives the next call, `due_us` says when to ask for it. Replies, wake-ups and losses are passed in; what they
change for requests comes out of `take_events`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from sidecar.pools.bids import Bids
from sidecar.pools.calls import (
    ALONE_US,
    BIDS_SHOWN,
    HEARTBEAT_US,
    HOLD_US,
    LAYOUT,
    BidGranted,
    Call,
    Cap,
    Drain,
    EngineConfig,
    EngineView,
    Kind,
    LedgerRules,
    Owed,
    Reply,
    WakeUp,
)
from sidecar.pools.elsewhere import GrantsElsewhere
from sidecar.pools.guards import GuardFigures, MemberGuard
from sidecar.pools.known_pool import KnownPool, NewsItem, Row
from sidecar.pools.ledger import Ledger
from sidecar.pools.member_events import Entered, Event, MemberMode, TakeBack, TicketRefused
from sidecar.pools.meter import Meter
from sidecar.pools.shortage import TakenBack
from sidecar.scheduling.amounts import UNBOUNDED, Amount
from sidecar.scheduling.scheduler import Scheduler
from sidecar.scheduling.tickets import ScheduledLease, Ticket

ANSWER_WITHIN_US = 1_500_000
"""A call without an answer for so long is lost: whether it was executed is not known."""

ASK_WITHIN_US = 750_000
RETRY_US = 500_000

LAZY_US = 20_000
"""What no one waits for is sent so much later, with what happened meanwhile."""


class Member:
    """One replica of a pool.

    `size_now` is called with a ticket that is about to be shown. `divides`: whether it admits alone when the store does
    not answer. `heartbeat_us`, `lazy_us`: what nobody waits for is sent so often, and so much later; UNBOUNDED for a
    ledger that has no other replicas. `presumed`: how many replicas there are where the ledger never answered, 0 for
    not known. `shares_engines`: whether others can use the same engines. `near`: the ledger, if it serves this replica
    alone. `last_number`: of the last call under this name.
    """

    def __init__(
        self,
        who: str,
        rules: LedgerRules,
        *,
        layout: int = LAYOUT,
        most_bids: int = BIDS_SHOWN,
        divides: bool = True,
        takes_over: bool = False,
        presumed: int = 0,
        shares_engines: bool = True,
        heartbeat_us: int = HEARTBEAT_US,
        lazy_us: int = LAZY_US,
        size_now: Callable[[Ticket], None] = lambda _: None,
        near: Ledger | None = None,
        last_number: int = 0,
    ) -> None:
        self.who, self.rules, self.layout = who, rules, layout
        self._own_rules = rules.as_rules()
        self.mode = MemberMode.JOINING
        self.is_closing = self.is_gone = self.is_foreign = False
        self.others_waiting = 0
        self.leases: dict[str, ScheduledLease] = {}
        self.views: dict[str, EngineView] = {}
        self._divides, self._beat_us, self._lazy_us = divides, heartbeat_us, lazy_us
        self._replaces, self._takes_over = True, takes_over
        self._names = [tier.name for tier in rules.tiers]
        self._bids = Bids(self._names, most_bids, size_now, tuple if near is None else near.queues)
        self._row = Row(self._names)
        self.pool = KnownPool(self._row, presumed, shares_engines=shares_engines)
        self.elsewhere = GrantsElsewhere(self._names)
        self.meter = Meter(self._bids, self._call_by, self._lazy_us % UNBOUNDED)
        self._near, self._size_now = near, size_now
        if near is not None:
            near.serves(self.leases, self._bids.are_more)
        self._number, self._entered, self._alone_number = last_number, 0, 0
        self._acks: list[int] = []
        self._news: list[NewsItem] = []
        self._is_view_new = True
        self._back = TakenBack(self._names)
        self._guard = MemberGuard(self._own_rules)
        self.events: list[Event] = []
        self._in_flight: Call | None = None
        self._sent_us = self._retry_us = self._heartbeat_us = self.failures = 0
        self.first_failure_us: int | None = None
        self._due_us: int | None = 0
        self._alone: Ledger | None = None
        self._alone_rules: LedgerRules | None = None  # those that are stated to it
        self._returns: dict[str, int] = {}

    # -- requests

    def submit(self, ticket: Ticket, now_us: int) -> None:
        """A request waits."""
        if self.is_foreign:
            self.events.append(TicketRefused(ticket))
            return
        self._bids.add(ticket)
        if self.mode is not MemberMode.SHARED or self._bids.has_urgent(now_us, ticket.tier):
            self._call_by(now_us)

    def enter(self, ticket: Ticket, now_us: int) -> ScheduledLease | None:
        """The lease of one that enters at once: nothing waits, and nothing else is to be sent. None: `submit` it."""
        near, bids, due_us = self._near, self._bids, self._due_us
        has_news = self._in_flight is not None or (due_us is not None and due_us <= now_us)
        if near is None or has_news or bids.waiting or bids.is_paused or self.mode is not MemberMode.SHARED:
            return None
        entered = near.enter(ticket, now_us)
        return None if entered is None else self._lease(ticket, *entered)

    def cancel(self, ticket: Ticket, now_us: int, *, is_replaced: bool = False) -> None:
        """A waiting ticket is given up, perhaps before its verdict, or is to be replaced by another of its request."""
        was_asked = self.meter.give_up(ticket.number)  # and in a pool of other tiers it was given up as it was refused
        if not is_replaced:
            self._returns.pop(ticket.id, None)
        if was_asked or self.is_foreign:
            return
        if self._bids.remove(ticket):
            self._call_by(now_us)
        elif self._near is not None:
            self._near.look_at_queue(ticket.tier)

    def resize(self, lease: ScheduledLease, tokens: int, now_us: int) -> None:
        """A lease holds other tokens."""
        is_less = tokens < lease.ticket.tokens
        self._count(lease, -1)
        lease.ticket.tokens = tokens
        self._count(lease, 1)
        if is_less:
            self._tell_soon(now_us)
        else:
            self._call_by(now_us + self._lazy_us)

    def charge(self, lease: ScheduledLease, tokens: int, now_us: int) -> None:
        """The tenant of a lease is charged for so many tokens more (rule 2); below 0: gets them back, if it paid."""
        if (self._near and not self._bids) or (tokens < 0 and not self._bids.has_paid(lease.ticket)):
            return
        self._news.append(NewsItem(self._bids.charge(lease.ticket, tokens)))
        self._call_by(now_us + self._lazy_us)

    def first_byte(self, lease: ScheduledLease, now_us: int) -> None:
        """The prompt of a lease counts no longer."""
        self._count(lease, -1)
        if owed_us := lease.first_byte(now_us):
            self._owe(lease, owed_us, now_us)
        self._count(lease, 1)
        self._tell_soon(now_us)

    def end(self, lease: ScheduledLease, now_us: int) -> None:
        """A lease ends."""
        ticket, near = lease.ticket, self._near
        if near is None:
            self._row.add(lease, -1)
        else:
            near.hold(lease, -1)
        self._back.ended(lease, self._own_rules)
        if (ticket.excess or ticket.excess_prompt) and (owed_us := lease.end(now_us)):
            self._owe(lease, owed_us, now_us)
        del self.leases[ticket.id]
        if self._returns:
            self._returns.pop(ticket.id, None)
        if near is None or self._bids.waiting:
            self._tell_soon(now_us)

    def _count(self, lease: ScheduledLease, sign: int) -> None:
        if lease.is_chosen:
            self._back.is_new = True
        if self._near is None:
            self._row.add(lease, sign)
        else:
            self._near.hold(lease, sign)

    def keep(self, lease: ScheduledLease, now_us: int) -> None:
        """The first byte of a lease is on its way: it is taken back no more."""
        if self._back.kept(lease):
            self._call_by(now_us)

    def hand_back(self, lease: ScheduledLease, barred: Iterable[str], now_us: int) -> None:
        """A lease waits again: it was taken back, or its engine (`barred`) broke or refused it."""
        lease.ticket.barred |= frozenset(barred)
        self._wait_again(lease, lease.returns + 1, now_us)

    def ask_again(self, lease: ScheduledLease, tokens: int, more: int, now_us: int) -> None:
        """A lease that nobody has used waits on: it had grown, and is charged for so much `more`. It is no return."""
        self.charge(lease, more, now_us)
        self.resize(lease, tokens, now_us)
        self._wait_again(lease, lease.returns, now_us)

    def _wait_again(self, lease: ScheduledLease, returns: int, now_us: int) -> None:
        self.end(lease, now_us)
        if returns:
            self._returns[lease.ticket.id] = returns
        lease.ticket.come_back()
        self._bids.add(lease.ticket)
        self._call_by(now_us)

    def show_anew(self, now_us: int) -> None:
        """Shows waiting tickets anew: their sizes may have changed."""
        self._bids.show_anew()
        self._call_by(now_us)

    def view(self, engines: Iterable[EngineView], now_us: int) -> None:
        """The engines as this replica sees them now."""
        self.views, self._is_view_new = {engine.id: engine for engine in engines}, True
        self._call_by(now_us)

    def tell(self, record: Drain | Cap, now_us: int) -> None:
        """An operator's word on an engine, or a cap."""
        self._news.append(NewsItem(record))
        self._call_by(now_us)

    def change_rules(self, rules: LedgerRules, now_us: int) -> None:
        """Other rules of the same tiers, which replace those of the pool."""
        self.rules, self._own_rules, self._replaces = rules, rules.as_rules(), True
        self._guard.change_rules(self._own_rules)
        self._back.start_over()
        for lease in self.leases.values():
            self._back.may_return(lease, self._own_rules)
        if self.mode is MemberMode.SHARED:
            self.mode = MemberMode.STATING
        self._call_by(now_us)

    def note_slo(self, tier: int, tenant: str, *, is_missed: bool, now_us: int) -> None:
        """A request met its tier's SLO or missed it (rule 10)."""
        report_at_us = self._guard.note(tier, tenant, is_missed=is_missed, now_us=now_us)
        if report_at_us is not None:
            self._call_by(report_at_us)

    def guards(self, now_us: int) -> list[GuardFigures]:
        """The guarded tiers, the most important first."""
        return self._guard.figures(self.mirror(now_us), now_us) if self._guard.levels else []

    def close(self, now_us: int) -> None:
        """Says goodbye when the last request has ended."""
        self.is_closing = True
        self._call_by(now_us)

    def pause(self, is_paused: bool, now_us: int) -> None:
        """Its requests wait and are not shown, or are shown again."""
        self._bids.pause(is_paused)
        self._call_by(now_us)

    @property
    def number(self) -> int:
        """That of its last call."""
        return self._number

    @property
    def is_awaiting(self) -> bool:
        """True if a call is on its way."""
        return self._in_flight is not None

    def own(self) -> dict[str, Amount]:
        """Amounts that its leases hold, by tier."""
        return self._row.by_tier()

    def seen(self) -> tuple[list[EngineConfig], dict[str, Drain]]:
        """The engines that the pool knows, and the operators' words on them, by name; its own also if not answered."""
        own = {item.record.engine: item.record for item in self._news if isinstance(item.record, Drain)}
        return list(self.pool.config.values()), {**self.pool.drained, **own}

    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._bids)

    def take_events(self) -> list[Event]:
        """Events of requests since the last time."""
        events, self.events = self.events, []
        return events

    # -- calls

    @property
    def is_quiet(self) -> bool:
        """True if its ledger is in this process, and there is nothing to tell it at any time."""
        return self._near is not None and (self._due_us is None or self._due_us >= UNBOUNDED)

    def due_us(self) -> int | None:
        """When `poll` has something to do next; None: not before something is passed in."""
        if self.is_gone:
            return None
        at = self._heartbeat_us if self._due_us is None else min(self._due_us, self._heartbeat_us)
        if self._in_flight is not None:
            at = self._answer_due_us()
        elif self.mode is not MemberMode.SHARED and self.mode is not MemberMode.STATING:
            at = max(self._retry_us, at)
        if self.first_failure_us is not None and self.mode is MemberMode.LOST:
            at = min(at, self.first_failure_us + ALONE_US)
        return at

    def _answer_due_us(self) -> int:
        is_asking = self._in_flight is not None and self._in_flight.kind == "ask"
        return self._sent_us + (ASK_WITHIN_US if is_asking else ANSWER_WITHIN_US)

    def poll(self, now_us: int) -> Call | None:
        """The call to make now, if one is due. Each is followed by `answered` or `unanswered`, or lost by time."""
        if self.is_gone:
            return None
        if self._in_flight is not None and now_us >= self._answer_due_us():
            self.unanswered(now_us)
        self._admit_alone(now_us)
        if self._in_flight is not None:
            return None
        is_beat = now_us >= self._heartbeat_us
        if not is_beat and (self._due_us is None or now_us < self._due_us):
            return None
        if self.mode in (MemberMode.JOINING, MemberMode.WAITING, MemberMode.LOST, MemberMode.ALONE):
            if now_us < self._retry_us:
                return None
            kind: Kind = "ask"
        elif self.mode is MemberMode.STATING:
            kind = "state"
        else:
            kind = "bye" if self._has_ended() else "call"
        self._due_us = None
        if is_beat:
            self._heartbeat_us = now_us + self._beat_us
        self._in_flight, self._sent_us = self._compose(kind, is_beat, now_us), now_us
        return self._in_flight

    def _compose(self, kind: Kind, is_beat: bool, now_us: int) -> Call:
        self._number += 1
        call = Call(self.layout, self.who, self._number, kind)
        if kind == "ask":
            return call
        if kind == "state":
            self._put_statement(call, 0 if self.is_foreign else self.pool.knew)  # a foreign one makes no pool
            call.replaces, call.takes_over, self._is_view_new = self._replaces, self._takes_over, True
            call.drains = list(self.pool.drained.values())
        elif is_beat:
            call.bid_count = self._bids.count()
        if self._near is None:
            call.whole = kind == "state" or is_beat
            call.cells = self._row.state(call.whole)
            self.pool.states()
        if self._is_view_new:
            call.engines, self._is_view_new = list(self.views.values()), False
        if self._guard.levels:
            self._news += [NewsItem(seen) for seen in self._guard.seen(now_us)]
            self._guard.put(call, self.pool.reply)
        for item in self._news:
            if item.number == 0 or kind == "state":
                item.number = item.number or call.number
                item.put(call)
        self.meter.put(call)
        self._put_requests(call, now_us, BIDS_SHOWN)
        return call

    def _put_statement(self, call: Call, knew: int) -> None:
        self._bids.go_back()
        self._acks = []
        call.rules, call.knew, call.virtual = self.rules, knew, self._bids.virtual()

    def _put_requests(self, call: Call, now_us: int, most: int) -> None:
        """Adds the news of tickets and leases, and at most `most` bids."""
        self._back.put(call)
        call.acks, self._acks = self._acks, []
        call.bids = self._bids.new(now_us, most)
        call.withdrawn, self._bids.withdrawn = self._bids.withdrawn, []

    def _has_ended(self) -> bool:
        return self.is_closing and not self.leases and not self.waiting() and self.meter.is_idle

    # -- answers

    def answered(self, reply: Reply, now_us: int) -> None:
        """The reply of the ledger to the call in flight. Others are ignored."""
        call = self._in_flight
        if call is None or reply.number != call.number:
            return
        self._in_flight, self.pool.last_answer_us, self.failures = None, now_us, 0
        if reply.kind == "wait":
            self._bids.go_back()
            self.mode, self._retry_us = MemberMode.WAITING, now_us + RETRY_US
            self._call_by(self._retry_us)
        elif reply.kind == "unknown":
            # Until its statement is answered it admits nothing alone.
            self.mode, self._alone = MemberMode.STATING, None
            self._bids.go_back()
            if self.is_foreign:  # the pool's own replicas come first
                self._heartbeat_us = now_us + HOLD_US
            else:
                self._call_by(now_us)
        elif call.kind == "bye":
            self.is_gone = True
        else:
            self._in_pool(call, reply, now_us)

    def _in_pool(self, call: Call, reply: Reply, now_us: int) -> None:
        self.mode, self.first_failure_us = MemberMode.SHARED, None
        self.pool.take(reply, call.engines, now_us)
        self.is_foreign = reply.is_foreign
        if call.kind == "state":
            self._replaces, self._takes_over = call.rules is not self.rules, False
        self._news = [item for item in self._news if item.number == 0 or item.number > reply.number]
        self.events += self.meter.take(call, reply.verdicts)
        self._take(reply.grants, True, self.pool.ahead_us)
        self.others_waiting = max(0, reply.waiting - self._bids.count())
        self._bids.take_tags(reply)
        may_replace = self.is_foreign and call.whole and call.kind == "call" and not self.is_closing
        if may_replace or self._replaces:
            self.mode = MemberMode.STATING  # the pool's own replicas may be gone, or the rules changed during the call
            self._call_by(now_us)
        if self.is_foreign:
            self.events += [TicketRefused(ticket) for ticket in self._bids.remove_all()]
        if self._near is None:
            self.pool.own_is_reported(reply.grants)
            self.elsewhere.answered(reply, self._sent_us, is_first=call.kind == "state")
        self._take_room_back(reply, self.pool.ahead_us, now_us)
        if self._guard.levels:
            self._decide_guards(reply, now_us)
        if reply.next_us is not None and (self.waiting() or reply.on_hold):
            self._call_by(now_us + reply.next_us)
        self._call_if_needed(now_us)

    def _take_room_back(self, reply: Reply, ahead_us: int, now_us: int) -> None:
        """Rule 7, among the leases of this replica, by the sums of the reply."""
        if reply.shortage is not None and not self._back.is_new:
            chosen = self._back.choose(reply, ahead_us, self.mirror(now_us), now_us)
            self._back.is_new |= reply.alive > 1  # another one is asked, if this one can give nothing
            self.events += [TakeBack(lease) for lease in chosen]

    def _decide_guards(self, reply: Reply, now_us: int) -> None:
        """Rule 10, where the time has come."""
        due_in_us = self._guard.answered(reply, now_us)
        if due_in_us == 0:
            self._guard.decide(reply, self.mirror(now_us))
        if due_in_us or self._guard.has_decided:
            self._call_by(now_us + (due_in_us or 0))

    def whole_level(self, ticket: Ticket, now_us: int) -> int:
        """The aged level of a ticket as a whole level (rule 3)."""
        return self._own_rules.whole_level(ticket, now_us)

    def mirror(self, now_us: int) -> Scheduler:
        """The pool, by the last reply and what changed since, without what waits. Alone: its part, and its line."""
        ledger = self._alone if self.mode is MemberMode.ALONE else self._near
        if ledger is not None and ledger.state is not None:
            ledger.state.scheduler.look(now_us)
            return ledger.state.scheduler
        return self.pool.as_scheduler(self._own_rules, now_us)

    def _take(self, grants: Iterable[BidGranted], is_reply: bool, ahead_us: int) -> None:
        """Only a reply is complete: a grant there for a bid that is gone gives its room back. A wake-up is a hint."""
        for grant in grants:
            ticket = self._bids.granted(grant.bid)
            if ticket is None and (not is_reply or grant.bid in self._acks):
                continue
            if self._near is None:
                self._acks.append(grant.bid)
                self.elsewhere.own(grant)
            if ticket is not None:
                self._begin(ticket, grant, ahead_us)

    def _begin(self, ticket: Ticket, grant: BidGranted, ahead_us: int) -> None:
        ticket.tokens, ticket.count = grant.tokens, grant.prompt
        ticket.excess, ticket.excess_prompt, ticket.is_in_floor = grant.excess, grant.excess_prompt, grant.is_in_floor
        ticket.counted_us, ticket.admission = grant.counted_us - ahead_us, 1
        lease = self._lease(ticket, grant.engine, grant.sent)
        if self._near is None:
            self._row.add(lease, 1)
        self.events.append(Entered(lease, grant.found, dict(grant.passed)))

    def _lease(self, ticket: Ticket, engine: str, sent: int) -> ScheduledLease:
        self._entered += 1
        returns = self._returns.get(ticket.id, 0) if self._returns else 0
        self.leases[ticket.id] = lease = ScheduledLease(ticket, engine, self._entered, sent, returns)
        self._back.may_return(lease, self._own_rules)
        return lease

    def woken(self, wake_up: WakeUp, now_us: int) -> None:
        """A hint: grants of this replica, or that an epoch begins."""
        if not wake_up.to or wake_up.is_asked:
            if self.mode is MemberMode.SHARED:
                self._call_by(now_us)
            return
        if self.mode in (MemberMode.SHARED, MemberMode.LOST, MemberMode.STATING):
            self._take(wake_up.grants, False, wake_up.now_us - now_us)
        if self.mode is MemberMode.SHARED:
            self._call_if_needed(now_us)

    def unanswered(self, now_us: int) -> None:
        """The call in flight has no answer. Whether it was executed is not known: ask, and state everything."""
        call, self._in_flight = self._in_flight, None
        if call is None:
            self._heartbeat_us = now_us
            return
        self.failures += 1
        if self.first_failure_us is None:
            self.first_failure_us = self._sent_us
        if call.kind == "bye":
            self.is_gone = True
            return
        if self.mode in (MemberMode.SHARED, MemberMode.STATING, MemberMode.JOINING):
            self.mode = MemberMode.LOST if self.pool.replicas() and self._divides else MemberMode.JOINING
        self._retry_us = now_us if self.failures == 1 else now_us + RETRY_US
        self._call_by(self._retry_us)

    # -- alone

    def _admit_alone(self, now_us: int) -> None:
        """Without the store: a ledger of its own, of the part `min(C // n, own + free // n)` of each engine."""
        if self.mode is MemberMode.LOST and self.first_failure_us is not None:
            if now_us < self.first_failure_us + ALONE_US:
                return
            self._begin_alone()
        if self.mode is not MemberMode.ALONE or self._alone is None:
            return
        is_done = False
        while not is_done:
            call = self._compose_alone(now_us)
            reply, _ = self._alone.execute(call, now_us)
            if reply.kind == "unknown":  # no call for LOST_US
                self._begin_alone()
                continue
            before = len(self.leases)
            self.events += self.meter.take(call, reply.verdicts, self._alone)
            self._take(reply.grants, True, 0)
            self._bids.take_tags(reply)
            self._take_room_back(reply, 0, now_us)
            if self._guard.levels:
                self._decide_guards(reply, now_us)
            is_done = len(self.leases) == before and not self.meter.has_questions and not self._guard.has_decided

    def _begin_alone(self) -> None:
        self.mode, self._alone, self._alone_number = MemberMode.ALONE, Ledger(), 0
        self._acks, self._alone_rules, self._back.is_new = [], None, True

    def _compose_alone(self, now_us: int) -> Call:
        self._alone_number += 1
        are_new = self._alone_rules is not self.rules
        call = Call(LAYOUT, self.who, self._alone_number, "state" if are_new else "call")
        if are_new:
            self._put_statement(call, 1)
            self._alone_rules, call.replaces = self.rules, True
        call.engines, call.cells = self.parts(now_us), self._row.state(are_new)
        call.caps = [item.record for item in self._news if isinstance(item.record, Cap)]
        self._news = [item for item in self._news if not isinstance(item.record, Cap)]
        call.seen = [msgspec.structs.replace(it, first_call=self._alone_number) for it in self._guard.seen(now_us)]
        self._guard.put(call, self.pool.reply)
        self.meter.put(call, self._alone, max(1, self.pool.knew))
        self._put_requests(call, now_us, UNBOUNDED)
        return call

    def parts(self, now_us: int) -> list[EngineView]:
        """The engines of a replica that is alone; at UNBOUNDED as they are when the others have died."""
        return self.pool.parts(self.views, now_us)

    def _owe(self, lease: ScheduledLease, owed_us: int, now_us: int) -> None:
        if self._near is not None:
            self._near.owe(lease.ticket.tier, owed_us, now_us)
        else:
            self._news.append(NewsItem(Owed(self._names[lease.ticket.tier], owed_us, 0)))
            self._call_by(now_us)

    def _call_by(self, at_us: int) -> None:
        if self._due_us is None or self._due_us > at_us:
            self._due_us = at_us

    def _tell_soon(self, now_us: int) -> None:
        if self._bids:
            self._call_by(now_us)
        elif self._near is None:
            others_wait = self.pool.reply is not None and self.pool.reply.waiting
            self._call_by(now_us if others_wait else now_us + self._lazy_us)

    def _call_if_needed(self, now_us: int) -> None:
        has_news = self._row.changed or self._bids.withdrawn or self._acks or self._is_view_new or self._back.is_new
        if has_news or self.meter.has_news or any(item.number == 0 for item in self._news):
            self._tell_soon(now_us)
        if self._has_ended():
            self._call_by(now_us)
        if self.mode is MemberMode.SHARED and (self.meter.has_questions or self._bids.has_urgent(now_us)):
            self._call_by(now_us)
