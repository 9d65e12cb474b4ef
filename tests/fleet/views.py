"""A view of a real fleet and its pool, in this event loop, with leases instead of requests."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from sidecar.fleet.fleet import Fleet
from sidecar.fleet.routing import FleetRouting
from sidecar.fleet.setup import new_fleet
from sidecar.fleet.view import FleetView
from sidecar.policy.compiler import load
from sidecar.policy.fleet import EngineAddress
from sidecar.policy.model import Policy
from sidecar.pools import Ask, Lease, Pool
from sidecar.pools.engines import WEIGHT_PERCENT
from tests.fleet.engines import LocalEngine, engines
from tests.support.waiting import now_us, until

POLICY = """\
engine: vllm
engines:
  static: [{static}]
  capacity: {{tokens: 1k, requests: 8}}
  prefill: unbounded
  health: {{path: /health, every: 100ms, fail: 3, rise: 2}}
  slow_start: 30s
  drain_timeout: {drain_timeout}
tiers:
  high: {{}}
  low: {{}}
default_tier: high
anonymous: high
endpoints: {{/v1/chat/completions: {{}}}}
"""


def policy_of_engines(started: Sequence[LocalEngine], drain_timeout: str = "30s") -> Policy:
    """A policy of two tiers whose engines are called `a`, `b` and so on."""
    static = ", ".join(
        f"{{name: {name}, url: 'http://127.0.0.1:{engine.port}'}}"
        for name, engine in zip("abcdefgh", started, strict=False)
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "policy.yaml")
        path.write_text(POLICY.format(static=static, drain_timeout=drain_timeout))
        return load(path)


async def lease_of(pool: Pool, tokens: int = 10, prompt: int = 1, **more: object) -> Lease:
    """One request of the first tier; its lease is held where there is room."""
    return await pool.enter(Ask(0, "t", 1, tokens, 1, prompt=prompt, **more))  # type: ignore[arg-type]


class Viewed:
    """Engines, the fleet and the pool over them, and what an operator sees."""

    def __init__(self, started: list[LocalEngine], policy: Policy, fleet: Fleet, pool: Pool) -> None:
        self.engines = started
        self.policy = policy
        self.fleet = fleet
        self.pool = pool
        self.routing = FleetRouting(fleet, pool, policy)
        self.view = FleetView(self.routing)

    def addresses(self) -> list[EngineAddress]:
        """All engines, as discovery names them."""
        assert self.policy.engines is not None
        return list(self.policy.engines.static)


@asynccontextmanager
async def viewed(count: int = 2, drain_timeout: str = "30s") -> AsyncIterator[Viewed]:
    """So many emulated engines, whose pool follows them."""
    async with engines(count) as started:
        policy = policy_of_engines(started, drain_timeout)
        pool = Pool(policy, now_us, weight_percent=WEIGHT_PERCENT)
        fleet = new_fleet(policy, now_us)
        seen = Viewed(started, policy, fleet, pool)
        await fleet.open()
        try:
            await until(lambda: len(pool.engines()) == count)
            yield seen
        finally:
            await fleet.close()
