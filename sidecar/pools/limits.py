"""The tenants' own limits, as a pool asks its ledger about them: they refuse a request before it waits."""

from __future__ import annotations

import msgspec

from sidecar.errors import AdmissionError, RemainingLimit, RemainingLimits, StoreUnavailable, TenantLimit
from sidecar.policy.size_limits import SizeLimits, requests_text
from sidecar.policy.tenant import Account, account_text
from sidecar.pools.base import Ask
from sidecar.pools.calls import HEARTBEAT_US, Metered
from sidecar.pools.meter import Judged
from sidecar.scheduling.rate_limit import UNIT, Limit


def downgraded(ask: Ask, sizes: SizeLimits) -> Ask | None:
    """The request at the tier that it falls to when its tenant is over its limits. It then counts in none of them.

    None where there is no such tier, or where that tier could never admit it. A request of a lower tier keeps its tier.
    """
    if ask.downgrade is None:
        return None
    tier = max(ask.tier, ask.downgrade)
    # Its figures are those of a tier that it does not have.
    lower = msgspec.structs.replace(ask, tier=tier, accounts=(), downgrade=None, gain=None)
    return None if sizes.too_large(lower) else lower


def raised(ask: Ask, tier: int, sizes: SizeLimits) -> Ask | None:
    """The request in a more important tier; None where that could never admit it."""
    higher = msgspec.structs.replace(ask, tier=tier, gain=None)  # that is of the tier which it leaves
    return None if sizes.too_large(higher) else higher


def metered(number: int, account: Account, tokens: int, *, charges: bool) -> Metered:
    """The question about one request and one of its accounts for the ledger."""
    limits = account.limits
    of = limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent_requests, limits.burst_us
    return Metered(number, account.name, tokens, charges, *of, account.most)


def remaining(judged: Judged) -> RemainingLimits:
    """Rest of a tenant's limits, as the ledger reports it."""

    def left(per_minute: int | None, figures: tuple[int, int] | None) -> RemainingLimit | None:
        return None if per_minute is None or figures is None else RemainingLimit(per_minute, *figures)

    asked, verdict = judged
    requests = left(asked.requests_per_minute, verdict.requests)
    return RemainingLimits(requests, left(asked.tokens_per_minute, verdict.tokens))


def refusal(ask: Ask, judged: Judged) -> AdmissionError:
    """The error for a request over its limits, or over this replica's part of them.

    Its message names the limit, what is left of it, and when the request would fit.
    """
    limits = next(account.limits for account in ask.accounts if account.name == judged.asked.tenant)
    after_us, whole = judged.verdict.after_us, limits.tokens_per_minute
    after_s = None if after_us is None else after_us / 1e6
    error = TenantLimit(
        _sentence(judged, is_weighted=ask.cost is not None), retry_after_s=after_s, allowance=remaining(judged)
    )
    if error.never_fits and whole is not None and ask.counted_tokens * UNIT <= whole * limits.burst_us:
        return StoreUnavailable(
            f"the store of this pool cannot be reached, and this request ({ask.counted_tokens} tokens) does not fit "
            f"into this replica's part of the limits of {account_text(judged.asked.tenant)}; try again, or ask for "
            "less output",
            retry_after_s=HEARTBEAT_US / 1e6,
        )
    return error


def _sentence(judged: Judged, *, is_weighted: bool) -> str:
    asked, verdict = judged
    whose = account_text(asked.tenant)
    fits = f"fits in {(verdict.after_us or 0) / 1e6:.3f} s"
    if verdict.over is Limit.CONCURRENT:
        return (
            f"{whose} has {requests_text(asked.concurrent)} waiting or running, which is its "
            "limit of concurrent requests; try again when one of them has ended"
        )
    if verdict.over is Limit.REQUESTS:
        return f"{whose} is over its limit of {asked.requests_per_minute:,} requests per minute; the next one {fits}"
    charged = f"{asked.tokens:,} tokens (prompt and maximum output{', weighted' if is_weighted else ''})"
    limit = f"{asked.tokens_per_minute:,} tokens per minute"
    if verdict.after_us is None:
        most = (asked.tokens_per_minute or 0) * asked.burst_us // UNIT
        return (
            f"this request counts for {charged}, and the limit of {whose}, {limit}, lets {most:,} "
            "through at once; shorten the prompt or ask for less output"
        )
    left = 0 if verdict.tokens is None else verdict.tokens[0]
    return (
        f"{whose} is over its limit of {limit}: {left:,} are left, and this request counts for "
        f"{charged}; it {fits}, a smaller one sooner"
    )
