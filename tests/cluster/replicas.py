"""`sidecar serve` in processes of their own before an emulated engine, and requests that overload them."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

CHAT = "/v1/chat/completions"
POLICY = f"""\
engine: vllm
capacity: {{tokens: 100k, requests: 4}}
tiers:
  high: {{slo: {{ttft: 500ms}}}}
  batch: {{}}
default_tier: batch
anonymous: high
endpoints:
  {CHAT}: {{}}
"""


@dataclass
class Replica:
    """A running sidecar."""

    process: subprocess.Popen[str]
    url: str
    admin_url: str

    async def refused(self) -> str:
        """Has it refuse a request; returns the request's id."""
        headers = {"authorization": "Bearer nobody"}
        async with (
            aiohttp.ClientSession() as client,
            client.post(self.url + CHAT, json={}, headers=headers) as response,
        ):
            assert response.status == 401
            return response.headers["x-request-id"]

    async def overview(self) -> Any:
        """What it shows."""
        async with aiohttp.ClientSession() as client, client.get(f"{self.admin_url}/overview") as response:
            return await response.json()


async def until_shown(replica: Replica, condition: Callable[[Any], bool]) -> Any:
    """Waits until its overview is so, and returns it."""
    end_s = time.monotonic() + 60
    while not condition(shown := await replica.overview()):
        told = ("store", "replicas", "held", "headline", "notices", "tiers")
        assert time.monotonic() < end_s, {name: shown[name] for name in told}
        await asyncio.sleep(0.1)
    return shown


@contextmanager
def started(log: Path, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """`sidecar ...`, which writes its errors to `log`."""
    inherited = {name: value for name, value in os.environ.items() if name != "SIDECAR_STORE"}
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "sidecar.cli", *arguments],
            stdout=subprocess.PIPE, stderr=errors, text=True, env={**inherited, **environment},
        )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()


def address(process: subprocess.Popen[str], log: Path) -> str:
    """The address in the next line that it prints."""
    found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
    assert found, log.read_text()
    return found[0]


@contextmanager
def replicas(
    folder: Path,
    count: int,
    policy: str = POLICY,
    *,
    stores: Sequence[str] = (),
    engine_options: Sequence[str] = (),
    **environment: str,
) -> Iterator[list[Replica]]:
    """So many sidecars before one engine. `environment` is for all of them, `stores` has an address for each."""
    path = folder / "policy.yaml"
    path.write_text(policy)
    emulated = (
        "emulate",
        "--engine",
        "vllm",
        "--port",
        "0",
        "--step-ms",
        "10",
        "--max-num-seqs",
        "64",
        *engine_options,
    )
    with ExitStack() as stack:
        engine = stack.enter_context(started(folder / "engine", *emulated))
        upstream = address(engine, folder / "engine")
        logs = [folder / f"sidecar-{number}" for number in range(count)]
        served = ("serve", "--upstream", upstream, "--policy", str(path), "--port", "0", "--admin-port", "0")
        of_each = [{"SIDECAR_STORE": store} for store in stores] or [{}] * count
        sidecars = [
            stack.enter_context(started(log, *served, **environment, **of_one))
            for log, of_one in zip(logs, of_each, strict=True)
        ]
        yield [
            Replica(sidecar, address(sidecar, log), address(sidecar, log))
            for sidecar, log in zip(sidecars, logs, strict=True)
        ]


@asynccontextmanager
async def overload(urls: Sequence[str], batch: int = 6, high: int = 3) -> AsyncIterator[None]:
    """While the block runs: twice as many clients as there are places, and those of `high` at once come again."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def keeps_asking(url: str, tier: str) -> None:
            body = {"model": "m", "stream": True, "max_tokens": 20, "messages": [{"role": "user", "content": "hello"}]}
            while True:
                async with client.post(url + CHAT, json=body, headers={"x-priority": tier}) as response:
                    await response.read()
                if response.status != 200:
                    await asyncio.sleep(0.1)

        tiers = ["batch"] * batch + ["high"] * (high + 2)
        clients = [
            asyncio.ensure_future(keeps_asking(urls[number % len(urls)], tier)) for number, tier in enumerate(tiers)
        ]
        try:
            yield
        finally:
            for asking in clients:
                asking.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
