"""A sidecar with several engines, in this event loop: real servers and sockets, and engines that misbehave on cue."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from sidecar.app import AdmissionMiddleware
from sidecar.fleet.routing import FleetRouting, ReplayReason
from sidecar.policy.compiler import load
from tests.support.engine import Connection, RawEngine, Received, raw_engine
from tests.support.middleware import recorded, tasks_of_ours
from tests.support.serving import serving
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
POLICY = """\
engine: {engine}
engines:
{source}
  capacity: {capacity}
  prefill: {prefill}
  affinity: {affinity}
  health: {{every: {every}, fail: 3, rise: 1}}
  slow_start: {slow_start}
  replay: {replay}
tiers:
  high: {{queue: {{max_wait: {max_wait}}}, preempt_after: 50ms}}
  normal: {{queue: {{max_wait: {max_wait}}}}}
  batch: {{preemptible: true}}
default_tier: normal
anonymous: high
sources: [header]
abort_latency: {abort_latency}
disconnect_grace: 1s
{more}
"""
DEFAULTS = {
    "engine": "vllm",
    "capacity": "{tokens: 100k, requests: 8}",
    "prefill": "unbounded",
    "affinity": "{prefix: false}",
    "every": "100ms",
    "slow_start": "0s",
    "replay": "{}",
    "max_wait": "30s",
    "abort_latency": "50ms",
    "more": "",
}


def static(*urls: str, more: str = "") -> str:
    """The policy's list of engines, called a, b, c ..."""
    entries = (f"{{name: {chr(ord('a') + number)}, url: '{url}'{more}}}" for number, url in enumerate(urls))
    return f"  static: [{', '.join(entries)}]"


def write_policy(path: Path, source: str, **settings: str) -> Path:
    """Writes a policy with these engines. `settings` fill in `POLICY`."""
    path.write_text(POLICY.format(**{**DEFAULTS, "source": source, **settings}))
    return path


@dataclass
class Reply:
    """What a client got. `at_s` is when it was complete, by the loop's clock; `error` that the connection broke."""

    status: int
    headers: dict[str, str]
    body: bytes
    at_s: float
    error: str | None = None

    @property
    def engine(self) -> str | None:
        """The engine that answered."""
        return self.headers.get("x-admission-engine")

    @property
    def code(self) -> str:
        """The error's code."""
        return str(json.loads(self.body)["error"]["code"])


class Routed:
    """A sidecar in front of its engines."""

    def __init__(self, middleware: AdmissionMiddleware, url: str, client: aiohttp.ClientSession) -> None:
        self.middleware = middleware
        self.url = url
        self.client = client
        self.controller = middleware.controller
        self.recorder = recorded(self.controller)
        assert isinstance(self.controller.routing, FleetRouting)
        self.routing = self.controller.routing
        self.pool: Any = self.routing.pool
        self.fleet = self.routing.fleet

    async def ask(
        self, text: str = "hi", headers: dict[str, str] | None = None, path: str = CHAT, **more: Any
    ) -> Reply:
        """One request, to its end."""
        body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": text}], **more}
        loop = asyncio.get_running_loop()
        async with self.client.post(self.url + path, json=body, headers=headers) as answer:
            found, status = dict(answer.headers), answer.status
            got, error = b"", None
            try:
                async for chunk in answer.content.iter_any():
                    got += chunk
            except aiohttp.ClientError as broken:
                error = type(broken).__name__
            return Reply(status, {name.lower(): value for name, value in found.items()}, got, loop.time(), error)

    def begin(self, *args: Any, **more: Any) -> asyncio.Task[Reply]:
        """The same in a task."""
        return asyncio.ensure_future(self.ask(*args, **more))

    @property
    def held(self) -> dict[str, int]:
        """Requests by engine id, of engines that hold any."""
        return {state.id: state.held_requests for state in self.pool.engines() if state.held_requests}

    @property
    def learned_prefills(self) -> int:
        """Samples of all engines' times to a first token."""
        return sum(engine.first.samples for engine in self.routing.speeds.engines.values())

    @property
    def unprefilled(self) -> int:
        """Un-prefilled tokens at all engines."""
        return sum(state.unprefilled_tokens for state in self.pool.engines())

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return int(str(self.pool.state()["waiting"]))

    @property
    def replays(self) -> dict[str, int]:
        """Replays by their reason."""
        found: Counter[str] = Counter()
        for (_, reason), count in self.routing.replays.items():
            assert isinstance(reason, ReplayReason)
            found[reason.value] += count
        return dict(found)

    async def nothing_left(self) -> None:
        """Fails unless no lease, ticket, un-prefilled token, place in line, count, task or story is left, soon."""
        await until(lambda: not self._left())
        self.recorder.check()

    def _left(self) -> list[object]:
        state: Any = self.controller.state()
        pool = state["pool"]
        found: list[object] = [pool["leases"], pool["waiting"], state["under_way"], state["aborting"]["requests"]]
        is_shared = "store" in pool  # then its own tasks go on
        found += [state["aborting"]["tokens"], *(() if is_shared else tasks_of_ours())]
        found += [member.in_flight for member in self.fleet.members()]
        for tier in pool["tiers"]:
            found += [*tier["held"].values(), *tier["queued"].values()]
        of_all = self.pool._member.mirror(self.pool.now_us())  # what the pool says of itself is read from this
        for tier in of_all.tiers:
            found += [*tier.used, *tier.in_line]
        for engine in of_all.engines.values():
            found += [*engine.held, engine.sent, engine.lined]
        return [it for it in found if it]


@asynccontextmanager
async def routed(policy: Path | AdmissionMiddleware, **settings: Any) -> AsyncIterator[Routed]:
    """A sidecar with this policy, or this one. When the block ends, nothing may be left of any request."""
    middleware = AdmissionMiddleware(None, load(policy), is_shown=True) if isinstance(policy, Path) else policy
    connector = aiohttp.TCPConnector(limit=0)
    async with serving(middleware, **settings) as server, aiohttp.ClientSession(connector=connector) as client:
        stand = Routed(middleware, server.url, client)
        yield stand
        await stand.nothing_left()


@asynccontextmanager
async def fleet_before(folder: Path, *acts: Act, **settings: str) -> AsyncIterator[Any]:
    """A sidecar, and the raw engines of its policy: one for each act."""
    async with (
        rude(*acts) as engines,
        routed(write_policy(folder / "policy.yaml", engines_of(engines), **settings)) as it,
    ):
        yield it, *engines


def changed(stand: Routed, policy: Path) -> None:
    """The policy's files have changed."""
    stand.controller.change_policy(load(policy))


Act = Callable[[Connection, Received], Awaitable[None]]


class Rude:
    """A raw engine whose answer to a client's request is what `act` does. Its connections stay open after that.

    `crash` closes its port and every connection.
    """

    def __init__(self, act: Act) -> None:
        self.act = act
        self.raw = RawEngine()
        self._stack = AsyncExitStack()

    @property
    def url(self) -> str:
        return self.raw.url

    @property
    def count(self) -> int:
        """Requests of clients that came."""
        return len(self.raw.requests)

    async def start(self) -> None:
        """Listens on a free port."""
        self.raw = await self._stack.enter_async_context(raw_engine(self.script))

    async def crash(self) -> None:
        """See `Rude`."""
        await self._stack.aclose()

    async def script(self, connection: Connection) -> None:
        """See `raw_engine`."""
        while True:
            await self.act(connection, await connection.request())


@asynccontextmanager
async def rude(*acts: Act) -> AsyncIterator[list[Rude]]:
    """A raw engine for each act."""
    found = [Rude(act) for act in acts]
    try:
        for engine in found:
            await engine.start()
        yield found
    finally:
        for engine in found:
            await engine.crash()


OK_BODY = b'{"choices": [{"message": {"content": "ok"}}], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}'


async def ok(connection: Connection, _: Received) -> None:
    """A right answer."""
    await connection.send(response(OK_BODY))


def response(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    """A response with its length."""
    lines = [f"HTTP/1.1 {status}", "content-type: application/json", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def refusing(status: int = 503, *headers: str, times: int | None = None) -> Act:
    """Refuses the first `times` requests, all by default, and answers the others."""
    left = [times]

    async def act(connection: Connection, request: Received) -> None:
        if left[0] == 0:
            await ok(connection, request)
            return
        if left[0] is not None:
            left[0] -= 1
        await connection.send(response(b'{"error": "full"}', f"{status} Full", *headers))

    return act


async def reset(connection: Connection, _: Received) -> None:
    """Breaks the connection without a byte, after so long that the proxy cannot take it for a stale one."""
    await asyncio.sleep(0.25)
    connection.abort()
    await connection.hung_up()


async def reset_after_head(connection: Connection, _: Received) -> None:
    """Breaks the connection between head and body."""
    await connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    await asyncio.sleep(0.02)
    connection.abort()
    await connection.hung_up()


async def reset_after_byte(connection: Connection, _: Received) -> None:
    """Breaks the connection after the first bytes of the body."""
    await connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    for number in range(3):
        await connection.send_chunk(b'data: {"choices": [{"delta": {"content": "w%d"}}]}\n\n' % number)
    await asyncio.sleep(0.02)
    connection.abort()
    await connection.hung_up()


async def silent(connection: Connection, _: Received) -> None:
    """Never answers."""
    await connection.hung_up()
    raise ConnectionResetError


async def silent_after_head(connection: Connection, request: Received) -> None:
    """A 200's head, and never a byte more."""
    await connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    await silent(connection, request)


def sequence(*acts: Act) -> Act:
    """Each request gets the next act; those after the last one get that again."""
    numbers = iter(range(len(acts)))

    async def act(connection: Connection, request: Received) -> None:
        await acts[next(numbers, len(acts) - 1)](connection, request)

    return act


def engines_of(stands: Sequence[Rude]) -> str:
    """The policy's list of these engines."""
    return static(*(stand.url for stand in stands))
