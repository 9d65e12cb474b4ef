"""`sidecar serve --workers N` as a user runs it, before an engine whose answers a test holds back."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.support import serving as server

WITHIN_S = 60.0
"""Two workers start in two seconds on an idle machine, and in many more on a busy one."""
POLICY = """\
engine: none
capacity: {{tokens: 100k, requests: {requests}}}
tiers: {{normal: {{reserve: 50%}}}}
anonymous: normal
"""


def write_policy(folder: Path, requests: int = 8, more: str = "") -> Path:
    """A policy's file that admits so many requests at once."""
    path = folder / "policy.yaml"
    path.write_text(POLICY.format(requests=requests) + more)
    return path


@dataclass
class HeldEngine:
    """An engine that streams a chunk now and then until `release`. `running` requests are there now, `most` were."""

    url: str = ""
    running: int = 0
    most: int = 0
    served: int = 0
    release: asyncio.Event = field(default_factory=asyncio.Event)

    async def completions(self, request: Request) -> Response:
        """Holds a request that streams; answers any other at once."""
        asked = await request.json()
        self.served += 1
        if not asked.get("stream"):
            return JSONResponse({"usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}})
        return StreamingResponse(self._chunks(), media_type="text/event-stream")

    async def _chunks(self) -> AsyncIterator[bytes]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            yield b"data: {}\n\n"
            while not self.release.is_set():
                await asyncio.sleep(0.05)
                yield b"data: {}\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            self.running -= 1


@asynccontextmanager
async def held_engine() -> AsyncIterator[HeldEngine]:
    engine = HeldEngine()
    routes = [Route("/v1/completions", engine.completions, methods=["POST"]), Route("/health", lambda _: Response())]
    async with server.serving(Starlette(routes=routes)) as served:
        engine.url = served.url
        yield engine


@dataclass
class Command:
    """The command while it runs. `proxy` and `admin` are its addresses."""

    process: asyncio.subprocess.Process
    proxy: str
    admin: str
    client: aiohttp.ClientSession
    written: Path

    @property
    def log(self) -> str:
        """Standard error so far."""
        return self.written.read_text()

    async def page(self, path: str, status: int = 200) -> Any:
        """An admin page, JSON decoded."""
        async with self.client.get(self.admin + path) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json() if answer.content_type == "application/json" else await answer.text()

    async def pids(self) -> list[int]:
        """The workers' processes."""
        return [row["pid"] for row in (await self.page("/state"))["workers"]]

    async def under_way(self) -> dict[int, int]:
        """The requests of each worker."""
        return {row["worker"]: row.get("under_way", 0) for row in (await self.page("/state"))["workers"]}

    async def ask(self) -> int:
        """Sends a request, on a connection of its own, and returns the answer's status."""
        async with self.client.post(f"{self.proxy}/v1/completions", json=ASKED) as answer:
            await answer.read()
            return answer.status

    async def stream(self) -> tuple[int, bytes]:
        """Sends a request that streams. Raises ClientError where the stream is cut off."""
        async with self.client.post(f"{self.proxy}/v1/completions", json={**ASKED, "stream": True}) as answer:
            return answer.status, await answer.read()

    def signal(self, number: signal.Signals) -> None:
        """To the supervisor."""
        self.process.send_signal(number)

    async def ended(self) -> tuple[int, str]:
        """The exit code, and standard error."""
        return await asyncio.wait_for(self.process.wait(), WITHIN_S), self.log


ASKED = {"model": "m", "prompt": "hello", "max_tokens": 4}


@asynccontextmanager
async def started(
    *arguments: str, errors: int | IO[bytes] = asyncio.subprocess.PIPE, **variables: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`sidecar serve`; at the end of the block it is killed if it is still there, and all that it started must end."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "SIDECAR_"))}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sidecar.cli", "serve", "--port", "0", "--admin-port", "0", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=errors,
        env=ours | variables,
    )
    offspring = children(process.pid)
    try:
        yield process
    finally:
        offspring |= children(process.pid)
        if process.returncode is None:
            process.kill()
        await until(lambda: not any(map(is_running, offspring)), "all that the command started has ended")
        await process.communicate()  # to the end of its output, which is known later where it was killed


@asynccontextmanager
async def serving(policy: Path, upstream: str | None, *more: str, **variables: str) -> AsyncIterator[Command]:
    """Two workers, when they serve."""
    where = () if upstream is None else ("--upstream", upstream)
    arguments = ("--workers", "2", "--policy", str(policy), *where, *more)
    log = policy.parent / "log"
    with log.open("wb") as errors:
        async with started(*arguments, errors=errors, **variables) as process:
            proxy, admin = await _address(process, log), await _address(process, log)
            connector = aiohttp.TCPConnector(force_close=True, limit=0)
            async with aiohttp.ClientSession(connector=connector) as client:
                yield Command(process, proxy, admin, client, log)


async def _address(process: asyncio.subprocess.Process, log: Path) -> str:
    line = (await asyncio.wait_for(process.stdout.readline(), WITHIN_S)).decode()
    found = re.search(r"http://\S+", line)
    if found is None:
        pytest.fail(f"it did not start: {line!r} {log.read_text()}")  # noqa: ASYNC240 - the test is over
    return found[0]


async def until(is_so: Callable[[], Any], what: str, within_s: float = WITHIN_S) -> None:
    """Waits for it. `is_so` may be a coroutine function."""
    deadline_s = asyncio.get_running_loop().time() + within_s
    while True:
        found = is_so()
        if await found if asyncio.iscoroutine(found) else found:
            return
        if asyncio.get_running_loop().time() > deadline_s:
            pytest.fail(f"not within {within_s:g} s: {what}")
        await asyncio.sleep(0.05)


def children(pid: int) -> set[int]:
    """The processes that it started and that still run."""
    try:
        return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    except OSError:
        return set()


def is_running(pid: int) -> bool:
    """Whether the process is there, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def events(log: str) -> list[str]:
    """The events of a log in JSON."""
    return [json.loads(line)["event"] for line in log.splitlines() if line.startswith("{")]


async def both_have_some(command: Command, streams: list[asyncio.Task[tuple[int, bytes]]]) -> None:
    """Sends requests that stream until each worker has one: the system divides the connections by chance."""
    while not all((await command.under_way()).values()):
        assert len(streams) < 40
        streams.append(asyncio.ensure_future(command.stream()))
        await until(lambda: has_come(command, len(streams)), "the last has come")


async def has_come(command: Command, requests: int) -> bool:
    """Whether the workers have so many requests under way, those that wait included."""
    return sum((await command.under_way()).values()) == requests


async def draining(command: Command) -> bool:
    """Whether it takes no more requests."""
    return (await command.page("/state")).get("draining", False)


async def is_restarted(command: Command, number: int, before: list[int]) -> bool:
    """Whether all serve, this worker in another process than before."""
    rows = (await command.page("/state"))["workers"]
    return all(row["state"] == "serving" for row in rows) and rows[number - 1]["pid"] not in (None, before[number - 1])
