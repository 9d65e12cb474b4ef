"""A store that comes back empty for a moment and is gone again, with three replicas before one engine.

A real server, and a proxy before it that cuts it off. Each trial begins with three `sidecar serve` that know of each
other and are busy; then the store is gone, is back and empty for 0.1 to 0.6 s, and is gone again, twice. In a second
series it is emptied twice within 0.6 s, while two replicas hold long requests and are silent and the third has many
waiting. The engine counts what it runs at once.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.adversary.engine import ANSWER_HEADER, Engine, body_of, running
from benchmarks.adversary.report import Line
from benchmarks.adversary.serving import Proxy, pool_in, proxy, state_of
from benchmarks.redis_setup import chosen_binary
from tests.support.fault_proxy import FaultProxy
from tests.support.redis_servers import RedisServer

REPLICAS, PLACES, WORKERS = 3, 12, 12
FLAPS, FLUSHES = 20, 10
ANSWER_S, BUSY_S, GONE_S, AFTER_S, BACK_S = 0.3, 0.8, (0.8, 1.4), 1.0, (0.1, 0.6)
LONG_S, LONG_EACH = 5.0, 4
READY_WITHIN_S = 30.0
POLICY = f"""\
engine: none
pool: adversary
capacity: {{requests: {PLACES}}}
tiers:
  only: {{}}
default_tier: only
anonymous: only
sources: [key]
endpoints:
  /v1/chat/completions: {{}}
"""
BODY = body_of({"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1})


@dataclass(slots=True)
class Setting:
    """Everything that runs."""

    engine: Engine
    store: FaultProxy
    server: RedisServer
    replicas: Sequence[Proxy]
    client: aiohttp.ClientSession
    luck: random.Random
    admitted: int = 0
    busy: frozenset[int] = frozenset(range(REPLICAS))
    is_over: bool = False

    async def empty(self) -> None:
        """The store loses all that it had, as when it is restarted."""
        for words in (("FLUSHALL",), ("SCRIPT", "FLUSH")):
            await asyncio.to_thread(self.server.command, *words)

    def cut_off(self) -> None:
        """The replicas cannot reach the store any more."""
        self.store.refuse = True
        self.store.drop_connections()


async def rows() -> AsyncIterator[Line]:
    """The engine's peak of both series, and a control: nothing is done to the store."""
    async with setting() as found:
        yield judged("control, the store stays: engine's peak", [await trial(found, _nothing) for _ in range(2)])
        flapping = [await trial(found, flap) for _ in range(FLAPS)]
        yield judged(f"store flapping with three replicas, {FLAPS} trials: engine's peak", flapping)
        flushed = [await trial(found, flush_twice) for _ in range(FLUSHES)]
        yield judged(f"FLUSHALL twice within 0.6 s, {FLUSHES} trials: engine's peak", flushed)
        yield Line("  requests answered meanwhile", f"{found.admitted:,}")
        yield Line("  defects that the replicas logged", f"{sum(one.defects() for one in found.replicas):,}")


def judged(attack: str, peaks: Sequence[int]) -> Line:
    """The highest of all trials. It also fails where the engine was never full: then nothing was attacked."""
    over = sum(peak > PLACES for peak in peaks)
    figure = f"{max(peaks)}, above in {over} of {len(peaks)}"
    return Line(attack, figure, f"at most {PLACES}, and no fewer", max(peaks) == PLACES)


async def trial(found: Setting, attack: Callable[[Setting], Awaitable[None]]) -> int:
    """The engine's peak from the moment at which all is well until some time after the attack."""
    found.store.refuse = False
    await _all_shared(found)
    await asyncio.sleep(BUSY_S)
    found.engine.peak = found.engine.running
    await attack(found)
    await asyncio.sleep(AFTER_S)
    return found.engine.peak


async def flap(found: Setting) -> None:
    """Gone, back and empty for a moment, gone; and once more."""
    for _ in range(2):
        found.cut_off()
        await found.empty()
        await asyncio.sleep(found.luck.uniform(*GONE_S))
        found.store.refuse = False
        await asyncio.sleep(found.luck.uniform(*BACK_S))
    found.cut_off()
    await asyncio.sleep(GONE_S[0])


async def flush_twice(found: Setting) -> None:
    """Emptied, and again, while the replicas with long requests have no reason to call."""
    found.busy = frozenset()
    await _until(lambda: found.engine.running == 0)
    silent = [_answered(found, one.url, LONG_S) for one in found.replicas[1:] for _ in range(LONG_EACH)]
    long = asyncio.gather(*silent)
    await _until(lambda: found.engine.running == len(silent))
    found.busy = frozenset({0})
    await asyncio.sleep(BUSY_S)
    found.engine.peak = found.engine.running
    await found.empty()
    await asyncio.sleep(found.luck.uniform(*BACK_S))
    await found.empty()
    await long
    found.busy = frozenset(range(REPLICAS))


async def _nothing(_: Setting) -> None:
    """For the control."""


async def _until(condition: Callable[[], bool]) -> None:
    """Polls; a RuntimeError after some time."""
    deadline_s = asyncio.get_running_loop().time() + READY_WITHIN_S
    while not condition():
        if asyncio.get_running_loop().time() > deadline_s:
            raise RuntimeError(f"not within {READY_WITHIN_S:g} s")
        await asyncio.sleep(0.02)


async def _all_shared(found: Setting) -> None:
    """Returns when every replica shares the store and knows of the others; a RuntimeError where that takes too long."""
    deadline_s = asyncio.get_running_loop().time() + READY_WITHIN_S
    while True:
        stores = [pool_in(await state_of(found.client, one.admin))["store"] for one in found.replicas]
        if all(store["state"] == "shared" and store["replicas"] == REPLICAS for store in stores):
            return
        if asyncio.get_running_loop().time() > deadline_s:
            raise RuntimeError(f"not shared by all within {READY_WITHIN_S:g} s: {stores}")
        await asyncio.sleep(0.05)


@asynccontextmanager
async def setting(seed: int = 1) -> AsyncIterator[Setting]:
    """Starts everything under load, and ends it."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = stack.enter_context(RedisServer(chosen_binary(), Path(folder)))
        store = await stack.enter_async_context(FaultProxy(server.host, server.port))
        engine = await stack.enter_async_context(running(Engine(answer_s=ANSWER_S)))
        started = [proxy(engine.url, POLICY, SIDECAR_STORE=store.url()) for _ in range(REPLICAS)]
        replicas = [await stack.enter_async_context(one) for one in started]
        connector = aiohttp.TCPConnector(limit=0)
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        found = Setting(engine, store, server, replicas, client, random.Random(seed))
        workers = [_worker(found, number) for number in range(REPLICAS) for _ in range(WORKERS)]
        load = asyncio.gather(*workers)
        try:
            yield found
        finally:
            found.is_over, store.refuse = True, False
            await asyncio.wait_for(load, READY_WITHIN_S)


async def _worker(found: Setting, number: int) -> None:
    """One request after the other through one replica; one that is refused is sent again a moment later."""
    while not found.is_over:
        if number not in found.busy or not await _answered(found, found.replicas[number].url, ANSWER_S):
            await asyncio.sleep(0.05)


async def _answered(found: Setting, url: str, answer_s: float) -> bool:
    """One request that the engine answers after so long. Whether it was answered."""
    headers = {"content-type": "application/json", ANSWER_HEADER: str(answer_s)}
    async with found.client.post(f"{url}/v1/chat/completions", data=BODY, headers=headers) as response:
        await response.read()
        found.admitted += response.status == 200
        return response.status == 200
