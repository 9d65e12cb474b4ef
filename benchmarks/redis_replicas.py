"""What a hundred replicas of one pool cost one Redis: idle, and under load.

    python -m benchmarks.redis_replicas [--replicas N] [--rates R R] [--seconds S] [--note TEXT]

The replicas are pools of one process on uvloop; the server is real, and has a core of its own where there are two.
Each pool keeps its connections, heartbeats and subscription, and shares a report of full size every two seconds. Under
load, requests come at random times to random pools, are admitted at once, and hold their room for 50 ms on average.
Where the process cannot send so many, it says how many it sent: no figure is extrapolated.

All replicas share one event loop. When it is busy, more operations travel in one call than from processes of their own,
which make up to two calls for a request. The lower rate is one at which they nearly do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvloop

from benchmarks.redis_setup import NORMAL, plain_client, replica, running_server, shipped_policy, version_of
from sidecar.cluster.document import OldestWaiter, TierWaits
from sidecar.cluster.overview import SHARE_EVERY_S
from sidecar.cluster.report import EngineReport, ReplicaReport, pack
from sidecar.engines.view import Amount
from sidecar.pools import Ask, Pool

REPLICAS, RATES, SECONDS = 100, (1_000.0, 5_000.0), 12
ASK = Ask(NORMAL, "acme", 1, 1_000, 1)
HOLD_S = (0.02, 0.08)
ROOM_FOR_ALL = 20
"""So many times the shipped pool: no request waits, so that the rate is that of the arrivals."""
MOST_AT_ONCE = 1_500
"""Requests under way. Arrivals beyond them are dropped: the process is at its limit."""
SLOW_US = 100
"""Runs of a script that take longer are in the server's own log."""
Sharing = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Counts:
    """The server's own counters at one moment."""

    at_s: float
    cpu_s: float
    read_bytes: int
    sent_bytes: int
    scripts: int

    @classmethod
    async def now(cls, client: Any) -> Counts:
        """As they are."""
        info = await client.info("everything")
        scripts = sum(info.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "fcall"))
        return cls(
            time.monotonic(),
            info["used_cpu_user"] + info["used_cpu_sys"],
            info["total_net_input_bytes"],
            info["total_net_output_bytes"],
            scripts,
        )


def full_report(number: int) -> bytes:
    """A report of 5 tiers in which requests wait, and of 8 engines, as it travels."""
    chance = random.Random(number)
    name, host = f"{chance.getrandbits(64):016x}", f"host-{number}"
    tiers = [
        TierWaits(
            f"tier-{tier}",
            Amount(chance.randrange(100_000), chance.randrange(100)),
            OldestWaiter(chance.random(), chance.random(), {"tier-0": chance.randrange(100_000)}, name),
        )
        for tier in range(5)
    ]
    engines = [EngineReport(f"engine-{at}", f"engine-{at}#1", "ready", chance.randrange(100)) for at in range(8)]
    return pack(ReplicaReport(name, host, 3, 4, "g", "enforce", engines=engines, tiers=tiers))


async def keep_sharing(share: Sharing, first_in_s: float) -> None:
    """Shares every two seconds, as a replica does."""
    await asyncio.sleep(first_in_s)
    while True:
        await share()
        await asyncio.sleep(SHARE_EVERY_S)


@asynccontextmanager
async def sharing(shares: Sequence[Sharing]) -> AsyncIterator[None]:
    """While the block runs, all share, spread over the two seconds."""
    chance = random.Random(5)
    tasks = [asyncio.ensure_future(keep_sharing(share, chance.uniform(0, SHARE_EVERY_S))) for share in shares]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()  # its failure is ours
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Load:
    """Requests at random times to random pools."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        self._pools = pools
        self._chance = random.Random(9)
        self._under_way: set[asyncio.Task[None]] = set()
        self.settled = 0
        self.waited = 0
        self.dropped = 0

    async def run(self, rate: float, for_s: float) -> None:
        """So many requests a second, for so long."""
        due, end_s = time.monotonic(), time.monotonic() + for_s
        while due < end_s:
            due += self._chance.expovariate(rate)
            if due > time.monotonic():
                await asyncio.sleep(due - time.monotonic())
            elif len(self._under_way) >= MOST_AT_ONCE:
                self.dropped += 1
                await asyncio.sleep(0)
                continue
            task = asyncio.ensure_future(self._request())
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
        await asyncio.gather(*self._under_way)

    async def _request(self) -> None:
        lease = await self._chance.choice(self._pools).enter(ASK)
        self.waited += lease.grant is None
        await lease.wait()
        await asyncio.sleep(self._chance.uniform(*HOLD_S))
        lease.settle()
        self.settled += 1


class Bench:
    """One server with all replicas of a pool."""

    def __init__(self, client: Any, pools: Sequence[Pool], seconds: float) -> None:
        self._client = client
        self._pools = pools
        self._seconds = seconds
        self._reports = [full_report(number) for number in range(len(pools))]
        self.report_bytes = sum(map(len, self._reports)) / len(pools)

    def shares(self) -> list[Sharing]:
        """Each replica shares as it does."""

        def of(pool: Pool, packed: bytes) -> Sharing:
            async def share() -> None:
                await pool.share(packed)

            return share

        return [of(pool, packed) for pool, packed in zip(self._pools, self._reports, strict=True)]

    async def measure(self, name: str, shares: Sequence[Sharing], rate: float = 0) -> None:
        """Prints one row of figures."""
        load = Load(self._pools)
        async with sharing(shares):
            await asyncio.sleep(2 * SHARE_EVERY_S + 0.5)  # all have shared
            await self._client.execute_command("SLOWLOG", "RESET")
            before = await Counts.now(self._client)
            await (load.run(rate, self._seconds) if rate else asyncio.sleep(self._seconds))
            after = await Counts.now(self._client)
        longest_us = await self._longest_us()
        for_s = after.at_s - before.at_s
        print(f"\n{name}")
        if rate:
            print(f"    requests a second, of {rate:,.0f} wanted{load.settled / for_s:34,.0f}")
            print(f"    of them waited{load.waited / load.settled:51.1%}")
            print(f"    runs of a script per request{(after.scripts - before.scripts) / load.settled:37.2f}")
        print(f"    processor time of Redis, of one core{(after.cpu_s - before.cpu_s) / for_s:29.1%}")
        print(f"    MB/s to Redis{(after.read_bytes - before.read_bytes) / for_s / 1e6:52.2f}")
        print(f"    MB/s from Redis{(after.sent_bytes - before.sent_bytes) / for_s / 1e6:50.2f}")
        print(f"    runs of a script a second{(after.scripts - before.scripts) / for_s:40,.0f}")
        longest = f"{longest_us / 1000:.2f}" if longest_us else f"under {SLOW_US / 1000}"
        print(f"    longest run of a script, ms{longest:>38}", flush=True)

    async def _longest_us(self) -> int:
        entries = await self._client.slowlog_get(100_000)
        return max(
            (entry["duration"] for entry in entries if entry["command"].startswith((b"EVALSHA", b"FCALL"))), default=0
        )


async def measure(url: str, arguments: argparse.Namespace) -> None:
    """All rows, one after the other."""
    policy = shipped_policy("replicas", ROOM_FOR_ALL)
    async with plain_client(url) as client, AsyncExitStack() as stack:
        await client.config_set("slowlog-log-slower-than", SLOW_US)
        await client.config_set("slowlog-max-len", 100_000)
        pools = [await stack.enter_async_context(replica(url, policy)) for _ in range(arguments.replicas)]
        bench = Bench(client, pools, arguments.seconds)
        print(f"{arguments.replicas} replicas; a report has {bench.report_bytes:,.0f} bytes", flush=True)
        await bench.measure("idle, without reports", [])
        await bench.measure("idle", bench.shares())
        for rate in arguments.rates:
            await bench.measure("under load", bench.shares(), rate)


def main() -> int:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    parser.add_argument("--rates", type=float, nargs="*", default=RATES, help="requests a second, of all replicas")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each row")
    parser.add_argument("--note", default="", help="what else the machine did, for the first line")
    arguments = parser.parse_args()
    with running_server() as server, contextlib.suppress(KeyboardInterrupt):
        print(", ".join(filter(None, (version_of(server), arguments.note))))
        uvloop.run(measure(server.url, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
