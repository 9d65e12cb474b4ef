"""The pool of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count

from sidecar.errors import AdmissionError, RemainingLimits
from sidecar.events import Obstacle
from sidecar.policy.model import Limits, Policy
from sidecar.policy.rules import PoolRules
from sidecar.policy.size_limits import SizeLimits
from sidecar.pools.base import (
    Ask,
    Lease,
    Merge,
    PeerReports,
    QueueMark,
    QueueStanding,
    TenantUse,
    WaitOutcome,
    new_lease,
)
from sidecar.pools.clock import Clock, monotonic_us
from sidecar.pools.limits import TenantLimits
from sidecar.pools.outgrown import OutgrownRequests
from sidecar.pools.queue_places import QueuePlaces
from sidecar.pools.runtime import LeaseRuntime
from sidecar.pools.stats import HELD_BACK, obstacle, pool_state
from sidecar.scheduling.rate_limit import RateLimiter


class LocalPool:
    """Leases of one process. Every change is one synchronous call: nothing is awaited between deciding and doing.

    Use it from one event loop. `clock` is for tests. `allowances` are the tenants' limits where other pools of the
    process count in them, too.
    """

    def __init__(self, policy: Policy, clock: Clock = monotonic_us, *, allowances: RateLimiter | None = None) -> None:
        self._sizes = SizeLimits(policy)
        self._places = QueuePlaces(self._sizes, len(policy.tiers))
        self._limits = TenantLimits(self._sizes, allowances)
        self._runtime = self._new_runtime(policy, clock)
        self._waiting = self._runtime.waiting
        self._outgrown = OutgrownRequests(self._sizes, self._refuse_waiting)
        self._ids = count(1)
        self._paused: str | None = None
        self.now_us = clock
        self.most_tokens, self.most_requests = self._sizes.most_tokens, self._sizes.most_requests
        self.oldest = self._runtime.oldest

    def _new_runtime(self, policy: Policy, clock: Clock) -> LeaseRuntime:
        return LeaseRuntime(policy.rules, clock, self._places.admitted)

    async def open(self) -> None:
        """See `Pool.open`."""

    async def close(self) -> None:
        """See `Pool.close`."""
        self._runtime.stop()
        self._outgrown.stop()

    def change_policy(self, policy: Policy) -> None:
        """See `Pool.change_policy`."""
        self._sizes.policy = policy
        self.change_rules(policy.rules)

    def change_rules(self, rules: PoolRules) -> None:
        """See `Pool.change_rules`."""
        self._sizes.change_rules(rules)
        self._runtime.scheduler.change_rules(rules)
        self._look_again()

    def hold_back(self, for_s: float) -> None:
        """See `Pool.hold_back`."""
        self._runtime.hold_back(round(for_s * 1e6))

    def pause(self, reason: str | None) -> None:
        """See `Pool.pause`."""
        self._paused = reason
        self._runtime.pause(is_paused=reason is not None)

    async def enter(self, ask: Ask) -> Lease:
        """See `Pool.enter`."""
        return self.enter_now(ask)

    def enter_now(self, ask: Ask) -> Lease:
        """The same, without a coroutine: this pool decides at once."""
        self._sizes.refuse_what_never_fits(ask)
        now_us = self.now_us()
        lease = new_lease(self, next(self._ids), ask, now_us)
        if ask.limits is not None:
            lease.ask = self._limits.within(ask, now_us)
        if not self._runtime.admit_at_once(lease, now_us):
            self._queue(lease, ask.limits, now_us)
        elif ask.limits is not None:
            self._limits.charge(lease, ask.limits, now_us)
        self._places.taken(lease.ask)
        return lease

    def _queue(self, lease: Lease, limits: Limits | None, now_us: int) -> None:
        """Puts a request in its tier's queue, and admits whatever the rules let in. Raises QueueFull."""
        runtime = self._runtime
        most = self._sizes.places(lease.ask.tier)
        queued = 0 if most is None else runtime.queued(lease.ask.tier)
        displaced = self._find_place(lease.ask, queued, most, now_us) if most else None
        if limits is not None:
            self._limits.charge(lease, limits, now_us)
        if displaced is not None:
            runtime.cancel(displaced, now_us)
            self._limits.ended(displaced, 0, now_us)
            displaced.refused(self._places.queue_full(displaced.ask, queued, now_us))
        runtime.submit(lease)
        runtime.dispatch(now_us)
        while most == 0 and runtime.is_unfinished:
            runtime.dispatch(now_us)
        if most == 0 and lease.grant is None:  # a tier that never queues: at once, or not at all
            self._limits.undo(lease)
            runtime.end(lease, now_us)
            raise self._places.queue_full(lease.ask, queued, now_us)

    # -- what a lease asks for (`runtime.LeaseOwner`)

    def end(self, lease: Lease, outcome: WaitOutcome | None, used_tokens: int | None = 0) -> None:
        """See `LeaseOwner.end`."""
        now_us = self.now_us()
        if lease.charge is not None:
            lease.is_counted &= lease.grant is not None or self._paused is None
            self._limits.ended(lease, used_tokens, now_us)
        wait = self._runtime.end(lease, now_us)
        if outcome is not None:
            outcome.set_result(wait)

    def change_size(self, lease: Lease, freed_tokens: int) -> None:
        """See `LeaseOwner.change_size`."""
        self._runtime.resize(lease, freed_tokens)

    def charge_tenant(self, lease: Lease, tokens: int) -> None:
        """See `LeaseOwner.charge_tenant`."""
        self._runtime.charge(lease, tokens)

    def keep(self, lease: Lease, *, was_chosen: bool) -> None:  # noqa: ARG002
        """See `LeaseOwner.keep`."""
        self._runtime.keep(lease)

    def requeue(self, lease: Lease) -> None:
        """See `LeaseOwner.requeue`."""
        self._wait_again(lease, self._runtime.requeue)

    def hand_back(self, lease: Lease) -> None:
        """See `LeaseOwner.hand_back`."""
        self._wait_again(lease, self._runtime.hand_back)

    def prefilled(self, lease: Lease) -> None:
        """See `LeaseOwner.prefilled`. Prompts are counted for each of several engines only."""

    def _wait_again(self, lease: Lease, give_back: Callable[[Lease, int], bool]) -> None:
        now_us = self.now_us()
        give_back(lease, now_us)
        lease.waits_again()
        if error := self._sizes.outgrown(lease.ask):
            self._refuse_waiting(lease, error)
        self._runtime.dispatch(now_us)

    # -- what the pool says of itself

    def retry_after_s(self, tier: int) -> float:
        """See `Pool.retry_after_s`."""
        return self._places.retry_after_s(tier, self._runtime.queued(tier), self.now_us())

    def mark(self, tier: int) -> QueueMark:
        """See `Pool.mark`."""
        return self._places.mark(tier, self._runtime.queued(tier))

    def standing(self, tier: int, mark: QueueMark) -> QueueStanding:
        """See `Pool.standing`."""
        return self._places.standing(tier, mark, self._runtime.queued, self.now_us())

    def use_of(self, tenant: str) -> TenantUse:
        """See `Pool.use_of`."""
        return self._runtime.use_of(tenant)

    async def allowance(self, tenant: str, limits: Limits) -> RemainingLimits:
        """See `Pool.allowance`."""
        return self._limits.allowance(tenant, limits, self.now_us())

    def state(self) -> Mapping[str, object]:
        """See `Pool.state`."""
        scheduler = self._runtime.scheduler
        return pool_state(
            scheduler.rules, self._runtime.usage(), leases=scheduler.leases(), waiting=scheduler.waiting()
        )

    def obstacle(self, ask: Ask) -> tuple[Obstacle, str]:
        """See `Pool.obstacle`."""
        if self._paused is not None:
            return Obstacle.ENGINE, self._paused
        if self._runtime.scheduler.is_held_back(self.now_us()):
            return HELD_BACK
        return obstacle(self._runtime.scheduler.rules, self._runtime.usage(), ask)

    def readiness(self) -> Sequence[str]:
        """See `Pool.readiness`: a pool in this process is always there."""
        return ()

    def notices(self) -> Sequence[str]:
        """See `Pool.notices`."""
        return ()

    async def share(self, report: bytes, merge: Merge) -> PeerReports:  # noqa: ARG002
        """See `Pool.share`: there are no other replicas."""
        return PeerReports({})

    def _find_place(self, ask: Ask, queued: int, most: int, now_us: int) -> Lease | None:
        """The request that has to give its place, None where one is free. Raises QueueFull where there is neither."""
        if queued < most:
            promised = self._places.promised(ask, queued, now_us)
            share = (ask.tier, ask.tenant, ask.weight, most)
            if promised is None or self._runtime.scheduler.is_within_share(*share, promised=promised):
                return None
        elif (displaced := self._runtime.displaced(ask, most)) is not None:
            return displaced
        raise self._places.queue_full(ask, queued, now_us)

    def _look_again(self) -> None:
        """The pool has another size: some waiting requests may be too large, and others fit."""
        self._outgrown.look(self._waiting.values())
        self._runtime.dispatch(self.now_us())

    def _refuse_waiting(self, lease: Lease, error: AdmissionError) -> None:
        """Refuses a request, where it still waits."""
        now_us = self.now_us()
        if self._waiting.get(lease.ticket_id) is lease:
            self._runtime.cancel(lease, now_us)
            self._limits.ended(lease, 0, now_us)
            lease.refused(error)


class LimitsPool(LocalPool):
    """The pool of a process whose models have pools of their own. It has no bound, and no request enters it.

    It stands for what those pools share: the clock, and the tenants' limits.
    """

    def __init__(self, policy: Policy, allowances: RateLimiter) -> None:
        super().__init__(_unbounded(policy), allowances=allowances)

    def change_policy(self, policy: Policy) -> None:
        """See `Pool.change_policy`."""
        super().change_policy(_unbounded(policy))


def _unbounded(policy: Policy) -> Policy:
    return replace(policy, rules=policy.rules_of(None, None))
