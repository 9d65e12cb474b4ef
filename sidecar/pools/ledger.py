"""The ledger of one pool: who holds how much of which engine, and who is next. `ledger.lua` is this in the store.

Replicas state sums and show bids (`calls`); the ledger decides by the rules (`scheduler`) and keeps each grant in its
replica's outbox until it is acknowledged. Sums are absolute, so that stating them again heals any error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from sidecar.pools import calls, guards
from sidecar.pools import ledger_limits as limits
from sidecar.pools.calls import DEAD_US, HOLD_US, LOST_US, Bid, BidGranted, Call, Cell, Drain, EngineView, Reply, WakeUp
from sidecar.pools.known_pool import Sides, added, sum_cells
from sidecar.pools.shortage import new_gone, report_shortage
from sidecar.scheduling.amounts import NOTHING, UNBOUNDED
from sidecar.scheduling.engines import Gone, ScheduledEngine
from sidecar.scheduling.figures import Rules
from sidecar.scheduling.preemption import Shortage, shortage
from sidecar.scheduling.queue import FairQueue
from sidecar.scheduling.rate_limit import RateLimiter
from sidecar.scheduling.scheduler import Scheduler
from sidecar.scheduling.tickets import ScheduledLease, Ticket
from sidecar.scheduling.time_alone import next_change

MOST_GRANTED = 64
"""One call of a replica in the same process grants so many: the event loop goes on between two calls."""

_ASKED_FOR_US = 2_000_000
"""So long one replica alone is asked to take room back: whose wake-up is lost learns of it with its next heartbeat."""


@dataclass(eq=False)
class _Member:
    """A replica. What it holds is what it stated (`row`), and its outbox. It has stated in the epoch `stated`."""

    number: int = 0
    last_call: int = 0
    stated: int = -1
    is_new: bool = False
    is_foreign: bool = False
    row: dict[Sides, Cell] = field(default_factory=dict)
    leaving: list[Cell] = field(default_factory=list)
    outbox: dict[int, BidGranted] = field(default_factory=dict)
    bids: dict[int, Ticket] = field(default_factory=dict)
    view: dict[str, EngineView] = field(default_factory=dict)
    view_number: int = 0
    viewed_at: int = 0
    seen: int = -1
    charged: dict[int, Sequence[calls.MeterVerdict]] = field(default_factory=dict)
    is_line_new: bool = True


class LedgerState:
    """State of the ledger, lost with the store."""

    def __init__(self, now: int, layout: int, offset: int, limiter: RateLimiter) -> None:
        self.layout, self.last_call, self.offset = layout, now, offset
        self.epoch, self.hold_until, self.expected = now, now + HOLD_US, 0
        self.is_empty = True  # nothing is known of before this epoch
        self.members: dict[str, _Member] = {}
        self.drained: dict[str, Drain] = {}
        self.views = self.version = 0
        self.latest = 0, "", 0  # of all that were granted the one that came last: arrival, owner, grant
        self.asked: tuple[str, int] | None = None  # whom to take room back, and until when others are not
        self.asked_before: set[str] = set()  # those that were asked since something left for it, or one was served
        self.begin_with(Scheduler(Rules(())))
        self.limiter = limiter

    def begin_with(self, scheduler: Scheduler) -> None:
        """Sums and order from now on. `names` are the tiers by level."""
        self.scheduler = scheduler
        self.names = [tier.name for tier in scheduler.rules.tiers]
        self.levels = {name: level for level, name in enumerate(self.names)}


class Ledger:
    """One atomic call after the other, on the store's clock.

    It may serve one replica in this process alone (`serves`): silence begins no epoch then, calls state no sums, and no
    grant waits to be acknowledged. `limiter`: its tenants' limits, where other ledgers count in them, too.
    """

    def __init__(self, limiter: RateLimiter | None = None) -> None:
        self._limiter = limiter
        self.state: LedgerState | None = None
        self._wake_ups: list[WakeUp] = []
        self._near: Mapping[str, ScheduledLease] | None = None
        self._has_more = False
        self._are_more: Callable[[int], bool] = lambda _: False

    def serves(self, leases: Mapping[str, ScheduledLease], are_more: Callable[[int], bool]) -> None:
        """`leases` are those of its only replica, in this process, which tells what changes by `hold` and `owe`.
        `are_more`: whether others of a tier wait there than its bids.
        """
        self._near, self._are_more = leases, are_more

    def hold(self, lease: ScheduledLease, sign: int) -> None:
        """A lease counts, or counts no more."""
        ticket, state = lease.ticket, self.state
        assert state is not None
        amount = sign * ticket.tokens, sign * ticket.requests, sign * ticket.count
        on_floor = amount if ticket.is_in_floor else NOTHING
        state.scheduler.hold(ticket.tier, lease.engine, amount, sign * lease.sent, on_floor)

    def queues(self) -> list[FairQueue]:
        """Of each tier, by level."""
        return [] if self.state is None else [tier.queue for tier in self.state.scheduler.tiers]

    def look_at_queue(self, tier: int) -> None:
        """One that was not shown waits no more."""
        if self.state is not None:
            self.state.scheduler.tiers[tier].queue.look()

    def owe(self, tier: int, owed_us: int, now_us: int) -> None:
        """A turn that a tier pays back."""
        self._now(now_us).scheduler.owe(tier, owed_us, now_us)

    def enter(self, ticket: Ticket, now_us: int) -> tuple[str, int] | None:
        """See `Scheduler.enter`: where a call with this bid alone would put it; None where it may have to wait."""
        state = self._now(now_us)
        return None if state.hold_until else state.scheduler.enter(ticket, state.last_call)

    def execute(self, call: Call, server_us: int) -> tuple[Reply, list[WakeUp]]:
        """Answers `call`, and returns what is published to others. `server_us` may go back."""
        self._wake_ups = []
        if self.state is None:
            self._create(server_us, call.layout, 0)
        state = self._now(server_us)
        silent_for = state.last_call - self._before
        if call.layout != state.layout:
            if any(state.last_call - max(m.last_call, state.epoch) < DEAD_US for m in state.members.values()):
                return Reply(call.number, "wait"), self._wake_ups
            state, silent_for = self._create(state.last_call, call.layout, state.offset), 0
        if self._near is None and silent_for >= LOST_US and state.members:
            self._begin_epoch()
        member = state.members.get(call.who)
        is_next = self._is_next(call, member)
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
        last_number = 0 if member is None else member.number
        if call.kind == "state":
            member = self._take_statement(call)
        assert member is not None
        member.last_call, member.number = state.last_call, call.number
        verdicts = limits.decide(state.limiter, call, last_number, member.charged, state.last_call)
        self._take_changes(call, member, last_number)
        self._end_hold()
        self._decide(call.who)
        reply = self._reply(call, member)
        reply.verdicts = verdicts
        return reply, self._wake_ups

    # -- time, epochs, members

    def _now(self, server_us: int) -> LedgerState:
        """Time never goes back, whichever server answers."""
        state = self.state
        assert state is not None
        self._before, now = state.last_call, server_us + state.offset
        if now < self._before:
            state.offset, now = self._before - server_us, self._before
        state.last_call = now
        return state

    def _create(self, now: int, layout: int, offset: int) -> LedgerState:
        limiter = RateLimiter() if self._limiter is None else self._limiter
        if self.state is not None:  # what tenants have used outlasts a layout
            limiter = self.state.limiter
            for who in self.state.members:
                limiter.forget(who)
        self.state = LedgerState(now, layout, offset, limiter)
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
            for grant in member.outbox.values():
                key = grant.tier, grant.engine
                member.row[key] = Cell(*key, *added(grant.sums, member.row.get(key, Cell(*key)).sums, 1))
            member.outbox.clear()
            member.is_new = False
        self._wake_ups.append(WakeUp(""))

    def _held(self) -> LedgerState:
        assert self.state is not None
        return self.state

    def _end_hold(self) -> None:
        """With the last replica that is expected. One that knows of nobody proves nothing."""
        state = self._held()
        stated = sum(m.stated == state.epoch and not m.is_new for m in state.members.values())
        is_known = self._near is not None or stated >= max(state.expected, 1)
        if state.hold_until and (state.last_call >= state.hold_until or is_known):
            state.hold_until = 0

    def _drop_dead(self, but: str | None) -> None:
        """The dead go. Who has missed a heartbeat is granted nothing: its bids go. It states them when it is back."""
        state = self._held()
        for who, member in sorted(state.members.items()):
            silent_for = 0 if who == but else state.last_call - max(member.last_call, state.epoch)
            if silent_for >= DEAD_US:
                self._drop(who)
            elif silent_for >= LOST_US:
                self._drop_bids(member)

    def _drop(self, who: str) -> None:
        state = self._held()
        member = state.members[who]
        self._drop_bids(member)
        self._hold([*member.row.values(), *member.outbox.values()], -1)
        del state.members[who]
        state.limiter.forget(who)
        self._combine_views()

    def _is_next(self, call: Call, member: _Member | None) -> bool:
        """True if the replica has stated in this epoch, and no call before this one is missing."""
        return member is not None and member.stated == self._held().epoch and call.number == member.number + 1

    def _is_accepted(self, call: Call, member: _Member | None) -> bool:
        state = self._held()
        if call.kind == "ask":
            return False
        if call.kind == "state":
            is_of_others = not call.knew and not call.replaces  # it had stated other tiers than the pool's
            is_early = not state.names and state.is_empty and state.last_call < state.hold_until
            return not (is_of_others and is_early) and (member is None or call.number > member.number)
        if member is None or not self._is_next(call, member):
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
        self._hold(member.outbox.values(), -1)
        member.outbox.clear()
        if state.is_empty and state.last_call < state.epoch + DEAD_US:
            state.expected = max(state.expected, call.knew)
        member.stated, member.seen, member.is_line_new = state.epoch, -1, True
        member.is_foreign = [t.name for t in call.rules.tiers] != state.names
        if not member.is_foreign:
            for of, virtual in zip(state.scheduler.tiers, call.virtual, strict=False):
                of.queue.virtual = max(of.queue.virtual, virtual)
        return member

    def _take_rules(self, call: Call, stated: calls.LedgerRules) -> None:
        state = self._held()
        names = [tier.name for tier in stated.tiers]
        is_same = names == state.names
        is_owned = any(not member.is_foreign for who, member in state.members.items() if who != call.who)
        if state.names and not (call.replaces if is_same else call.takes_over or not is_owned):
            return
        rules = stated.as_rules()
        if is_same and rules.by_gain == state.scheduler.rules.by_gain:
            state.scheduler.change_rules(rules)
            return
        for _, member in sorted(state.members.items()):
            self._drop_bids(member)  # a replica whose number of bids is not right states everything
            member.is_foreign = names != state.names and not member.is_foreign
        before = dict(zip(state.names, state.scheduler.tiers, strict=True))
        engines, admissions, moved = state.scheduler.engines, state.scheduler.admissions, state.scheduler.moved
        before_guards = {state.names[guarded.level]: guarded for guarded in state.scheduler.guards.tiers}
        state.begin_with(Scheduler(rules))
        for level, tier in enumerate(state.scheduler.tiers):
            tier.queue.are_more = partial(self._are_more, level)
        state.scheduler.admissions, state.scheduler.moved = admissions, moved
        for engine in engines.values():
            engine.held, engine.sent = NOTHING, 0
        state.scheduler.engines = engines
        for name, tier in zip(names, state.scheduler.tiers, strict=True):
            if (old := before.get(name)) is not None:
                tier.queue.virtual, tier.owes_until_us, tier.latest = old.queue.virtual, old.owes_until_us, old.latest
                tier.served = old.served
        for guarded in state.scheduler.guards.tiers:
            guarded.take(before_guards.get(names[guarded.level], guarded))
        for member in state.members.values():
            row = member.row.values() if self._near is None else sum_cells(names, self._near.values())
            self._hold([*row, *member.outbox.values()], 1)

    def _take_changes(self, call: Call, member: _Member, last_number: int) -> None:
        state, now = self._held(), self._held().last_call
        acknowledged = [grant for bid in call.acks if (grant := member.outbox.pop(bid, None)) is not None]
        self._hold(acknowledged, -1)
        view = member.view if call.engines is None else {e.id: e for e in call.engines}
        if list(view.values()) != list(member.view.values()):
            state.views += 1
            member.view, member.view_number, member.viewed_at = view, state.views, now
        for drain in call.drains:
            newest = Drain(drain.engine, drain.is_drained, drain.at_us or now)
            if newest.at_us >= state.drained.get(drain.engine, newest).at_us:
                state.drained[drain.engine] = newest
        if call.engines is not None or call.drains:
            self._combine_views()
        self._take_cells(call, member)
        for cap in call.caps:
            if (engine := state.scheduler.engines.get(cap.engine)) is not None:
                engine.set_cap(cap.requests, now + cap.for_us, now)
        levels = state.levels
        for charge in call.charges:
            if charge.tier in levels and charge.first_call > last_number:
                queue = state.scheduler.tiers[levels[charge.tier]].queue
                queue.charge(charge.tenant, charge.tokens, charge.weight, charge.user)
        for owed in call.owes:
            if owed.tier in levels and owed.first_call > last_number:
                state.scheduler.owe(levels[owed.tier], owed.owed_us, now)
        guards.take(state.scheduler, state.levels, call, last_number, now)
        if not member.is_foreign:
            for bid in call.bids:
                self._add_bid(bid, call.who, member)
        for gone in call.withdrawn:
            ticket = member.bids.get(gone.id)
            if ticket is not None and ticket.tier == levels.get(gone.tier):
                del member.bids[gone.id]
                state.scheduler.remove(ticket, now)

    def _take_cells(self, call: Call, member: _Member) -> None:
        """Absolute: what was stated of these cells before is taken off."""
        if call.whole:
            self._hold(member.row.values(), -1)
            member.row.clear()
        for cell in call.cells:
            key = cell.tier, cell.engine
            if key in member.row:
                self._hold([member.row.pop(key)], -1)
            if any(cell.sums):
                member.row[key] = cell
                self._hold([cell], 1)
        if call.leaving is not None:
            if call.leaving != member.leaving:
                self._held().asked_before.clear()
            member.leaving = call.leaving

    def _add_bid(self, bid: Bid, who: str, member: _Member) -> None:
        state = self._held()
        if bid.tier not in state.levels:
            return
        ticket = Ticket(
            id=str(bid.id),
            tier=state.levels[bid.tier],
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
            gain=bid.gain,
            has_returned=bid.has_returned,
            hint=bid.hint,
            user=bid.user,
            cost=bid.cost,
        )
        member.bids[bid.id] = ticket
        state.scheduler.add(ticket)

    def _drop_bids(self, member: _Member) -> None:
        state = self._held()
        for ticket in sorted(member.bids.values(), key=lambda t: (t.tier, t.arrival)):
            state.scheduler.remove(ticket, state.last_call)
        member.bids.clear()

    # -- sums and engines

    def _hold(self, what: Iterable[Cell | BidGranted], sign: int) -> None:
        """Counts what replicas hold, or counts it no more."""
        state = self._held()
        for held in what:
            tokens, requests, prompt, sent, *floor = (sign * figure for figure in held.sums)
            on_floor = floor[0], floor[1], floor[2]
            level = state.levels.get(held.tier)
            state.scheduler.hold(level, held.engine, (tokens, requests, prompt), sent, on_floor)

    def _combine_views(self) -> None:
        """The newest view that names an engine counts, from when it was first stated; any that reaches it will do."""
        state = self._held()
        table: dict[str, ScheduledEngine] = {}
        by_age = sorted(state.members.items(), key=lambda it: it[1].view_number)
        for _, member in by_age:
            for view in member.view.values():
                is_ready = view.is_reachable or (view.id in table and table[view.id].takes_new)
                since = member.viewed_at - view.age_us
                table[view.id] = ScheduledEngine(
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
        granted: dict[str, list[BidGranted]] = {}
        most = UNBOUNDED if self._near is None else MOST_GRANTED
        decided = state.scheduler.decide(state.last_call, most)
        self._has_more = len(decided) >= most or state.scheduler.runs_out
        for ticket, engine, sent, found, passed in decided:
            member = state.members[ticket.owner]
            bid = int(ticket.id)
            del member.bids[bid]
            member.outbox[bid] = grant = BidGranted(
                bid,
                state.names[ticket.tier],
                engine,
                *ticket.amount,
                sent,
                ticket.excess,
                ticket.excess_prompt,
                ticket.is_in_floor,
                ticket.counted_us,
                found,
                [(state.names[level], rule.value) for level, rule in passed.items()],
            )
            state.scheduler.tiers[ticket.tier].served += ticket.tokens
            if state.scheduler.rules.tiers[ticket.tier].preempt_after_us is not None:
                state.asked_before.clear()
            if ticket.arrived_us > state.latest[0]:
                state.latest = ticket.arrived_us, ticket.owner, state.last_call
            granted.setdefault(ticket.owner, []).append(grant)
        for who, grants in granted.items():
            if who != caller:
                self._wake_ups.append(WakeUp(who, grants, False, state.last_call))

    # -- rule 7: whom to ask for room

    def _gone(self) -> Gone:
        state = self._held()
        cells = (cell for member in state.members.values() for cell in member.leaving)
        return new_gone(cells, state.levels)

    def _shortage_for(self, call: Call) -> Shortage | None:
        """The room that the caller is to take back. Another one, which has more to take from, is woken instead.

        Each is woken once. Who can give nothing says so (`leaving`, as before); it is asked again when it calls anyway.
        """
        state = self._held()
        if state.asked is not None and state.last_call >= state.asked[1]:
            state.asked_before.add(state.asked[0])  # it was silent
            state.asked = None
        caller, asked = call.who, state.asked
        if state.hold_until or self._has_more or (asked is not None and asked[0] != caller):
            return None
        is_answer = asked is not None and caller in state.asked_before and call.leaving is not None
        has_answered = is_answer and len(state.members) > 1  # one alone is asked by no one for another
        state.asked = None
        scheduler = state.scheduler
        if not scheduler.may_preempt():
            return None
        found = shortage(scheduler, state.last_call, self._gone(), scheduler.order)
        if found is None:
            return None
        if self._near is not None:
            return found
        takeable = {
            who: self._takeable(who, found)
            for who in state.members
            if who not in state.asked_before or (who == caller and not has_answered)
        }
        most = max(takeable, key=lambda who: (takeable[who], who == caller, who), default="")
        if not any(takeable.get(most, ())):
            return None
        state.asked = most, state.last_call + _ASKED_FOR_US
        if most == caller:
            state.asked_before.add(most)
            return found
        self._wake_ups.append(WakeUp(most, is_asked=True))
        return None

    def _takeable(self, who: str, found: Shortage) -> list[int]:
        """The tokens of the leases of a replica that may be taken back for it, on each of the engines."""
        state = self._held()
        tiers = {
            tier.name
            for level, tier in enumerate(state.scheduler.rules.tiers)
            if level > found.served.tier and tier.preemptible and level not in found.closed
        }
        member, tokens = state.members[who], dict.fromkeys(found.engines, 0)
        held = [(cell, cell.tokens - cell.floor_tokens) for cell in member.row.values()]
        for cell, more in held + [(cell, -cell.tokens) for cell in member.leaving]:
            if cell.tier in tiers and cell.engine in tokens:
                tokens[cell.engine] += more
        return list(tokens.values())

    def _next_change(self) -> int | None:
        """When time alone changes something, at least a millisecond from now."""
        state, now = self._held(), self._held().last_call
        if not state.hold_until and not any(m.bids for m in state.members.values()):
            return None
        if state.scheduler.runs_out:
            return 0
        at = now if self._has_more else state.hold_until or next_change(state.scheduler, now)
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
            list(member.outbox.values()),
            max(len(state.members), expected, 1),
            bool(state.hold_until),
            member.is_foreign,
            sum(len(m.bids) for m in state.members.values()),
            self._next_change(),
            (state.latest[0], state.latest[2]) if state.latest[1] not in ("", call.who) else None,
            [
                calls.EngineHeld(e.id, *e.held, e.sent, e.lined, e.cap_requests, e.cap_until_us)
                for e in (engines if self._near is None else ())
            ],
        )
        for level, (name, of) in enumerate(tiers.items()):
            sums = of.on_engines, of.in_line, of.on_floor, of.in_line_on_floor
            guard = guards.held(scheduler, level)
            reply.tiers.append(
                calls.TierHeld(name, of.queue.virtual, of.queue.afresh, of.owes_until_us, *sums, of.served, guard)
            )
        for name, tenant in dict.fromkeys((bid.tier, bid.tenant) for bid in call.bids):
            if name in tiers and (ahead := tiers[name].queue.ahead([tenant])):
                reply.finish.append((name, tenant, ahead[tenant]))
        if self._near is not None:
            member.outbox.clear()
        reply.leaving = [cell for _, other in sorted(state.members.items()) for cell in other.leaving]
        if (found := self._shortage_for(call)) is not None:
            reply.shortage = report_shortage(found, state.names)
        if member.seen != state.version:
            member.seen = state.version
            reply.config = [
                calls.EngineConfig(e.id, e.tokens, e.requests, e.prefill, e.speed, e.is_ready, e.since_us, e.ramp_us)
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
