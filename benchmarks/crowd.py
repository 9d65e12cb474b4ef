"""A full pool of one process with a crowd before it: what `decision` and `instructions` measure."""

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
from sidecar.pools.engines import WEIGHT_PERCENT, EngineOffer
from sidecar.scheduling.tickets import TicketGain

TOKENS, PROMPT, PREFILL = 2_500, 300, 8_000
GAIN_WEIGHTS = (8, 4, 2, 1, 1)


class Crowd:
    """`running` are the leases that are held, `waiting` what waits, by number. `engines`: 0 for one without a name."""

    def __init__(self, waiting: int, leases: int, tenants: int, order: Order, engines: int = 0) -> None:
        policy = load(shipped_policies()).ordered_by(order)
        policy = replace(policy, tiers=tuple(replace(tier, queue=Queue()) for tier in policy.tiers))
        self.policy = replace(policy, rules=policy.rules_for(leases * TOKENS, leases))
        self.pool = Pool(self.policy, weight_percent=WEIGHT_PERCENT if engines else None)
        self.running: deque[Lease] = deque()
        self.waiting: dict[int, Lease] = {}
        self.tier: int | None = None
        """Of the latest admission: the next one comes there, so that equally many wait in each tier all the time."""
        self._size, self._leases, self._tenants, self._engines = waiting, leases, tenants, engines
        self._numbers, self._luck = count(), random.Random(7)
        if engines:
            self.resize(1)

    def resize(self, times: float) -> None:
        """The pool has another size."""
        leases = round(self._leases * times)
        if not self._engines:
            rules = self.policy.rules_for(leases * TOKENS, leases)
            self.pool.change_policy(replace(self.policy, rules=rules))
            return
        each = leases // self._engines
        self.pool.set_engines(
            [EngineOffer(f"e{number}#1", each * TOKENS, each, PREFILL) for number in range(self._engines)]
        )

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
        hits = ((f"e{number % self._engines}#1", PROMPT // 2),) if self._engines and number % 2 else ()
        gain = None
        if self.policy.rules.is_by_gain:
            gain = TicketGain(GAIN_WEIGHTS[tier], 300, self._luck.randint(10_000, 1_000_000), 120_000_000, 50_000)
        tenant = f"tenant-{self._luck.randrange(self._tenants)}"
        lease = await self.pool.enter(Ask(tier, tenant, 1, TOKENS, 1, prompt=PROMPT, hits=hits, gain=gain))
        if lease.grant is not None:
            self._begin(lease)
            return
        self.waiting[number] = lease
        lease.wait().add_done_callback(lambda _: self._admitted(number))

    def leave(self) -> None:
        """The client of one that waits gives up."""
        number = next(iter(self.waiting))
        self.waiting.pop(number).leave()

    def _admitted(self, number: int) -> None:
        lease = self.waiting.pop(number, None)
        if lease is not None and lease.grant is not None:
            self.tier = lease.tier
            self._begin(lease)

    def _begin(self, lease: Lease) -> None:
        """An engine has it, and sends its first byte at once."""
        self.running.append(lease)
        lease.keep()
        if self._engines:
            lease.prefilled()
