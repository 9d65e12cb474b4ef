"""Makes the pictures of the page in docs/pictures anew: `python -m tests.admin.pictures [SECONDS]`.

Two sidecars of one pool in a real store, before an emulated engine that is asked for more than it can do half of the
time. After five minutes, which is the default, the page's plots are full.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import aiohttp

from sidecar.policy.compiler import shipped_policies
from tests.cluster.replicas import CHAT, address, started
from tests.support.devtools import headless, tab
from tests.support.png import smaller
from tests.support.redis_servers import RedisServer, first_binary

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
PER_SECOND = {"critical": 0.6, "high": 6.0, "normal": 9.0, "low": 1.5, "batch": 5.0}
KEYS = {
    "critical": "sk-demo-interactive",
    "high": "sk-demo-interactive",
    "normal": "sk-demo-standard",
    "low": "sk-demo-standard",
    "batch": "sk-demo-research",
}
BUSY_S, QUIET_S = 40.0, 30.0
BUSY, QUIET = 1.6, 0.35
"""How much of the usual load there is, turn by turn: the engine does about 20 requests a second."""


def policies(folder: Path) -> Path:
    """The shipped policy, for a smaller engine, and with a promise more."""
    shutil.copytree(shipped_policies(), folder / "policies")
    path = folder / "policies" / "policy.yaml"
    text = path.read_text()
    for before, after in (
        ("engine: tensorrt-llm", "engine: vllm"),
        ("capacity: {tokens: 400k, requests: 160}", "capacity: {tokens: 32k, requests: 48}"),
        ("normal: {reserve: 10%}", "normal: {reserve: 10%, slo: {queue_wait: 5s}}"),
    ):
        assert before in text
        text = text.replace(before, after)
    path.write_text(text)
    return path


async def ask(client: aiohttp.ClientSession, url: str, tier: str, rng: random.Random) -> None:
    """One request of a tier; a few of batch give up after a while, and a few have no key that is known."""
    headers = {"authorization": f"Bearer {KEYS[tier]}", "x-priority": tier}
    if rng.random() < 0.005:
        headers["authorization"] = "Bearer unknown"
    if tier == "batch" and rng.random() < 0.1:
        headers["x-admission-max-wait"] = "25s"
    content = "lorem ipsum " * rng.randint(20, 300)
    body = {"model": "m", "stream": True, "max_tokens": rng.randint(30, 90)}
    messages = [{"role": "user", "content": content}]
    with contextlib.suppress(aiohttp.ClientError):  # the sidecars end before the last answers
        async with client.post(url + CHAT, json={**body, "messages": messages}, headers=headers) as response:
            await response.read()


async def load(urls: list[str], tier: str) -> None:
    """Requests of a tier at random times, until canceled."""
    rng = random.Random(tier)
    begun_s = time.monotonic()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        asked: set[asyncio.Task[None]] = set()
        while True:
            is_busy = (time.monotonic() - begun_s) % (BUSY_S + QUIET_S) < BUSY_S
            await asyncio.sleep(rng.expovariate(PER_SECOND[tier] * (BUSY if is_busy else QUIET)))
            task = asyncio.ensure_future(ask(client, rng.choice(urls), tier, rng))
            asked.add(task)
            task.add_done_callback(asked.discard)


async def pictures(page_url: str, sidecars: list[str], tools: str, seconds: float) -> None:
    """Loads the sidecars, and takes the pictures when one tier starves."""
    loads = [asyncio.ensure_future(load(sidecars, tier)) for tier in PER_SECOND]
    await asyncio.sleep(seconds)
    async with tab(tools) as page:
        await page.look(1180, 900)
        await page.open(page_url)
        await page.until("document.title.includes('starves')", within_s=120)
        for name, width, height, dark in (("live", 1180, 0, False), ("live-phone-dark", 390, 1250, True)):
            await page.look(width, height or 900, dark=dark)
            await asyncio.sleep(1.2)
            (PICTURES / f"{name}.png").write_bytes(smaller(await page.picture(whole=not height)))
    for task in loads:
        task.cancel()
    await asyncio.gather(*loads, return_exceptions=True)


def main(seconds: float) -> None:
    """Starts everything, and ends it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        store = stack.enter_context(RedisServer(first_binary(), folder))
        emulated = ("emulate", "--engine", "vllm", "--port", "0", "--step-ms", "40", "--max-num-seqs", "48")
        engine = address(stack.enter_context(started(folder / "engine", *emulated)), folder / "engine")
        served = ("serve", "--upstream", engine, "--policy", str(policies(folder)), "--port", "0", "--admin-port", "0")
        logs = [folder / f"sidecar-{number}" for number in range(2)]
        sidecars = [stack.enter_context(started(log, *served, SIDECAR_STORE=store.url)) for log in logs]
        places = [(address(sidecar, log), address(sidecar, log)) for sidecar, log in zip(sidecars, logs, strict=True)]
        tools = stack.enter_context(headless(folder))
        asyncio.run(pictures(f"{places[0][1]}/", [sidecar for sidecar, _ in places], tools, seconds))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 300.0)
