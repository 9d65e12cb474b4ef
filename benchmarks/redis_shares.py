"""Whether the tiers get the same of a pool that two replicas share as of one, when traffic is spread unevenly.

Requests come at fixed moments, half as many again as the pool can serve. In every tier a heavy tenant sends four fifths
and a light one the rest, and every tenant sends four fifths of its own through one replica: the heavy tenants of the
tiers that matter most and the light ones of the others through the first, all others through the second. So no replica
sees the mix that the rules are for, and two pools of half the size, the negative control, get it wrong.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing import get_context
from typing import NamedTuple

import uvloop

from benchmarks.redis_setup import BATCH, CRITICAL, HIGH, LOW, NORMAL, Figure, replica, shipped_policy
from sidecar.pools import Ask, Pool
from sidecar.pools.local import LocalPool
from sidecar.pools.redis.partition import equal_part

TARGET = 5
OVERLOAD = 1.5
DEMAND = {CRITICAL: 0.05, HIGH: 0.20, NORMAL: 0.30, LOW: 0.20, BATCH: 0.25}
"""Each tier's part of the tokens that are asked for."""
MOSTLY = 0.8
TOKENS = (2_000, 18_000)
HOLD_S = (0.020, 0.050)
WARM_UP_S = 0.5
"""The queues fill up before anything counts."""
START_AFTER_S = 1.0
"""By then every process has opened its pool."""

Shares = Mapping[int, float]


class Arrival(NamedTuple):
    """One request: when it comes, through which replica, and what it wants to hold for how long."""

    at_s: float
    replica: int
    ask: Ask
    hold_s: float


class Part(NamedTuple):
    """What one process does in a run: all requests, or those of one of two replicas.

    `url` is None for a pool of its own with its part of the capacity. `start_at` is the moment by `time.time`.
    """

    url: str | None
    pool: str
    replicas: int
    replica: int
    start_at: float
    until_s: float


def shares(url: str, quick: bool) -> Figure:
    """The largest difference between a tier's share of two replicas and of one, in percentage points."""
    until_s = 1.2 if quick else 5.0
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
        list(processes.map(_get_ready, range(2)))
        one = _run(processes, url, "one", 1, until_s)
        two = _run(processes, url, "two", 2, until_s)
        halves = _run(processes, None, "halves", 2, until_s)
    control = _largest_difference(halves, one)
    if control <= TARGET:
        raise RuntimeError(f"two halves of the pool differ by {control:.1f} points: the comparison could not fail")
    name = "largest difference of a tier's share, two replicas to one, % points"
    parts = _parts(one, two, halves) | {"the same of two pools of half the size, the control": control}
    return Figure(name, _largest_difference(two, one), TARGET, parts)


def _parts(one: Shares, two: Shares, halves: Shares) -> dict[str, float | Sequence[float]]:
    return {
        f"% of the tokens, {tier.name}: one replica, two, two halves": [each[tier.level] for each in (one, two, halves)]
        for tier in shipped_policy("names").tiers
    }


def _largest_difference(some: Shares, others: Shares) -> float:
    return max(abs(some[level] - others[level]) for level in DEMAND)


def _get_ready(_: int) -> None:
    """Has a process started, with all its imports. It takes a moment so that both are needed."""
    time.sleep(0.3)


def _run(processes: ProcessPoolExecutor, url: str | None, pool: str, replicas: int, until_s: float) -> Shares:
    start_at = time.time() + START_AFTER_S
    parts = [Part(url, pool, replicas, number, start_at, until_s) for number in range(replicas)]
    admitted: Counter[int] = Counter()
    for tokens in processes.map(admitted_tokens, parts):
        admitted.update(tokens)
    return {level: 100 * admitted[level] / admitted.total() for level in DEMAND}


def admitted_tokens(part: Part) -> Counter[int]:
    """Runs a part to its end, and counts the tokens admitted by tier, from the warm-up to the last arrival."""
    return uvloop.run(_admitted_tokens(part))


async def _admitted_tokens(part: Part) -> Counter[int]:
    admitted: Counter[int] = Counter()
    async with _pool(part) as pool:
        if time.time() > part.start_at:
            raise RuntimeError("a process came too late for its run")
        requests = []
        for arrival in arrivals(part):
            await asyncio.sleep(part.start_at + arrival.at_s - time.time())
            requests.append(asyncio.ensure_future(_request(pool, arrival, part, admitted)))
        await asyncio.gather(*requests)
    return admitted


async def _request(pool: Pool, arrival: Arrival, part: Part, admitted: Counter[int]) -> None:
    lease = await pool.enter(arrival.ask)
    await lease.wait()
    if WARM_UP_S <= time.time() - part.start_at < part.until_s:
        admitted[arrival.ask.tier] += arrival.ask.tokens
    await asyncio.sleep(arrival.hold_s)
    lease.settle()


@asynccontextmanager
async def _pool(part: Part) -> AsyncIterator[Pool]:
    policy = shipped_policy(part.pool)
    if part.url is None:
        yield LocalPool(replace(policy, rules=equal_part(policy.rules, part.replicas)))
        return
    async with replica(part.url, policy) as pool:
        yield pool


def arrivals(part: Part) -> Iterator[Arrival]:
    """The same requests at the same moments, however many replicas there are; those that come through this one."""
    luck = random.Random(3)
    served_per_s = shipped_policy(part.pool).rules.tokens / (sum(TOKENS) / 2) / (sum(HOLD_S) / 2)
    at_s = 0.0
    while (at_s := at_s + luck.expovariate(served_per_s * OVERLOAD)) < part.until_s:
        arrival = _arrival(luck, at_s)
        if part.replicas == 1 or arrival.replica == part.replica:
            yield arrival


def _arrival(luck: random.Random, at_s: float) -> Arrival:
    level = luck.choices(list(DEMAND), list(DEMAND.values()))[0]
    is_light, strays = luck.random() >= MOSTLY, luck.random() >= MOSTLY
    ask = Ask(level, f"{'light' if is_light else 'heavy'}-{level}", 1, luck.randint(*TOKENS), 1)
    home = (level > NORMAL) ^ is_light ^ strays
    return Arrival(at_s, int(home), ask, luck.uniform(*HOLD_S))
