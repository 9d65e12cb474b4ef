"""The pool of several engines that many replicas share: the store's script chooses the engine of each request.

Each replica states which engines it knows, and which of them it can use. The store merges that: it never places a
request on an engine that the request's own replica cannot use. An engine's incarnation and whether it drains are the
store's; a replica hears of them by its next call, at the latest by its next heartbeat.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from sidecar.events import Obstacle, StoreObserver
from sidecar.policy.model import Policy
from sidecar.policy.rules import PoolRules
from sidecar.pools.base import Ask, Grant, Lease, WaitOutcome
from sidecar.pools.clock import Clock, monotonic_us
from sidecar.pools.engine_reports import change_sizes, engine_obstacle, engine_state, placed_on
from sidecar.pools.engines import WEIGHT_PERCENT, EngineOffer, EngineState
from sidecar.pools.redis import protocol
from sidecar.pools.redis.batch import Batch, EngineBatchQueue, operations_in_line
from sidecar.pools.redis.connection import Connect
from sidecar.pools.redis.engine_ledgers import EngineLedgers
from sidecar.pools.redis.engine_partition import EngineOutage, EnginePartition
from sidecar.pools.redis.partition import LastKnown
from sidecar.pools.redis.pool import RedisPool
from sidecar.pools.redis.resync import EngineStatement, Statement
from sidecar.pools.redis.session import RoundTripObserver


class _SaidDrain(NamedTuple):
    """What this replica has said of an engine, and the store has not answered: whether `engine`, the id that is offered
    here, drains. `batch` is of the call that says it; None where it is said once the store has the next statement.
    """

    engine: str | None
    drains: bool
    batch: Batch | None


class RedisFleetPool(RedisPool):
    """See `RedisPool` and `EnginePool`. `connect` is `connector(..., has_engines=True, is_by_gain=...)`.

    `on_incarnation` is called with a name, its latest incarnation in the store where that is later than the one stated
    here, and whether other replicas have seen it restart just now: see `Fleet.adopt`. `on_drain` is called with a name
    and whether it drains, where that has changed, and `on_reached_elsewhere` with the names of the engines that other
    replicas can use and this one cannot. `is_sole_user`: no other replica can use the engines that are stated here, so
    that they are not divided while the store is lost.
    """

    _batches: EngineBatchQueue
    _outage: EngineOutage | None

    def __init__(
        self,
        policy: Policy,
        connect: Connect,
        clock: Clock = monotonic_us,
        observer: StoreObserver | None = None,
        *,
        weight_percent: int = WEIGHT_PERCENT,
        took: RoundTripObserver | None = None,
        takes_over: bool = False,
        is_sole_user: bool = False,
    ) -> None:
        self._is_sole_user = is_sole_user
        self._weight_percent = weight_percent
        self._offers: Sequence[EngineOffer] = ()
        self._draining: dict[str, str | None] = {}  # by names, the ids that drain; None where it is not offered yet
        self._said_drains: dict[str, _SaidDrain] = {}
        self._elsewhere: frozenset[str] = frozenset()
        self._prefilled: set[int] = set()
        self._ledgers = EngineLedgers()
        self._is_syncing = False
        self._blocked_us = self._blocked_us_in_store = 0
        self.on_incarnation: Callable[[str, int, bool], None] = lambda _, __, ___: None
        self.on_drain: Callable[[str, bool], None] = lambda _, __: None
        self.on_reached_elsewhere: Callable[[Collection[str]], None] = lambda _: None
        super().__init__(policy, connect, clock, observer, took=took, takes_over=takes_over)
        change_sizes(self._sizes, self._offers)

    # -- the contract of a pool of several engines

    def set_engines(self, offers: Sequence[EngineOffer]) -> None:
        """See `EnginePool.set_engines`. The other replicas' engines stay."""
        was_cut_off = self._is_cut_off
        self._offers = tuple(offers)
        change_sizes(self._sizes, self._offers)
        self._outgrown.look(self._leases.values())
        for name, engine in self._offered().items():
            if name in self._said_drains and self._said_drains[name].engine != engine:
                del self._said_drains[name]  # a new incarnation does not drain
        if self._outage is not None:
            self._outage.set_engines(self._offers, self._weight_percent)
        if self._partition is None:  # also during a resync, whose statement has the engines from before
            self._batches.say(self._engines())
        self._turned(was_cut_off=was_cut_off)

    def cap_engine(self, engine: str, for_s: float, refused: int = 1) -> None:
        """See `EnginePool.cap_engine`. It holds for all replicas that share the pool."""
        for_us = round(for_s * 1e6)
        if isinstance(partition := self._partition, EnginePartition):
            now_us, scheduler = self.now_us(), partition.scheduler
            scheduler.cap(engine, max(0, scheduler.held_by(engine) - refused), now_us + for_us, now_us)
        elif self._session is not None:
            self._batches.say(protocol.cap(engine, refused, for_us))

    def raise_cap(self, engine: str, requests: int) -> None:
        """See `EnginePool.raise_cap`."""
        if isinstance(partition := self._partition, EnginePartition):
            partition.scheduler.raise_cap(engine, requests)
        elif self._session is not None:
            self._batches.say(protocol.raise_cap(engine, requests))

    def drain_engine(self, name: str, *, drains: bool) -> None:
        """See `EnginePool.drain_engine`. Said while the store is away, it counts there when it is back."""
        engine = self._offered().get(name)
        if drains:
            self._draining[name] = engine
        else:
            self._draining.pop(name, None)
        is_said = self._partition is None and self._session is not None
        batch = self._batches.say(protocol.drain(name, drains=drains)) if is_said else None
        self._said_drains[name] = _SaidDrain(engine, drains, batch)

    def engines(self) -> Sequence[EngineState]:
        """See `EnginePool.engines`. By the store's latest answer; of this replica's parts while it is alone."""
        if isinstance(partition := self._partition, EnginePartition):
            return partition.scheduler.engines(self.now_us())
        return self._ledgers.states()

    def named_engines(self) -> Mapping[str, Sequence[str]]:
        """The names of the engines that each replica knows, by replicas, where not all know the same; else empty."""
        return self._ledgers.named

    def change_weight(self, weight_percent: int) -> None:
        """See `FleetPool.change_weight`."""
        self._weight_percent = weight_percent

    def change_policy(self, policy: Policy) -> None:
        """See `Pool.change_policy`. The pool's size is that of its engines."""
        self._sizes.policy = policy
        change_sizes(self._sizes, self._offers)
        self._rules_are_new = True
        self._outgrown.look(self._leases.values())
        if self._outage is not None:
            self._outage.set_engines(self._offers, self._weight_percent)
        if self._session is not None:
            self._session.restate()

    def change_rules(self, rules: PoolRules) -> None:
        """See `Pool.change_rules`: nothing changes, because the engines say how large the pool is."""

    def state(self) -> Mapping[str, object]:
        """See `Pool.state`; with the engines, and which replica knows which, where they differ.

        `no_engine_fits_s` is of the whole pool since this replica joined it, without the times when the store is away.
        """
        return {
            **super().state(),
            "engines": [engine_state(engine) for engine in self.engines()],
            "engines_by_replica": dict(self.named_engines()),
            "no_engine_fits_s": round(self._blocked_us / 1e6, 3),
        }

    def obstacle(self, ask: Ask) -> tuple[Obstacle, str]:
        """See `Pool.obstacle`."""
        found = super().obstacle(ask)
        if self._paused is not None or self._partition is not None:
            return found
        return engine_obstacle(self.engines(), ask, found) or found

    # -- what a lease asks for

    def end(self, lease: Lease, outcome: WaitOutcome | None, used_tokens: int | None = 0) -> None:
        """See `LeaseOwner.end`."""
        self._prefilled.discard(lease.id)
        super().end(lease, outcome, used_tokens)

    def prefilled(self, lease: Lease) -> None:
        """See `LeaseOwner.prefilled`."""
        if lease.id in self._prefilled:
            return
        self._prefilled.add(lease.id)
        if isinstance(partition := self._partition, EnginePartition):
            partition.prefilled(lease)
        else:
            self._batches.prefilled(lease)

    def _wait_again(self, lease: Lease, *, is_handed_back: bool) -> None:
        self._prefilled.discard(lease.id)
        super()._wait_again(lease, is_handed_back=is_handed_back)

    def _grant(self, lease: Lease, wait: protocol.WaitReply | None, now_us: int) -> Grant:
        grant = super()._grant(lease, wait, now_us)
        if wait is None or wait.found is None:
            return grant
        return msgspec.structs.replace(grant, placed=placed_on(wait.found, lease.ask, wait.claimed_us))

    def _unprefilled(self, lease: Lease) -> int:
        """The tokens of a lease's prompt that its engine has not prefilled yet."""
        if lease.grant is None or lease.grant.engine is None or lease.id in self._prefilled:
            return 0
        return max(1, lease.ask.prompt - dict(lease.ask.hits).get(lease.grant.engine, 0))

    # -- what happens to the session

    def statement(self) -> tuple[Sequence[protocol.Argument], Statement]:
        """See `SessionOwner.statement`. Drains that were not answered are to be said again."""
        self._said_drains = {name: said._replace(batch=None) for name, said in self._said_drains.items()}
        return super().statement()

    def synced(self, reply: protocol.Reply, batch: Batch) -> None:
        """See `SessionOwner.synced`. Says drains again that were not answered: of an engine that the store knows it
        takes no drain from a statement. The answer said which have restarted: these do not drain.
        """
        self._is_syncing = True
        super().synced(reply, batch)
        self._is_syncing = False
        for name, said in self._said_drains.items():
            if said.batch is None:
                again = self._batches.say(protocol.drain(name, drains=said.drains))
                self._said_drains[name] = said._replace(batch=again)

    def answered(self, reply: protocol.Reply, batch: Batch) -> None:
        """See `SessionOwner.answered`."""
        self._ledgers.hear(reply, is_complete=self._is_syncing or batch.is_beat)
        if not self._is_syncing:
            self._blocked_us += max(0, reply.blocked_us - self._blocked_us_in_store)
        self._blocked_us_in_store = reply.blocked_us
        if self._said_drains:
            self._said_drains = {name: it for name, it in self._said_drains.items() if it.batch is not batch}
        super().answered(reply, batch)
        if reply.engines:
            self._follow_ledgers()

    def _follow_ledgers(self) -> None:
        """Reports what other replicas have seen of the engines."""
        own = {protocol.name_of(offer.id): int(offer.id.rpartition("#")[2]) for offer in self._offers}
        for name, incarnation in self._ledgers.latest().items():
            if own.get(name, incarnation) < incarnation:
                self._said_drains.pop(name, None)  # a new incarnation does not drain
                self.on_incarnation(name, incarnation, not self._is_syncing)
        # An answer to an earlier call does not know what has been said since.
        draining: dict[str, str | None] = dict(self._ledgers.draining())
        for name, said in self._said_drains.items():
            draining.pop(name, None)
            if said.drains:
                draining[name] = said.engine
        before, self._draining = self._draining, draining
        for name in sorted(before.keys() ^ draining.keys()):
            self.on_drain(name, name in draining)
        usable = {protocol.name_of(offer.id) for offer in self._offers if offer.takes_new}
        elsewhere = frozenset(map(protocol.name_of, self._ledgers.taking())) - usable
        if elsewhere != self._elsewhere:
            self._elsewhere = elsewhere
            self.on_reached_elsewhere(elsewhere)

    # -- what `RedisPool` does otherwise

    @property
    def _is_cut_off(self) -> bool:
        return self._paused is not None or not any(offer.takes_new for offer in self._offers)

    def _offered(self) -> Mapping[str, str]:
        """The ids of the engines that are offered here, by their names."""
        return {protocol.name_of(offer.id): offer.id for offer in self._offers}

    def _engines(self) -> Sequence[protocol.Argument]:
        offered = self._offered()
        draining = [name for name, engine in self._draining.items() if engine in (None, offered.get(name))]
        return protocol.engines(self._offers, draining, self.now_us())

    def _new_batches(self) -> EngineBatchQueue:
        is_by_gain = self._sizes.policy.rules.is_by_gain
        return EngineBatchQueue(operations_in_line(has_engines=True, is_by_gain=is_by_gain))

    def _new_statement(self) -> EngineStatement:
        return EngineStatement(
            self._leases.values(),
            self.now_us,
            is_cut_off=self._is_cut_off,
            engines=self._engines(),
            unprefilled=self._unprefilled,
        )

    def _new_outage(self, known: LastKnown | None, *, is_refused: bool) -> EngineOutage:
        return EngineOutage(
            self._sizes,
            self._leases,
            known,
            self.now_us,
            weight_percent=self._weight_percent,
            offers=self._offers,
            ledgers=self._ledgers,
            unprefilled=self._unprefilled,
            is_refused=is_refused,
            is_sole_user=self._is_sole_user,
        )

    def _channel(self) -> str:
        policy = self._sizes.policy
        return protocol.grants_channel(policy.pool, self.name, has_engines=True, is_by_gain=policy.rules.is_by_gain)

    def _rules_text(self) -> str:
        return protocol.engines_rules_text(self._sizes.policy, self._weight_percent)

    def _rules(self) -> PoolRules:
        if self._is_shared:
            return self._sizes.policy.rules_of(*self._ledgers.capacity())
        return super()._rules()
