"""The pool as its last reply to a replica shows it, with what has changed in its own leases since."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from sidecar.pools import guards
from sidecar.pools.calls import (
    DEAD_US,
    BidGranted,
    Call,
    Cap,
    Cell,
    Drain,
    EngineConfig,
    EngineView,
    LeaseGrowth,
    Owed,
    Reply,
    SloSeen,
    Sums,
)
from sidecar.scheduling.amounts import NOTHING, UNBOUNDED, Amount, plus
from sidecar.scheduling.engines import ScheduledEngine
from sidecar.scheduling.figures import Rules
from sidecar.scheduling.scheduler import Scheduler
from sidecar.scheduling.tickets import ScheduledLease

# -- Amounts that one replica holds, as sums of its leases by tier and engine.

Sides: TypeAlias = tuple[str, str]
"""The tier and the engine of a cell."""

NO_SUMS = (0, 0, 0, 0, 0, 0, 0)


def added(a: Sums, b: Sums, sign: int) -> Sums:
    """The one, and the other added or taken off."""
    return (
        a[0] + sign * b[0],
        a[1] + sign * b[1],
        a[2] + sign * b[2],
        a[3] + sign * b[3],
        a[4] + sign * b[4],
        a[5] + sign * b[5],
        a[6] + sign * b[6],
    )


class Row:
    """The sums, and which of them changed since they were stated."""

    def __init__(self, tiers: Sequence[str]) -> None:
        self._tiers = tiers
        self.sums: dict[Sides, Sums] = {}
        self.changed: set[Sides] = set()

    def add(self, lease: ScheduledLease, sign: int) -> None:
        """Counts a lease, or counts it no more."""
        ticket = lease.ticket
        key = self._tiers[ticket.tier], lease.engine
        sums = added(self.sums.get(key, NO_SUMS), (*ticket.amount, lease.sent, *ticket.on_floor), sign)
        if sums == NO_SUMS:
            self.sums.pop(key, None)
        else:
            self.sums[key] = sums
        self.changed.add(key)

    def state(self, all_of_them: bool) -> list[Cell]:
        """The cells to state: all, or those that changed."""
        keys = self.sums if all_of_them else self.changed
        cells = [Cell(*key, *self.sums.get(key, NO_SUMS)) for key in sorted(keys)]
        self.changed = set()
        return cells

    def by_tier(self) -> dict[str, Amount]:
        """Amounts that each tier holds."""
        found: dict[str, Amount] = {}
        for (tier, _), sums in self.sums.items():
            held = sums[0], sums[1], sums[2]
            found[tier] = plus(found[tier], held) if tier in found else held
        return found


def sum_cells(tiers: Sequence[str], leases: Iterable[ScheduledLease]) -> list[Cell]:
    """The sums of some leases."""
    part = Row(tiers)
    for lease in leases:
        part.add(lease, 1)
    return part.state(all_of_them=True)


class KnownPool:
    """Of one replica. `row` is what it holds now.

    `presumed`: how many replicas there are where the ledger never answered, 0 for not known. `shares_engines`: whether
    others can use the same engines.
    """

    def __init__(self, row: Row, presumed: int, *, shares_engines: bool) -> None:
        self.reply: Reply | None = None
        """The last one with figures."""
        self.knew = 0
        self.config: dict[str, EngineConfig] = {}
        self.drained: dict[str, Drain] = {}
        self.ahead_us = 0
        """The ledger's clock before this replica's."""
        self.last_answer_us = 0
        self._row, self._presumed, self._shares_engines = row, presumed, shares_engines
        self._reported: dict[str, EngineView] = {}
        self._own: dict[Sides, Sums] = {}  # what the figures of the last reply have of this replica
        self._stated = self._own

    def take(self, reply: Reply, reported: Sequence[EngineView] | None, now_us: int) -> None:
        """The ledger has answered, and it knows the replica, which `reported` its view, if that had changed."""
        if reported is not None:
            self._reported = {engine.id: engine for engine in reported}
        if reply.lined is None and self.reply is not None:
            reply.lined = self.reply.lined
        self.reply, self.ahead_us = reply, reply.now_us - now_us
        if reply.config is not None:
            self.config = {engine.id: engine for engine in reply.config}
        if reply.drained is not None:
            self.drained = {drain.engine: drain for drain in reply.drained}
        if not reply.on_hold:
            self.knew = reply.alive

    def states(self) -> None:
        """A call says what the replica holds now."""
        self._stated = dict(self._row.sums)

    def own_is_reported(self, grants: Iterable[BidGranted]) -> None:
        """Forgets the news of that call: it is in the figures of its reply, and so are the `grants` there."""
        self._own = self._stated
        for grant in grants:
            key = grant.tier, grant.engine
            self._own[key] = added(self._own.get(key, NO_SUMS), grant.sums, 1)

    def replicas(self) -> int:
        """How many there are, 0 for not known. Who got only replies on hold knows of nobody."""
        return self.knew or (0 if self.last_answer_us else self._presumed)

    def as_scheduler(self, rules: Rules, now_us: int) -> Scheduler:
        """The engines and tiers by `rules`. Nothing waits in it."""
        scheduler = Scheduler(rules)
        if self.reply is not None:
            held = {engine.id: engine for engine in self.reply.held}
            for engine in self.config.values():
                of = ScheduledEngine(
                    engine.id, engine.tokens, engine.requests, engine.prefill, engine.speed, engine.is_ready
                )
                of.since_us, of.ramp_us = engine.since_us - self.ahead_us, engine.ramp_us
                if (now := held.get(engine.id)) is not None:
                    of.held, of.sent, of.lined = (now.tokens, now.requests, now.prompt), now.sent, now.lined
                    of.cap_requests, of.cap_until_us = now.cap_requests, now.cap_until_us - self.ahead_us
                scheduler.engines[engine.id] = of
            for state, tier in zip(scheduler.tiers, self.reply.tiers, strict=False):
                state.on_engines, state.in_line = tier.on_engines, tier.in_line
                state.on_floor, state.in_line_on_floor = tier.on_floor, tier.in_line_on_floor
            for level, tier in enumerate(self.reply.tiers):
                guards.mirror(scheduler, level, tier.guard)
            self._add_changes(scheduler, [tier.tier for tier in self.reply.tiers])
        scheduler.look(now_us)
        return scheduler

    def _add_changes(self, scheduler: Scheduler, names: Sequence[str]) -> None:
        """Adds what has changed in the replica's own leases since. `names` are the pool's tiers."""
        levels = {name: level for level, name in enumerate(names[: len(scheduler.tiers)])}
        for tier, engine in {**self._own, **self._row.sums}:
            now, before = self._row.sums.get((tier, engine), NO_SUMS), self._own.get((tier, engine), NO_SUMS)
            change = added(now, before, -1)
            if any(change) and engine in scheduler.engines:
                scheduler.hold(levels.get(tier), engine, change[:3], change[3], change[4:])

    def _own_on(self, engine: str) -> Amount:
        """Tokens, requests and sent prompts of the replica on an engine, as the last reply has them."""
        there = [sums for (_, on), sums in self._own.items() if on == engine]
        return sum(it[0] for it in there), sum(it[1] for it in there), sum(it[3] for it in there)

    def parts(self, views: Mapping[str, EngineView], now_us: int) -> list[EngineView]:
        """Its part of the engines that it `views`, without its ledger: `min(C // n, own + free // n)` of each.

        From DEAD_US after the last answer on it is `C // n`. C is what the ledger has, or its own view where that has
        another size since, or where the ledger does not know the engine: it came, or began anew, meanwhile.
        """
        alive = max(1, self.replicas()) if self._shares_engines else 1
        held = {} if self.reply is None else {it.id: (it.tokens, it.requests, it.sent) for it in self.reply.held}
        parts, out = [], {word.engine for word in self.drained.values() if word.is_drained}
        for view in views.values():
            config, reported = self.config.get(view.id, view), self._reported.get(view.id)
            whole = _sizes(config if reported is None or _sizes(reported) == _sizes(view) else view)
            sizes, used, own = [], held.get(view.id, NOTHING), self._own_on(view.id)
            for d, size in enumerate(whole):
                part = size if size == UNBOUNDED else size // alive
                if now_us < self.last_answer_us + DEAD_US and size != UNBOUNDED:
                    part = min(part, own[d] + max(0, size - used[d]) // alive)
                sizes.append(part)
            is_ready = view.is_reachable and view.id.rpartition("#")[0] not in out
            parts.append(EngineView(view.id, sizes[0], sizes[1], sizes[2], view.speed, is_ready))
        return parts


def _sizes(engine: EngineConfig | EngineView) -> Amount:
    return engine.tokens, engine.requests, engine.prefill


# -- News of a replica that its ledger adds up.


@dataclass
class NewsItem:
    """Something that the ledger adds up: it is sent once, and again with a statement if no answer came.

    `number` is that of the first call that had it, 0 for none: a call that was applied is not applied twice.
    """

    record: LeaseGrowth | Owed | SloSeen | Drain | Cap
    number: int = 0

    def put(self, call: Call) -> None:
        """Puts it into a call."""
        if isinstance(self.record, LeaseGrowth):
            call.charges = [*call.charges, msgspec.structs.replace(self.record, first_call=self.number)]
        elif isinstance(self.record, Owed):
            call.owes = [*call.owes, msgspec.structs.replace(self.record, first_call=self.number)]
        elif isinstance(self.record, SloSeen):
            call.seen = [*call.seen, msgspec.structs.replace(self.record, first_call=self.number)]
        elif isinstance(self.record, Drain):
            call.drains = [*call.drains, self.record]
        else:
            call.caps = [*call.caps, self.record]
