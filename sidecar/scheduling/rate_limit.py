"""The rate limiter of tenants, without I/O and without a clock. Time is an argument, in whole microseconds.

The law is the generic cell rate algorithm (ITU-T I.371, annex A) in its form as a continuous-state leaky bucket: one
for requests and one for tokens. A bucket drains `per_minute` units in a microsecond, and a request, or a token, is
60,000,000 of them; it holds `per_minute * burst_us`, that of requests at least one request. What costs c conforms while

    level + c <= capacity

in both buckets, and while fewer requests than `concurrent_requests` wait or are held, in all replicas. Nothing is
charged to one bucket that does not conform in the other. All of it is in whole numbers below 2^53, so that
`lua/limits.lua` computes the same.

Bound. What conforms within any stretch of t seconds adds up to at most limit * (burst + t) / 60, and to at most one
request where that is less. There are no windows, so no edge at which the amounts of two windows meet.

A request is charged by its estimate, and corrected by its use. Use beyond the estimate is charged at once: the level
may then exceed the capacity. The unused part is refunded, but never what has drained meanwhile: with a level of l right
after the charge, r refunded to the tenant since, and e microseconds gone,

    refund <= max(0, l - r - per_minute * e)

so the level is never below the level of charges by use from the start. A refund does not help a later minute: after a
charge at most the capacity, and all use beyond estimates, has to drain. A request that the engine failed is refunded in
the bucket of requests by the same rule, with r = one request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from enum import Enum
from itertools import islice
from typing import NamedTuple

from sidecar.errors import RemainingLimit, RemainingLimits
from sidecar.policy.tenant import AccountLimits

UNIT = 60_000_000
"""Of a bucket, in one request or one token: a microsecond of one per minute is one unit."""
FULLEST = 2**53 - 1
"""The highest level, far beyond the capacity of the largest limit: what a double in Lua still has exactly."""
FEWEST_SWEPT = 64
"""Tenants remembered before those at rest are looked for."""
REMEMBERED_US = 600_000_000
"""So long after the last request it is known how long a tenant's requests take."""
GUESSED_US = 1_000_000
"""How long a tenant's requests are taken to last before one of them has ended: no client comes back in a tight loop."""


class Limit(str, Enum):
    """The limit that a request exceeded."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    CONCURRENT = "concurrent_requests"


class ExceededLimit(NamedTuple):
    """The reason why a request does not conform. `fits_after_us` is exact for the two rates, and None where it never
    will.

    For `concurrent_requests` it is an estimate: the mean time that the tenant's requests took, over their number.
    Before one of them has ended it is `GUESSED_US`.
    """

    limit: Limit
    fits_after_us: int | None


class Charge(NamedTuple):
    """The charge of one request, so that it can be corrected: see the law above.

    `level` is that of the tokens' bucket right after it, `refunded` the tenant's refunds until then, in tokens.
    `requests_level`, `requests_refunded` and `requests_per_minute` are the same of the bucket of requests.
    """

    tenant: str
    tokens: int
    at_us: int
    per_minute: int
    level: int
    refunded: int
    requests_level: int = 0
    requests_refunded: int = 0
    requests_per_minute: int = 0


class _Account:
    """One tenant's buckets. `mean_us` is how long its requests take, exponentially weighted by an eighth.

    Both were empty last at `since_us`: of what was charged before nothing is left to be refunded.
    """

    __slots__ = ("at_us", "limits", "mean_us", "refunded", "requests", "requests_refunded", "since_us", "tokens")

    def __init__(self, now_us: int) -> None:
        self.limits = AccountLimits()
        self.at_us = self.since_us = now_us
        self.requests = 0
        self.tokens = 0
        self.refunded = 0
        self.requests_refunded = 0
        self.mean_us = 0

    def drain(self, now_us: int) -> None:
        elapsed_us, limits = max(0, now_us - self.at_us), self.limits
        self.requests = max(0, self.requests - elapsed_us * (limits.requests_per_minute or FULLEST))
        self.tokens = max(0, self.tokens - elapsed_us * (limits.tokens_per_minute or FULLEST))
        self.at_us = max(self.at_us, now_us)
        if self.is_at_rest():
            self.since_us, self.refunded, self.requests_refunded = self.at_us, 0, 0
            if elapsed_us > REMEMBERED_US:
                self.mean_us = 0

    def is_at_rest(self) -> bool:
        return not (self.requests or self.tokens)


class RateLimiter:
    """The accounts of all tenants with limits, and how many requests of theirs each holder has. Not thread-safe.

    An account at rest only has a mean. It is forgotten when there are many. A changed limit counts from the next
    request on. A holder is a replica, or a pool of the process.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._running: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self._kept: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._sweep_at = FEWEST_SWEPT

    def __len__(self) -> int:
        return len(self._accounts)

    def keep_within(self, tenant: str, most: int) -> None:
        """Keeps an account, whose name ends with a user's, and so `most` in all of those like it that came last.

        0: all that are not at rest.
        """
        if most:
            kept = self._kept[tenant.rpartition(" ")[0]]
            kept.pop(tenant, None)
            kept[tenant] = None
            for oldest in [*islice(kept, max(0, len(kept) - most))]:
                del kept[oldest]
                self._accounts.pop(oldest, None)

    def over(self, tenant: str, limits: AccountLimits, tokens: int, now_us: int) -> ExceededLimit | None:
        """The reason why a request of so many tokens does not conform now, None where it does. Charges nothing."""
        account = self._drained(tenant, limits, now_us)
        waits = [
            _wait(Limit.TOKENS, limits.tokens_per_minute, _tokens_capacity(limits), account.tokens, tokens * UNIT),
            _wait(Limit.REQUESTS, limits.requests_per_minute, _requests_capacity(limits), account.requests, UNIT),
            self._wait_for_others(tenant, account),
        ]
        found = [over for over in waits if over is not None]
        return max(found, key=lambda over: FULLEST if over.fits_after_us is None else over.fits_after_us, default=None)

    def charge(self, tenant: str, limits: AccountLimits, tokens: int, now_us: int) -> Charge:
        """Charges a request that conforms. It ends with `correct`."""
        account = self._drained(tenant, limits, now_us)
        if limits.requests_per_minute is not None:
            account.requests = min(FULLEST, account.requests + UNIT)
        if limits.tokens_per_minute is not None:
            account.tokens = min(FULLEST, account.tokens + tokens * UNIT)
        rate = limits.tokens_per_minute or 0
        of_requests = account.requests, account.requests_refunded, limits.requests_per_minute or 0
        return Charge(tenant, tokens, account.at_us, rate, account.tokens, account.refunded, *of_requests)

    def correct(self, charge: Charge, used_tokens: int, now_us: int, *, was_held: bool = True) -> None:
        """The request has ended and used so many tokens. `was_held`: it ran, so its time counts in the mean."""
        account = self._accounts.get(charge.tenant)
        if account is None:  # its limits were taken away, and it was forgotten
            return
        account.drain(now_us)
        if was_held:
            took_us = max(0, now_us - charge.at_us)
            account.mean_us = account.mean_us + (took_us - account.mean_us) // 8 if account.mean_us else took_us
        if account.limits.tokens_per_minute is not None and charge.per_minute:
            self._settle_tokens(account, charge, used_tokens)

    def refund_request(self, charge: Charge, now_us: int) -> None:
        """The request that was charged counts no more, as far as it has not drained. `correct` follows."""
        account = self._accounts.get(charge.tenant)
        if account is None or account.limits.requests_per_minute is None or not charge.requests_per_minute:
            return
        account.drain(now_us)
        rate = max(charge.requests_per_minute, account.limits.requests_per_minute)
        drained = rate * max(0, account.at_us - charge.at_us)
        left = charge.requests_level - (account.requests_refunded - charge.requests_refunded) - drained
        refund = max(0, min(UNIT, left, account.requests)) if charge.at_us >= account.since_us else 0
        account.requests -= refund
        account.requests_refunded += refund

    def hold(self, holder: str, tenant: str, count: int) -> None:
        """Sets how many requests of a tenant wait or run at a holder."""
        if count > 0:
            self._running[holder][tenant] = count
        else:
            self._running[holder].pop(tenant, None)

    def hold_only(self, holder: str, counts: Mapping[str, int]) -> None:
        """A holder has these, and no others."""
        self._running[holder] = {tenant: count for tenant, count in counts.items() if count > 0}

    def held(self, holder: str, tenant: str) -> int:
        """How many requests of a tenant wait or run at a holder."""
        return self._running[holder].get(tenant, 0)

    def forget(self, holder: str) -> None:
        """A holder is gone, with all that it had."""
        del self._running[holder]

    def allowance(self, tenant: str, limits: AccountLimits, now_us: int) -> RemainingLimits:
        """Rest of a tenant's limits now."""
        account = self._drained(tenant, limits, now_us)
        return RemainingLimits(
            _remaining(limits.requests_per_minute, _requests_capacity(limits), account.requests),
            _remaining(limits.tokens_per_minute, _tokens_capacity(limits), account.tokens),
        )

    def _drained(self, tenant: str, limits: AccountLimits, now_us: int) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= self._sweep_at:
                self._sweep(now_us)
            account = self._accounts[tenant] = _Account(now_us)
        if account.limits is not limits:
            account.drain(now_us)  # by the limits that were
            account.limits = limits
        account.drain(now_us)
        return account

    def _wait_for_others(self, tenant: str, account: _Account) -> ExceededLimit | None:
        most = account.limits.concurrent_requests
        if most is None or sum(held.get(tenant, 0) for held in self._running.values()) < most:
            return None
        return ExceededLimit(Limit.CONCURRENT, account.mean_us // most if account.mean_us else GUESSED_US)

    def _sweep(self, now_us: int) -> None:
        for account in self._accounts.values():
            account.drain(now_us)
        self._accounts = {tenant: account for tenant, account in self._accounts.items() if not account.is_at_rest()}
        self._sweep_at = max(FEWEST_SWEPT, 2 * len(self._accounts))

    @staticmethod
    def _settle_tokens(account: _Account, charge: Charge, used_tokens: int) -> None:
        over = min(used_tokens, FULLEST // UNIT) - charge.tokens
        if over >= 0:
            account.tokens = min(FULLEST, account.tokens + over * UNIT)
            return
        rate = max(charge.per_minute, account.limits.tokens_per_minute or 0)
        drained = rate * max(0, account.at_us - charge.at_us)
        refund = min(-over * UNIT, charge.level - (account.refunded - charge.refunded) * UNIT - drained, account.tokens)
        if refund > 0 and charge.at_us >= account.since_us:
            account.tokens -= refund
            account.refunded += -(-refund // UNIT)  # a part of a token counts as one: rather too little is refunded


def _requests_capacity(limits: AccountLimits) -> int:
    return max(UNIT, (limits.requests_per_minute or 0) * limits.burst_us)


def _tokens_capacity(limits: AccountLimits) -> int:
    return (limits.tokens_per_minute or 0) * limits.burst_us


def _wait(limit: Limit, per_minute: int | None, capacity: int, level: int, cost: int) -> ExceededLimit | None:
    if per_minute is None or level <= capacity - cost:
        return None
    return ExceededLimit(limit, None if cost > capacity else -((capacity - cost - level) // per_minute))


def _remaining(per_minute: int | None, capacity: int, level: int) -> RemainingLimit | None:
    if per_minute is None:
        return None
    return RemainingLimit(per_minute, max(0, capacity - level) // UNIT, -(-level // per_minute))
