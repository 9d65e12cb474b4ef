"""The limits of tenants, decided before the bids of a call are taken. `limits.lua` is this in the store."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby
from operator import attrgetter

from sidecar.errors import RemainingLimit
from sidecar.policy.tenant import AccountLimits
from sidecar.pools.calls import Call, ChargeSettled, Metered, MeterVerdict
from sidecar.scheduling.rate_limit import RateLimiter


def decide(
    limiter: RateLimiter, call: Call, last_number: int, charged: dict[int, Sequence[MeterVerdict]], now_us: int
) -> list[MeterVerdict]:
    """Applies the news and questions of `call` on its tenants' limits; it loses the bids that are refused.

    `last_number`: of the replica's last call before it. `charged` are the charges of that call by their bids, which the
    replica may not know: it then asks again, with a statement, and other calls were lost before that. They become those
    of this call.
    """
    holder = call.who
    if call.kind == "state":
        limiter.hold_only(holder, {running.tenant: running.count for running in call.running})
    else:
        for running in call.running:
            limiter.hold(holder, running.tenant, running.count)
    for settled in call.settled:
        if settled.first_call > last_number:
            _settle(limiter, settled, now_us)
    known = charged.copy() if call.kind == "state" and call.number > last_number + 1 else {}
    charged.clear()
    verdicts: list[MeterVerdict] = []
    for number, asked in groupby(call.metered, attrgetter("number")):
        found = known.pop(number, None) or _verdicts(limiter, list(asked), now_us)
        verdicts += found
        charges = [verdict.charge for verdict in found if verdict.charge is not None]
        if charges:
            charged[number] = found
        for charge in charges:
            limiter.hold(holder, charge.tenant, limiter.held(holder, charge.tenant) + 1)
    for verdict in chain.from_iterable(known.values()):  # its client left before the replica had an answer
        assert verdict.charge is not None
        _settle(limiter, ChargeSettled(0, verdict.charge, 0, True, False), now_us)
    if refused := {verdict.number for verdict in verdicts if verdict.over is not None}:
        call.bids = [bid for bid in call.bids if bid.number not in refused]
    return verdicts


def _settle(limiter: RateLimiter, settled: ChargeSettled, now_us: int) -> None:
    charge = settled.charge
    if not settled.is_counted:
        limiter.refund_request(charge, now_us)
    used = charge.tokens if settled.used is None else settled.used
    limiter.correct(charge, used, now_us, was_held=settled.was_held)


def _verdicts(limiter: RateLimiter, asked: Sequence[Metered], now_us: int) -> Sequence[MeterVerdict]:
    """The verdicts on the questions about one request: it is charged to all of its accounts, or to none."""
    limits = [_limits(metered) for metered in asked]
    for metered in asked:
        limiter.keep_within(metered.tenant, metered.most)
    overs = [limiter.over(it.tenant, of, it.tokens, now_us) for it, of in zip(asked, limits, strict=True)]
    is_within, found = not any(overs), []
    for metered, of, over in zip(asked, limits, overs, strict=True):
        charge = limiter.charge(metered.tenant, of, metered.tokens, now_us) if is_within and metered.charges else None
        left = limiter.allowance(metered.tenant, of, now_us)
        limit, after_us = (None, None) if over is None else over
        found.append(MeterVerdict(metered.number, charge, limit, after_us, _left(left.requests), _left(left.tokens)))
    return found


def _limits(metered: Metered) -> AccountLimits:
    return AccountLimits(
        requests_per_minute=metered.requests_per_minute,
        tokens_per_minute=metered.tokens_per_minute,
        concurrent_requests=metered.concurrent,
        burst_us=metered.burst_us,
    )


def _left(remaining: RemainingLimit | None) -> tuple[int, int] | None:
    return None if remaining is None else (remaining.left, remaining.reset_us)
