"""Policies that load and will surprise: each warning one sentence with the numbers, and what would be better."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sidecar.policy.policy import Limits, Policy, Tier
from sidecar.policy.problems import Path, Place, Problem, dotted
from sidecar.policy.rules import UNLIMITED, PoolRules, TierRules, best_level, largest_request

MOSTLY_RESERVED = 0.8
"""Above this, the prototype of the rules showed that priorities hardly matter under overload (scheduling.md)."""

A_MINUTE_US = 60_000_000

NOMINAL = 10_000
"""The requests of a pool whose size only the engine knows: its shares are judged, no amount is shown."""

Found = Iterator[tuple[Path, str]]


def warnings(policy: Policy, place: Callable[[Path], Place | None] = lambda _path: None) -> tuple[Problem, ...]:
    """What `sidecar check` says about a policy without mistakes. `place` knows the files' lines: `Loaded.place`."""
    found = [*_pool(policy), *_tiers(policy), *_tenants(policy)]
    return tuple(Problem(dotted(path), message, place(path)) for path, message in found)


def _pool(policy: Policy) -> Found:
    rules = _rules(policy)
    reserved = _part(sum(_reserve(tier, rules) for tier in rules.tiers), rules)
    if reserved > MOSTLY_RESERVED:
        yield (
            ("tiers",),
            f"{reserved:.0%} of the pool is reserved, so priorities hardly matter under overload; reserve 80% at most",
        )
    if not policy.tenants and policy.anonymous is None:
        yield ("tenants",), "no tenant, and anonymous is deny: every request is refused; add a tenant, or a tier there"


def _tiers(policy: Policy) -> Found:
    pool = _rules(policy)
    for tier, rules in zip(policy.tiers, pool.tiers, strict=True):
        yield from _starving(rules, pool)
        yield from _idle(rules, pool, shows_amount=policy.is_sized)
        yield from _too_large(tier, pool)
        yield from _preemption(rules, pool)


def _preemption(tier: TierRules, rules: PoolRules) -> Found:
    """What one tier says of preemption, where no other says its part of it."""
    above, below = rules.tiers[: tier.level], rules.tiers[tier.level + 1 :]
    if tier.preempt_after_us is not None and not any(other.preemptible for other in below):
        yield (
            ("tiers", tier.name, "preempt_after"),
            "does nothing: no less important tier is preemptible; write preemptible: true there, or leave this out",
        )
    if not tier.preemptible:
        return
    if not rules.max_preemptions:
        yield (
            ("tiers", tier.name, "preemptible"),
            "does nothing: max_preemptions is 0; write at least 1 there, or leave this out",
        )
    elif all(other.preempt_after_us is None for other in above):
        yield (
            ("tiers", tier.name, "preemptible"),
            "does nothing: no more important tier has preempt_after; write it there, such as 500ms, or leave this out",
        )


def _rules(policy: Policy) -> PoolRules:
    return policy.rules if policy.is_sized else policy.rules_of(None, NOMINAL)


def _starving(tier: TierRules, rules: PoolRules) -> Found:
    """A tier with no floor, under tiers that it never reaches by aging and that can hold the whole pool."""
    above = rules.tiers[: best_level(rules, tier.level)]
    if min(tier.reserve_tokens, tier.reserve_requests) or not _can_fill(above, rules):
        return
    ceiling = (
        "does not age"
        if best_level(rules, tier.level) == tier.level
        else "ages no further than " + (rules.tiers[best_level(rules, tier.level)].name)
    )
    names = ", ".join(other.name for other in above)
    yield (
        ("tiers", tier.name),
        f"can starve: it has no reserve, {ceiling}, and {names} can hold the whole pool; give it a reserve, even 5%",
    )


def _can_fill(tiers: tuple[TierRules, ...], rules: PoolRules) -> bool:
    """Whether the tiers' limits together reach the pool, in either of the dimensions that it bounds."""
    tokens = sum(tier.limit_tokens for tier in tiers) >= rules.tokens != UNLIMITED
    return tokens or sum(tier.limit_requests for tier in tiers) >= rules.requests != UNLIMITED


def _idle(tier: TierRules, rules: PoolRules, *, shows_amount: bool) -> Found:
    headroom, reserve = _headroom(tier, rules), _reserve(tier, rules)
    if headroom and headroom >= reserve - 1:  # lend is 0%: one is rounded up, the other down
        part = f"{_part(headroom, rules):.0%} of the pool"
        idle = f"{_amount(headroom, rules)} ({part}) stay" if shows_amount else f"{part} stays"
        yield (
            ("tiers", tier.name, "lend"),
            f"lends nothing: while it is idle, {idle} unused; lend more, unless it must start at once",
        )


def _too_large(tier: Tier, rules: PoolRules) -> Found:
    largest, _ = largest_request(rules, tier.level)
    if tier.max_request_tokens is not None and tier.max_request_tokens > largest:
        yield (
            ("tiers", tier.name, "max_request_tokens"),
            f"{tier.max_request_tokens:,} is more than the {largest:,} tokens it could ever be given; a larger request "
            f"is refused at the door, so write {largest} or less",
        )


def _tenants(policy: Policy) -> Found:
    for tenant in {tenant.name: tenant for tenant in policy.tenants.values()}.values():
        limits, path = tenant.limits, ("tenants", tenant.name)
        if limits.tokens_per_minute is not None:
            most = limits.tokens_per_minute * limits.burst_us // A_MINUTE_US
            output = _assumed_output(policy.tiers[tenant.level], limits)
            if most < output:
                yield (
                    (*path, "limits", "tokens_per_minute"),
                    f"lets {most:,} tokens through at once, and a request that names no maximum counts for {output:,} "
                    "and its prompt: each is over the limit; allow more, or a longer burst",
                )
        if tenant.downgrade_level is not None and not limits.are_counted:
            yield (*path, "over_limit"), "does nothing without limits by the minute or at once; add some, or remove it"


def _assumed_output(tier: Tier, limits: Limits) -> int:
    return min(tier.default_output_tokens, limits.max_output_tokens or tier.default_output_tokens)


def _reserve(tier: TierRules, rules: PoolRules) -> int:
    return tier.reserve_requests if rules.tokens == UNLIMITED else tier.reserve_tokens


def _headroom(tier: TierRules, rules: PoolRules) -> int:
    return tier.headroom_requests if rules.tokens == UNLIMITED else tier.headroom_tokens


def _part(amount: int, rules: PoolRules) -> float:
    return amount / (rules.requests if rules.tokens == UNLIMITED else rules.tokens)


def _amount(amount: int, rules: PoolRules) -> str:
    return f"{amount:,} {'requests' if rules.tokens == UNLIMITED else 'tokens'}"
