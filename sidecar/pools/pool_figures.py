"""The figures of a pool for people: its size, what it holds and has waiting, what is in a request's way, warnings."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from sidecar.errors import RemainingLimits
from sidecar.events import Grant, Obstacle, StoreState
from sidecar.policy.rules import PoolRules
from sidecar.policy.size_limits import SizeLimits
from sidecar.policy.tenant import Account, RateLimits
from sidecar.pools.base import Ask, Clock, PeerReport, QueueMark, QueueStanding, StoreError, TenantUse
from sidecar.pools.engine_reports import EngineSize, engine_figures, engine_obstacle, engine_state
from sidecar.pools.engines import EngineFigures, EngineOffer, sum_figures
from sidecar.pools.guards import GuardFigures
from sidecar.pools.ledger_link import Link, new_ticket
from sidecar.pools.limits import metered, remaining
from sidecar.pools.member import Member
from sidecar.pools.member_events import MemberMode
from sidecar.pools.meter import Judged
from sidecar.pools.pool_requests import PoolRequests
from sidecar.pools.stats import HELD_BACK, Demand, TierUsage, alone, demand, obstacle, part_in_words, pool_state
from sidecar.pools.store_watch import StoreStatus, StoreWatch
from sidecar.scheduling.amounts import NOTHING, UNBOUNDED
from sidecar.scheduling.guard import largest_share

RECENT_US = 600_000_000
"""Ten minutes: a busy hour says nothing of the next one, and a slow tier admits few requests in less."""
LONGEST_EXPECTED_S = 3600.0
"""A longer wait is not foreseen: a queue that has hardly moved lately says nothing."""


class ReportedPool:
    """The part of a pool that only reports, to people and to other replicas. It changes nothing."""

    name: str
    now_us: Clock
    status: StoreStatus
    _link: Link
    _member: Member
    _requests: PoolRequests
    _sizes: SizeLimits
    _watch: StoreWatch
    _size: EngineSize | None
    _has_names: bool
    _questions: dict[int, asyncio.Future[Judged | None]]
    _ids: count[int]
    _run: Callable[[], None]
    _offers: Sequence[EngineOffer] = ()
    _paused: str | None = None
    _blocked_us = 0
    _blocked_since_us: int | None = None

    def retry_after_s(self, tier: int) -> float:
        """Seconds after which a request of this tier may expect to be admitted, by how fast its queue drains."""
        return self._requests.places.retry_after_s(tier, self._requests.queued(tier), self.now_us())

    def mark(self, tier: int) -> QueueMark:
        """Where the newest request of a tier stands. Call it when a request begins to wait."""
        return QueueMark(max(0, self._requests.queued(tier) - 1), self._requests.places.drain_rates[tier].total)

    def standing(self, tier: int, mark: QueueMark) -> QueueStanding:
        """How that request stands now: an estimate. More important tiers count as before it, and its own in order of
        arrival; tenants that take turns, requests that leave and reserves change that.
        """
        requests, rate = self._requests, self._requests.places.drain_rates[tier]
        own = max(0, min(requests.queued(tier) - 1, mark.ahead - (rate.total - mark.admitted)))
        per_second = rate.per_second(self.now_us())
        wait_s = (own + 1) / per_second if per_second > 0 else math.inf
        ahead = own + sum(map(requests.queued, range(tier)))
        return QueueStanding(ahead, wait_s if wait_s <= LONGEST_EXPECTED_S else None)

    def longest_wait_us(self, tier: int) -> int:
        """The longest wait of the requests of a tier that this process admitted lately; 0 where none waited."""
        since_us = self.now_us() - RECENT_US
        return max((wait_us for at_us, wait_us in self._requests.recent[tier] if at_us >= since_us), default=0)

    def tenant_use(self, tenant: str) -> TenantUse:
        """Present use by a tenant's requests of this process. Costs as much as this process has requests."""
        return self._requests.tenant_use(tenant)

    def oldest(self) -> Sequence[Grant | None]:
        """How the oldest request of every tier in this process has waited so far; None where none waits."""
        return self._requests.oldest(self.now_us())

    def engines(self) -> Sequence[EngineFigures]:
        """Each named engine's ledger, by name and incarnation; also of those that are gone and still hold something."""
        if not self._has_names:
            return ()
        member, now_us = self._member, self.now_us()
        pool, reply = member.mirror(now_us), member.pool.reply
        lined = pool.line if member.mode is MemberMode.ALONE or reply is None else reply.lined or ()
        claims = Counter(it.engine for it in lined)
        return engine_figures(pool, claims, now_us, {offer.id for offer in self._offers})

    def state(self) -> Mapping[str, object]:
        """The pool's present state, for people and dashboards: JSON types only."""
        rules, usage = self._usage()
        own = {"leases": self._requests.held(), "waiting": len(self._requests.waiting)}
        state = pool_state(rules, usage, self.guards(), **own)
        if self._size is not None:
            state["engine"] = self._size.state()
        if self._link.is_shared:
            state |= self._watch.state(self._member, own, usage, self._link.round_trips)
        if self._has_names:
            since_us = self._blocked_since_us
            blocked_us = self._blocked_us + (0 if since_us is None else self.now_us() - since_us)
            state["engines"] = [engine_state(engine) for engine in self.engines()]
            state["no_engine_fits_s"] = round(blocked_us / 1e6, 3)
        return state

    def _note_blocked(self, now_us: int, *, is_blocked: bool) -> None:
        """Keeps the time during which a request that fits the pool waits for an engine."""
        if self._blocked_since_us is not None:
            self._blocked_us += now_us - self._blocked_since_us
        self._blocked_since_us = now_us if is_blocked else None

    def obstacle(self, ask: Ask) -> tuple[Obstacle, str]:
        """Why a waiting request could not be admitted when it came, and a sentence about it with figures."""
        if self._paused is not None:
            return Obstacle.ENGINE, self._paused
        if self._size is not None and self._size.is_held_back:
            return HELD_BACK
        if self._link.is_shared and self._is_held_up():
            return Obstacle.STORE, "the store has not answered yet, or waits for other replicas to state what they hold"
        rules, usage = self._usage()
        if self.status.state is StoreState.DIVIDED:
            return alone(rules, usage, ask)
        of_pool = obstacle(rules, usage, ask)
        if of_pool[0] is Obstacle.BEHIND:
            of_pool = self._guarded(ask) or of_pool
        of_engine = engine_obstacle(self.engines(), ask, of_pool) if self._has_names else None
        return of_engine or of_pool

    def _is_held_up(self) -> bool:
        """True if nothing is admitted for now: the ledger does not answer or is on hold, and this is not alone yet."""
        mode, reply = self._member.mode, self._member.pool.reply
        is_on_hold = reply is not None and reply.on_hold
        return mode is not MemberMode.ALONE and (mode is not MemberMode.SHARED or is_on_hold)

    def guards(self) -> Sequence[GuardFigures]:
        """The tiers whose SLO is held, the most important first."""
        return self._member.guards(self.now_us())

    def _guarded(self, ask: Ask) -> tuple[Obstacle, str] | None:
        """The most important guarded tier that leaves no room to a request beyond its floor, if there is one."""
        scheduler = self._member.mirror(self.now_us()) if self.guards() else None
        if scheduler is None or (guarded := scheduler.guards.keeping_out(new_ticket(ask, 0, 0))) is None:
            return None
        name, share = scheduler.rules.tiers[guarded.level].name, float(guarded.share)
        total = largest_share(scheduler.held, scheduler.capacity)
        return Obstacle.GUARDED, (
            f"tier {name} is held to its SLO: beyond their reserves, less important requests may fill the pool to"
            f" {share:.0%}, and {total:.0%} of it is held"
        )

    def readiness(self) -> Sequence[str]:
        """Why this pool admits no request at present; empty while it does."""
        of_engine = () if self._size is None else self._size.readiness()
        return (*of_engine, *(self.status.readiness() if self._link.is_shared else ()))

    def notices(self) -> Sequence[str]:
        """Warnings for the operator although requests are being admitted."""
        found = [] if self._size is None else [*self._size.notices()]
        if self._link.is_shared:
            found += self.status.notices(part_in_words(self._usage()[0], self._sizes.rules))
        return found

    def _usage(self) -> tuple[PoolRules, Sequence[TierUsage]]:
        """The rules of the pool's present size, and what its tiers hold in all processes and have waiting in this one.

        A ticket that stands in line for its tier's floor holds its tokens. Without its store a replica has its part of
        the pool, and its own leases.
        """
        policy, rules, part = self._sizes.policy, self._sizes.rules, self._watch.part(self._member)
        if part is not None:
            own, rules = self._member.own(), policy.rules_for(*part)
            held = [own.get(tier.name, NOTHING) for tier in policy.tiers]
        else:
            pool = self._member.mirror(self.now_us())
            held = [tier.used for tier in pool.tiers]
            if self._has_names or (self._link.is_shared and pool.capacity[1]):
                rules = policy.rules_for(*(None if size == UNBOUNDED else size for size in pool.capacity))
        queues = self._requests.queues()
        return rules, [TierUsage(*amount[:2], *waiting) for amount, waiting in zip(held, queues, strict=True)]

    def demand(self, elsewhere: Sequence[tuple[int, int]] = ()) -> Demand | None:
        """Room that is wanted, for those that scale the engines; None while the ledger does not answer.

        `elsewhere`: the tokens and requests of each tier that wait in other replicas. Without its store a replica
        compares what it has itself with its part of the pool.
        """
        if self._link.is_shared and self._is_held_up():
            return None
        rules: PoolRules | None
        rules, usage = self._usage()
        if self.status.state is StoreState.DIVIDED:
            return demand(rules, usage, self.guards())
        if self._has_names:
            ready = [(engine.tokens, engine.requests) for engine in self.engines() if engine.takes_new]
            sizes = map(sum_figures, zip(*ready, strict=True))  # whole, also in a slow start
            rules = self._sizes.policy.rules_for(*sizes) if ready else None
        if elsewhere:
            both = zip(usage, elsewhere, strict=True)
            usage = [TierUsage(*own[:2], own[2] + other[0], own[3] + other[1]) for own, other in both]
        return demand(rules, usage, self.guards())

    async def allowance(self, tenant: str, limits: RateLimits) -> RemainingLimits | None:
        """Rest of a tenant's limits, in all processes that share the pool. None where that is not known now."""
        self._run()
        if self._member.mode is not MemberMode.SHARED:
            return None
        number = next(self._ids)
        judged = self._questions[number] = asyncio.get_running_loop().create_future()
        asked = metered(number, Account(tenant, limits), 0, charges=False)
        self._member.meter.ask([asked], None, self.now_us())
        self._run()
        try:
            verdict = await judged
        finally:
            del self._questions[number]
            self._member.meter.give_up(number)
        return None if verdict is None else remaining(verdict)

    async def share(self, report: bytes) -> Mapping[str, PeerReport]:
        """Leaves `report` to the other replicas of this pool, and returns what each of them has left, by name.

        It has at most `MOST_REPORT_BYTES`; more raises StoreError: each replica reads the reports of all.

        A replica without a report in the last 10 seconds is left out. A pool of one process has no others. Raises
        StoreError where the store cannot be reached. No request is ever admitted later for it.
        """
        if self._link.is_shared and self.status.state is not StoreState.SHARED:
            raise StoreError(f"the store is {self.status.state.value}: {self.status.reason}")
        return await self._link.share(self.name, report)
