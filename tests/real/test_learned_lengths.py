"""Learned output lengths before a real vLLM whose KV cache is small: more run at once, and its preemptions are heard.

An answer's length is the test's: `min_tokens` keeps the ending token away, and its bias brings it then. `max_tokens`
stays large, as clients write it.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.real.lab import MODEL, vllm
from tests.support.commands import address

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

TOKENS = 128 * 32
"""Of the engine's KV cache: blocks, and the tokens of one, the fewest that vLLM allows on a CPU."""
MAX_TOKENS = 700
ENDING = 2
"""The token that ends an answer of the lab's model."""


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    cache = ("--num-gpu-blocks-override", "128", "--block-size", "32", "--no-enable-prefix-caching")
    with vllm(scheduling="fcfs", sequences=64, arguments=cache, variables={"MAXLEN": "1024"}) as engine:
        yield engine.url


class Stand:
    """A sidecar before the engine."""

    def __init__(self, client: aiohttp.ClientSession, url: str, engine_url: str, log: Path) -> None:
        self.client = client
        self.url = url
        self.engine_url = engine_url
        self.log = log

    async def ask(self, length: int) -> None:
        """A streamed answer of so many tokens; fails where it is not one, or is not complete."""
        body = {
            "model": MODEL,
            "prompt": "the queue",
            "max_tokens": MAX_TOKENS,
            "min_tokens": length - 1,
            "logit_bias": {str(ENDING): 100},
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with self.client.post(f"{self.url}/v1/completions", json=body) as answer:
            text = await answer.text()
        assert answer.status == 200, text
        assert text.endswith("data: [DONE]\n\n")
        assert re.findall(r'"completion_tokens":(\d+)', text)[-1] == str(length)

    async def ask_all(self, length: int, count: int) -> int:
        """So many at once. The most that vLLM ran at a time."""
        asked = [asyncio.ensure_future(self.ask(length)) for _ in range(count)]
        most = 0
        while not all(one.done() for one in asked):
            most = max(most, await self.engine("num_requests_running"))
            await asyncio.sleep(0.02)
        await asyncio.gather(*asked)
        return most

    async def engine(self, name: str) -> int:
        """A figure of vLLM's own page."""
        async with self.client.get(f"{self.engine_url}/metrics") as page:
            text = await page.text()
        return sum(int(float(value)) for value in re.findall(rf"^vllm:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE))

    def raised(self) -> list[float]:
        """The quantiles that preemptions brought, oldest first."""
        said = re.findall(
            r"requests that the engine preempted: \d+. Leases hold quantile ([\d.]+)", self.log.read_text()
        )
        return [float(quantile) for quantile in said]


@contextmanager
def serving(engine_url: str, folder: Path, learn: str) -> Iterator[tuple[str, Path]]:
    """A `sidecar serve` before the engine: its address, and its log."""
    policy, log = folder / "policy.yaml", folder / "log"
    policy.write_text(
        f"engine: vllm\ncapacity: {{from: engine, fraction: 100%, requests: 64, learn: {learn}}}\n"
        "tiers: {normal: {}}\ndefault_tier: normal\nanonymous: normal\n"
    )
    serve = [sys.executable, "-m", "sidecar.cli", "serve", "--upstream", engine_url, "--policy", str(policy)]
    ports = ["--port", "0", "--admin-port", "0"]
    with (
        log.open("w") as errors,
        subprocess.Popen([*serve, *ports], stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            yield address(process), log
        finally:
            process.kill()


@asynccontextmanager
async def stand(engine_url: str, folder: Path, learn: str) -> AsyncIterator[Stand]:
    timeout = aiohttp.ClientTimeout(total=180)
    with serving(engine_url, folder, learn) as (url, log):
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as client:
            yield Stand(client, url, engine_url, log)


@pytest.mark.parametrize("learn", ["off", "cautious", "full"])
async def test_what_was_learned_lets_more_requests_run_at_once(engine_url: str, tmp_path: Path, learn: str) -> None:
    by_maximum = TOKENS // MAX_TOKENS
    async with stand(engine_url, tmp_path, learn) as it:
        preempted = await it.engine("num_preemptions_total")
        assert await it.ask_all(48, 20) <= by_maximum, "the old rule, while too little is known"
        await it.ask_all(48, 40)
        most = await it.ask_all(48, 60)
        if learn == "off":
            assert most <= by_maximum
        else:
            assert most >= 4 * by_maximum
        assert await it.engine("num_preemptions_total") == preempted
        assert not it.raised()


@pytest.mark.parametrize(("learn", "next_step"), [("cautious", 0.975), ("full", 0.95)])
async def test_preemptions_in_the_engine_raise_the_quantile(
    engine_url: str, tmp_path: Path, learn: str, next_step: float
) -> None:
    async with stand(engine_url, tmp_path, learn) as it:
        await it.ask_all(8, 60)
        preempted = await it.engine("num_preemptions_total")
        await it.ask_all(250, 32)  # admitted as if they had 8 tokens; all of them together need twice the cache
        assert await it.engine("num_preemptions_total") > preempted + 1, "else there was nothing to hear"
        for _ in range(50):
            if it.raised():
                break
            await asyncio.sleep(0.1)
        assert it.raised()[0] == next_step
