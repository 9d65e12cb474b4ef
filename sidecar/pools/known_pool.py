"""The pool as its last reply told a replica, with what has changed in its own leases since."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sidecar.pools.calls import DEAD_US, Drain, EngineConfig, EngineView, Granted, Reply
from sidecar.pools.row import Row
from sidecar.scheduling.amounts import NOTHING, UNBOUNDED, Amount, minus, plus
from sidecar.scheduling.engines import Engine
from sidecar.scheduling.figures import Rules
from sidecar.scheduling.scheduler import Scheduler


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
        self._told: dict[str, EngineView] = {}
        self._own_held: dict[str, tuple[int, int, int]] = {}
        self._own_tiers: dict[str, Amount] = {}
        self._stated = self._own_held, self._own_tiers

    def take(self, reply: Reply, told: Sequence[EngineView] | None, now_us: int) -> None:
        """The ledger has answered, and it knows the replica, which `told` its view, if that had changed."""
        if told is not None:
            self._told = {engine.id: engine for engine in told}
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
        self._stated = self._row.by_engine(), self._row.by_tier()

    def own_is_told(self, grants: Iterable[Granted]) -> None:
        """What that call said is in the figures of its reply, and so are the `grants` there."""
        self._own_held, self._own_tiers = held, tiers = self._stated
        for grant in grants:
            on_engine, of_tier = held.get(grant.engine, NOTHING), tiers.get(grant.tier, NOTHING)
            held[grant.engine] = plus(on_engine, (grant.tokens, grant.requests, grant.sent))
            tiers[grant.tier] = plus(of_tier, (grant.tokens, grant.requests, grant.prompt))

    def replicas(self) -> int:
        """How many there are, 0 for not known. Who got only replies on hold knows of nobody."""
        return self.knew or (0 if self.last_answer_us else self._presumed)

    def as_scheduler(self, rules: Rules, now_us: int) -> Scheduler:
        """The engines and tiers by `rules`. Nothing waits in it."""
        scheduler = Scheduler(rules)
        if self.reply is not None:
            own, own_tiers = self._row.by_engine(), self._row.by_tier()
            held = {engine.id: engine for engine in self.reply.held}
            for engine in self.config.values():
                of = Engine(engine.id, engine.tokens, engine.requests, engine.prefill, engine.speed, engine.is_ready)
                of.since_us, of.ramp_us = engine.since_us - self.ahead_us, engine.ramp_us
                if (now := held.get(engine.id)) is not None:
                    tokens, requests, sent = minus(own.get(of.id, NOTHING), self._own_held.get(of.id, NOTHING))
                    of.held = (now.tokens + tokens, now.requests + requests, now.prompt)
                    of.sent, of.lined = now.sent + sent, now.lined
                    of.cap_requests, of.cap_until_us = now.cap_requests, now.cap_until_us - self.ahead_us
                scheduler.engines[engine.id] = of
            for state, tier in zip(scheduler.tiers, self.reply.tiers, strict=False):
                change = minus(own_tiers.get(tier.tier, NOTHING), self._own_tiers.get(tier.tier, NOTHING))
                state.on_engines, state.in_line = plus(tier.on_engines, change), tier.in_line
                state.on_floor, state.in_line_on_floor = tier.on_floor, tier.in_line_on_floor
        scheduler.look(now_us)
        return scheduler

    def parts(self, views: Mapping[str, EngineView], now_us: int) -> list[EngineView]:
        """Its part of the engines that it `views`, without its ledger: `min(C // n, own + free // n)` of each.

        From DEAD_US after the last answer on it is `C // n`. C is what the ledger said, or its own view where that has
        another size since.
        """
        alive = max(1, self.replicas()) if self._shares_engines else 1
        held = {} if self.reply is None else {it.id: (it.tokens, it.requests, it.sent) for it in self.reply.held}
        parts, out = [], {word.engine for word in self.drained.values() if word.is_drained}
        for view in views.values():
            config, told = view if self.reply is None else self.config.get(view.id), self._told.get(view.id)
            if config is None:
                continue
            whole = _sizes(config if told is None or _sizes(told) == _sizes(view) else view)
            sizes, taken = [], held.get(view.id, NOTHING)
            for d, size in enumerate(whole):
                part = size if size == UNBOUNDED else size // alive
                if now_us < self.last_answer_us + DEAD_US and size != UNBOUNDED:
                    part = min(part, self._own_held.get(view.id, NOTHING)[d] + max(0, size - taken[d]) // alive)
                sizes.append(part)
            is_ready = view.is_reachable and view.id.rpartition("#")[0] not in out
            parts.append(EngineView(view.id, sizes[0], sizes[1], sizes[2], view.speed, is_ready))
        return parts


def _sizes(engine: EngineConfig | EngineView) -> Amount:
    return engine.tokens, engine.requests, engine.prefill
