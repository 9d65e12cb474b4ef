"""What a request of a shared pool costs its store, and a client, each figure with its target.

    python -m benchmarks.redis_pool [--json FILE] [--quick]

Pools of one process on uvloop share a real server on loopback, which has a core of its own where there are two. The
whole life of a request: it enters, is admitted, has its first byte and ends, each in a call of its own as between real
processes. With 400 waiting before full engines another one is admitted for each that ends. All processor time of the
server counts, in calls of a script that does nothing; so do its commands, and its bytes to and fro.

Then: the p50 of an admission that nothing is in the way of, to a bare call; what the store keeps for a request that
waits; and how far two tenants with a backlog are apart over four replicas. The command fails where a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.redis_setup import NORMAL, plain_client, replica, running_server, shipped_policy, version_of
from sidecar.policy.choices import Order
from sidecar.policy.model import Policy
from sidecar.policy.tier import Queue
from sidecar.pools import Pool
from sidecar.pools.base import Ask, Lease
from sidecar.pools.engines import WEIGHT_PERCENT, EngineOffer
from sidecar.scheduling.tickets import TicketGain

TOKENS, PROMPT, EACH, PREFILL, TENANTS = 2_500, 300, 16, 8_000, 24
APART_S = 0.03
"""Between two events of a request: longer than a replica keeps what nobody waits for."""
BARE = "return 1"
GAIN = TicketGain(2, 300, 1_000_000, 120_000_000, 100_000)


@dataclass(frozen=True)
class Figure:
    """One figure, and the most that is asked of it; `parts` are what it was made from, with their units."""

    name: str
    value: float
    most: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_met(self) -> bool:
        """Whether the target is met."""
        return self.most is None or self.value <= self.most

    def lines(self) -> Iterator[str]:
        """For a reader."""
        target = "" if self.most is None else f"   at most {self.most:g}"
        yield f"{self.name:70} {self.value:9,.2f}{target:16}{'' if self.is_met else '   MISSED'}".rstrip()
        for name, part in self.parts.items():
            yield f"    {name:66} {part:9,.1f}"


@dataclass(frozen=True)
class Case:
    """Of the commands of a request so many are asked at most."""

    engines: int
    waiting: int
    most_commands: int | None = None
    order: Order = Order.LEVEL

    def __str__(self) -> str:
        return f"{self.engines} engine{'s' * (self.engines > 1)}, {self.waiting} waiting, by {self.order.value}"


CASES = (
    Case(16, 400, 18),
    Case(16, 400, order=Order.GAIN),
    Case(1, 400, 18),
    Case(16, 0, 14),
    Case(1, 0, 14),
)


@asynccontextmanager
async def replicas(url: str, case: Case, number: int, leases: int | None = None) -> AsyncIterator[Sequence[Pool]]:
    """So many, of a pool of their own, as large as its engines or for so many `leases`."""
    policy = policy_of(f"{case}, {number}", case.order, leases or EACH * case.engines)
    weight_percent = WEIGHT_PERCENT if case.engines > 1 else None
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(replica(url, policy, weight_percent)) for _ in range(number)]


def policy_of(name: str, order: Order, leases: int) -> Policy:
    """The policy that we ship, with queues without an end."""
    policy = shipped_policy(name).ordered_by(order)
    return replace(
        policy,
        tiers=tuple(replace(tier, queue=Queue()) for tier in policy.tiers),
        rules=policy.rules_for(max(leases, EACH) * TOKENS, leases),
    )


class Lives:
    """Requests of several replicas. `waiting` wait all the time, of all tiers but the first."""

    def __init__(self, pools: Sequence[Pool], case: Case) -> None:
        self._pools, self._case = cycle(pools), case
        self._numbers = count()
        self._tier = NORMAL
        self.running: deque[Lease] = deque()
        self.is_over = False
        if case.engines > 1:
            for pool in pools:
                pool.set_engines([EngineOffer(f"e{n}#1", EACH * TOKENS, EACH, PREFILL) for n in range(case.engines)])

    async def fill(self) -> None:
        """Until the engines are full, and so many wait. A store that is new grants nothing in its first seconds."""
        first = await next(self._pools).enter(Ask(NORMAL, "first", 1, TOKENS, 1))
        await first.wait()
        first.settle()
        full = EACH * self._case.engines if self._case.waiting else 0
        while len(self.running) < full:
            await self.enter(1 + len(self.running) % 4)
            await asyncio.sleep(0.001)
        for number in range(self._case.waiting):
            await self.enter(1 + number % 4)
        await asyncio.sleep(10 * APART_S)

    async def live(self) -> None:
        """One ends, for which one that waits is admitted, and one comes. Where none waits: one comes, and ends."""
        if not self._case.waiting:
            await self.enter(NORMAL)
            await asyncio.sleep(2 * APART_S)
            self.running.popleft().settle(TOKENS)
            await asyncio.sleep(APART_S)
            return
        self.running.popleft().settle(TOKENS)
        await asyncio.sleep(2 * APART_S)
        await self.enter(self._tier)
        await asyncio.sleep(APART_S)

    async def enter(self, tier: int) -> None:
        """A request comes to one of the replicas."""
        number = next(self._numbers)
        hits = ((f"e{number % self._case.engines}#1", 100),) if self._case.engines > 1 else ()
        gain = GAIN if self._case.order is Order.GAIN else None
        ask = Ask(tier, f"tenant-{number * 7 % TENANTS}", 1, TOKENS, 1, prompt=PROMPT, hits=hits, gain=gain)
        lease = await next(self._pools).enter(ask)
        if lease.grant is not None:
            self._begin(lease)
        else:
            lease.wait().add_done_callback(lambda _: self._begin(lease))

    def _begin(self, lease: Lease) -> None:
        if lease.grant is None or self.is_over:
            return
        self._tier = lease.tier
        self.running.append(lease)
        asyncio.get_running_loop().call_later(APART_S, self._first_byte, lease)

    def _first_byte(self, lease: Lease) -> None:
        if lease in self.running and not self.is_over:
            lease.keep()
            lease.prefilled()


@dataclass(frozen=True)
class Counted:
    """The server's own counters: microseconds of its processor time, commands, bytes."""

    cpu_us: float
    commands: int
    read: int
    written: int

    @classmethod
    async def now(cls, client: Any) -> Counted:
        """As they are."""
        info = await client.info("everything")
        commands = sum(of["calls"] for name, of in info.items() if name.startswith("cmdstat_") and "info" not in name)
        cpu_us = (info["used_cpu_user"] + info["used_cpu_sys"]) * 1e6
        return cls(cpu_us, commands, info["total_net_input_bytes"], info["total_net_output_bytes"])

    def since(self, before: Counted, lives: int) -> Counted:
        """What was added, for each of so many."""
        return Counted(
            (self.cpu_us - before.cpu_us) / lives,
            round((self.commands - before.commands) / lives),
            round((self.read - before.read) / lives),
            round((self.written - before.written) / lives),
        )


async def lives(client: Any, pools: Sequence[Pool], case: Case, times: int) -> list[Figure]:
    """The figures of one case."""
    crowd = Lives(pools, case)
    await crowd.fill()
    bare_us = await bare_cost_us(client)
    found = []
    for _ in range(3):
        before = await Counted.now(client)
        for _ in range(times):
            await crowd.live()
        found.append((await Counted.now(client)).since(before, times))
    crowd.is_over = True
    one = sorted(found, key=lambda each: each.cpu_us)[1]
    parts = {
        "us of the server": one.cpu_us,
        "us of a bare call": bare_us,
        "commands": one.commands,
        "bytes to the server": one.read,
        "bytes from the server": one.written,
    }
    figures = [Figure(f"{case}: the server's time of a request, bare calls", one.cpu_us / bare_us, None, parts)]
    if case.most_commands is not None:
        figures.append(Figure(f"{case}: commands of a request", one.commands, case.most_commands))
    return figures


async def bare_cost_us(client: Any, times: int = 1_000) -> float:
    """Microseconds of the server for a call that does nothing."""
    sha, costs = await client.script_load(BARE), []
    for _ in range(3):
        before = await Counted.now(client)
        for _ in range(times):
            await client.evalsha(sha, 1, "bare", b"x" * 60)
        costs.append((await Counted.now(client)).since(before, times).cpu_us)
    return statistics.median(costs)


async def kept_bytes(client: Any, pools: Sequence[Pool], case: Case) -> Figure:
    """What the store keeps for a further one that waits."""
    crowd = Lives(pools, case)
    await crowd.fill()
    before = await memory(client)
    for number in range(case.waiting):
        await crowd.enter(1 + number % 4)
    await asyncio.sleep(10 * APART_S)
    crowd.is_over = True
    return Figure("bytes in the store for one that waits", (await memory(client) - before) / case.waiting, 1)


async def memory(client: Any) -> int:
    """The bytes of all keys."""
    return sum([await client.memory_usage(key, samples=0) or 0 for key in await client.keys("*")])


async def latency(client: Any, pool: Pool, rounds: int) -> Figure:
    """The p50 of an admission that nothing is in the way of, to that of a call that does nothing."""
    sha, ask = await client.script_load(BARE), Ask(NORMAL, "acme", 1, 1_000, 1)
    ours: list[float] = []
    bare: list[float] = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        lease = await pool.enter(ask)
        await lease.wait()
        ours.append(time.perf_counter() - began_s)
        lease.settle()
        await asyncio.sleep(2 * APART_S)
        began_s = time.perf_counter()
        await client.evalsha(sha, 1, "bare", b"x" * 60)
        bare.append(time.perf_counter() - began_s)
    p50, p50_bare = statistics.median(ours) * 1e6, statistics.median(bare) * 1e6
    name = "p50 of an admission that nothing is in the way of, to a bare EVALSHA"
    return Figure(name, p50 / p50_bare, 3, {"us": p50, "us, a bare EVALSHA": p50_bare})


async def apart(pools: Sequence[Pool], each: int) -> Figure:
    """How far two tenants with a backlog on every replica are apart, at any moment, in requests that were admitted."""
    admitted: Counter[str] = Counter()
    most = 0

    async def request(pool: Pool, tenant: str) -> None:
        nonlocal most
        lease = await pool.enter(Ask(NORMAL, tenant, 1, TOKENS, 1))
        await lease.wait()
        admitted[tenant] += 1
        if min(admitted["a"], admitted["b"]) < 0.9 * len(pools) * each:  # then one of them has no backlog any more
            most = max(most, abs(admitted["a"] - admitted["b"]))
        await asyncio.sleep(0.002)
        lease.settle()

    blocker = await pools[0].enter(Ask(NORMAL, "first", 1, TOKENS, 1))
    await blocker.wait()
    requests = [asyncio.ensure_future(request(pool, tenant)) for _ in range(each) for pool in pools for tenant in "ab"]
    await asyncio.sleep(1)
    blocker.settle()
    await asyncio.gather(*requests)
    return Figure(f"two tenants with a backlog, {len(pools)} replicas: requests apart", most, 2)


async def measure(url: str, quick: bool) -> list[Figure]:
    """Measures and prints one figure after the other."""
    figures: list[Figure] = []

    def show(*found: Figure) -> None:
        figures.extend(found)
        print("\n".join(line for figure in found for line in figure.lines()), flush=True)

    full = Case(1, 400)
    async with plain_client(url) as client:
        for case in CASES:
            async with replicas(url, case, 2) as pools:
                show(*await lives(client, pools, case, 5 if quick else 60))
        async with replicas(url, full, 3) as pools:
            show(await kept_bytes(client, pools, full))
        async with replicas(url, Case(1, 0), 1) as pools:
            show(await latency(client, pools[0], 20 if quick else 200))
        async with replicas(url, Case(1, 0), 4, leases=1) as pools:
            show(await apart(pools, 10 if quick else 50))
    return figures


def main() -> int:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures as JSON")
    parser.add_argument("--quick", action="store_true", help="short rounds: to see that it runs, not to quote")
    arguments = parser.parse_args()
    with running_server() as server:
        print(version_of(server) + (", quick" if arguments.quick else ""), flush=True)
        figures = uvloop.run(measure(server.url, arguments.quick))
    if arguments.json:
        records = [asdict(figure) | {"is_met": figure.is_met} for figure in figures]
        arguments.json.write_text(json.dumps(records, indent=2) + "\n")
    missed = [figure.name for figure in figures if not figure.is_met]
    print("\nevery target is met" if not missed else f"\nTHE TARGET IS MISSED: {'; '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
