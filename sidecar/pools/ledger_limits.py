"""The limits of tenants, decided before the bids of a call are taken. `limits.lua` is this in the store."""

from __future__ import annotations

from sidecar.errors import RemainingLimit
from sidecar.policy.tenant import Limits
from sidecar.pools.calls import Call, ChargeSettled, Metered, MeterVerdict
from sidecar.scheduling.rate_limit import RateLimiter


def decide(
    limiter: RateLimiter, call: Call, last_number: int, charged: dict[int, MeterVerdict], now_us: int
) -> list[MeterVerdict]:
    """Applies the news and questions of `call` on its tenants' limits; it loses the bids that are refused.

    `last_number`: of the replica's last call before it. `charged` are the charges of that call, which the replica may
    not know: it then asks again, with a statement. They become those of this call.
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
    known = charged.copy() if call.kind == "state" else {}
    charged.clear()
    verdicts = []
    for metered in call.metered:
        verdict = known.pop(metered.number, None) or _verdict(limiter, metered, now_us)
        verdicts.append(verdict)
        if verdict.charge is not None:
            charged[metered.number] = verdict
            limiter.hold(holder, metered.tenant, limiter.held(holder, metered.tenant) + 1)
    for verdict in known.values():  # its client left before the replica had an answer
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


def _verdict(limiter: RateLimiter, metered: Metered, now_us: int) -> MeterVerdict:
    limits = Limits(
        requests_per_minute=metered.requests_per_minute,
        tokens_per_minute=metered.tokens_per_minute,
        concurrent_requests=metered.concurrent,
        burst_us=metered.burst_us,
    )
    tenant, charge = metered.tenant, None
    over = limiter.over(tenant, limits, metered.tokens, now_us)
    if over is None and metered.charges:
        charge = limiter.charge(tenant, limits, metered.tokens, now_us)
    left = limiter.allowance(tenant, limits, now_us)
    limit, after_us = (None, None) if over is None else over
    return MeterVerdict(metered.number, charge, limit, after_us, _left(left.requests), _left(left.tokens))


def _left(remaining: RemainingLimit | None) -> tuple[int, int] | None:
    return None if remaining is None else (remaining.left, remaining.reset_us)
