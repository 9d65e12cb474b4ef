"""Trust before a real process: an emulated engine whose KV cache overflows, read as a pool reads it."""

from __future__ import annotations

import asyncio
import sys
import time
from fractions import Fraction

import aiohttp
import pytest

from sidecar.admission.engine_pages import EnginePages
from sidecar.engines import ENGINES
from sidecar.lengths.trust import Trust
from sidecar.policy.capacity import Capacity
from sidecar.policy.choices import CapacitySource, Learn
from sidecar.pools.engine_reader import EngineReader, Size
from sidecar.proxy.proxy import ReverseProxy

pytestmark = pytest.mark.anyio
CLIENTS = 12


def now_us() -> int:
    return time.monotonic_ns() // 1000


async def _resized(before: Size | None) -> None:
    del before


async def _asked(client: aiohttp.ClientSession, url: str) -> None:
    body = {"model": "m", "prompt": "one two three four five six seven eight", "max_tokens": 60}
    async with client.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200


@pytest.mark.parametrize(("engine", "rises"), [("vllm", True), ("sglang", True), ("tensorrt-llm", False)])
async def test_an_engine_that_preempts_raises_the_quantile_where_it_counts_that(engine: str, rises: bool) -> None:
    flags = ("--max-num-seqs", str(CLIENTS), "--kv-tokens", "250", "--step-ms", "1", "--port", "0", "--preempt")
    arguments = ("-m", "sidecar.cli", "emulate", "--engine", engine, *flags)
    emulator = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    assert emulator.stdout is not None
    url = (await asyncio.wait_for(emulator.stdout.readline(), 20)).decode().partition(" on ")[2].partition(",")[0]
    proxy, trust, admitted = ReverseProxy(url), Trust(Learn.FULL, now_us()), 0
    capacity = Capacity(read_from=CapacitySource.ENGINE, fraction=Fraction(1), waiting=2, requests=CLIENTS)
    reader = EngineReader(
        ENGINES[engine],
        capacity,
        EnginePages(proxy),
        now_us,
        resized=_resized,
        was_read=lambda: None,
        read_every_s=0.02,
    )
    reader.on_preemptions = lambda total, read_us: trust.preempted(total, read_us, admitted)
    try:
        await reader.open()
        async with aiohttp.ClientSession() as client:
            await _asked(client, url)  # alone it fits
            await asyncio.sleep(0.2)
            assert (trust.quantile, trust.is_raised) == (0.90, False)
            for _ in range(3):
                admitted += CLIENTS
                await asyncio.gather(*(_asked(client, url) for _ in range(CLIENTS)))
            await asyncio.sleep(0.2)
        assert trust.is_raised is rises
        assert (trust.quantile > 0.90) is rises
    finally:
        await reader.close()
        await proxy.close()
        emulator.terminate()
        await emulator.wait()
