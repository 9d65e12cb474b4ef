"""A full pool of one process with a crowd before it: what `instructions` measures."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from itertools import count

from sidecar.policy.choices import Order
from sidecar.policy.compiler import load, shipped_policies
from sidecar.policy.tier import Queue
from sidecar.pools import Pool
from sidecar.pools.base import Ask, Lease

TOKENS, PROMPT = 2_500, 300


class Crowd:
    """`running` are the leases that are held, `waiting` what waits, by number."""

    def __init__(self, waiting: int, leases: int, tenants: int) -> None:
        policy = load(shipped_policies()).ordered_by(Order.LEVEL)
        policy = replace(policy, tiers=tuple(replace(tier, queue=Queue()) for tier in policy.tiers))
        self.pool = Pool(replace(policy, rules=policy.rules_for(leases * TOKENS, leases)))
        self.running: deque[Lease] = deque()
        self.waiting: dict[int, Lease] = {}
        self.tier: int | None = None
        """Of the latest admission: the next one comes there, so that equally many wait in each tier all the time."""
        self._size, self._tenants = waiting, tenants
        self._numbers, self._luck = count(), random.Random(7)

    async def fill(self) -> None:
        """Enters requests until all leases are held, and so many wait."""
        while len(self.waiting) < self._size:
            await self.enter()

    async def cycle(self) -> None:
        """The oldest lease ends, one that waits is admitted, and another comes."""
        self.running.popleft().settle(TOKENS)
        await self.enter()

    async def enter(self) -> None:
        """A request comes."""
        number = next(self._numbers)
        tier = 1 + number % 4 if self.tier is None else self.tier
        tenant = f"tenant-{self._luck.randrange(self._tenants)}"
        lease = await self.pool.enter(Ask(tier, tenant, 1, TOKENS, 1, prompt=PROMPT))
        if lease.grant is not None:
            self._begin(lease)
            return
        self.waiting[number] = lease
        lease.wait().add_done_callback(lambda _: self._admitted(number))

    def _admitted(self, number: int) -> None:
        lease = self.waiting.pop(number, None)
        if lease is not None and lease.grant is not None:
            self.tier = lease.tier
            self._begin(lease)

    def _begin(self, lease: Lease) -> None:
        """An engine has it, and sends its first byte at once."""
        self.running.append(lease)
        lease.keep()
