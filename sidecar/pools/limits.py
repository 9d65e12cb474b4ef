"""The tenants' own limits, as one process counts them: they refuse a request before it waits."""

from __future__ import annotations

import msgspec

from sidecar.errors import AdmissionError, RemainingLimit, RemainingLimits, StoreUnavailable, TenantLimit
from sidecar.policy.model import Limits
from sidecar.policy.size_limits import SizeLimits, requests_text
from sidecar.pools.base import Ask, Lease
from sidecar.pools.calls import HEARTBEAT_US, Metered
from sidecar.pools.meter import Judged
from sidecar.scheduling.rate_limit import UNIT, Charge, ExceededLimit, Limit, RateLimiter


class TenantLimits:
    """What this process counts of its tenants' limits. `sizes` has what a lower tier could ever admit.

    `allowances` are those of all pools of the process, None where there is one.
    """

    def __init__(self, sizes: SizeLimits, allowances: RateLimiter | None = None) -> None:
        self._sizes = sizes
        self._allowances = RateLimiter() if allowances is None else allowances

    def within(self, ask: Ask, now_us: int) -> Ask:
        """The request that may enter: `ask` itself within its limits, otherwise the same at a lower tier.

        Raises TenantLimit where there is no lower tier for it. Nothing is charged yet.
        """
        if ask.limits is None:
            return ask
        over = self._allowances.over(ask.tenant, ask.limits, ask.charged_tokens, now_us)
        if over is None:
            return ask
        lower = downgraded(ask, self._sizes)
        if lower is None:
            raise tenant_limit(ask, over, self._allowances.allowance(ask.tenant, ask.limits, now_us))
        return lower

    def charge(self, lease: Lease, limits: Limits, now_us: int) -> None:
        """Charges a request, unless it enters at a lower tier, and notes what is left of its tenant's `limits`."""
        ask = lease.ask
        if ask.limits is not None:
            lease.charge = self._allowances.charge(ask.tenant, limits, ask.charged_tokens, now_us)
            self._count(ask.tenant, 1)
        lease.allowance = self._allowances.allowance(ask.tenant, limits, now_us, is_downgraded=lease.charge is None)

    def count(self, lease: Lease, now_us: int) -> None:
        """Counts a request that another process let in among its tenant's concurrent ones, until it ends."""
        if lease.charge is None and lease.ask.limits is not None:
            lease.charge = Charge(lease.ask.tenant, 0, now_us, 0, 0, 0)
            self._count(lease.ask.tenant, 1)

    def _count(self, tenant: str, more: int) -> None:
        self._allowances.hold("", tenant, self._allowances.held("", tenant) + more)

    def ended(self, lease: Lease, used_tokens: int | None, now_us: int) -> None:
        """Corrects the charge of a lease that is over: its estimate stands where `used_tokens` is None.

        A request that was never admitted gets its tokens back, as far as they have not drained. One that is not counted
        gets itself back as well.
        """
        charge, lease.charge = lease.charge, None
        if charge is None:
            return
        self._count(charge.tenant, -1)
        if not lease.is_counted:
            self._allowances.refund_request(charge, now_us)
        if lease.grant is None:
            self._allowances.correct(charge, 0, now_us, was_held=False)
        else:
            self._allowances.correct(charge, charge.tokens if used_tokens is None else used_tokens, now_us)

    def allowance(self, tenant: str, limits: Limits, now_us: int) -> RemainingLimits:
        """What is left of a tenant's limits."""
        return self._allowances.allowance(tenant, limits, now_us)

    def undo(self, lease: Lease) -> None:
        """Takes a charge of this very moment back: the pool has no place for the request."""
        if lease.charge is not None:
            self._allowances.undo(lease.charge)
            self._count(lease.charge.tenant, -1)
            lease.charge = None


def downgraded(ask: Ask, sizes: SizeLimits) -> Ask | None:
    """The request at the tier that it falls to when its tenant is over its limits. It then counts in none of them.

    None where there is no such tier, or where that tier could never admit it. A request of a lower tier keeps its tier.
    """
    if ask.downgrade is None:
        return None
    tier = max(ask.tier, ask.downgrade)
    # Its figures are those of a tier that it does not have.
    lower = msgspec.structs.replace(ask, tier=tier, limits=None, downgrade=None, gain=None)
    return None if sizes.too_large(lower) else lower


def tenant_limit(ask: Ask, over: ExceededLimit, allowance: RemainingLimits) -> TenantLimit:
    """The refusal. Its message names the limit, what is left of it, and when the request would fit."""
    assert ask.limits is not None
    after_s = None if over.fits_after_us is None else over.fits_after_us / 1e6
    return TenantLimit(_sentence(ask, ask.limits, over, allowance), retry_after_s=after_s, allowance=allowance)


def metered(number: int, tenant: str, tokens: int, limits: Limits, *, charges: bool) -> Metered:
    """The question about one request for the ledger."""
    of = limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent_requests, limits.burst_us
    return Metered(number, tenant, tokens, charges, *of)


def remaining(judged: Judged, *, is_downgraded: bool = False) -> RemainingLimits:
    """What is left of a tenant's limits, as the ledger says."""

    def left(per_minute: int | None, figures: tuple[int, int] | None) -> RemainingLimit | None:
        return None if per_minute is None or figures is None else RemainingLimit(per_minute, *figures)

    asked, verdict = judged
    requests = left(asked.requests_per_minute, verdict.requests)
    return RemainingLimits(requests, left(asked.tokens_per_minute, verdict.tokens), is_downgraded)


def refusal(ask: Ask, judged: Judged) -> AdmissionError:
    """The error for a request over its limits, or over this replica's part of them."""
    asked, verdict = judged
    assert ask.limits is not None
    assert verdict.over is not None
    part = Limits(asked.requests_per_minute, asked.tokens_per_minute, asked.concurrent, None, asked.burst_us)
    over = ExceededLimit(verdict.over, verdict.after_us)
    error = tenant_limit(msgspec.structs.replace(ask, limits=part), over, remaining(judged))
    whole = ask.limits.tokens_per_minute
    if error.never_fits and whole is not None and ask.charged_tokens * UNIT <= whole * ask.limits.burst_us:
        return StoreUnavailable(
            f"the store of this pool cannot be reached, and this request ({ask.charged_tokens} tokens) does not fit "
            f"into this replica's part of the limits of tenant {ask.tenant}; try again, or ask for less output",
            retry_after_s=HEARTBEAT_US / 1e6,
        )
    return error


def _sentence(ask: Ask, limits: Limits, over: ExceededLimit, allowance: RemainingLimits) -> str:
    if over.limit is Limit.CONCURRENT:
        return (
            f"tenant {ask.tenant} has {requests_text(limits.concurrent_requests)} waiting or running, which is its "
            "limit of concurrent requests; try again when one of them has ended"
        )
    if over.limit is Limit.REQUESTS:
        return (
            f"tenant {ask.tenant} is over its limit of {limits.requests_per_minute:,} requests per minute; "
            f"the next one fits in {_seconds(over)}"
        )
    charged = f"{ask.charged_tokens:,} tokens (prompt and maximum output)"
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
