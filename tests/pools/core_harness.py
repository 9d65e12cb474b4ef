"""Plugs the pool over a ledger into the contract suite."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from fractions import Fraction

from sidecar.policy.model import Policy
from sidecar.policy.rules import UNLIMITED, PoolRules, Shares, TierRules
from sidecar.pools import Pool
from sidecar.pools.ledger_pool import LedgerPool
from tests.pools.harness import Clock


class CoreHarness:
    """The pool over a ledger in the process. Rules that a test states in whole numbers become shares again."""

    async def pool(self, policy: Policy, clock: Clock | None = None) -> Pool:
        pool = LedgerPool(with_shares(policy)) if clock is None else LedgerPool(with_shares(policy), clock)
        change_policy = pool.change_policy
        pool.change_policy = lambda policy: change_policy(with_shares(policy))  # type: ignore[method-assign]
        pool.change_rules = lambda rules: pool.change_policy(  # type: ignore[method-assign]
            replace(pool._sizes.policy, rules=rules, shares=())
        )
        return pool

    async def quiet(self, pool: Pool) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def poke(self, pool: Pool) -> None:
        pool._run()  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    async def close(self) -> None:
        pass


def with_shares(policy: Policy) -> Policy:
    """The policy with the shares that its rules were made of, as far as whole numbers say."""
    if policy.shares:
        return policy
    fair = Fraction(1)  # floors are all of the reserves
    return replace(policy, shares=tuple(_shares(policy.rules, tier) for tier in policy.rules.tiers), fair=fair)


def _shares(rules: PoolRules, tier: TierRules) -> Shares:
    sizes = [
        (rules.tokens, tier.reserve_tokens, tier.headroom_tokens, tier.limit_tokens),
        (rules.requests, tier.reserve_requests, tier.headroom_requests, tier.limit_requests),
    ]
    size, reserve, headroom, limit = max(it for it in sizes if it[0] != UNLIMITED) if sizes else sizes[0]
    return Shares(
        tier.name,
        Fraction(reserve, size),
        1 - Fraction(headroom, reserve) if reserve else Fraction(1),
        Fraction(limit, size) if tier.limited else Fraction(1),
        tier.always_first,
        tier.preemptible,
        tier.preempt_after_us,
    )
