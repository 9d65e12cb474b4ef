"""The figures of a pool for people: its size, what it holds and has waiting, what is in a request's way, warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from sidecar.events import Obstacle, StoreState
from sidecar.policy.rules import PoolRules
from sidecar.policy.size_limits import SizeLimits
from sidecar.pools.base import Ask, Grant, Merge, PeerReports, QueueMark, QueueStanding, StoreError, TenantUse
from sidecar.pools.clock import Clock
from sidecar.pools.engine_reports import engine_obstacle, engine_state, engines_of
from sidecar.pools.engine_size import EngineSize
from sidecar.pools.engines import EngineFigures, EngineOffer
from sidecar.pools.ledger_link import Link
from sidecar.pools.member import Member
from sidecar.pools.member_events import Mode
from sidecar.pools.pool_requests import PoolRequests
from sidecar.pools.stats import HELD_BACK, TierUsage, alone, obstacle, part_in_words, pool_state
from sidecar.pools.store_status import StoreStatus
from sidecar.pools.store_watch import StoreWatch
from sidecar.scheduling.amounts import NOTHING, UNBOUNDED


class PoolFigures:
    """Of the pool of one process. `has_names`: its engines are named; `offers` are those. `size` reads its engine."""

    def __init__(
        self,
        sizes: SizeLimits,
        requests: PoolRequests,
        watch: StoreWatch,
        link: Link,
        size: EngineSize | None,
        *,
        has_names: bool,
    ) -> None:
        self.offers: Sequence[EngineOffer] = ()
        self.paused: str | None = None
        self._sizes, self._requests, self._watch, self._link, self._size = sizes, requests, watch, link, size
        self._has_names = has_names
        self._blocked_us = 0
        self._blocked_since_us: int | None = None

    def engines(self, member: Member, now_us: int) -> Sequence[EngineFigures]:
        """See `EnginePool.engines`."""
        if not self._has_names:
            return ()
        pool, reply = member.mirror(now_us), member.pool.reply
        lined = pool.line if member.mode is Mode.ALONE or reply is None else reply.lined or ()
        claims = Counter(it.engine for it in lined)
        return engines_of(pool, claims, now_us, {offer.id for offer in self.offers})

    def state(self, member: Member, now_us: int) -> Mapping[str, object]:
        """See `Pool.state`; with the engines, where they are named, or the figures of the one that says its size."""
        rules, usage = self._usage(member, now_us)
        own = {"leases": self._requests.held(), "waiting": len(self._requests.waiting)}
        state = pool_state(rules, usage, **own)
        if self._size is not None:
            state["engine"] = self._size.state()
        if self._link.is_shared:
            state |= self._watch.state(member, own, usage, self._link.round_trips)
        if not self._has_names:
            return state
        since_us = self._blocked_since_us
        blocked_us = self._blocked_us + (0 if since_us is None else now_us - since_us)
        engines = [engine_state(engine) for engine in self.engines(member, now_us)]
        return {**state, "engines": engines, "no_engine_fits_s": round(blocked_us / 1e6, 3)}

    def note_blocked(self, now_us: int, *, is_blocked: bool) -> None:
        """Keeps the time during which a request that fits the pool waits for an engine."""
        if self._blocked_since_us is not None:
            self._blocked_us += now_us - self._blocked_since_us
        self._blocked_since_us = now_us if is_blocked else None

    def obstacle(self, member: Member, ask: Ask, now_us: int) -> tuple[Obstacle, str]:
        """See `Pool.obstacle`."""
        if self.paused is not None:
            return Obstacle.ENGINE, self.paused
        if self._size is not None and self._size.is_held_back:
            return HELD_BACK
        rules, usage = self._usage(member, now_us)
        if self._watch.status.state is StoreState.DIVIDED:
            return alone(rules, usage, ask)
        of_pool = obstacle(rules, usage, ask)
        of_engine = engine_obstacle(self.engines(member, now_us), ask, of_pool) if self._has_names else None
        return of_engine or of_pool

    def readiness(self) -> Sequence[str]:
        """See `Pool.readiness`."""
        of_engine = () if self._size is None else self._size.readiness()
        return (*of_engine, *(self._watch.status.readiness() if self._link.is_shared else ()))

    def notices(self, member: Member, now_us: int) -> Sequence[str]:
        """See `Pool.notices`."""
        found = [] if self._size is None else [*self._size.notices()]
        if self._link.is_shared:
            found += self._watch.status.notices(part_in_words(self._usage(member, now_us)[0], self._sizes.rules))
        return found

    def _usage(self, member: Member, now_us: int) -> tuple[PoolRules, Sequence[TierUsage]]:
        """The rules of the pool's present size, and what its tiers hold in all processes and have waiting in this one.

        A ticket that stands in line for its tier's floor holds its tokens. Without its store a replica has its part of
        the pool, and its own leases.
        """
        policy, rules, part = self._sizes.policy, self._sizes.rules, self._watch.part(member)
        if part is not None:
            own, rules = member.own(), policy.rules_of(*part)
            held = [own.get(tier.name, NOTHING) for tier in policy.tiers]
        else:
            pool = member.mirror(now_us)
            held = [tier.used for tier in pool.tiers]
            if self._has_names or (self._link.is_shared and pool.capacity[1]):
                rules = policy.rules_of(*(None if size == UNBOUNDED else size for size in pool.capacity))
        queues = self._requests.queues()
        return rules, [TierUsage(*amount[:2], *waiting) for amount, waiting in zip(held, queues, strict=True)]


class ReportedPool:
    """The part of a pool that only reports, to people and to other replicas. It changes nothing."""

    name: str
    now_us: Clock
    status: StoreStatus
    _link: Link
    _member: Member
    _requests: PoolRequests
    _figures: PoolFigures

    def retry_after_s(self, tier: int) -> float:
        """See `Pool.retry_after_s`."""
        return self._requests.retry_after_s(tier, self.now_us())

    def mark(self, tier: int) -> QueueMark:
        """See `Pool.mark`."""
        return self._requests.mark(tier)

    def standing(self, tier: int, mark: QueueMark) -> QueueStanding:
        """See `Pool.standing`."""
        return self._requests.standing(tier, mark, self.now_us())

    def use_of(self, tenant: str) -> TenantUse:
        """See `Pool.use_of`."""
        return self._requests.use_of(tenant)

    def oldest(self) -> Sequence[Grant | None]:
        """See `Pool.oldest`."""
        return self._requests.oldest(self.now_us())

    def engines(self) -> Sequence[EngineFigures]:
        """See `EnginePool.engines`."""
        return self._figures.engines(self._member, self.now_us())

    def state(self) -> Mapping[str, object]:
        """See `Pool.state`; with the engines, where they are named, or the figures of the one that says its size."""
        return self._figures.state(self._member, self.now_us())

    def obstacle(self, ask: Ask) -> tuple[Obstacle, str]:
        """See `Pool.obstacle`."""
        return self._figures.obstacle(self._member, ask, self.now_us())

    def readiness(self) -> Sequence[str]:
        """See `Pool.readiness`."""
        return self._figures.readiness()

    def notices(self) -> Sequence[str]:
        """See `Pool.notices`."""
        return self._figures.notices(self._member, self.now_us())

    async def share(self, report: bytes, merge: Merge) -> PeerReports:
        """See `Pool.share`."""
        if self._link.is_shared and self.status.state is not StoreState.SHARED:
            raise StoreError(f"the store is {self.status.state.value}: {self.status.reason}")
        return await self._link.share(self.name, report, merge)
