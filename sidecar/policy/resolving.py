"""From the operator's files to what the process runs on: names become levels, shares whole numbers, times seconds."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from types import MappingProxyType

from sidecar.policy.fields import ANONYMOUS, infer_api
from sidecar.policy.models import EndpointBody, LimitsBody, PoolFile, Slo, TenantFile, TierBody
from sidecar.policy.policy import Api, Endpoint, Limits, Policy, Promises, Tenant, Tier
from sidecar.policy.rules import EngineCapacity, PoolRules, Shares, pool_rules


def resolve(pool: PoolFile, tenants: Sequence[TenantFile], generation: str) -> Policy:
    """The policy of files that were found to be without mistakes; `generation` says which version of them it is."""
    levels = {name: level for level, name in enumerate(pool.tiers)}
    by_key = [(body.keys, _tenant(body, levels)) for body in tenants]
    thresholds = pool.engine_levels or {}
    return Policy(
        rules=_rules(pool, levels),
        shares=_shares(pool),
        engine_capacity=_engine_capacity(pool),
        tiers=tuple(_tier(name, levels[name], body) for name, body in pool.tiers.items()),
        endpoints=MappingProxyType({path: _endpoint(path, body, levels) for path, body in pool.endpoints.items()}),
        tenants=MappingProxyType({key: tenant for keys, tenant in by_key for key in keys}),
        anonymous=_anonymous(pool, levels),
        default_level=levels[str(pool.default_tier)],
        sources=tuple(pool.sources),
        engine=pool.engine,
        carrier=pool.forward_priority,
        engine_levels=tuple((thresholds[name], level) for name, level in levels.items() if name in thresholds),
        tier_header=pool.tier_header.encode("ascii"),
        max_body_bytes=pool.max_body,
        body_timeout_s=float(pool.body_timeout),
        disconnect_grace_s=float(pool.disconnect_grace),
        tokenizer=pool.tokenizer,
        generation=generation,
        store=pool.store,
        pool=pool.pool,
        on_store_loss=pool.on_store_loss,
        mode=pool.mode,
        keep_alive_s=_seconds(pool.keep_alive),
        forward_key=pool.forward_key,
        abort_latency_s=_seconds(pool.abort_latency),
        unguarded=pool.unguarded,
        background=pool.background,
        max_choices=pool.max_choices,
        unsized=pool.unsized,
    )


def _rules(pool: PoolFile, levels: dict[str, int]) -> PoolRules:
    return pool_rules(
        tokens=pool.capacity.tokens,
        requests=pool.capacity.requests,
        tiers=_shares(pool),
        promote_after_us=round(pool.aging.promote_after * 1_000_000) if pool.aging else None,
        ceiling=levels[pool.aging.ceiling] if pool.aging else 0,
        max_preemptions=pool.max_preemptions,
    )


def _shares(pool: PoolFile) -> tuple[Shares, ...]:
    return tuple(
        Shares(
            name=name,
            reserve=body.reserve,
            lend=body.lend,
            limit=body.limit,
            always_first=body.always_first,
            preemptible=body.preemptible,
            preempt_after_us=_microseconds(body.preempt_after),
        )
        for name, body in pool.tiers.items()
    )


def _engine_capacity(pool: PoolFile) -> EngineCapacity | None:
    capacity = pool.capacity
    if capacity.told_by is None:
        return None
    return EngineCapacity(capacity.fraction, capacity.waiting, capacity.tokens, capacity.requests)


def _tier(name: str, level: int, body: TierBody) -> Tier:
    return Tier(
        name=name,
        level=level,
        default_output_tokens=body.default_output_tokens,
        max_waiting=body.queue.max_requests if body.queue else None,
        max_wait_s=_seconds(body.queue.max_wait) if body.queue else None,
        max_request_tokens=body.max_request_tokens,
        slo=_promises(body.slo) if body.slo else Promises(),
    )


def _promises(slo: Slo) -> Promises:
    return Promises(_seconds(slo.ttft), _seconds(slo.queue_wait), _seconds(slo.starvation))


def _seconds(duration: Fraction | None) -> float | None:
    return None if duration is None else float(duration)


def _microseconds(duration: Fraction | None) -> int | None:
    return None if duration is None else round(duration * 1_000_000)


def _endpoint(path: str, body: EndpointBody, levels: dict[str, int]) -> Endpoint:
    api = body.api or infer_api(body.forward_to or path)
    assert isinstance(api, Api)  # crosschecks refuses a path that does not tell
    return Endpoint(path, api, None if body.tier is None else levels[body.tier], body.forward_to)


def _tenant(body: TenantFile, levels: dict[str, int]) -> Tenant:
    return Tenant(
        name=body.tenant,
        level=levels[body.tier],
        max_level=levels[body.max_tier or body.tier],
        weight=body.weight,
        limits=_limits(body.limits),
        downgrade_level=levels[body.over_limit] if body.over_limit else None,
    )


def _limits(body: LimitsBody | None) -> Limits:
    if body is None:
        return Limits()
    return Limits(
        requests_per_minute=body.requests_per_minute,
        tokens_per_minute=body.tokens_per_minute,
        concurrent_requests=body.concurrent_requests,
        max_output_tokens=body.max_output_tokens,
        burst_us=round(body.burst * 1_000_000),
    )


def _anonymous(pool: PoolFile, levels: dict[str, int]) -> Tenant | None:
    if pool.anonymous is None:
        return None
    level = levels[pool.anonymous]
    return Tenant(ANONYMOUS, level=level, max_level=level)
