"""A pool's side of its tenants' own limits: who is let in, at which tier, and what the others are told."""

from __future__ import annotations

import msgspec

from sidecar.errors import RemainingLimits, TenantLimit
from sidecar.policy.model import Limits
from sidecar.pools.pool import Ask
from sidecar.pools.sizes import Sizes
from sidecar.scheduling.rate_limit import UNIT, Charge, ExceededLimit, Limit, RateLimiter


class TenantLimits:
    """The allowances of one process. `sizes` knows what a lower tier could never be given."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._allowances = RateLimiter()

    def within(self, ask: Ask, now_us: int) -> Ask:
        """What goes in: `ask` itself within its limits, and beyond them the same at a lower tier, without limits.

        Raises TenantLimit where there is no lower tier for it. Nothing is charged yet.
        """
        if ask.limits is None:
            return ask
        over = self._allowances.over(ask.tenant, ask.limits, ask.tokens, now_us)
        if over is None:
            return ask
        lower = downgraded(ask, self._sizes)
        if lower is None:
            raise tenant_limit(ask, over, self._allowances.allowance(ask.tenant, ask.limits, now_us))
        return lower

    def charge(self, asked: Ask, entered: Ask, now_us: int) -> tuple[Charge | None, RemainingLimits | None]:
        """Charges what goes in within its limits. Also returns what is left of them, None for a tenant without."""
        if asked.limits is None:
            return None, None
        charge = None
        if entered.limits is not None:
            charge = self._allowances.charge(entered.tenant, entered.limits, entered.tokens, now_us)
        left = self._allowances.allowance(asked.tenant, asked.limits, now_us, is_downgraded=charge is None)
        return charge, left

    def ran(self, charge: Charge, used_tokens: int | None, now_us: int) -> None:
        """A lease was given back. Where nobody knows what it used, its estimate stands."""
        self._allowances.correct(charge, charge.tokens if used_tokens is None else used_tokens, now_us)

    def never_ran(self, charge: Charge | None, now_us: int) -> None:
        """A request left the queue, or was taken from it: its tokens come back, as far as they have not drained."""
        if charge is not None:
            self._allowances.correct(charge, 0, now_us, was_held=False)

    def undo(self, charge: Charge | None) -> None:
        """The pool has no place for what was charged in this very moment."""
        if charge is not None:
            self._allowances.undo(charge)

    def count(self, ask: Ask, now_us: int) -> Charge | None:
        """A request that was let in elsewhere counts among its tenant's concurrent here, until it ends."""
        return None if ask.limits is None else self._allowances.count(ask.tenant, ask.limits, now_us)


def downgraded(ask: Ask, sizes: Sizes) -> Ask | None:
    """The request at the tier that its tenant falls to over its limits, None where there is none that could admit it.

    What asks for an even lower tier stays where it is. It counts in none of the limits.
    """
    if ask.downgrade is None:
        return None
    tier = max(ask.tier, ask.downgrade)
    lower = msgspec.structs.replace(ask, tier=tier, limits=None, downgrade=None)
    return None if sizes.too_large(lower) else lower


def tenant_limit(ask: Ask, over: ExceededLimit, allowance: RemainingLimits) -> TenantLimit:
    """The refusal: which limit, how much of it is left, and when the request would conform."""
    assert ask.limits is not None
    after_s = None if over.fits_after_us is None else over.fits_after_us / 1e6
    return TenantLimit(_sentence(ask, ask.limits, over, allowance), retry_after_s=after_s, allowance=allowance)


def _sentence(ask: Ask, limits: Limits, over: ExceededLimit, allowance: RemainingLimits) -> str:
    if over.limit is Limit.CONCURRENT:
        return (
            f"tenant {ask.tenant} has {limits.concurrent_requests:,} requests waiting or running, which is its limit "
            "of concurrent requests; try again when one of them has ended"
        )
    if over.limit is Limit.REQUESTS:
        return (
            f"tenant {ask.tenant} is over its limit of {limits.requests_per_minute:,} requests per minute; "
            f"the next one fits in {_seconds(over)}"
        )
    charged = f"{ask.tokens:,} tokens (prompt and maximum output)"
    limit = f"{limits.tokens_per_minute:,} tokens per minute"
    if over.fits_after_us is None:
        most = (limits.tokens_per_minute or 0) * limits.burst_us // UNIT
        return (
            f"this request counts for {charged}, and the limit of tenant {ask.tenant}, {limit}, lets {most:,} through "
            "at once; shorten the prompt or ask for less output"
        )
    left = 0 if allowance.tokens is None else allowance.tokens.left
    return (
        f"tenant {ask.tenant} is over its limit of {limit}: {left:,} are left, and this request counts for {charged}; "
        f"it fits in {_seconds(over)}, a smaller one sooner"
    )


def _seconds(over: ExceededLimit) -> str:
    return f"{(over.fits_after_us or 0) / 1e6:.3f} s"
