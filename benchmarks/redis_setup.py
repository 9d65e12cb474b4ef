"""What the benchmarks of the Redis pool share: a real server, replicas of a pool, a client past it, a figure's form."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from sidecar.events import StoreChanged, StoreState
from sidecar.policy.compiler import load, shipped_policies
from sidecar.policy.model import Policy
from sidecar.policy.rules import Amount, TierRules
from sidecar.policy.store import store_address
from sidecar.pools import Pool
from sidecar.pools.redis import RedisLink, ledger_connector
from tests.support.redis_servers import Binary, RedisServer, binaries, first_binary

CRITICAL, HIGH, NORMAL, LOW, BATCH = range(5)
"""The levels of the policy that we ship."""


def chosen_binary() -> Binary:
    """Redis where there is one, else Valkey. An AssertionError that says what to install where there is neither."""
    return next((binary for binary in binaries() if binary.name == "redis"), None) or first_binary()


@contextlib.contextmanager
def running_server() -> Iterator[RedisServer]:
    """A server of this benchmark's own on loopback, which keeps nothing."""
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(chosen_binary(), Path(folder)) as server,
        _core_of_its_own(server.pid),
    ):
        yield server


@contextlib.contextmanager
def _core_of_its_own(pid: int) -> Iterator[None]:
    """Keeps a process on one core, and this one and its children off it, where there are two.

    Left to itself the kernel puts the two of them on one core in some runs and on two in others. A bare call then takes
    30 us or 100 us, and no two runs have the same ratios. A store in production is never on the core of its callers.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        yield
        return
    os.sched_setaffinity(pid, cores[:1])
    os.sched_setaffinity(0, cores[1:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def version_of(server: RedisServer) -> str:
    """Which server it is, such as `valkey 9.0.1`."""
    lines = server.command("INFO", "server").splitlines()
    said = dict(line.split(":", 1) for line in lines if ":" in line)
    return f"{server.binary.name} {said.get(f'{server.binary.name}_version') or said['redis_version']}"


def shipped_policy(pool: str, times: int = 1) -> Policy:
    """The policy that we ship, for a pool of that name; `times` makes its pool and all shares of it so much larger."""
    policy = load(shipped_policies())
    rules = policy.rules
    larger = replace(
        rules,
        tokens=rules.tokens * times,
        requests=rules.requests * times,
        tiers=tuple(_larger(tier, times) for tier in rules.tiers),
    )
    return replace(policy, rules=larger, pool=pool)


def _larger(tier: TierRules, times: int) -> TierRules:
    def more(amount: Amount) -> Amount:
        return amount[0] * times, amount[1] * times, amount[2]

    return replace(tier, reserve=more(tier.reserve), headroom=more(tier.headroom), limit=more(tier.limit))


@contextlib.asynccontextmanager
async def replica(url: str, policy: Policy, weight_percent: int | None = None) -> AsyncIterator[Pool]:
    """One replica, open. Raises RuntimeError at the end where it lost its store: then no figure of it would stand."""
    changes: list[StoreChanged] = []
    link = RedisLink(ledger_connector(store_address(url), policy.pool), policy.pool)
    pool = Pool(policy, link=link, observer=changes.append, weight_percent=weight_percent)
    await pool.open()
    try:
        yield pool
    finally:
        await pool.close()
    if [change.state for change in changes] != [StoreState.SHARED]:
        raise RuntimeError(f"the store was lost: {changes}")


@contextlib.asynccontextmanager
async def plain_client(url: str) -> AsyncIterator[Any]:
    """A client past the pools."""
    client = Redis.from_url(url)
    try:
        yield client
    finally:
        await client.aclose()
