"""Learned lengths as an operator sees them: a sidecar before an emulated engine, over HTTP.

The emulated engine answers with 40 tokens where the client sets no maximum, and with the maximum where it sets one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.in_process import emulated_engine, served_sidecar

pytestmark = pytest.mark.anyio

ANSWER = 40
ASSUMED = 400
"""`default_output_tokens`: what the old rule holds for a request without a maximum."""
CAPACITY = 4_000


def policy_of(folder: Path, learn: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "policy.yaml"
    path.write_text(
        f"engine: vllm\ncapacity: {{tokens: {CAPACITY}, requests: 200, learn: {learn}}}\n"
        f"tiers:\n  normal: {{default_output_tokens: {ASSUMED}}}\n"
        "default_tier: normal\nanonymous: normal\nendpoints:\n  /v1/chat/completions: {}\n"
    )
    return path


@dataclass(frozen=True)
class Stand:
    """A sidecar before an engine."""

    session: aiohttp.ClientSession
    url: str
    admin: str

    async def ask(self, text: str = "go", **fields: object) -> tuple[int, str]:
        body = {"model": "emulated", "messages": [{"role": "user", "content": text}], "stream": True, **fields}
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body) as response:
            return response.status, (await response.read()).decode()

    async def pool(self) -> Any:
        async with self.session.get(f"{self.admin}/state") as response:
            return (await response.json())["pool"]

    async def held(self) -> tuple[int, int]:
        pool = await self.pool()
        return pool["tiers"][0]["held"]["tokens"], pool["leases"]

    async def most_at_once(self, requests: int) -> int:
        """Asks so many times at once, and returns the most leases that were seen."""
        tasks = [asyncio.ensure_future(self.ask()) for _ in range(requests)]
        most = 0
        while not all(task.done() for task in tasks):
            most = max(most, (await self.held())[1])
            await asyncio.sleep(0.05)
        assert {task.result()[0] for task in tasks} == {200}
        return most


@contextmanager
def started(policy: Path, step_ms: int) -> Iterator[tuple[str, str]]:
    engine = ("--engine", "vllm", "--max-num-seqs", "200", "--step-ms", str(step_ms), "--output-tokens", str(ANSWER))
    with emulated_engine(*engine) as upstream, served_sidecar(policy, upstream) as urls:
        yield urls


@asynccontextmanager
async def stand(folder: Path, learn: str, step_ms: int = 10) -> AsyncIterator[Stand]:
    with started(policy_of(folder, learn), step_ms) as (url, admin):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            yield Stand(session, url, admin)


@pytest.mark.long
@pytest.mark.parametrize("learn", ["off", "cautious", "full"])
async def test_fifty_answers_later_the_pool_admits_as_many_as_really_fit(tmp_path: Path, learn: str) -> None:
    async with stand(tmp_path, learn) as it:
        before = await it.most_at_once(60)
        assert before <= CAPACITY // ASSUMED, "the old rule, while nothing is known"
        after = await it.most_at_once(90)
        if learn == "off":
            assert after <= CAPACITY // ASSUMED
        else:
            assert after >= 4 * before
        assert await it.held() == (0, 0)


@pytest.mark.long
async def test_a_disconnect_in_mid_stream_leaves_nothing_and_teaches_nothing_short(tmp_path: Path) -> None:
    async with stand(tmp_path, "cautious", step_ms=20) as it:
        for _ in range(60):
            body = {"model": "emulated", "messages": [{"role": "user", "content": "go"}], "stream": True}
            async with it.session.post(f"{it.url}/v1/chat/completions", json=body) as response:
                await response.content.readany()
                response.close()
        for _ in range(100):
            if await it.held() == (0, 0):
                break
            await asyncio.sleep(0.05)
        assert await it.held() == (0, 0)
        assert await it.most_at_once(30) <= CAPACITY // ASSUMED, "sixty answers cut short say nothing of the length"
