"""The ledger of one pool: who holds how much of which engine, and who is next. `ledger.lua` is this in the store.

Replicas state sums and show bids (`calls`); the ledger decides by the rules (`scheduler`) and keeps each grant in its
replica's outbox until it is acknowledged. Sums are absolute, so that stating them again heals any error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import msgspec

from sidecar.core import calls
from sidecar.core.amounts import NOTHING
from sidecar.core.calls import DEAD_US, HOLD_US, LOST_US, Bid, Call, Cell, Drain, EngineView, Granted, Reply, WakeUp
from sidecar.core.engines import Engine
from sidecar.core.figures import Rules
from sidecar.core.preemption import Shortage, shortage
from sidecar.core.reports import Found
from sidecar.core.scheduler import Gone, Scheduler
from sidecar.core.tickets import Gain, Ticket
from sidecar.core.time_alone import next_change
from sidecar.policy.rules import Shares

_PPM = 1_000_000

_ASKED_FOR_US = 1_000_000
"""So long one replica alone is asked to take room back."""


def rules_of(stated: calls.PoolRules) -> Rules:
    """The rules that a replica stated."""
    return Rules(
        tuple(
            Shares(
                t.name,
                Fraction(t.reserve_ppm, _PPM),
                Fraction(t.lend_ppm, _PPM),
                Fraction(t.limit_ppm, _PPM),
                t.always_first,
                t.preemptible,
                t.preempt_after_us,
            )
            for t in stated.tiers
        ),
        stated.promote_after_us,
        stated.ceiling,
        stated.max_preemptions,
        stated.affinity_percent,
        stated.by_gain,
        Fraction(stated.fair_ppm, _PPM),
    )


@dataclass(eq=False)
class _Entry:
    """A grant that its replica has not acknowledged."""

    ticket: Ticket
    engine: str
    tokens: int
    prompt: int
    sent: int
    found: Found
    passed: list[tuple[str, str]]

    def cell(self, tier: str) -> Cell:
        floor = (self.tokens, self.ticket.requests, self.prompt) if self.ticket.is_in_floor else NOTHING
        return Cell(tier, self.engine, self.tokens, self.ticket.requests, self.prompt, self.sent, *floor)


@dataclass(eq=False)
class _Member:
    """A replica. Its row is what it stated (`cells`), and its outbox. It has stated in the epoch `stated`."""

    number: int = 0
    last_call: int = 0
    stated: int = -1
    is_new: bool = False
    is_foreign: bool = False
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    leaving: dict[tuple[str, str], Cell] = field(default_factory=dict)
    outbox: dict[int, tuple[str, _Entry]] = field(default_factory=dict)
    bids: dict[int, Ticket] = field(default_factory=dict)
    view: dict[str, EngineView] = field(default_factory=dict)
    view_number: int = 0
    viewed_at: int = 0
    seen: int = -1
    is_line_new: bool = True


class State:
    """What is lost with the store."""

    def __init__(self, now: int, layout: int, offset: int) -> None:
        self.layout, self.last_call, self.offset = layout, now, offset
        self.epoch, self.hold_until, self.expected = now, now + HOLD_US, 0
        self.is_empty = True  # nothing is known of before this epoch
        self.members: dict[str, _Member] = {}
        self.drained: dict[str, Drain] = {}
        self.views = self.version = 0
        self.asked: tuple[str, int] | None = None  # whom to take room back, and until when others are not
        self.scheduler = Scheduler(Rules(()))

    @property
    def names(self) -> list[str]:
        """The tiers, by level."""
        return [tier.name for tier in self.scheduler.rules.tiers]


class Ledger:
    """One atomic call after the other, on the store's clock. In one that is not shared silence begins no epoch."""

    def __init__(self, *, is_shared: bool = True) -> None:
        self._is_shared = is_shared
        self.state: State | None = None
        self._wake_ups: list[WakeUp] = []

    def execute(self, call: Call, server_us: int) -> tuple[Reply, list[WakeUp]]:
        """What `call` is answered, and what is published to others. `server_us` may go back."""
        self._wake_ups = []
        if self.state is None:
            self._create(server_us, call.layout, 0)
        state = self._now(server_us)
        silent_for = state.last_call - self._before
        if call.layout != state.layout:
            if any(state.last_call - max(m.last_call, state.epoch) < DEAD_US for m in state.members.values()):
                return Reply(call.number, "wait"), self._wake_ups
            state, silent_for = self._create(state.last_call, call.layout, state.offset), 0
        if self._is_shared and silent_for >= LOST_US:
            self._begin_epoch()
        member = state.members.get(call.who)
        is_next = member is not None and member.stated == state.epoch and call.number == member.number + 1
        self._drop_dead(call.who if is_next and call.kind in ("call", "bye") else None)
        member = state.members.get(call.who)
        if call.kind == "bye":
            if is_next and member is not None:
                self._drop(call.who)
                state.expected -= not member.is_new
                self._decide(call.who)
            return Reply(call.number, "ok"), self._wake_ups
        if not self._is_accepted(call, member):
            return Reply(call.number, "unknown"), self._wake_ups
        if call.kind == "state":
            member = self._take_statement(call)
        assert member is not None
        member.last_call, member.number = state.last_call, call.number
        self._take_changes(call, member)
        self._end_hold()
        self._decide(call.who)
        return self._reply(call, member), self._wake_ups

    # -- time, epochs, members

    def _now(self, server_us: int) -> State:
        """Time never goes back, whichever server answers."""
        state = self.state
        assert state is not None
        state.offset = max(state.offset, state.last_call - server_us)
        self._before, state.last_call = state.last_call, server_us + state.offset
        return state

    def _create(self, now: int, layout: int, offset: int) -> State:
        self.state = State(now, layout, offset)
        self._before = now
        self._wake_ups.append(WakeUp(""))
        return self.state

    def _begin_epoch(self) -> None:
        """Replicas may have admitted alone while the store was silent: rows are a floor, bids are stated anew."""
        state = self._held()
        state.epoch, state.hold_until = state.last_call, state.last_call + HOLD_US
        state.expected, state.is_empty = len(state.members), False
        for _, member in sorted(state.members.items()):
            self._drop_bids(member)
            for tier, entry in member.outbox.values():
                self._add_cell(member, entry.cell(tier))
            member.outbox.clear()
            member.is_new = False
        self._wake_ups.append(WakeUp(""))

    def _add_cell(self, member: _Member, cell: Cell) -> None:
        old = member.cells.get((cell.tier, cell.engine))
        if old is not None:
            sums = (a + b for a, b in zip(_figures(old), _figures(cell), strict=True))
            cell = Cell(cell.tier, cell.engine, *sums)
        member.cells[cell.tier, cell.engine] = cell

    def _held(self) -> State:
        assert self.state is not None
        return self.state

    def _end_hold(self) -> None:
        """With the last replica that is expected. One that knows of nobody proves nothing."""
        state = self._held()
        stated = sum(m.stated == state.epoch and not m.is_new for m in state.members.values())
        if state.hold_until and (state.last_call >= state.hold_until or stated >= max(state.expected, 1)):
            state.hold_until = 0

    def _drop_dead(self, but: str | None) -> None:
        state = self._held()
        for who, member in sorted(state.members.items()):
            if who != but and state.last_call - max(member.last_call, state.epoch) >= DEAD_US:
                self._drop(who)

    def _drop(self, who: str) -> None:
        state = self._held()
        member = state.members[who]
        self._drop_bids(member)
        for tier, entry in member.outbox.values():
            self._hold(entry.cell(tier), -1)
        for cell in member.cells.values():
            self._hold(cell, -1)
        if state.asked is not None and state.asked[0] == who:
            state.asked = None
        del state.members[who]
        self._combine_views()

    def _is_accepted(self, call: Call, member: _Member | None) -> bool:
        state = self._held()
        if call.kind == "ask":
            return False
        if call.kind == "state":
            return member is None or call.number > member.number
        if member is None or member.stated != state.epoch or call.number != member.number + 1:
            return False
        if call.bid_count is None:
            return True
        unseen = sum(bid not in call.acks for bid in member.outbox)
        return len(member.bids) <= call.bid_count <= len(member.bids) + unseen

    # -- what a call says

    def _take_statement(self, call: Call) -> _Member:
        """Everything that the replica has replaces everything that was known of it."""
        state = self._held()
        assert call.rules is not None
        self._take_rules(call, call.rules)
        member = state.members.get(call.who)
        if member is None:
            member = state.members[call.who] = _Member(is_new=call.knew == 0)
        self._drop_bids(member)
        for tier, entry in member.outbox.values():
            self._hold(entry.cell(tier), -1)
        member.outbox.clear()
        if state.is_empty and state.last_call < state.epoch + DEAD_US:
            state.expected = max(state.expected, call.knew)
        member.stated, member.seen, member.is_line_new = state.epoch, -1, True
        member.is_foreign = [t.name for t in call.rules.tiers] != state.names
        if not member.is_foreign:
            for of, virtual in zip(state.scheduler.tiers, call.virtual, strict=False):
                of.queue.virtual = max(of.queue.virtual, virtual)
        return member

    def _take_rules(self, call: Call, stated: calls.PoolRules) -> None:
        state = self._held()
        names = [tier.name for tier in stated.tiers]
        is_same = names == state.names
        is_owned = any(not member.is_foreign for who, member in state.members.items() if who != call.who)
        if state.names and not (call.replaces if is_same else call.takes_over or not is_owned):
            return
        rules = rules_of(stated)
        if is_same and rules.by_gain == state.scheduler.rules.by_gain:
            state.scheduler.rules = rules
            return
        for _, member in sorted(state.members.items()):
            self._drop_bids(member)  # a replica whose number of bids is not right states everything
            member.is_foreign = names != state.names and not member.is_foreign
        before = dict(zip(state.names, state.scheduler.tiers, strict=True))
        engines, admissions, moved = state.scheduler.engines, state.scheduler.admissions, state.scheduler.moved
        state.scheduler = Scheduler(rules)
        state.scheduler.admissions, state.scheduler.moved = admissions, moved
        for engine in engines.values():
            engine.held, engine.sent = NOTHING, 0
        state.scheduler.engines = engines
        for name, tier in zip(names, state.scheduler.tiers, strict=True):
            if (old := before.get(name)) is not None:
                tier.queue.virtual, tier.owes_until_us, tier.latest = old.queue.virtual, old.owes_until_us, old.latest
        for member in state.members.values():
            for cell in member.cells.values():
                self._hold(cell, 1)
            for tier_name, entry in member.outbox.values():
                self._hold(entry.cell(tier_name), 1)

    def _take_changes(self, call: Call, member: _Member) -> None:
        state, now = self._held(), self._held().last_call
        for acknowledged in call.acks:
            if (granted := member.outbox.pop(acknowledged, None)) is not None:
                self._hold(granted[1].cell(granted[0]), -1)
        if call.engines is not None:
            state.views += 1
            member.view, member.view_number, member.viewed_at = {e.id: e for e in call.engines}, state.views, now
        for drain in call.drains:
            told = Drain(drain.engine, drain.is_drained, drain.at_us or now)
            if told.at_us >= state.drained.get(drain.engine, told).at_us:
                state.drained[drain.engine] = told
        if call.engines is not None or call.drains:
            self._combine_views()
        self._take_cells(call, member)
        for cap in call.caps:
            if (engine := state.scheduler.engines.get(cap.engine)) is not None:
                engine.set_cap(cap.requests, now + cap.for_us, now)
        levels = {name: level for level, name in enumerate(state.names)}
        for charge in call.charges:
            if charge.tier in levels:
                state.scheduler.tiers[levels[charge.tier]].queue.charge(charge.tenant, charge.tokens, charge.weight)
        for owed in call.owes:
            if owed.tier in levels:
                state.scheduler.owe(levels[owed.tier], owed.owed_us, now)
        if not member.is_foreign:
            for bid in call.bids:
                self._add_bid(bid, call.who, member, levels)
        for gone in call.withdrawn:
            ticket = member.bids.get(gone.id)
            if ticket is not None and ticket.tier == levels.get(gone.tier):
                del member.bids[gone.id]
                state.scheduler.remove(ticket, now)

    def _take_cells(self, call: Call, member: _Member) -> None:
        """Absolute: what was stated of these cells before is taken off."""
        if call.whole:
            for cell in member.cells.values():
                self._hold(cell, -1)
            member.cells.clear()
        for cell in call.cells:
            key = cell.tier, cell.engine
            if (old := member.cells.pop(key, None)) is not None:
                self._hold(old, -1)
            if any(_figures(cell)):
                member.cells[key] = cell
                self._hold(cell, 1)
        if call.leaving is not None:
            member.leaving = {(cell.tier, cell.engine): cell for cell in call.leaving}
            asked = self._held().asked
            if asked is not None and asked[0] == call.who:
                self._held().asked = None

    def _add_bid(self, bid: Bid, who: str, member: _Member, levels: dict[str, int]) -> None:
        state = self._held()
        if bid.tier not in levels:
            return
        gain = bid.gain
        ticket = Ticket(
            id=str(bid.id),
            tier=levels[bid.tier],
            tenant=bid.tenant,
            tokens=bid.tokens,
            requests=bid.requests,
            prompt=bid.prompt,
            weight=bid.weight,
            hits=bid.hits,
            barred=frozenset(bid.barred),
            arrived_us=max(0, state.last_call - bid.waited_us),
            owner=who,
            number=bid.number,
            gain=None if gain is None else Gain(*msgspec.structs.astuple(gain)),
            has_returned=bid.has_returned,
            hint=bid.hint,
        )
        member.bids[bid.id] = ticket
        state.scheduler.add(ticket)

    def _drop_bids(self, member: _Member) -> None:
        state = self._held()
        for ticket in sorted(member.bids.values(), key=lambda t: (t.tier, t.arrival)):
            state.scheduler.remove(ticket, state.last_call)
        member.bids.clear()

    # -- sums and engines

    def _hold(self, cell: Cell, sign: int) -> None:
        scheduler = self._held().scheduler
        names = self._held().names
        if cell.engine not in scheduler.engines:
            scheduler.engines[cell.engine] = Engine(cell.engine, is_known=False)
        amount = (sign * cell.tokens, sign * cell.requests, sign * cell.prompt)
        floor = (sign * cell.floor_tokens, sign * cell.floor_requests, sign * cell.floor_prompt)
        tier = names.index(cell.tier) if cell.tier in names else None
        scheduler.hold(tier, cell.engine, amount, sign * cell.sent, floor)

    def _combine_views(self) -> None:
        """The newest view that names an engine counts; any that reaches it will do."""
        state = self._held()
        table: dict[str, Engine] = {}
        by_age = sorted(state.members.items(), key=lambda it: it[1].view_number)
        for _, member in by_age:
            for view in member.view.values():
                is_ready = view.is_reachable or (view.id in table and table[view.id].takes_new)
                since = member.viewed_at - view.age_us
                table[view.id] = Engine(
                    view.id, view.tokens, view.requests, view.prefill, view.speed, is_ready, since, view.ramp_us
                )
        for engine in table.values():
            drained = state.drained.get(engine.name)
            engine.takes_new = engine.takes_new and not (drained is not None and drained.is_drained)
            engine.unreachable_for = frozenset(
                who for who, member in by_age if not (engine.id in member.view and member.view[engine.id].is_reachable)
            )
        state.scheduler.set_engines(table.values())
        state.version += 1

    # -- decide and reply

    def _decide(self, caller: str) -> None:
        state = self._held()
        if state.hold_until:
            return
        granted: dict[str, list[Granted]] = {}
        for ticket, engine, sent, found, passed in state.scheduler.decide(state.last_call):
            member = state.members[ticket.owner]
            bid = int(ticket.id)
            del member.bids[bid]
            by_name = [(state.names[level], rule.value) for level, rule in passed.items()]
            entry = _Entry(ticket, engine, ticket.tokens, ticket.count, sent, found, by_name)
            tier = state.names[ticket.tier]
            member.outbox[bid] = tier, entry
            granted.setdefault(ticket.owner, []).append(self._granted(bid, tier, entry))
        for who, grants in granted.items():
            if who != caller:
                self._wake_ups.append(WakeUp(who, grants, False, state.last_call))

    def _granted(self, bid: int, tier: str, entry: _Entry) -> Granted:
        ticket = entry.ticket
        return Granted(
            bid,
            tier,
            entry.engine,
            entry.tokens,
            ticket.requests,
            entry.prompt,
            entry.sent,
            ticket.excess,
            ticket.excess_prompt,
            ticket.is_in_floor,
            ticket.counted_us,
            entry.found,
            entry.passed,
        )

    # -- rule 7: whom to ask for room

    def _gone(self) -> Gone:
        state, gone = self._held(), Gone()
        for member in state.members.values():
            for cell in member.leaving.values():
                if cell.tier in state.names:
                    tokens, requests, prompt, sent, *floor = _figures(cell)
                    amount, on_floor = (tokens, requests, prompt), (floor[0], floor[1], floor[2])
                    gone.add(state.names.index(cell.tier), cell.engine, amount, sent, on_floor)
        return gone

    def _shortage_for(self, caller: str) -> Shortage | None:
        """The room that the caller is to take back. Another one, which has more to take from, is woken instead."""
        state = self._held()
        if state.hold_until or (
            state.asked is not None and state.asked[0] != caller and state.last_call < state.asked[1]
        ):
            return None
        state.asked = None
        found = shortage(state.scheduler, state.last_call, self._gone()) if state.scheduler.may_preempt() else None
        if found is None:
            return None
        most = max(state.members, key=lambda who: (self._takeable(who, found), who == caller, who))
        if not self._takeable(most, found):
            return None
        state.asked = most, state.last_call + _ASKED_FOR_US
        if most == caller:
            return found
        self._wake_ups.append(WakeUp(most, [], True, state.last_call))
        return None

    def _takeable(self, who: str, found: Shortage) -> int:
        """The tokens of the leases of a replica that may be taken back for it."""
        state = self._held()
        tiers = {
            tier.name
            for level, tier in enumerate(state.scheduler.rules.tiers)
            if level > found.served.tier and tier.preemptible and level not in found.closed
        }
        member = state.members[who]
        held = sum(c.tokens - c.floor_tokens for (t, e), c in member.cells.items() if t in tiers and e == found.engine)
        return held - sum(c.tokens for (t, e), c in member.leaving.items() if t in tiers and e == found.engine)

    def _told(self, found: Shortage) -> calls.ShortageTold:
        state = self._held()
        order_class, before, key, _ = found.place
        return calls.ShortageTold(
            found.engine,
            order_class,
            before,
            key,
            self._needed(found.served, found.engine),
            [self._needed(ticket, found.engine) for ticket in found.before],
            [self._needed(ticket, found.engine) for ticket in found.burst],
            sorted(state.names[level] for level in found.closed),
        )

    def _needed(self, ticket: Ticket, engine: str) -> calls.Needed:
        return calls.Needed(
            int(ticket.id),
            self._held().names[ticket.tier],
            ticket.tokens,
            ticket.requests,
            ticket.prompt,
            max(ticket.hits.values(), default=0),
            ticket.hits.get(engine, 0),
            ticket.arrived_us,
            ticket.number,
        )

    def _next_change(self) -> int | None:
        """When time alone changes something, at least a millisecond from now."""
        state, now = self._held(), self._held().last_call
        if not any(m.bids for m in state.members.values()):
            return None
        at = state.hold_until or next_change(state.scheduler, now)
        return None if at is None else max(1_000, at - now)

    def _reply(self, call: Call, member: _Member) -> Reply:
        state, scheduler = self._held(), self._held().scheduler
        engines = sorted(scheduler.engines.values(), key=lambda e: e.order)
        tiers = dict(zip(state.names, scheduler.tiers, strict=True))
        expected = state.expected if state.last_call < state.epoch + DEAD_US else 0
        reply = Reply(
            call.number,
            "ok",
            state.last_call,
            [self._granted(bid, tier, entry) for bid, (tier, entry) in member.outbox.items()],
            max(len(state.members), expected, 1),
            bool(state.hold_until),
            member.is_foreign,
            sum(len(m.bids) for m in state.members.values()),
            self._next_change(),
            [calls.EngineHeld(e.id, *e.held, e.sent, e.lined, e.cap_requests, e.cap_until_us) for e in engines],
            [
                calls.TierHeld(
                    name,
                    tier.queue.virtual,
                    tier.queue.afresh,
                    tier.owes_until_us,
                    tier.on_engines,
                    tier.in_line,
                    tier.on_floor,
                    tier.in_line_on_floor,
                )
                for name, tier in tiers.items()
            ],
        )
        for name, tenant in dict.fromkeys((bid.tier, bid.tenant) for bid in call.bids):
            if name in tiers and (ahead := tiers[name].queue.ahead([tenant])):
                reply.finish.append((name, tenant, ahead[tenant]))
        reply.leaving = [
            cell for _, other in sorted(state.members.items()) for _, cell in sorted(other.leaving.items())
        ]
        if (found := self._shortage_for(call.who)) is not None:
            reply.shortage = self._told(found)
        if member.seen != state.version:
            member.seen = state.version
            reply.config = [
                calls.EngineState(e.id, e.tokens, e.requests, e.prefill, e.speed, e.is_ready, e.since_us, e.ramp_us)
                for e in engines
            ]
            reply.drained = [state.drained[name] for name in sorted(state.drained)]
        if member.is_line_new or call.who in scheduler.moved:
            member.is_line_new = False
            scheduler.moved.discard(call.who)
            reply.lined = [
                calls.Lined(int(t.id), t.engine or "", t.in_line_since_us)
                for t in scheduler.line
                if t.owner == call.who
            ]
        return reply


def _figures(cell: Cell) -> tuple[int, ...]:
    figures: tuple[int, ...] = msgspec.structs.astuple(cell)[2:]
    return figures
