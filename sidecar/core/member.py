"""A replica's side of the ledger: its queues and leases, and when it calls. No I/O; its owner carries calls and replies.

`poll` gives the next call, `due_us` says when to ask for it. Replies, wake-ups and losses are told; what they change for
requests comes out of `take_events`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from sidecar.core import calls
from sidecar.core.amounts import UNBOUNDED
from sidecar.core.calls import (
    ALONE_US,
    BIDS_SHOWN,
    DEAD_US,
    HEARTBEAT_US,
    LAYOUT,
    Bid,
    Call,
    Cap,
    Cell,
    Charge,
    Drain,
    EngineView,
    GainBid,
    Granted,
    Kind,
    Owed,
    PoolRules,
    Reply,
    WakeUp,
    Withdrawn,
)
from sidecar.core.ledger import Ledger
from sidecar.core.queue import FairQueue
from sidecar.core.tickets import Lease, Ticket

ANSWER_WITHIN_US = 1_500_000
"""A call without an answer for so long is lost: whether it was executed is not known."""

ASK_WITHIN_US = 750_000
RETRY_US = 500_000

LAZY_US = 20_000
"""What no one waits for is told so much later, with what happened meanwhile."""


class Mode(Enum):
    """`JOINING`: was never in the pool. `WAITING`: another layout is in force. `LOST`: no answer, not for ALONE_US yet."""

    JOINING = "joining"
    WAITING = "waiting"
    STATING = "stating"
    SHARED = "shared"
    LOST = "lost"
    ALONE = "alone"


class Entered(NamedTuple):
    """A ticket got an engine: it is a lease."""

    lease: Lease


class Refused(NamedTuple):
    """The pool has other tiers: a ticket cannot wait here."""

    ticket: Ticket


@dataclass
class _Tier:
    """The waiting tickets of one tier: those not shown in a fair queue, and those shown by their bids."""

    queue: FairQueue
    shown: dict[int, Ticket] = field(default_factory=dict)


@dataclass
class _Told:
    """Something that the ledger adds up: it is sent once, and again with a statement if no answer came."""

    record: Charge | Owed | Drain | Cap
    number: int = 0


class Member:
    """One replica of a pool.

    `own_us`: of the owner's clock. `size_now` is called with a ticket that is about to be shown. `divides`: whether it
    admits alone when the store does not answer.
    """

    def __init__(
        self,
        who: str,
        rules: PoolRules,
        *,
        layout: int = LAYOUT,
        most_bids: int = BIDS_SHOWN,
        divides: bool = True,
        takes_over: bool = False,
        size_now: Callable[[Ticket], None] = lambda _: None,
    ) -> None:
        self.who, self.rules, self.layout = who, rules, layout
        self.mode = Mode.JOINING
        self.is_closing = self.is_gone = self.is_foreign = False
        self.knew = 0
        self.leases: dict[str, Lease] = {}
        self.views: dict[str, EngineView] = {}
        self.reply: Reply | None = None
        """The last one with figures."""
        self._most_bids, self._divides, self._size_now = most_bids, divides, size_now
        self._replaces, self._takes_over = True, takes_over
        self._tiers = [_Tier(FairQueue()) for _ in rules.tiers]
        self._bids: dict[str, int] = {}
        self._bids_made = self._number = self._entered = 0
        self._cells: dict[tuple[int, str], list[int]] = {}
        self._changed: set[tuple[int, str]] = set()
        self._acks: list[int] = []
        self._withdrawn: list[Withdrawn] = []
        self._told: list[_Told] = []
        self._is_view_new = True
        self._config: dict[str, calls.EngineState] = {}
        self._drained: dict[str, Drain] = {}
        self._own_held: dict[str, list[int]] = {}
        self._events: list[Entered | Refused] = []
        self._in_flight: Call | None = None
        self._sent_us = self._retry_us = self._last_answer_us = 0
        self._first_failure_us: int | None = None
        self._failures = 0
        self._due_us: int | None = 0
        self._heartbeat_us = 0
        self._alone: Ledger | None = None
        self._returns: dict[str, int] = {}

    # -- requests

    def submit(self, ticket: Ticket, now_us: int) -> None:
        """A request waits."""
        if self.is_foreign:
            self._events.append(Refused(ticket))
            return
        self._wait(ticket)
        self._call_by(now_us)

    def cancel(self, ticket: Ticket, now_us: int) -> None:
        """A waiting request is given up."""
        tier = self._tiers[ticket.tier]
        bid = self._bids.pop(ticket.id, None)
        if bid is None:
            tier.queue.remove(ticket)
            return
        del tier.shown[bid]
        self._withdrawn.append(Withdrawn(bid, self._name(ticket.tier)))
        self._call_by(now_us)

    def resize(self, lease: Lease, tokens: int, now_us: int) -> None:
        """A lease holds other tokens; growth is charged to its tenant."""
        ticket = lease.ticket
        if tokens > ticket.tokens:
            charge = Charge(self._name(ticket.tier), ticket.tenant, tokens - ticket.tokens, ticket.weight)
            self._told.append(_Told(charge))
        self._count(lease, -1)
        ticket.tokens = tokens
        self._count(lease, 1)
        self._call_by(now_us + LAZY_US)

    def first_byte(self, lease: Lease, now_us: int) -> None:
        """The prompt of a lease counts no longer."""
        self._count(lease, -1)
        self._owe(lease, lease.first_byte(now_us))
        self._count(lease, 1)
        self._tell_soon(now_us)

    def end(self, lease: Lease, now_us: int) -> None:
        """A lease ends."""
        self._count(lease, -1)
        self._owe(lease, lease.end(now_us))
        del self.leases[lease.ticket.id]
        self._returns.pop(lease.ticket.id, None)
        self._tell_soon(now_us)

    def hand_back(self, lease: Lease, barred: Iterable[str], now_us: int) -> None:
        """A lease waits again: it was taken back, or its engine (`barred`) broke or refused it."""
        self._returns[lease.ticket.id] = lease.returns + 1
        returns = self._returns[lease.ticket.id]
        self.end(lease, now_us)
        self._returns[lease.ticket.id] = returns
        lease.ticket.come_back()
        lease.ticket.barred |= frozenset(barred)
        self._wait(lease.ticket)
        self._call_by(now_us)

    def view(self, engines: Iterable[EngineView], now_us: int) -> None:
        """The engines as this replica sees them now."""
        self.views, self._is_view_new = {engine.id: engine for engine in engines}, True
        self._call_by(now_us)

    def tell(self, record: Drain | Cap, now_us: int) -> None:
        """An operator's word on an engine, or a cap."""
        self._told.append(_Told(record))
        self._call_by(now_us)

    def change_rules(self, rules: PoolRules, now_us: int) -> None:
        """Other rules of the same tiers, which replace those of the pool."""
        self.rules, self._replaces = rules, True
        if self.mode is Mode.SHARED:
            self.mode = Mode.STATING
        self._call_by(now_us)

    def close(self, now_us: int) -> None:
        """Says goodbye when the last request has ended."""
        self.is_closing = True
        self._call_by(now_us)

    def waiting(self) -> int:
        """How many requests wait."""
        return sum(len(tier.queue) + len(tier.shown) for tier in self._tiers)

    def take_events(self) -> list[Entered | Refused]:
        """What happened to requests since the last time."""
        events, self._events = self._events, []
        return events

    # -- calls

    def due_us(self) -> int | None:
        """When `poll` has something to do next; None: not before something is told."""
        times = [self._heartbeat_us] if self._due_us is None else [self._due_us, self._heartbeat_us]
        if self._in_flight is not None:
            within = ASK_WITHIN_US if self._in_flight.kind == "ask" else ANSWER_WITHIN_US
            times = [self._sent_us + within]
        elif self.mode in (Mode.JOINING, Mode.WAITING, Mode.LOST, Mode.ALONE):
            times = [max(self._retry_us, min(times))]
        if self._first_failure_us is not None and self.mode in (Mode.LOST, Mode.ALONE):
            times += [self._first_failure_us + ALONE_US] if self.mode is Mode.LOST else []
        return None if self.is_gone else min(times)

    def poll(self, now_us: int) -> Call | None:
        """The call to make now, if one is due. Each is followed by `answered` or `unanswered`, or lost by time."""
        if self.is_gone:
            return None
        if self._in_flight is not None:
            within = ASK_WITHIN_US if self._in_flight.kind == "ask" else ANSWER_WITHIN_US
            if now_us >= self._sent_us + within:
                self.unanswered(now_us)
            else:
                self._admit_alone(now_us)
                return None
        self._admit_alone(now_us)
        is_beat = now_us >= self._heartbeat_us
        if not is_beat and (self._due_us is None or now_us < self._due_us):
            return None
        if self.mode in (Mode.JOINING, Mode.WAITING, Mode.LOST, Mode.ALONE):
            if now_us < self._retry_us:
                return None
            kind: Kind = "ask"
        elif self.mode is Mode.STATING:
            kind = "state"
        else:
            kind = "bye" if self.is_closing and not self.leases and not self.waiting() else "call"
        self._due_us = None
        if is_beat:
            self._heartbeat_us = now_us + HEARTBEAT_US
        self._in_flight, self._sent_us = self._compose(kind, is_beat, now_us), now_us
        return self._in_flight

    def _compose(self, kind: Kind, is_beat: bool, now_us: int) -> Call:
        self._number += 1
        call = Call(self.layout, self.who, self._number, kind)
        if kind == "ask":
            return call
        if kind == "state":
            self._bids_go_back()
            self._is_view_new, self._withdrawn, self._acks = True, [], []
            call.knew, call.rules = self.knew, self.rules
            call.replaces, call.takes_over = self._replaces, self._takes_over
            call.drains = list(self._drained.values())
        elif is_beat:
            call.bid_count = len(self._bids) + len(self._withdrawn)
        call.whole = kind == "state" or is_beat
        keys = self._cells if call.whole else self._changed
        nothing = [0] * 7
        call.cells = [Cell(self._name(t), e, *self._cells.get((t, e), nothing)) for t, e in sorted(keys)]
        call.acks, call.withdrawn = self._acks, self._withdrawn
        self._changed, self._acks, self._withdrawn = set(), [], []
        if self._is_view_new:
            call.engines, self._is_view_new = list(self.views.values()), False
        for told in self._told:
            if told.number == 0 or kind == "state":
                told.number = call.number
                self._put(call, told.record)
        call.bids = self._new_bids(now_us)
        return call

    @staticmethod
    def _put(call: Call, record: Charge | Owed | Drain | Cap) -> None:
        if isinstance(record, Charge):
            call.charges = [*call.charges, record]
        elif isinstance(record, Owed):
            call.owes = [*call.owes, record]
        elif isinstance(record, Drain):
            call.drains = [*call.drains, record]
        else:
            call.caps = [*call.caps, record]

    def _new_bids(self, now_us: int) -> list[Bid]:
        """The next tickets of every tier that some engine can take, in fair order, as far as the tags are known."""
        made: list[Bid] = []
        for level, tier in enumerate(self._tiers):
            skipped: list[Ticket] = []
            while len(tier.shown) < self._most_bids and len(made) < BIDS_SHOWN:
                ticket = tier.queue.next()
                if ticket is None:
                    break
                tier.queue.show(ticket)
                if not self._can_use(ticket):
                    skipped.append(ticket)
                    continue
                self._size_now(ticket)
                made.append(self._show(level, ticket, now_us))
            for ticket in skipped:
                tier.queue.take_back(ticket)
        return made

    def _show(self, level: int, ticket: Ticket, now_us: int) -> Bid:
        """A ticket that bids again has another id, so a grant of its former bid cannot be taken for this one."""
        is_first = not any(t.tenant == ticket.tenant for t in self._tiers[level].shown.values())
        self._bids_made += 1
        self._bids[ticket.id] = self._bids_made
        self._tiers[level].shown[self._bids_made] = ticket
        gain = ticket.gain
        return Bid(
            self._bids_made,
            self._name(level),
            ticket.tenant,
            ticket.tokens,
            ticket.requests,
            ticket.prompt,
            ticket.weight,
            dict(ticket.hits),
            sorted(ticket.barred),
            now_us - ticket.arrived_us,
            ticket.number,
            None if gain is None else GainBid(*dataclasses.astuple(gain)),
            ticket.has_returned,
            ticket.start if is_first else None,
        )

    def _can_use(self, ticket: Ticket) -> bool:
        """Whether some engine takes new work that this replica reaches, as far as it knows."""
        return any(
            view.is_reachable
            and view.tokens >= ticket.tokens
            and view.requests >= ticket.requests
            and view.id.rpartition("#")[0] not in ticket.barred
            and (view.id not in self._config or self._config[view.id].is_ready)
            for view in self.views.values()
        )

    def _wait(self, ticket: Ticket) -> None:
        self._tiers[ticket.tier].queue.add(ticket)

    def _bids_go_back(self) -> None:
        for tier in self._tiers:
            for ticket in tier.shown.values():
                tier.queue.take_back(ticket)
            tier.shown.clear()
        self._bids.clear()

    # -- answers

    def answered(self, reply: Reply, now_us: int) -> None:
        """The reply of the ledger to the call in flight. Others are ignored."""
        call = self._in_flight
        if call is None or reply.number != call.number:
            return
        self._in_flight, self._last_answer_us, self._failures = None, now_us, 0
        if reply.kind == "wait":
            self._bids_go_back()
            self.mode, self._retry_us = Mode.WAITING, now_us + RETRY_US
            self._call_by(self._retry_us)
        elif reply.kind == "unknown":
            # Until its statement is answered it admits nothing alone.
            self.mode, self._alone = Mode.STATING, None
            self._bids_go_back()
            self._call_by(now_us)
        elif call.kind == "bye":
            self.is_gone = True
        else:
            self._in_pool(call, reply, now_us)

    def _in_pool(self, call: Call, reply: Reply, now_us: int) -> None:
        self.mode, self._first_failure_us, self.reply = Mode.SHARED, None, reply
        self.is_foreign = reply.is_foreign
        if call.kind == "state":
            self._replaces = self._takes_over = False
        self._told = [told for told in self._told if told.number == 0 or told.number > reply.number]
        if reply.config is not None:
            self._config = {engine.id: engine for engine in reply.config}
        if reply.drained is not None:
            self._drained = {drain.engine: drain for drain in reply.drained}
        if not reply.on_hold:
            self.knew = reply.alive
        self._take_tags(reply)
        if self.is_foreign:
            self._refuse_all()
        self._take(reply.grants, True, now_us)
        self._own_held = self._by_engine()
        self._withdraw_unusable()
        if reply.next_us is not None and self.waiting():
            self._call_by(now_us + reply.next_us)
        self._call_if_needed(now_us)

    def _take_tags(self, reply: Reply) -> None:
        """The tags as the ledger has them, and beyond them what this replica has shown."""
        names = {tier.name: level for level, tier in enumerate(self.rules.tiers)}
        for held in reply.tiers:
            if held.tier not in names:
                continue
            tier = self._tiers[names[held.tier]]
            tier.queue.virtual = max(tier.queue.virtual, held.virtual)
            if not tier.queue and not tier.shown:
                tier.queue.finish.clear()
            for tenant, finish in held.finish.items():
                shown = sum(t.tokens / t.weight for t in tier.shown.values() if t.tenant == tenant)
                tier.queue.finish[tenant] = max(finish, held.virtual) + shown

    def _refuse_all(self) -> None:
        self._bids_go_back()
        for tier in self._tiers:
            for ticket in list(tier.queue):
                tier.queue.remove(ticket)
                self._events.append(Refused(ticket))

    def _take(self, grants: Iterable[Granted], is_reply: bool, now_us: int) -> None:
        """Only a reply is complete: a grant there for a bid that is gone gives its room back. A wake-up is a hint."""
        for grant in grants:
            ticket = next((t.shown.pop(grant.bid) for t in self._tiers if grant.bid in t.shown), None)
            if ticket is None and (not is_reply or grant.bid in self._acks):
                continue
            self._acks.append(grant.bid)
            self._withdrawn = [gone for gone in self._withdrawn if gone.id != grant.bid]
            if ticket is not None:
                del self._bids[ticket.id]
                self._begin(ticket, grant, now_us)

    def _begin(self, ticket: Ticket, grant: Granted, now_us: int) -> None:
        ticket.tokens, ticket.count = grant.tokens, grant.prompt
        ticket.excess, ticket.excess_prompt, ticket.is_in_floor = grant.excess, grant.excess_prompt, grant.is_in_floor
        ticket.counted_us, ticket.admission = now_us - grant.counted_for_us, 1
        self._entered += 1
        lease = Lease(ticket, grant.engine, self._entered, grant.sent, self._returns.get(ticket.id, 0))
        self.leases[ticket.id] = lease
        self._count(lease, 1)
        self._events.append(Entered(lease))

    def woken(self, wake_up: WakeUp, now_us: int) -> None:
        """A hint: grants of this replica, or that an epoch begins."""
        if not wake_up.to:
            if self.mode is Mode.SHARED:
                self._call_by(now_us)
            return
        if self.mode in (Mode.SHARED, Mode.LOST, Mode.STATING):
            self._take(wake_up.grants, False, now_us)
        if self.mode is Mode.SHARED:
            self._call_if_needed(now_us)

    def unanswered(self, now_us: int) -> None:
        """The call in flight has no answer. Whether it was executed is not known: ask, and state everything."""
        call, self._in_flight = self._in_flight, None
        if call is None:
            self._heartbeat_us = now_us
            return
        self._failures += 1
        if self._first_failure_us is None:
            self._first_failure_us = self._sent_us
        if call.kind == "bye":
            self.is_gone = True
            return
        if self.mode in (Mode.SHARED, Mode.STATING):
            self.mode = Mode.LOST if self.knew and self._divides else Mode.JOINING
        self._retry_us = now_us if self._failures == 1 else now_us + RETRY_US
        self._call_by(self._retry_us)

    # -- alone

    def _admit_alone(self, now_us: int) -> None:
        """Without the store: a ledger of its own, of the part `min(C // n, own + free // n)` of each engine."""
        if self.mode is Mode.LOST and self._first_failure_us is not None:
            if now_us < self._first_failure_us + ALONE_US:
                return
            self.mode, self._alone = Mode.ALONE, Ledger()
            self._bids_go_back()
        if self.mode is not Mode.ALONE or self._alone is None:
            return
        while True:
            state = Call(0, self.who, self._number, "state", rules=self.rules, replaces=True)
            self._number += 1
            state.number, state.whole, state.engines = self._number, True, self._parts(now_us)
            state.cells = [Cell(self._name(t), e, *sums) for (t, e), sums in sorted(self._cells.items())]
            self._bids_go_back()
            state.bids = self._new_bids(now_us)
            reply, _ = self._alone.execute(state, now_us)
            before = len(self.leases)
            self._take(reply.grants, True, now_us)
            self._acks.clear()
            if len(self.leases) == before:
                break

    def _parts(self, now_us: int) -> list[EngineView]:
        alive, parts = max(1, self.knew), []
        held = {engine.id: engine for engine in self.reply.held} if self.reply is not None else {}
        for view in self.views.values():
            config = self._config.get(view.id)
            if config is None:
                continue
            sizes = []
            known = held.get(view.id)
            for d, size in enumerate((config.tokens, config.requests, config.prefill)):
                part = size if size == UNBOUNDED else size // alive
                if now_us < self._last_answer_us + DEAD_US and size != UNBOUNDED:
                    taken = 0 if known is None else (known.tokens, known.requests, known.sent)[d]
                    part = min(part, self._own_held.get(view.id, [0, 0, 0])[d] + max(0, size - taken) // alive)
                sizes.append(part)
            is_ready = view.is_reachable and (view.id.rpartition("#")[0] not in self._drained_names())
            parts.append(EngineView(view.id, sizes[0], sizes[1], sizes[2], view.speed, is_ready))
        return parts

    def _drained_names(self) -> set[str]:
        return {drain.engine for drain in self._drained.values() if drain.is_drained}

    # -- sums

    def _name(self, level: int) -> str:
        return self.rules.tiers[level].name

    def _count(self, lease: Lease, sign: int) -> None:
        key = lease.ticket.tier, lease.engine
        sums = self._cells.setdefault(key, [0] * 7)
        figures = (*lease.amount, lease.sent, *lease.ticket.on_floor)
        for i, figure in enumerate(figures):
            sums[i] += sign * figure
        if not any(sums):
            del self._cells[key]
        self._changed.add(key)

    def _by_engine(self) -> dict[str, list[int]]:
        """Tokens, requests and sent prompts of this replica."""
        found: dict[str, list[int]] = {}
        for (_, engine), sums in self._cells.items():
            own = found.setdefault(engine, [0, 0, 0])
            for i, at in enumerate((0, 1, 3)):
                own[i] += sums[at]
        return found

    def _owe(self, lease: Lease, owed_us: int) -> None:
        if owed_us:
            self._told.append(_Told(Owed(self._name(lease.ticket.tier), owed_us)))

    def _withdraw_unusable(self) -> None:
        for level, tier in enumerate(self._tiers):
            for bid, ticket in list(tier.shown.items()):
                if not self._can_use(ticket):
                    del tier.shown[bid], self._bids[ticket.id]
                    self._withdrawn.append(Withdrawn(bid, self._name(level)))
                    tier.queue.take_back(ticket)

    def _call_by(self, at_us: int) -> None:
        if self._due_us is None or self._due_us > at_us:
            self._due_us = at_us

    def _tell_soon(self, now_us: int) -> None:
        someone_waits = self.waiting() or (self.reply is not None and self.reply.waiting)
        self._call_by(now_us if someone_waits else now_us + LAZY_US)

    def _call_if_needed(self, now_us: int) -> None:
        if self._changed or self._withdrawn or self._acks or self._is_view_new or any(t.number == 0 for t in self._told):
            self._tell_soon(now_us)
        if self.is_closing and not self.leases and not self.waiting():
            self._call_by(now_us)
        if self.mode is Mode.SHARED and any(
            len(tier.queue) and len(tier.shown) < self._most_bids for tier in self._tiers
        ):
            first = [tier.queue.next() for tier in self._tiers if len(tier.shown) < self._most_bids]
            if any(ticket is not None and self._can_use(ticket) for ticket in first):
                self._call_by(now_us)
