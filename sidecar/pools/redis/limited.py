"""Tenants' own limits in a replica: what it makes of the store's verdicts, and what it goes by without the store."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from sidecar.errors import AdmissionError, RemainingLimit, RemainingLimits, StoreUnavailable, TenantLimit
from sidecar.policy.model import Limits
from sidecar.pools.dispatcher import Clock
from sidecar.pools.pool import Ask
from sidecar.pools.redis.lease import RedisLease
from sidecar.pools.redis.protocol import BEAT_S, LimitVerdict
from sidecar.pools.sizes import Sizes
from sidecar.pools.tenant_limits import TenantLimits, tenant_limit


def judge(lease: RedisLease, verdict: LimitVerdict) -> TenantLimit | None:
    """Takes over what the store decided about a request with limits. The refusal, where it is over them."""
    limits = lease.ask.limits
    if limits is None:  # told a second time
        return None
    allowance = RemainingLimits(
        _remaining(limits.requests_per_minute, verdict.requests),
        _remaining(limits.tokens_per_minute, verdict.tokens),
        verdict.is_downgraded,
    )
    if verdict.over is not None:
        return tenant_limit(lease.ask, verdict.over, allowance)
    lease.allowance = allowance
    if verdict.is_downgraded:
        lease.ask = msgspec.structs.replace(lease.ask, tier=verdict.level, limits=None, downgrade=None)
    return None


def _remaining(per_minute: int | None, left: tuple[int, int] | None) -> RemainingLimit | None:
    return None if per_minute is None or left is None else RemainingLimit(per_minute, *left)


class DividedLimits:
    """One replica's part of every tenant's limits: the n-th of them, for n replicas, while the store is lost.

    Its buckets begin full. What the replica runs or has waiting counts among its tenants' concurrent requests.
    """

    def __init__(self, sizes: Sizes, replicas: int, clock: Clock) -> None:
        self._limits = TenantLimits(sizes)
        self._replicas = replicas
        self._clock = clock

    def take_over(self, lease: RedisLease) -> None:
        """One that the store let in."""
        if lease.charge is None:
            lease.charge = self._limits.count(lease.ask, self._clock())

    def admit(self, lease: RedisLease) -> AdmissionError | None:
        """Charges a new request, or brings it to its lower tier. The refusal, where it is over its part."""
        if lease.ask.limits is None:
            return None
        now_us = self._clock()
        asked = msgspec.structs.replace(lease.ask, limits=nth(lease.ask.limits, self._replicas))
        try:
            entered = self._limits.within(asked, now_us)
        except TenantLimit as error:
            return _too_large_for_the_part(lease.ask) if error.never_fits and _fits_the_whole(lease.ask) else error
        lease.charge, lease.allowance = self._limits.charge(asked, entered, now_us)
        if entered is not asked:
            lease.ask = entered
        return None

    def undo(self, lease: RedisLease) -> None:
        """The part has no place for what was charged in this very moment."""
        self._limits.undo(lease.charge)
        lease.charge = None

    def ended(self, lease: RedisLease, used_tokens: int | None) -> None:
        """A lease or a wait is over."""
        charge, lease.charge = lease.charge, None
        if charge is None:
            return
        if lease.grant is None:
            self._limits.never_ran(charge, self._clock())
        else:
            self._limits.ran(charge, used_tokens, self._clock())


def nth(limits: Limits, replicas: int) -> Limits:
    """One of `replicas` equal parts, at least one of each."""
    return replace(
        limits,
        requests_per_minute=_part(limits.requests_per_minute, replicas),
        tokens_per_minute=_part(limits.tokens_per_minute, replicas),
        concurrent_requests=_part(limits.concurrent_requests, replicas),
    )


def _part(figure: int | None, replicas: int) -> int | None:
    return None if figure is None else max(1, figure // replicas)


def _fits_the_whole(ask: Ask) -> bool:
    limits = ask.limits
    if limits is None or limits.tokens_per_minute is None:
        return True
    return ask.tokens * 60_000_000 <= limits.tokens_per_minute * limits.burst_us


def _too_large_for_the_part(ask: Ask) -> StoreUnavailable:
    return StoreUnavailable(
        f"the store of this pool cannot be reached, and this request ({ask.tokens} tokens) does not fit into this "
        f"replica's part of the limits of tenant {ask.tenant}; try again, or ask for less output",
        retry_after_s=BEAT_S,
    )
