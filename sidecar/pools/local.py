"""The pool of one process: the scheduler, the event loop's clock, and a future for everyone who waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from sidecar.errors import AdmissionError, RemainingLimits
from sidecar.events import Obstacle
from sidecar.policy.model import Policy
from sidecar.policy.rules import PoolRules
from sidecar.pools.dispatcher import Clock, Dispatcher, monotonic_us
from sidecar.pools.figures import TierFigures, grant_of, pool_state
from sidecar.pools.obstacles import HELD_BACK, obstacle
from sidecar.pools.places import Places
from sidecar.pools.pool import Ask, Grant, Shared
from sidecar.pools.sizes import Sizes
from sidecar.pools.tenant_limits import TenantLimits
from sidecar.scheduling import Admission, Scheduler, Ticket
from sidecar.scheduling.rate_limit import Charge


class LocalLease:
    """One request in a `LocalPool`. See `pool.Lease`."""

    __slots__ = ("_error", "_future", "_id", "_pool", "allowance", "ask", "charge", "grant", "on_preempt")

    def __init__(
        self, pool: LocalPool, lease_id: str, ask: Ask, charge: Charge | None, allowance: RemainingLimits | None
    ) -> None:
        self.ask = ask
        self.charge = charge
        self.allowance = allowance
        self.grant: Grant | None = None
        self.on_preempt: Callable[[], None] | None = None
        self._pool = pool
        self._id = lease_id
        self._future: asyncio.Future[Grant] | None = None
        self._error: AdmissionError | None = None

    @property
    def tier(self) -> int:
        """See `Lease`."""
        return self.ask.tier

    def wait(self) -> asyncio.Future[Grant]:
        """See `Lease.wait`."""
        if self._future is None:
            self._future = asyncio.get_running_loop().create_future()
            if self.grant is not None:
                self._future.set_result(self.grant)
            elif self._error is not None:
                self._future.set_exception(self._error)
        return self._future

    def settle(self, used_tokens: int | None = None) -> bool:
        """See `Lease.settle`."""
        return self._pool.settle(self._id, self.charge, used_tokens)

    def leave(self) -> asyncio.Future[Grant | None]:
        """See `Lease.leave`."""
        left: asyncio.Future[Grant | None] = asyncio.get_running_loop().create_future()
        left.set_result(self._pool.leave(self._id))
        return left

    def keep(self) -> None:
        """See `Lease.keep`."""
        self._pool.keep(self._id)

    def requeue(self) -> asyncio.Future[Grant]:
        """See `Lease.requeue`."""
        self._pool.requeue(self._id)
        return self.wait()

    def resize(self, tokens: int) -> bool:
        """See `Lease.resize`."""
        return self._pool.resize(self._id, tokens)

    def waits_again(self) -> None:
        """Called by the pool: it gave its room back."""
        self.grant = self._future = None

    def granted(self, grant: Grant) -> None:
        """Called by the pool, once a wait."""
        self.grant = grant
        if self._future is not None and not self._future.done():
            self._future.set_result(grant)

    def refused(self, error: AdmissionError) -> None:
        """Called by the pool: nobody will ever admit it."""
        self._error = error
        if self._future is not None and not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # whoever asked for it may have gone: then nobody would look at it


class LocalPool:
    """Leases of one process. Every change is one synchronous call: nothing is awaited between deciding and doing.

    Use it from one event loop. `clock` is for tests.
    """

    def __init__(self, policy: Policy, clock: Clock = monotonic_us) -> None:
        self._policy = policy
        self._names = tuple(tier.name for tier in policy.tiers)
        self._scheduler = Scheduler(policy.rules)
        self._dispatcher = Dispatcher(self._scheduler, clock, self._admitted, self._chosen)
        self._sizes = Sizes(policy)
        self._places = Places(self._sizes, len(policy.tiers))
        self._limits = TenantLimits(self._sizes)
        self._waiting: dict[str, LocalLease] = {}
        self._takeable: dict[str, LocalLease] = {}  # those held that may be preempted
        self._ids = count(1)
        self.now_us = clock

    async def open(self) -> None:
        """See `Pool.open`."""

    async def close(self) -> None:
        """See `Pool.close`."""
        self._dispatcher.stop()

    def change_policy(self, policy: Policy) -> None:
        """See `Pool.change_policy`."""
        self._policy = policy
        self._sizes.change_policy(policy)
        self.change_rules(policy.rules)

    def change_rules(self, rules: PoolRules) -> None:
        """See `Pool.change_rules`."""
        self._sizes.change_rules(rules)
        self._scheduler.change_rules(rules)
        now_us = self.now_us()
        for lease_id, lease in list(self._waiting.items()):
            if error := self._sizes.outgrown(lease.ask):
                self._scheduler.cancel(lease_id, now_us)
                del self._waiting[lease_id]
                self._limits.never_ran(lease.charge, now_us)
                lease.refused(error)
        self._dispatcher.dispatch(now_us)

    def hold_back(self, for_s: float) -> None:
        """See `Pool.hold_back`."""
        now_us = self.now_us()
        self._scheduler.hold_back(now_us + round(for_s * 1e6))
        self._dispatcher.dispatch(now_us)

    async def enter(self, ask: Ask) -> LocalLease:
        """See `Pool.enter`."""
        self._sizes.refuse_what_never_fits(ask)
        now_us, asked = self.now_us(), ask
        ask = self._limits.within(asked, now_us)
        queued, most = self._scheduler.queued(ask.tier)[1], self._sizes.places(ask.tier)
        displaced = self._find_place(ask, queued, most, now_us) if most else None
        charge, allowance = self._limits.charge(asked, ask, now_us)
        if displaced is not None:
            self._displace(displaced.id, queued, now_us)
        lease = LocalLease(self, str(next(self._ids)), ask, charge, allowance)
        self._dispatcher.submit(lease._id, ask, now_us)
        self._waiting[lease._id] = lease
        self._dispatcher.dispatch(now_us)
        if most == 0 and lease.grant is None:  # a tier that never queues: at once, or not at all
            self._limits.undo(charge)
            lease.charge = None
            self.leave(lease._id)
            raise self._places.queue_full(ask, queued, now_us)
        self._places.taken(ask)
        return lease

    def settle(self, lease_id: str, charge: Charge | None = None, used_tokens: int | None = None) -> bool:
        """See `Lease.settle`."""
        if self._takeable:
            self._takeable.pop(lease_id, None)
        now_us = self.now_us()
        is_settled = self._scheduler.settle(lease_id, now_us)
        if is_settled and charge is not None:
            self._limits.ran(charge, used_tokens, now_us)
        return self._changed(is_settled)

    def keep(self, lease_id: str) -> None:
        """See `Lease.keep`."""
        if self._takeable.pop(lease_id, None) is not None:
            self._changed(self._scheduler.keep(lease_id))  # one that was chosen is not: maybe another can be

    def requeue(self, lease_id: str) -> None:
        """See `Lease.requeue`."""
        now_us = self.now_us()
        if not self._scheduler.requeue(lease_id, now_us):
            raise RuntimeError("a lease is requeued once, after on_preempt, where it is still held and was not kept")
        lease = self._takeable.pop(lease_id)
        lease.waits_again()
        if error := self._sizes.outgrown(lease.ask):
            self._scheduler.cancel(lease_id, now_us)
            self._limits.never_ran(lease.charge, now_us)
            lease.refused(error)
        else:
            self._waiting[lease_id] = lease
        self._dispatcher.dispatch(now_us)

    def resize(self, lease_id: str, tokens: int) -> bool:
        """See `Lease.resize`."""
        return self._changed(self._scheduler.resize(lease_id, tokens))

    def leave(self, lease_id: str) -> Grant | None:
        """See `Lease.leave`."""
        now_us = self.now_us()
        wait = self._scheduler.cancel(lease_id, now_us)
        if wait is None:
            return None
        lease = self._waiting.pop(lease_id)
        self._limits.never_ran(lease.charge, now_us)
        self._dispatcher.dispatch(now_us)  # whoever stood behind it may be first now
        return grant_of(self._names, wait, now_us, lease.ask.tier)

    def most_tokens(self, level: int) -> int:
        """See `Pool.most_tokens`."""
        return self._sizes.limits(level)[0]

    def retry_after_s(self, tier: int) -> float:
        """See `Pool.retry_after_s`."""
        return self._places.retry_after_s(tier, self._scheduler.queued(tier)[1], self.now_us())

    def state(self) -> Mapping[str, object]:
        """See `Pool.state`."""
        return pool_state(
            self._sizes.rules, self._figures(), leases=self._scheduler.leases(), waiting=self._scheduler.waiting()
        )

    def oldest(self) -> Sequence[Grant | None]:
        """See `Pool.oldest`."""
        now_us = self.now_us()
        return [
            None if wait is None else grant_of(self._names, wait, now_us, level)
            for level, wait in enumerate(self._scheduler.oldest(now_us))
        ]

    def obstacle(self, ask: Ask) -> tuple[Obstacle, str]:
        """See `Pool.obstacle`."""
        if self._scheduler.is_held_back(self.now_us()):
            return HELD_BACK
        return obstacle(self._sizes.rules, self._figures(), ask)

    def readiness(self) -> Sequence[str]:
        """See `Pool.readiness`: what lives in this process is always there."""
        return ()

    def notices(self) -> Sequence[str]:
        """See `Pool.notices`."""
        return ()

    async def share(self, report: bytes) -> Mapping[str, Shared]:  # noqa: ARG002
        """See `Pool.share`: there are no others."""
        return {}

    def _find_place(self, ask: Ask, queued: int, most: int, now_us: int) -> Ticket | None:
        """The ticket that has to give its place, None where one is free. Raises QueueFull where there is neither."""
        scheduler, share = self._scheduler, (ask.tier, ask.tenant, ask.weight, most)
        if queued < most:
            promised = self._places.promised(ask, queued, now_us)
            if promised is None or scheduler.is_within_share(*share, promised=promised):
                return None
        elif (displaced := scheduler.displaced(*share)) is not None:
            return displaced
        raise self._places.queue_full(ask, queued, now_us)

    def _displace(self, lease_id: str, queued: int, now_us: int) -> None:
        """Refuses a request that waits, with the promise that a full queue gives."""
        self._scheduler.cancel(lease_id, now_us)
        lease = self._waiting.pop(lease_id)
        self._limits.never_ran(lease.charge, now_us)
        lease.refused(self._places.queue_full(lease.ask, queued, now_us))

    def _figures(self) -> Sequence[TierFigures]:
        scheduler = self._scheduler
        return [TierFigures(*scheduler.held(tier), *scheduler.queued(tier)) for tier in range(len(self._names))]

    def _changed(self, is_changed: bool) -> bool:
        if is_changed and self._waiting:
            self._dispatcher.dispatch(self.now_us())
        return is_changed

    def _admitted(self, admission: Admission, now_us: int) -> None:
        tier = admission.ticket.tier
        self._places.admitted(tier, now_us)
        grant = grant_of(self._names, admission.wait, now_us, admission.level, admission.passed)
        lease = self._waiting.pop(admission.ticket.id)
        if self._sizes.rules.tiers[tier].preemptible:
            self._takeable[admission.ticket.id] = lease
        lease.granted(grant)

    def _chosen(self, lease_id: str) -> None:
        """Not told at once: the holder must not come back to a pool that is about to admit somebody."""
        asyncio.get_running_loop().call_soon(self._preempt, lease_id)

    def _preempt(self, lease_id: str) -> None:
        lease = self._takeable.get(lease_id)  # it may have been kept or settled since
        if lease is None:
            return
        if lease.on_preempt is None:
            self.keep(lease_id)
        else:
            lease.on_preempt()
