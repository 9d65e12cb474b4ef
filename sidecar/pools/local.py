"""The pool of one process: the scheduler, the event loop's clock, and a future for everyone who waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from itertools import count

from sidecar.errors import QueueFull, RequestTooLarge
from sidecar.policy.policy import Policy
from sidecar.policy.rules import UNLIMITED, largest_request
from sidecar.pools.drain_rate import DrainRate
from sidecar.pools.pool import Ask, Grant
from sidecar.scheduling import Admission, Scheduler, Wait

Clock = Callable[[], int]


def monotonic_us() -> int:
    """The process's monotonic clock in whole microseconds."""
    return time.monotonic_ns() // 1000


class LocalLease:
    """One request in a `LocalPool`. See `pool.Lease`."""

    __slots__ = ("_future", "_id", "_pool", "ask", "grant")

    def __init__(self, pool: LocalPool, lease_id: str, ask: Ask) -> None:
        self.ask = ask
        self.grant: Grant | None = None
        self._pool = pool
        self._id = lease_id
        self._future: asyncio.Future[Grant] | None = None

    def wait(self) -> asyncio.Future[Grant]:
        """See `Lease.wait`."""
        if self._future is None:
            self._future = asyncio.get_running_loop().create_future()
            if self.grant is not None:
                self._future.set_result(self.grant)
        return self._future

    def settle(self) -> bool:
        """See `Lease.settle`."""
        return self._pool.settle(self._id)

    def leave(self) -> Grant | None:
        """See `Lease.leave`."""
        return self._pool.leave(self._id)

    def granted(self, grant: Grant) -> None:
        """Called by the pool, once."""
        self.grant = grant
        if self._future is not None and not self._future.done():
            self._future.set_result(grant)


class LocalPool:
    """Leases of one process. Every change is one synchronous call: nothing is awaited between deciding and doing.

    Use it from one event loop. `clock` is for tests.
    """

    def __init__(self, policy: Policy, clock: Clock = monotonic_us) -> None:
        self._policy = policy
        self._names = tuple(tier.name for tier in policy.tiers)
        self._scheduler = Scheduler(policy.rules)
        self._largest = tuple(largest_request(policy.rules, tier.level) for tier in policy.tiers)
        self._drain_rates = tuple(DrainRate() for _ in policy.tiers)
        self._waiting: dict[str, LocalLease] = {}
        self._ids = count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_us = 0
        self.now_us = clock

    def enter(self, ask: Ask) -> LocalLease:
        """See `Pool.enter`."""
        self._refuse_what_never_fits(ask)
        most = self._policy.tiers[ask.tier].max_waiting
        if most and self._scheduler.queued(ask.tier)[1] >= most:
            raise self._queue_full(ask.tier, most)
        now_us = self.now_us()
        lease = LocalLease(self, str(next(self._ids)), ask)
        self._scheduler.submit(
            lease._id,
            tier=ask.tier,
            tokens=ask.tokens,
            requests=ask.requests,
            tenant=ask.tenant,
            weight=ask.weight,
            now_us=now_us,
        )
        self._waiting[lease._id] = lease
        self._dispatch(now_us)
        if most == 0 and lease.grant is None:  # a tier that never queues: at once, or not at all
            self.leave(lease._id)
            raise self._queue_full(ask.tier, most)
        return lease

    def settle(self, lease_id: str) -> bool:
        """See `Lease.settle`."""
        settled = self._scheduler.settle(lease_id)
        if settled and self._waiting:
            self._dispatch(self.now_us())
        return settled

    def leave(self, lease_id: str) -> Grant | None:
        """See `Lease.leave`."""
        now_us = self.now_us()
        wait = self._scheduler.cancel(lease_id, now_us)
        if wait is None:
            return None
        lease = self._waiting.pop(lease_id)
        self._dispatch(now_us)  # whoever stood behind it may be first now
        return self._grant(wait, lease.ask.tier, now_us)

    def retry_after_s(self, tier: int) -> float:
        """See `Pool.retry_after_s`."""
        _, requests = self._scheduler.queued(tier)
        return self._drain_rates[tier].retry_after_s(requests, self.now_us())

    def state(self) -> Mapping[str, object]:
        """See `Pool.state`."""
        rules = self._policy.rules
        return {
            "capacity": {"tokens": _bounded(rules.tokens), "requests": _bounded(rules.requests)},
            "leases": self._scheduler.leases(),
            "waiting": self._scheduler.waiting(),
            "tiers": [self._tier_state(tier.level) for tier in self._policy.tiers],
        }

    def _tier_state(self, tier: int) -> Mapping[str, object]:
        rules = self._policy.rules.tiers[tier]
        held_tokens, held_requests = self._scheduler.held(tier)
        queued_tokens, queued_requests = self._scheduler.queued(tier)
        return {
            "tier": self._names[tier],
            "held": {"tokens": held_tokens, "requests": held_requests},
            "queued": {"tokens": queued_tokens, "requests": queued_requests},
            "reserve": {"tokens": _bounded(rules.reserve_tokens), "requests": _bounded(rules.reserve_requests)},
            "limit": {"tokens": _bounded(rules.limit_tokens), "requests": _bounded(rules.limit_requests)},
        }

    def _refuse_what_never_fits(self, ask: Ask) -> None:
        tokens, requests = self._largest[ask.tier]
        of_policy = self._policy.tiers[ask.tier].max_request_tokens
        tokens = tokens if of_policy is None else min(tokens, of_policy)
        if ask.tokens > tokens:
            raise RequestTooLarge(
                f"this request would hold {ask.tokens} tokens (prompt and maximum output); "
                f"tier {self._names[ask.tier]} allows {tokens}; shorten the prompt or ask for less output"
            )
        if ask.requests > requests:
            raise RequestTooLarge(
                f"this request would start {ask.requests} sequences (prompts times choices); "
                f"tier {self._names[ask.tier]} allows {requests}; ask for fewer"
            )

    def _queue_full(self, tier: int, most: int) -> QueueFull:
        return QueueFull(
            f"tier {self._names[tier]} has {most} requests waiting, which is all it may have; try again later",
            retry_after_s=self.retry_after_s(tier),
        )

    def _dispatch(self, now_us: int) -> None:
        for admission in self._scheduler.dispatch(now_us):
            tier = admission.ticket.tier
            self._drain_rates[tier].admitted(now_us)
            self._waiting.pop(admission.ticket.id).granted(self._grant(admission.wait, tier, now_us, admission))
        if self._waiting:
            self._wake_in_time(now_us)

    def _grant(self, wait: Wait, tier: int, now_us: int, admission: Admission | None = None) -> Grant:
        waited = wait.queue_wait_us > 0
        ahead = {n: c for n, c in zip(self._names, wait.served_ahead, strict=True) if c} if waited else {}
        level = tier if admission is None else admission.level
        return Grant(now_us, wait.queue_wait_us, wait.starvation_us, wait.overtaken_at_us, ahead, level)

    def _wake_in_time(self, now_us: int) -> None:
        """Sees to it that `dispatch` runs when aging alone can change who is next."""
        change_us = self._scheduler.next_change_us(now_us)
        if change_us is None or (self._timer is not None and self._timer_at_us <= change_us):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_us = change_us
        self._timer = asyncio.get_running_loop().call_later((change_us - now_us) / 1e6, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._dispatch(self.now_us())


def _bounded(figure: int) -> int | None:
    return None if figure == UNLIMITED else figure
