"""What goes wrong during a soak: one thing after another, by a seeded chance. Then it is mended."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from benchmarks.soak.setting import SLOTS, TRAFFIC, Knobs, Setting

EVERY_S = 10.0
"""The mean of the pauses between two faults, which are exponential; a fault itself takes up to 12 s."""
BROKEN_POLICIES = (
    "engine: vllm\ntiers: [",
    "engine: vllm\ntiers:\n  critical: {reserve: 300%}\n",
    "",
    "engine: sglang\n",
)
SILENCE_S = 12.0
"""Longer than a replica may be silent in Redis before its leases are freed."""


@dataclass(slots=True)
class Faults:
    """Makes them. `made` counts them by what they were."""

    setting: Setting
    luck: random.Random
    made: Counter[str] = field(default_factory=Counter)

    async def make_for(self, seconds: float) -> None:
        """One after another for so long, and mends what is left. Raises what a server's start raises."""
        end_s = time.monotonic() + seconds
        kinds: dict[Callable[[], Awaitable[str]], int] = {
            self._engine_restarts: 3,
            self._redis_restarts: 2,
            self._redis_is_paused: 2,
            self._redis_forgets: 2,
            self._policy_changes: 4,
            self._policy_breaks: 2,
        }
        while True:
            pause_s = self.luck.expovariate(1 / EVERY_S)
            if time.monotonic() + pause_s > end_s:
                break
            await asyncio.sleep(pause_s)
            (kind,) = self.luck.choices(list(kinds), list(kinds.values()))
            self.made[await kind()] += 1
        await asyncio.sleep(max(0.0, end_s - time.monotonic()))
        self.setting.write(Knobs())
        self.setting.hang_up()

    async def _engine_restarts(self) -> str:
        self.setting.kill_engine()
        await asyncio.sleep(self.luck.uniform(0, 3))
        await asyncio.get_running_loop().run_in_executor(None, self.setting.start_engine)
        return "engine killed and started"

    async def _redis_restarts(self) -> str:
        self.setting.redis.kill()
        await asyncio.sleep(self.luck.uniform(0, 8))
        self.setting.redis.restart()
        return "Redis killed and started, empty"

    async def _redis_is_paused(self) -> str:
        self.setting.redis.pause()
        try:
            await asyncio.sleep(self.luck.choice((self.luck.uniform(0.1, 6), SILENCE_S)))
        finally:
            self.setting.redis.resume()
        return "Redis paused"

    async def _redis_forgets(self) -> str:
        self.setting.redis.command("FLUSHALL")
        return "Redis flushed"

    async def _policy_changes(self) -> str:
        removable = [traffic.tenant for traffic in TRAFFIC if traffic.removable]
        self.setting.write(
            Knobs(
                requests=self.luck.choice((SLOTS // 2, SLOTS - 4, SLOTS, SLOTS, SLOTS)),
                low_places=self.luck.choice((5, 20, 40)),
                batch_limit=self.luck.choice((40, 60, 80)),
                without=frozenset(tenant for tenant in removable if self.luck.random() < 0.5),
            )
        )
        if self.luck.random() < 0.5:
            self.setting.hang_up()
        return "policy changed"

    async def _policy_breaks(self) -> str:
        self.setting.break_policy(self.luck.choice(BROKEN_POLICIES))
        if self.luck.random() < 0.5:
            self.setting.hang_up()
        await asyncio.sleep(self.luck.uniform(0, 5))
        self.setting.write(self.setting.knobs)
        return "policy broken and mended"
