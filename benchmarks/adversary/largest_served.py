"""The attack of `largest` once more over HTTP, in real time, with the largest size found by the answers.

One run of two minutes before a real `sidecar serve`: its figures are noisier than those of `largest`, which it
confirms.
Pool use is read from `/state` four times a second. Waits are what the responses say; without one, what they are so far.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.adversary.engine import ANSWER_HEADER, Engine, body_of, running
from benchmarks.adversary.largest import LEAST_USE, LONGEST_LEASE_S, ORDINARY
from benchmarks.adversary.policies import HIGH, NORMAL, shipped, shipped_files
from benchmarks.adversary.report import Line, at_least, at_most
from benchmarks.adversary.serving import Proxy, held_in, proxy, state_of
from benchmarks.adversary.simulation import Traffic
from sidecar.tools.loadgen import quantile

PATH = "/v1/chat/completions"
KEYS = {HIGH: "sk-demo-interactive", NORMAL: "sk-demo-standard"}
"""The keys of the shipped tenants whose requests are of these tiers."""
WARM_UP_S, COMES_S, END_S = 15.0, 50.0, 110.0
LOOKS_EVERY_S = 0.25
SLACK_S = 1.0
"""Clients, the proxy, the engine and this process share few cores."""


@dataclass(slots=True)
class Seen:
    """Use by its moment, and high's waits by the moment at which they were sent. Seconds from the start."""

    used: list[tuple[float, float]] = field(default_factory=list)
    waits_s: list[tuple[float, float]] = field(default_factory=list)

    def use(self, from_s: float, until_s: float) -> float:
        """The mean share of the pool that was held in a stretch of time."""
        return statistics.fmean(share for at_s, share in self.used if from_s <= at_s < until_s)


async def rows() -> AsyncIterator[Line]:
    """The size, the use and the wait."""
    with shipped_files() as folder:
        async with running(Engine()) as engine, proxy(engine.url, folder) as where:
            tokens = await largest_accepted(where)
            yield Line("largest `max_tokens` without a key that is accepted over HTTP", f"{tokens:,}")
            seen = await attacked(where, tokens)
    use = seen.use(COMES_S, END_S) / seen.use(WARM_UP_S, COMES_S)
    yield at_least("  pool use over the minute after it came, to before", use, LEAST_USE)
    high_s = quantile([wait_s for at_s, wait_s in seen.waits_s if at_s >= COMES_S], 0.99)
    yield at_most("    high p99 wait over that minute", high_s, LONGEST_LEASE_S + SLACK_S, " s")


async def largest_accepted(where: Proxy) -> int:
    """The largest `max_tokens` that is not refused by the empty pool, by bisection."""
    least, most = 1, shipped().rules.tokens
    async with aiohttp.ClientSession() as client:
        while least < most:
            middle = (least + most + 1) // 2
            async with client.post(where.url + PATH, data=_body(middle)) as response:
                await response.read()
            least, most = (middle, most) if response.status == 200 else (least, middle - 1)
    return least


async def attacked(where: Proxy, tokens: int) -> Seen:
    """Ordinary requests throughout, and the large one at its moment."""
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client:
        run = _Run(client, where)
        run.start(run.look())
        for traffic in ORDINARY:
            run.start(run.ordinary(traffic))
        await asyncio.sleep(COMES_S)
        run.start(run.send(None, _body(tokens), LONGEST_LEASE_S))
        await asyncio.sleep(END_S - run.now_s())
        await run.stop()
    return run.seen


class _Run:
    """One run; times are seconds from its start."""

    def __init__(self, client: aiohttp.ClientSession, where: Proxy) -> None:
        self.seen = Seen()
        self._client = client
        self._where = where
        self._tasks: set[asyncio.Task[None]] = set()
        self._began_s = asyncio.get_running_loop().time()

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() - self._began_s

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._tasks.discard(task)

    async def stop(self) -> None:
        """Ends all that goes on. Raises what a task ended with."""
        failed = [task.exception() for task in self._tasks if task.done() and not task.cancelled()]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for error in failed:
            if error is not None:
                raise error

    async def look(self) -> None:
        """Notes how much of the pool is held."""
        rules = shipped().rules
        while True:
            held = held_in(await state_of(self._client, self._where.admin))
            self.seen.used.append((self.now_s(), max(held.tokens / rules.tokens, held.requests / rules.requests)))
            await asyncio.sleep(LOOKS_EVERY_S)

    async def ordinary(self, traffic: Traffic) -> None:
        """Sends one tier's requests when their time has come."""
        luck, at_s = random.Random(traffic.tier), 0.0
        for gap_s in traffic.gaps_s(shipped().rules.tokens, luck):
            at_s += gap_s
            await asyncio.sleep(at_s - self.now_s())
            self.start(self.send(traffic.tier, _body(traffic.sizes(luck)), luck.uniform(*traffic.held_s)))

    async def send(self, tier: int | None, body: bytes, held_s: float) -> None:
        """One request, without a key where `tier` is None. Raises RuntimeError where it is not answered with 200."""
        headers = {"content-type": "application/json", ANSWER_HEADER: f"{held_s:.3f}"}
        if tier is not None:
            headers["authorization"] = f"Bearer {KEYS[tier]}"
        sent_s, wait_s = self.now_s(), None
        try:
            async with self._client.post(self._where.url + PATH, data=body, headers=headers) as response:
                await response.read()
                if response.status != 200:
                    raise RuntimeError(f"{response.status} for an ordinary request")
                wait_s = int(response.headers["x-admission-wait-ms"]) / 1000
        finally:
            if tier == HIGH:  # one that runs, or waits, at the end: at most as long as it was there without its lease
                still_s = max(0.0, self.now_s() - sent_s - held_s)
                self.seen.waits_s.append((sent_s, still_s if wait_s is None else wait_s))


def _body(tokens: int) -> bytes:
    return body_of({"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens})
