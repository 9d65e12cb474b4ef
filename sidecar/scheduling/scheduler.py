"""Rules 3 to 6 and 10: the order of what waits, and one step after the other into engines and into the line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import takewhile
from typing import NamedTuple, TypeAlias

from sidecar.policy.rules import MOST_EXCESS
from sidecar.scheduling.amounts import NOTHING, UNBOUNDED, Amount, below, larger, minus, plus, smaller, within
from sidecar.scheduling.engines import NOTHING_GONE, Gone, Reach, ScheduledEngine
from sidecar.scheduling.figures import Rules, figures_for
from sidecar.scheduling.guard import Guards
from sidecar.scheduling.queue import FairQueue
from sidecar.scheduling.reports import Found, Rule, passed
from sidecar.scheduling.tickets import Ticket

PATIENCE_US = 5_000_000
"""How long one in line waits for the engine that it wants, before it takes any (rule 6)."""


class OrderClass(IntEnum):
    """Rule 3: the classes, in order."""

    FIRST = 0
    LINE = 1
    INSIDE = 2
    TURN = 3
    OTHER = 4


FIRST, LINE, INSIDE, TURN, OTHER = OrderClass

Place: TypeAlias = tuple[int, int, int, tuple[int, str, int]]


class Candidate(NamedTuple):
    """A ticket that may be next. Candidates compare by `place`."""

    place: Place
    ticket: Ticket
    order_class: OrderClass


class EngineGrant(NamedTuple):
    """A ticket enters an engine. `sent`: the prompt tokens that the engine has to prefill of it.

    `passed`: the levels whose first in order had come before it.
    """

    ticket: Ticket
    engine: str
    sent: int
    found: Found
    passed: dict[int, Rule]


@dataclass
class TierState:
    """Amounts that one tier holds, owes and had.

    `on_engines` and `in_line` (for the floor) are U together. `on_floor` and `in_line_on_floor`: the part of them that
    was let in for the floor (rule 9). `latest`: the number of its last admission. `served`: tokens granted so far.
    """

    queue: FairQueue
    on_engines: Amount = NOTHING
    in_line: Amount = NOTHING
    on_floor: Amount = NOTHING
    in_line_on_floor: Amount = NOTHING
    owes_until_us: int = 0
    latest: int = 0
    lined: int = 0
    served: int = 0

    @property
    def used(self) -> Amount:
        """U."""
        return plus(self.on_engines, self.in_line)


class Scheduler:
    """Decides for one pool. Its owner keeps the leases and tells what they hold (`hold`)."""

    def __init__(self, rules: Rules) -> None:
        self.tiers = [TierState(FairQueue(rules.by_gain)) for _ in rules.tiers]
        self.engines: dict[str, ScheduledEngine] = {}
        self.line: list[Ticket] = []
        self.moved: set[str] = set()  # the owners of those that came into the line, left it, or chose another engine
        self.order: list[Candidate] | None = None  # of those that the last decision left
        self.guards = Guards(self)
        self.admissions = 0
        self._now = 0
        self._total = NOTHING
        self._only: ScheduledEngine | None = None  # that of a steady pool of one engine, which is as large as it
        self._largest_prefill = 0
        self._reach = Reach(())
        self.change_rules(rules)

    # -- what comes, ends and changes

    def change_rules(self, rules: Rules) -> None:
        """Other rules of the same tiers."""
        self.rules, self._is_steady, self._only = rules, False, None
        self._is_limited = [tier.limit < 1 for tier in rules.tiers]
        self.guards.change_rules(rules)
        self._take_figures(NOTHING)

    def add(self, ticket: Ticket) -> None:
        """A ticket that came, or came back, waits in its queue."""
        self.tiers[ticket.tier].queue.add(ticket)

    def remove(self, ticket: Ticket, now_us: int) -> None:
        """A waiting ticket that is given up, in its queue or in line."""
        if ticket.is_in_line:
            owed = (ticket.excess + ticket.excess_prompt) * (now_us - ticket.counted_us)
            self._leave_line(ticket)
            self.owe(ticket.tier, owed, now_us)
        else:
            self.tiers[ticket.tier].queue.remove(ticket)

    def hold(self, tier: int | None, engine: str, amount: Amount, sent: int, on_floor: Amount = NOTHING) -> None:
        """Adds to what a tier holds on an engine; what is given free is negative.

        `on_floor`: the part of it that was let in for the tier's floor. None: a tier that the rules do not know.
        """
        tokens, requests, prompt = amount
        if tier is not None:
            state = self.tiers[tier]
            a, b, c = state.on_engines
            state.on_engines = a + tokens, b + requests, c + prompt
            if on_floor is not NOTHING:
                state.on_floor = plus(state.on_floor, on_floor)
        of = self.engines.get(engine)
        if of is None:
            of, self._is_steady, self._only = ScheduledEngine(engine, is_known=False), False, None
            self.engines[engine] = of
        a, b, c = of.held
        of.held = held = a + tokens, b + requests, c + prompt
        of.sent += sent
        self._total = held if of is self._only else plus(self._total, amount)

    def owe(self, tier: int, owed_us: int, now_us: int) -> None:
        """Rule 5: the tier has no turn for so much longer."""
        if owed_us:
            state = self.tiers[tier]
            state.owes_until_us = max(now_us, state.owes_until_us) + owed_us

    def set_engines(self, offers: Iterable[ScheduledEngine]) -> None:
        """The engines from now on. What others hold still counts; a cap ends with its engine (rule 8)."""
        known = {e.id: e for e in offers}
        for name, old in self.engines.items():
            if name in known and (old.is_known or old.held != NOTHING):
                new = known[name]
                new.held, new.sent, new.lined = old.held, old.sent, old.lined
                new.cap_requests, new.cap_until_us = old.cap_requests, old.cap_until_us
            elif name not in known and old.held != NOTHING:
                old.is_known = False
                known[name] = old
        self.engines, self._is_steady, self._only = known, False, None
        self._reach = Reach(list(known.values()))
        for ticket in self.line:
            if ticket.engine is not None and ticket.engine not in known:
                ticket.engine = None
                self.moved.add(ticket.owner)

    # -- one decision

    def decide(self, now_us: int, most: int = UNBOUNDED) -> list[EngineGrant]:
        """The steps that can be done now, in order, until so `most` have entered engines or a queue `runs_out`."""
        self.look(now_us)
        for tier in self.tiers:
            tier.queue.runs_out = False
        grants, self.order = list[EngineGrant](), None
        is_any_ready = any(e.is_ready for e in self.engines.values())
        while is_any_ready and len(grants) < most and not self.runs_out and self._step(grants):
            pass
        return grants

    @property
    def runs_out(self) -> bool:
        """True if the next may be one that waits elsewhere."""
        return any(tier.queue.runs_out for tier in self.tiers)

    def enter(self, ticket: Ticket, now_us: int) -> tuple[str, int] | None:
        """`add` and `decide` where nothing waits and the engine that the ticket wants has room for it.

        The engine, and what it has to prefill. Else None, and nothing has changed. Most find it so.
        """
        self._now = now_us
        if not self._is_steady:
            self.look(now_us)
        level, of, figures = ticket.tier, self._only, self._figures
        if of is None:
            wanted = self.wanted(ticket)
            of = None if wanted is None else self.engines[wanted]
            if of is None or not of.has_room(ticket, now_us):
                return None
        elif ticket.barred or now_us < of.cap_until_us:
            return None
        sent = ticket.sent_to(of.id)
        if of.sent and of.sent + sent > of.prefill:
            return None
        needed, (tokens, requests, prompt), most = self.need(ticket), self._total, figures.capacity
        if tokens + needed[0] > most[0] or requests + needed[1] > most[1] or prompt + needed[2] > most[2]:
            return None
        is_beyond_limit = self._is_limited[level] and not self.is_within_limit(ticket)
        if is_beyond_limit or (figures.has_headroom and not self.fits(ticket)):
            return None
        order_class = FIRST if self.rules.tiers[level].always_first else self._class_of_front(ticket, needed)
        if self.guards and order_class == OTHER and self.guards.keeping_out(ticket):
            return None
        self.tiers[level].queue.pass_through(ticket)
        self._begin_to_count(ticket, order_class, needed)
        sent = sent if ticket.count else 0
        self.hold(level, of.id, needed, sent, needed if ticket.is_in_floor else NOTHING)
        return of.id, sent

    def look(self, now_us: int) -> None:
        """Figures change with the engines, in slow start with time; of those that are not ready with what they hold."""
        self._now = now_us
        if self._is_steady:
            return
        capacity, total, self._largest_prefill = NOTHING, NOTHING, 0
        for engine in self.engines.values():
            total = plus(total, engine.held)
            if engine.is_ready:
                size = engine.size(now_us)
                self._largest_prefill = max(self._largest_prefill, size[2])
                capacity = plus(capacity, size)
            else:
                capacity = plus(capacity, engine.held)
        self._total, self._is_steady = total, all(e.is_ready and not e.ramp_us for e in self.engines.values())
        if self._is_steady and len(self.engines) == 1:
            (of,) = self.engines.values()
            self._only = of if of.requests > 0 and not of.unreachable_for else None
        self._take_figures(smaller(capacity, (UNBOUNDED, UNBOUNDED, UNBOUNDED)))

    def _take_figures(self, capacity: Amount) -> None:
        self._figures = figures_for(self.rules, capacity)
        self._most_prompt = [min(self._largest_prefill, prompt) for _, _, prompt in self._figures.size_limit]
        self.guards.take_figures(self._figures)

    @property
    def capacity(self) -> Amount:
        """C, as of the last look."""
        return self._figures.capacity

    @property
    def held(self) -> Amount:
        """The amount that engines hold."""
        return self._total

    def _step(self, grants: list[EngineGrant]) -> bool:
        """Rule 6: the next step, one enters an engine or comes to stand in line. False where there is none."""
        self._choose_again()
        closed: set[str] = set()  # engines that those before want
        stopped: set[str] = set()  # engines for which a small one before it has stood in line for 5 s
        roomy = [engine for engine in self.engines.values() if not engine.is_full(self._now)]
        self.order = order = self.in_order()
        for candidate in order:
            _, ticket, order_class = candidate
            if order_class == OTHER and stopped and self._reach.reaches_one(ticket.owner, stopped):
                continue
            if not self.fits(ticket):
                if self.holds(ticket, order_class):
                    return False
                continue
            was_in_line = ticket.is_in_line
            joins = not was_in_line and self._has_place(ticket, order_class)
            is_late = was_in_line and self._is_late(ticket)
            wanted = self.wanted(ticket)
            open_ = [engine for engine in roomy if engine.id not in closed]
            engine = self._engine_for(
                ticket, wanted, open_, order_class == FIRST or is_late or not (was_in_line or joins)
            )
            if engine is not None:
                grants.append(self._enter(ticket, engine, order_class, passed(self, candidate, order)))
                return True
            if joins:
                self._join(ticket, wanted)
            if ticket.is_in_line and not ticket.is_for_floor and wanted and order_class in (FIRST, INSIDE, TURN):
                self._begin_to_count(ticket, order_class, self.need(ticket))
                self._hold_in_line(ticket, ticket.amount)
                return True
            if joins:
                return True
            if wanted:
                closed.add(wanted)
                if is_late and self.is_small(ticket):
                    stopped.add(wanted)
        return False

    # -- rule 3: order

    def in_order(self) -> list[Candidate]:
        """The candidates: those in line, the heads of all tiers, by gain the best of each tier that earns something."""
        candidates, fronts = list(self.line), dict[int, Ticket]()
        for ticket in self.line:
            if not ticket.is_for_floor:
                fronts.setdefault(ticket.tier, ticket)
        heads = [self.heads(level) for level in range(len(self.tiers))]
        for level, tier in enumerate(self.rules.tiers):
            candidates += heads[level]
            if self.rules.by_gain and heads[level] and not tier.always_first:
                best = self.tiers[level].queue.best(self._now)
                candidates += [best] if best and best not in heads[level] else []
        found = []
        for ticket in candidates:
            level = ticket.tier
            if ticket.is_for_floor or not self._is_limited[level] or self.is_within_limit(ticket):
                order_class = self.class_for(ticket, fronts.get(level), heads[level])
                found.append(Candidate(self.place(ticket, order_class), ticket, order_class))
        found.sort(key=lambda candidate: candidate.place)
        return self.guards.allowed(found) if self.guards else found

    def heads(self, level: int) -> list[Ticket]:
        """The next in fair order; while the tier owes and that one is not small, also the next that is."""
        queue = self.tiers[level].queue
        first = queue.next()
        if first is None:
            return []
        heads = [first]
        if self._owes(level) and not self.is_small(first) and (small := queue.next(self.is_small)):
            heads.append(small)
        return heads + self._reach.heads_elsewhere(queue, heads) if self._reach.is_divided else heads

    def class_for(self, ticket: Ticket, front: Ticket | None, heads: Sequence[Ticket]) -> OrderClass:
        """A floor is for its tier's front; while the tier owes, also for what is small beside a front that is not.

        `front` is the one in line, None where the heads are.
        """
        if self.rules.tiers[ticket.tier].always_first:
            return FIRST
        if ticket.is_for_floor:
            return LINE
        if front is None:
            may_be_inside = ticket in heads
        elif ticket is front:
            may_be_inside = True
        else:
            may_be_inside = (
                self._owes(ticket.tier)
                and not self.is_small(front)
                and self.is_small(ticket)
                and (ticket.is_in_line or ticket in heads)
            )
        return self._class_of_front(ticket, self.need(ticket)) if may_be_inside else OTHER

    def _class_of_front(self, ticket: Ticket, needed: Amount) -> OrderClass:
        held, reserve = self.on_floor(ticket.tier), self._figures.reserve[ticket.tier]
        tokens, requests, prompt = needed
        if held[0] + tokens <= reserve[0] and held[1] + requests <= reserve[1] and held[2] + prompt <= reserve[2]:
            return INSIDE
        return TURN if below(held, reserve) and not self._owes(ticket.tier) else OTHER

    def place(self, ticket: Ticket, order_class: OrderClass) -> Place:
        """Key that the order compares. Turns: whose last admission is longest ago. Ties and others: by aged level."""
        before, key = 0, self.aged_level(ticket)
        if order_class == LINE:
            before = ticket.admission
        elif order_class == TURN:
            before = self.tiers[ticket.tier].latest
        elif order_class == OTHER and self.rules.by_gain:
            before, key = self._gain_key(ticket)
        return order_class, before, key, ticket.arrival

    def aged_level(self, ticket: Ticket) -> int:
        """See `Rules.aged_level`."""
        return self.rules.aged_level(ticket, self._now)

    def _tiers_above(self, ticket: Ticket) -> int:
        """How many tiers are more important than the ticket."""
        return self.rules.whole_level(ticket, self._now)

    def _gain_key(self, ticket: Ticket) -> tuple[int, int]:
        """Rule 9: weight for time; what earns nothing, or whose tenant is ahead, comes after all others, by level."""
        earned, waits_in_queue = ticket.earned(self._now), not ticket.is_in_line and ticket.admission == 0
        if not earned or (waits_in_queue and self.tiers[ticket.tier].queue.is_ahead(ticket)):
            return 1, self.aged_level(ticket)
        return 0, -earned

    # -- rule 4: room

    def need(self, ticket: Ticket) -> Amount:
        """t: its prompt counts less its best hit, for no more than its size limit and the largest engine's prefill."""
        prompt = ticket.prompt or 1
        if ticket.hits:
            prompt = max(1, prompt - max(ticket.hits.values()))
        return ticket.tokens, ticket.requests, min(prompt, self._most_prompt[ticket.tier])

    def is_small(self, ticket: Ticket) -> bool:
        """`t <= R`."""
        return within(self.need(ticket), self._figures.reserve[ticket.tier])

    def fits(self, ticket: Ticket) -> bool:
        """Beside what engines hold and the idle headroom of tiers that are more important than the ticket."""
        return within(self._with(ticket, NOTHING_GONE), self._figures.capacity)

    def lacking(self, ticket: Ticket, before: Amount, gone: Gone) -> Amount:
        """The amount that is lacking for the ticket, as if `gone` had ended and `before` had entered before the
        ticket.
        """
        needed = plus(self._with(ticket, gone), minus(before, gone.total))
        return larger(NOTHING, minus(needed, self._figures.capacity))

    def _with(self, ticket: Ticket, gone: Gone) -> Amount:
        needed = plus(self._total, self.need(ticket))
        if self._figures.has_headroom:
            for tier, headroom in enumerate(self._figures.headroom[: self._tiers_above(ticket)]):
                if tier != ticket.tier:
                    used = minus(self.tiers[tier].used, gone.of(tier))
                    needed = plus(needed, larger(NOTHING, minus(headroom, used)))
        return needed

    def holds(self, ticket: Ticket, order_class: OrderClass) -> bool:
        """True if it holds its place though it does not fit, so that nothing after it is admitted."""
        if order_class == FIRST:
            return True
        kept, above = self.need(ticket), self._tiers_above(ticket)
        for q, tier in enumerate(self.rules.tiers):
            if q == ticket.tier:
                continue
            is_better, k = q < above, self.tiers[q].used
            if not (tier.always_first or (order_class == OTHER and is_better and not self.rules.by_gain)):
                k = smaller(self.on_floor(q), self._figures.reserve[q])
            kept = plus(kept, larger(k, self._figures.headroom[q]) if is_better else k)
        return within(kept, self._figures.capacity)

    def is_within_limit(self, ticket: Ticket, others: Amount = NOTHING) -> bool:
        """True if its tier may hold it beside what that holds, and beside `others`."""
        more = others if ticket.is_for_floor else plus(others, self.need(ticket))
        return within(plus(self.tiers[ticket.tier].used, more), self._figures.limit[ticket.tier])

    # -- rule 7: what may be taken back (`preemption`)

    def could_come_back(self, ticket: Ticket) -> bool:
        """True if its tokens and requests would be let in again."""
        tokens, requests, _ = self._figures.returnable[ticket.tier]
        return ticket.tokens <= tokens and ticket.requests <= requests

    def would_be_below_floor(self, level: int, taken: Amount, gone: Gone) -> bool:
        """True if it would be `U < R` in all dimensions without leases that were `taken`, none for its floor."""
        left = self.on_floor(level)
        if not self.rules.by_gain:  # by gain what fills a floor is not taken
            left = minus(minus(left, gone.of(level)), taken)
        return below(left, self._figures.reserve[level])

    def may_preempt(self) -> bool:
        """True if something that may be served so waits."""
        return self.rules.max_preemptions > 0 and any(
            tier.preempt_after_us is not None and (state.lined or state.queue)
            for tier, state in zip(self.rules.tiers, self.tiers, strict=True)
        )

    # -- rule 6: engines and the line

    def wanted(self, ticket: Ticket) -> str | None:
        """The engine with the smallest score. One in line keeps to the engine that it waits for."""
        if len(self.engines) == 1:
            (only,) = self.engines.values()
            return only.id if only.could_take(ticket, self._now) else None
        if ticket.engine is not None and self.engines[ticket.engine].could_take(ticket, self._now):
            return ticket.engine
        return self._best(ticket, [e for e in self.engines.values() if e.could_take(ticket, self._now)])

    def would_enter(self, ticket: Ticket, order_class: OrderClass) -> list[str]:
        """The engines that it would enter if they had room: the one that it wants, then the next best."""
        wanted, percent = self.wanted(ticket), self.rules.affinity_percent
        if wanted is None:
            return []
        others = [e for e in self.engines.values() if e.id != wanted and e.could_take(ticket, self._now)]
        ids = [e.id for e in sorted(others, key=lambda engine: engine.score(ticket, percent))]
        waits = not self._is_late(ticket) if ticket.is_in_line else self._has_place(ticket, order_class)
        if waits and order_class != FIRST:
            hit = ticket.hits.get(wanted, 0)
            ids = list(takewhile(lambda other: ticket.hits.get(other, 0) >= hit, ids))
        return [wanted, *ids]

    def _is_late(self, ticket: Ticket) -> bool:
        """True if one in line takes any engine now."""
        return self._now >= ticket.in_line_since_us + PATIENCE_US

    def _best(self, ticket: Ticket, engines: Sequence[ScheduledEngine]) -> str | None:
        if len(engines) < 2:
            return engines[0].id if engines else None
        percent = self.rules.affinity_percent
        return min(engines, key=lambda engine: engine.score(ticket, percent)).id

    def _engine_for(
        self, ticket: Ticket, wanted: str | None, open_: Sequence[ScheduledEngine], takes_any: bool
    ) -> str | None:
        """The engine that it enters now: the one that it wants, or the best other one without less of its prompt."""
        now = self._now
        engines = [e for e in open_ if e.has_room(ticket, now) and e.could_take(ticket, now)]
        if any(engine.id == wanted for engine in engines):
            return wanted
        other = self._best(ticket, engines)
        if other is None or takes_any:
            return other
        return other if ticket.hits.get(other, 0) >= ticket.hits.get(wanted or "", 0) else None

    def _has_place(self, ticket: Ticket, order_class: OrderClass) -> bool:
        """Each tier has as many places in line as there are ready engines; class 0 has always one."""
        if self._reach.is_divided:
            free = self._reach.places(ticket, self.line)
        else:
            free = sum(engine.is_ready for engine in self.engines.values()) - self.tiers[ticket.tier].lined
        return order_class == FIRST or free > 0

    def _enter(self, ticket: Ticket, engine: str, order_class: OrderClass, over: dict[int, Rule]) -> EngineGrant:
        if not ticket.is_in_line:
            self.tiers[ticket.tier].queue.leave(ticket)
            return self._into(ticket, engine, order_class, 0, over)
        self._leave_line(ticket)
        return self._into(ticket, engine, order_class, self._now - ticket.in_line_since_us, over)

    def _into(
        self, ticket: Ticket, engine: str, order_class: OrderClass, lined_us: int, over: dict[int, Rule]
    ) -> EngineGrant:
        """One that left its queue or the line. If it stood there for the floor, it counts already."""
        of = self.engines[engine]
        size, held = of.size(self._now), of.held
        found = Found(size[0], size[1], held[0], held[1], of.sent, lined_us)
        if not ticket.admission:
            self._begin_to_count(ticket, order_class, self.need(ticket))
        ticket.engine = None
        sent = ticket.sent_to(engine) if ticket.count else 0
        self.hold(ticket.tier, engine, ticket.amount, sent, ticket.on_floor)
        return EngineGrant(ticket, engine, sent, found, over)

    def _join(self, ticket: Ticket, wanted: str | None) -> None:
        state = self.tiers[ticket.tier]
        state.queue.leave(ticket)
        state.lined += 1
        ticket.is_in_line, ticket.in_line_since_us = True, self._now
        self.line.append(ticket)
        self.moved.add(ticket.owner)
        self._wait_for(ticket, wanted)

    def _leave_line(self, ticket: Ticket) -> None:
        self.line.remove(ticket)
        self.moved.add(ticket.owner)
        self.tiers[ticket.tier].lined -= 1
        self._wait_for(ticket, None)
        if ticket.is_for_floor:
            self._hold_in_line(ticket, minus(NOTHING, ticket.amount))
        ticket.is_in_line = False

    def _wait_for(self, ticket: Ticket, wanted: str | None) -> None:
        if ticket.engine is not None:
            self.engines[ticket.engine].lined -= ticket.prompt
        if wanted is not None:
            self.engines[wanted].lined += ticket.prompt
        ticket.engine = wanted

    def _choose_again(self) -> None:
        """Chooses again for tickets in line for an engine that can take them no more."""
        gone = [t for t in self.line if t.engine is None or not self.engines[t.engine].could_take(t, self._now)]
        for ticket in gone:
            before = ticket.engine
            self._wait_for(ticket, None)
            self._wait_for(ticket, self.wanted(ticket))
            if ticket.engine != before:
                self.moved.add(ticket.owner)

    def _begin_to_count(self, ticket: Ticket, order_class: OrderClass, needed: Amount) -> None:
        """Rule 5: by a turn, how many whole reserves too much; of the prompt, what is above that."""
        if order_class == TURN:
            after = plus(self.on_floor(ticket.tier), needed)
            tokens, requests, prompt = (
                min(MOST_EXCESS, max(0, (a - r) // r))
                for a, r in zip(after, self._figures.reserve[ticket.tier], strict=True)
            )
            ticket.excess = max(tokens, requests)
            ticket.excess_prompt = max(0, prompt - ticket.excess)
        ticket.count = needed[2]
        ticket.is_in_floor, ticket.counted_us = self.rules.by_gain and order_class != OTHER, self._now
        self.admissions += 1
        self.tiers[ticket.tier].latest = ticket.admission = self.admissions

    def _hold_in_line(self, ticket: Ticket, amount: Amount) -> None:
        state = self.tiers[ticket.tier]
        state.in_line = plus(state.in_line, amount)
        if ticket.is_in_floor:
            state.in_line_on_floor = plus(state.in_line_on_floor, amount)

    def on_floor(self, level: int) -> Amount:
        """U where it is compared with R: by gain, what was let in for the floor (rule 9)."""
        state = self.tiers[level]
        if self.rules.by_gain:
            return plus(state.on_floor, state.in_line_on_floor)
        return state.on_engines if state.in_line is NOTHING else state.used

    def _owes(self, level: int) -> bool:
        return self._now < self.tiers[level].owes_until_us
