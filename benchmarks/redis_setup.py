"""What the benchmarks of the Redis pool share: a real server, replicas of a pool, a client past it, a figure's form."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sidecar.policy.compiler import load, shipped_policies

from sidecar.events import StoreChanged, StoreState
from sidecar.policy.model import Policy
from sidecar.policy.rules import TierRules
from sidecar.policy.store import store_address
from sidecar.pools.redis import Connect, RedisPool, connector
from tests.support.redis_servers import Binary, RedisServer, binaries, first_binary

CRITICAL, HIGH, NORMAL, LOW, BATCH = range(5)
"""The levels of the policy that we ship."""

Parts = Mapping[str, float | Sequence[float]]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure and its target; `parts` are what it was made from, by names that say their units."""

    name: str
    value: float
    target: float
    parts: Parts = field(default_factory=dict)
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the target is met."""
        return self.value >= self.target if self.at_least else self.value <= self.target


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
    names = ("reserve", "headroom", "limit")
    shares = [f"{name}_{unit}" for name in names for unit in ("tokens", "requests")]
    return replace(tier, **{share: getattr(tier, share) * times for share in shares})


@contextlib.asynccontextmanager
async def replica(url: str, policy: Policy, connect: Connect | None = None) -> AsyncIterator[RedisPool]:
    """One replica, open. Raises RuntimeError at the end where it lost its store: then no figure of it would stand."""
    changes: list[StoreChanged] = []
    pool = RedisPool(policy, connect or connector(store_address(url), policy.pool), observer=changes.append)
    await pool.open()
    try:
        yield pool
    finally:
        await pool.close()
    if [change.state for change in changes] != [StoreState.SHARED]:
        raise RuntimeError(f"the store was lost: {changes}")


@contextlib.asynccontextmanager
async def plain_client(url: str) -> AsyncIterator[Any]:
    """A client of one connection, with the very settings of the pool's own."""
    connection = await connector(store_address(url), "plain")()
    try:
        yield connection._client
    finally:
        await connection.close()
