"""What the contract suite needs of a pool under test: how one is made, and how its clock and its rules are reached."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Protocol

from sidecar.engines import NoPriorityEngine
from sidecar.policy.choices import Order, TierSource
from sidecar.policy.model import Policy
from sidecar.policy.rules import UNLIMITED, PoolRules, Shares, TierRules, pool_rules
from sidecar.policy.tier import Aging, Queue, Tier
from sidecar.pools import Ask, Pool


class Clock:
    """Time that only the test moves, in whole microseconds."""

    def __init__(self) -> None:
        self.us = 1_000_000_000

    def __call__(self) -> int:
        return self.us

    def advance(self, seconds: float) -> None:
        self.us += round(seconds * 1e6)


class Harness(Protocol):
    """One kind of pool. Another is plugged in by writing this for it and naming it in `conftest.harness_of`."""

    async def pool(self, policy: Policy, clock: Clock | None = None) -> Pool:
        """A pool on a test's clock, or on its own."""

    async def quiet(self, pool: Pool) -> None:
        """Returns when the pool has done all that was asked of it so far, and reported it to every request."""

    async def poke(self, pool: Pool) -> None:
        """Lets the pool look again at what the clock says, as its own timer would."""

    async def close(self) -> None:
        """Lets go of every pool that was made."""


class LocalHarness:
    """The pool over a ledger in the process."""

    async def pool(self, policy: Policy, clock: Clock | None = None) -> Pool:
        return Pool(policy) if clock is None else Pool(policy, clock)

    async def quiet(self, pool: Pool) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def poke(self, pool: Pool) -> None:
        pool._run()  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    async def close(self) -> None:
        pass


class ByGain:
    """Pools of another harness that order by gain, whatever their policies say. The floors are all of the reserves."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self.quiet, self.poke, self.close = harness.quiet, harness.poke, harness.close

    async def pool(self, policy: Policy, clock: Clock | None = None) -> Pool:
        pool = await self._harness.pool(by_gain(policy), clock)
        change_policy = pool.change_policy
        pool.change_policy = lambda policy: change_policy(by_gain(policy))  # type: ignore[method-assign]
        return pool


def change_rules(pool: Pool, rules: PoolRules) -> None:
    """The pool has other rules of the same tiers."""
    policy = pool._sizes.policy
    pool.change_policy(
        replace(policy, rules=rules, tiers=shared(rules, policy.tiers), fair=Fraction(1), **_keys_for(rules))
    )


def by_gain(policy: Policy) -> Policy:
    """The same, in another order."""
    return replace(policy, order=Order.GAIN, rules=replace(policy.rules, is_by_gain=True))


def policy_of(rules: PoolRules, *, max_waiting: int | None = None, max_request_tokens: int | None = None) -> Policy:
    """A policy around rules; what a pool does not look at is left empty."""
    tiers = [
        Tier(name=tier.name, level=tier.level, queue=Queue(max_waiting), max_request_tokens=max_request_tokens)
        for tier in rules.tiers
    ]
    return Policy(
        **_keys_for(rules),
        rules=rules,
        tiers=shared(rules, tiers),
        fair=Fraction(1),  # floors are all of the reserves
        endpoints={},
        named={},
        anonymous=None,
        default_level=0,
        sources=(TierSource.KEY,),
        engine=NoPriorityEngine,
        carrier=None,
        engine_levels=(),
        service_tiers=(),
        tier_header=b"x-priority",
        max_body_bytes=2**23,
        body_timeout_s=30,
        disconnect_grace_s=2,
        tokenizer=None,
        generation="test",
    )


def _keys_for(rules: PoolRules) -> dict[str, Any]:
    """The keys of a pool's file that rules were made of."""
    aging = None if rules.promote_after_us is None else Aging(rules.promote_after_us, rules.ceiling)
    order = Order.GAIN if rules.is_by_gain else Order.LEVEL
    return {"aging": aging, "max_preemptions": rules.max_preemptions, "order": order}


def shared(rules: PoolRules, tiers: Sequence[Tier]) -> tuple[Tier, ...]:
    """The tiers with the shares that their rules were made of, as far as whole numbers say."""
    return tuple(_shared(tier, rules, its) for tier, its in zip(tiers, rules.tiers, strict=True))


def _shared(stated: Tier, rules: PoolRules, tier: TierRules) -> Tier:
    sizes = [
        (rules.tokens, tier.reserve[0], tier.headroom[0], tier.limit[0]),
        (rules.requests, tier.reserve[1], tier.headroom[1], tier.limit[1]),
    ]
    size, reserve, headroom, limit = max([it for it in sizes if it[0] != UNLIMITED] or [(1, 0, 0, 1)])
    return replace(
        stated,
        reserve=Fraction(reserve, size),
        lend=1 - Fraction(headroom, reserve) if reserve else Fraction(1),
        limit=Fraction(limit, size) if tier.limited else Fraction(1),
        always_first=tier.always_first,
        preemptible=tier.preemptible,
        preempt_after_us=tier.preempt_after_us,
    )


def simple(
    names: Sequence[str] = ("high", "low"),
    *,
    tokens: int | None = 100,
    requests: int | None = None,
    promote_after_s: float | None = None,
    **more: int | None,
) -> Policy:
    """Tiers without reserves in one pool."""
    rules = pool_rules(
        tokens=tokens,
        requests=requests,
        tiers=tuple(Shares(name, Fraction(0)) for name in names),
        promote_after_us=None if promote_after_s is None else round(promote_after_s * 1e6),
    )
    return policy_of(rules, **more)


def ask(
    tier: int = 0, tokens: int = 10, *, requests: int = 1, tenant: str = "t", weight: int = 1, request: int = 0
) -> Ask:
    return Ask(tier, tenant, weight, tokens, requests, request)
