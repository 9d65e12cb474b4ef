"""Makes the pictures of the pages in docs/pictures anew: `python -m tests.admin.pictures [SECONDS] [--scenes NAME]`.

Two sidecars of one pool in a real store, before an emulated engine that is asked for more than it can do half of the
time. After five minutes, which is the default, the page's plots are full. A scene is a function in `SCENES`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from sidecar.policy.compiler import shipped_policies
from tests.cluster.replicas import CHAT, address, started
from tests.support.devtools import Tab, headless, tab
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
DESKTOP, PHONE = (1180, 600), (390, 1250)
STARVES = "/(normal|low|batch) starves/.test(document.title)"
REQUEST_ID = "nightly-report-7"
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
    patient = aiohttp.ClientTimeout(total=None)  # batch may wait for half an hour
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=patient) as client:
        asked: set[asyncio.Task[None]] = set()
        while True:
            is_busy = (time.monotonic() - begun_s) % (BUSY_S + QUIET_S) < BUSY_S
            await asyncio.sleep(rng.expovariate(PER_SECOND[tier] * (BUSY if is_busy else QUIET)))
            task = asyncio.ensure_future(ask(client, rng.choice(urls), tier, rng))
            asked.add(task)
            task.add_done_callback(asked.discard)


class Engine:
    """The emulated engine, which a scene may kill. It always has the same port."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._stack = ExitStack()
        self.url = self._start("0")

    def kill(self) -> None:
        """Ends it at once."""
        self._stack.close()

    def restart(self) -> None:
        """Starts it again, on its port."""
        self._start(self.url.rpartition(":")[2])

    def _start(self, port: str) -> str:
        emulated = ("emulate", "--engine", "vllm", "--port", port, "--step-ms", "40", "--max-num-seqs", "48")
        return address(self._stack.enter_context(started(self._log, *emulated)), self._log)


@dataclass
class Stage:
    """What a scene needs: the page in a browser, and the processes behind it."""

    page: Tab
    admin_url: str
    sidecar_url: str
    store: RedisServer
    engine: Engine
    condition: str = ""

    async def show(self, path: str, condition: str, within_s: float = 120.0) -> None:
        """Opens a page of the admin port, and waits until a condition holds in it."""
        await self.page.look(*DESKTOP)
        await self.page.open(self.admin_url + path)
        await self.page.until(condition, within_s)
        self.condition = condition

    async def take(self, name: str) -> None:
        """The page on a desktop by day, and the top of it on a phone by night, each while the condition holds."""
        for suffix, (width, height), dark in (("", DESKTOP, False), ("-phone-dark", PHONE, True)):
            await self.page.look(width, height, dark=dark)
            await asyncio.sleep(1.2)
            await self.page.until(self.condition, 120)
            picture = await self.page.picture(whole=not dark)
            (PICTURES / f"{name}{suffix}.png").write_bytes(smaller(picture))


async def live(stage: Stage) -> None:
    """The live page while a tier starves."""
    await stage.show("/", STARVES)
    await stage.take("live")


async def request(stage: Stage) -> None:
    """The page of a request that waited and was overtaken."""
    await stage.show("/", STARVES)
    async with aiohttp.ClientSession() as client:
        body = {"model": "m", "max_tokens": 60, "messages": [{"role": "user", "content": "lorem ipsum " * 40}]}
        headers = {"authorization": f"Bearer {KEYS['normal']}", "x-priority": "normal", "x-request-id": REQUEST_ID}
        async with client.post(stage.sidecar_url + CHAT, json=body, headers=headers) as response:
            await response.read()
    await stage.show(f"/request?id={REQUEST_ID}", "document.title.includes('Request')")
    await stage.take("request")


async def store_lost(stage: Stage) -> None:
    """The live page while the store is lost and requests wait. The store is back afterward."""
    stage.store.kill()
    await asyncio.sleep(14)  # the first ten seconds have a smaller part
    await stage.show("/", f"{STARVES} && document.body.innerText.includes('has not answered for')")
    await stage.take("live-store-lost")
    stage.store.restart()


async def engine_down(stage: Stage) -> None:
    """The live page while the engine is down and requests wait. The engine is back afterward."""
    stage.engine.kill()
    await asyncio.sleep(8)
    await stage.show("/", "document.body.innerText.includes('The engine does not answer')")
    await stage.take("live-engine-down")
    stage.engine.restart()


SCENES: dict[str, Callable[[Stage], Awaitable[None]]] = {
    "live": live,
    "request": request,
    "store-lost": store_lost,
    "engine-down": engine_down,
}
"""In this order, each under the load that goes on. A scene leaves everything as it was."""


async def pictures(stage: Stage, sidecars: list[str], seconds: float, scenes: Sequence[str]) -> None:
    """Loads the sidecars, and plays the scenes."""
    loads = [asyncio.ensure_future(load(sidecars, tier)) for tier in PER_SECOND]
    await asyncio.sleep(seconds)
    for name in scenes:
        await SCENES[name](stage)
    for task in loads:
        task.cancel()
    await asyncio.gather(*loads, return_exceptions=True)


def main(seconds: float, scenes: Sequence[str]) -> None:
    """Starts everything, and ends it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        store = stack.enter_context(RedisServer(first_binary(), folder))
        engine = Engine(folder / "engine")
        stack.callback(engine.kill)
        policy = policies(folder)
        served = ("serve", "--upstream", engine.url, "--policy", str(policy), "--port", "0", "--admin-port", "0")
        logs = [folder / f"sidecar-{number}" for number in range(2)]
        sidecars = [stack.enter_context(started(log, *served, SIDECAR_STORE=store.url)) for log in logs]
        places = [(address(sidecar, log), address(sidecar, log)) for sidecar, log in zip(sidecars, logs, strict=True)]
        tools = stack.enter_context(headless(folder))

        async def play() -> None:
            async with tab(tools) as page:
                stage = Stage(page, places[0][1], places[0][0], store, engine)
                await pictures(stage, [sidecar for sidecar, _ in places], seconds, scenes)

        asyncio.run(play())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", type=float, nargs="?", default=300.0, help="of load before the first picture")
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES))
    given = parser.parse_args()
    main(given.seconds, given.scenes)
