"""Requests in virtual time, to a controller before an emulated engine: by two policies, their dry run is compared."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sidecar.policy.model import Policy
from sidecar.pools import Pool
from sidecar.pools.guards import GuardFigures
from sidecar.telemetry.dry_run import DryRunStats
from sidecar.tools.emulator import Emulator
from sidecar.tools.loadgen import Planned
from tests.support.middleware import Caller, TestedMiddleware, monitor
from tests.support.virtual_time import virtual_now_us


class Played:
    """One controller, and what it counts of a dry run. `guards` are those of the end."""

    def __init__(self, policy: Policy, engine: Emulator) -> None:
        self.policy = policy
        self.pool = Pool(policy, virtual_now_us)
        self.sidecar = TestedMiddleware(engine.app, policy=policy, pool=self.pool)
        names = [tier.name for tier in policy.tiers]
        self.stats = DryRunStats(
            lambda: 0.0,
            self.sidecar.shadows.waiting,
            lambda: {names[level]: holds for level, holds in self.sidecar.engine_times.counted().items()},
        )
        self.stats.begin(policy.generation, 0)
        monitor(self.sidecar, observed=self.stats.note)
        self.guards: Sequence[GuardFigures] = ()
        self._ended: dict[int, asyncio.Event] = {}

    async def play(self, plan: Sequence[Planned]) -> list[tuple[Planned, Caller]]:
        """Plays all of them. Returns each with its answer."""
        self._ended = {number: asyncio.Event() for number in range(len(plan))}
        callers = await asyncio.gather(*(self._one(number, planned) for number, planned in enumerate(plan)))
        await asyncio.sleep(600)  # shadows outlive their requests
        assert len(self.sidecar.shadows) == 0
        self.guards = self.pool.guards()
        return list(zip(plan, callers, strict=True))

    async def _one(self, number: int, planned: Planned) -> Caller:
        if planned.after is None:
            await asyncio.sleep(planned.at_s)
        else:
            await self._ended[planned.after].wait()
        headers = [(name.encode(), value.encode()) for name, value in planned.headers.items()]
        caller = Caller(self.sidecar, planned.body, headers=headers)
        await caller.run()
        self._ended[number].set()
        return caller
