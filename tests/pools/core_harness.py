"""Plugs the pool over a ledger into the contract suite."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from sidecar.policy.model import Policy
from sidecar.pools import Pool
from sidecar.pools.ledger_pool import LedgerPool
from tests.pools.harness import Clock, with_shares


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
