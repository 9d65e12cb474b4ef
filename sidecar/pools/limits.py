"""Limits that refuse a request before it waits: the size limits of the tiers, and the tenants' own limits."""

from __future__ import annotations

import msgspec

from sidecar.errors import QueueFull, RemainingLimits, RequestTooLarge, TenantLimit
from sidecar.policy.model import Limits, Policy
from sidecar.policy.rules import UNLIMITED, PoolRules, largest_admissible, largest_request
from sidecar.pools.base import Ask, Lease
from sidecar.scheduling.rate_limit import UNIT, ExceededLimit, Limit, RateLimiter


class SizeLimits:
    """The size limit of every tier of `policy`, in a pool of its present size. It counts the most that a request may
    use.

    A larger request is refused with status 400 at once: it could never be admitted. In a pool of several engines it
    must fit the largest of them, too.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.has_shrunk = False
        self._admissible: tuple[tuple[int, int], ...] = ()
        self.change_rules(policy.rules, policy.largest_engine)

    def change_rules(self, rules: PoolRules, engine: tuple[int, int] = (UNLIMITED, UNLIMITED)) -> None:
        """The pool has another size. The largest of several engines holds so many tokens and requests.

        `has_shrunk` says whether a request that waited may be too large now.
        """
        self.rules = rules
        tokens, requests = engine
        sizes = [
            (largest_request(rules, tier.level), largest_admissible(rules, tier.level)) for tier in self.policy.tiers
        ]
        self.largest = tuple((min(tokens, limit[0]), min(requests, limit[1])) for limit, _ in sizes)
        # What waits already is not refused while the only engine that could hold it is away for a moment.
        admissible = tuple(most for _, most in sizes)
        self.has_shrunk = any(
            tokens < before[0] or requests < before[1]
            for (tokens, requests), before in zip(admissible, self._admissible, strict=False)
        )
        self._admissible = admissible
        self._engine = engine
        self._limits = tuple(
            (tokens if tier.max_request_tokens is None else min(tokens, tier.max_request_tokens), requests)
            for tier, (tokens, requests) in zip(self.policy.tiers, self.largest, strict=True)
        )

    def refuse_what_never_fits(self, ask: Ask) -> None:
        """Raises RequestTooLarge, with the figures, for a request that could never be admitted."""
        tokens, requests = self._limits[ask.tier]
        if ask.tokens > tokens or ask.most > tokens or ask.requests > requests:
            error = self._exceeds(ask, tokens, requests)
            assert error is not None
            raise error

    def most_tokens(self, level: int) -> int:
        """See `Pool.most_tokens`."""
        return self.limits(level)[0]

    def limits(self, level: int) -> tuple[int, int]:
        """The most (tokens, requests) that a request of a tier may hold when it comes: its size limit."""
        return self._limits[level]

    def too_large(self, ask: Ask) -> RequestTooLarge | None:
        """The refusal of a request that could never be admitted, with the figures; None where it could."""
        try:
            self.refuse_what_never_fits(ask)
        except RequestTooLarge as error:
            return error
        return None

    def outgrown(self, ask: Ask) -> RequestTooLarge | None:
        """The refusal of a waiting request that could never be admitted any more, None where it could.

        The size limit and `max_request_tokens` do not count: they are for new requests.
        """
        return self._exceeds(ask, *self._admissible[ask.tier])

    def _exceeds(self, ask: Ask, tokens: int, requests: int) -> RequestTooLarge | None:
        tier = self.policy.tiers[ask.tier]
        if (most := ask.charged_tokens) > tokens:
            return RequestTooLarge(
                f"this request would hold {most} tokens (prompt and maximum output); "
                f"tier {tier.name} allows {tokens}, {self.reason(ask.tier, tokens)}; "
                "shorten the prompt or ask for less output"
            )
        if ask.requests > requests:
            return RequestTooLarge(
                f"this request would start {ask.requests} sequences (choices times prompts, or inputs); "
                f"tier {tier.name} allows {requests}, {self.reason(ask.tier, requests, tokens=False)}; "
                "ask for fewer at once"
            )
        return None

    def reason(self, level: int, allowed: int, *, tokens: bool = True) -> str:
        """The limit by which a tier's requests may hold so much of one dimension, as half a sentence."""
        tier = self.rules.tiers[level]
        limit, reserve, pool = (
            (tier.limit_tokens, tier.reserve_tokens, self.rules.tokens)
            if tokens
            else (tier.limit_requests, tier.reserve_requests, self.rules.requests)
        )
        if tokens and allowed == self.policy.tiers[level].max_request_tokens:
            return "its max_request_tokens"
        if tier.limited and allowed == limit:
            return "the tier's limit"
        if allowed == pool:
            return "the whole pool"
        if allowed == self._engine[0 if tokens else 1]:
            return "the largest engine"
        if allowed == self._admissible[level][0 if tokens else 1]:
            return "the pool less what more important tiers keep free"
        return "the tier's reserve" if allowed == reserve else "the pool less what the other tiers reserve"

    def places(self, level: int) -> int | None:
        """The most requests that may wait in a tier's queue; None where it is unbounded."""
        return self.policy.tiers[level].max_waiting

    def queue_full(self, level: int, retry_after_s: float) -> QueueFull:
        """The refusal of one request more than a tier's queue may hold."""
        tier = self.policy.tiers[level]
        return QueueFull(
            f"tier {tier.name} has {_requests(tier.max_waiting)} waiting, the most that it may have; try again later",
            retry_after_s=retry_after_s,
            level=level,
        )


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
        lease.allowance = self._allowances.allowance(ask.tenant, limits, now_us, is_downgraded=lease.charge is None)

    def count(self, lease: Lease, now_us: int) -> None:
        """Counts a request that another process let in among its tenant's concurrent ones, until it ends."""
        if lease.charge is None and lease.ask.limits is not None:
            lease.charge = self._allowances.count(lease.ask.tenant, lease.ask.limits, now_us)

    def ended(self, lease: Lease, used_tokens: int | None, now_us: int) -> None:
        """Corrects the charge of a lease that is over: its estimate stands where `used_tokens` is None.

        A request that was never admitted gets its tokens back, as far as they have not drained. One that is not counted
        gets itself back as well.
        """
        charge, lease.charge = lease.charge, None
        if charge is None:
            return
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


def _sentence(ask: Ask, limits: Limits, over: ExceededLimit, allowance: RemainingLimits) -> str:
    if over.limit is Limit.CONCURRENT:
        return (
            f"tenant {ask.tenant} has {_requests(limits.concurrent_requests)} waiting or running, which is its limit "
            "of concurrent requests; try again when one of them has ended"
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


def _requests(number: int | None) -> str:
    return "1 request" if number == 1 else f"{number or 0:,} requests"


def _seconds(over: ExceededLimit) -> str:
    return f"{(over.fits_after_us or 0) / 1e6:.3f} s"
