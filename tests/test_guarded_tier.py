"""A tier that is held to its SLO, in real processes: its figures are its clients', and its share outlives faults."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cluster.replicas import CHAT, Replica, address, replicas, started
from tests.support.redis_servers import RedisServer, first_binary

pytestmark = pytest.mark.anyio
POLICY = f"""\
engine: vllm
capacity: {{tokens: 1M, requests: 64}}
tiers:
  chat: {{slo: {{ttft: 2s, tpot: 1s, hold: 97%}}}}
  batch: {{}}
default_tier: batch
anonymous: chat
endpoints:
  {CHAT}: {{}}
"""
TTFT_S = 2.0
IN_TIME, LATE = 6, 4


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "store"
    folder.mkdir()
    with RedisServer(first_binary(), folder) as server:
        yield server


async def ask(client: aiohttp.ClientSession, url: str, tier: str, tokens: int) -> float:
    """One request. Returns its time to the first byte."""
    body = {"model": "m", "stream": True, "max_tokens": tokens, "messages": [{"role": "user", "content": "hello"}]}
    began_s = time.monotonic()
    async with client.post(url + CHAT, json=body, headers={"x-priority": tier}) as response:
        assert response.status == 200, await response.text()
        await response.content.readany()
        first_s = time.monotonic() - began_s
        await response.read()
    return first_s


async def guard(client: aiohttp.ClientSession, replica: Replica) -> Any:
    async with client.get(f"{replica.admin_url}/state") as response:
        return (await response.json())["pool"]["tiers"][0]["guard"]


async def test_met_and_missed_are_what_the_clients_measured(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    engine_log, log = tmp_path / "engine", tmp_path / "sidecar"
    emulated = ("emulate", "--engine", "vllm", "--port", "0", "--step-ms", "5", "--max-num-seqs", "64")
    with started(engine_log, *emulated) as engine:
        upstream = address(engine, engine_log)
        served = ("--policy", str(tmp_path), "--port", "0", "--admin-port", "0")
        with started(log, "serve", "--upstream", upstream, *served) as process:
            replica = Replica(process, address(process, log), address(process, log))
            async with aiohttp.ClientSession() as client:
                first = [await ask(client, replica.url, "chat", 3) for _ in range(IN_TIME)]
                fault = [{"kind": "slow_headers", "delay_s": TTFT_S + 0.5}]
                async with client.post(f"{upstream}/_emulator/faults", json=fault) as response:
                    assert response.status == 200
                first += await asyncio.gather(*[ask(client, replica.url, "chat", 3) for _ in range(LATE)])
                missed = sum(first_s > TTFT_S for first_s in first)
                assert missed >= LATE
                assert (await guard(client, replica))["requests"] == {"met": len(first) - missed, "missed": missed}
                async with client.get(f"{replica.admin_url}/metrics") as response:
                    page = await response.text()
    name = "admission_guard_requests_total"
    counted = {line.partition('admission_slo="')[2][:3]: line.split()[-1] for line in page.splitlines() if name in line}
    assert (float(counted["met"]), float(counted["mis"])) == (len(first) - missed, missed)


@asynccontextmanager
async def load(client: aiohttp.ClientSession, urls: list[str], answers: list[tuple[str, str]]) -> AsyncIterator[None]:
    """Clients of both tiers, at each replica, which note their `answers`. Those of one that has died end."""

    async def keeps_asking(url: str, tier: str) -> None:
        while True:
            try:
                await ask(client, url, tier, 5 if tier == "chat" else 60)
            except (aiohttp.ClientError, OSError):
                return
            answers.append((url, tier))
            await asyncio.sleep(0.2 if tier == "chat" else 0)

    tiers = ["chat"] * 4 + ["batch"] * 20
    clients = [asyncio.ensure_future(keeps_asking(url, tier)) for url in urls for tier in tiers]
    try:
        yield
    finally:
        for each in clients:
            each.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def test_a_share_goes_on_when_its_store_is_emptied_and_a_replica_dies(tmp_path: Path, store: RedisServer) -> None:
    answers: list[tuple[str, str]] = []
    with replicas(tmp_path, 2, POLICY, stores=[store.url] * 2) as (rude, other):
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
            load(client, [rude.url, other.url], answers),
        ):
            end_s = time.monotonic() + 60
            while (before := (await guard(client, other))["share"]) < 0.115:
                assert time.monotonic() < end_s, before
                await asyncio.sleep(0.1)
            store.command("FLUSHALL")
            rude.process.kill()
            answers.clear()
            shares = {before}
            while len(shares) < 3 or answers.count((other.url, "batch")) < 4:
                assert time.monotonic() < end_s + 60, (shares, answers)
                shares.add((await guard(client, other))["share"])
                await asyncio.sleep(0.1)
            assert before * 0.69 < min(shares) <= max(shares) < 0.5
            assert (other.url, "chat") in answers
