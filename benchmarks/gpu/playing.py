"""Plays the requests against the engine, in three ways, inside one process: no sockets, no other packages."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from starlette.types import ASGIApp, Message

from benchmarks.gpu.engine import DeviceTime, Engine, Model
from benchmarks.gpu.plan import LONGEST, TIERS, PlannedRequest
from sidecar import AdmissionMiddleware

EQUAL, PRIORITY, ADMISSION = WAYS = ("equal priority", "the engine's priority", "admission")
PATH = "/v1/completions"


@dataclass(slots=True)
class Seen:
    """One request as its client saw it, in seconds since all were sent."""

    tier: str
    status: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class Played:
    """One way to serve all requests."""

    way: str
    seen: list[Seen]
    device: DeviceTime
    most_in_engine_queue: int = field(default=0)

    @property
    def whole_s(self) -> float:
        """Until the last token."""
        return max(seen.last_s for seen in self.seen)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all requests."""
        return sum(seen.tokens for seen in self.seen) / self.whole_s


def policy_text(places: int) -> str:
    """A pool as large as the engine's places, whose tiers get what the plan's tiers need."""
    return f"""\
engine: vllm
capacity: {{requests: {places}, tokens: {places * LONGEST}, learn: off}}
tiers:
  interactive: {{reserve: 50%, lend: 100%}}
  default: {{reserve: 25%, lend: 100%}}
  bulk: {{}}
default_tier: default
anonymous: interactive
endpoints:
  {PATH}: {{}}
"""


async def play(way: str, model: Model, places: int, requests: Sequence[PlannedRequest]) -> Played:
    """Serves all requests, which come at once. Raises RuntimeError where one of them did not get all its tokens."""
    engine = Engine(model, places, by_priority=way != EQUAL)
    app: ASGIApp = engine
    with TemporaryDirectory() as folder:
        if way == ADMISSION:
            policy = Path(folder) / "policy.yaml"
            policy.write_text(policy_text(places))
            app = AdmissionMiddleware(engine, policy)
        running = asyncio.ensure_future(engine.run())
        began_s = time.perf_counter()
        try:
            asking = [_ask(app, request, way, began_s) for request in requests]
            seen = list(await asyncio.gather(*asking))
        finally:
            running.cancel()
            await asyncio.wait((running,))
    for request, one in zip(requests, seen, strict=True):
        if (one.status, one.tokens) != (200, request.output_tokens):
            raise RuntimeError(f"{way}: status {one.status}, {one.tokens} of {request.output_tokens} tokens")
    return Played(way, seen, engine.time, engine.time.most_waiting)


async def _ask(app: ASGIApp, request: PlannedRequest, way: str, began_s: float) -> Seen:
    """Sends one request as a server would present it, and reads its stream."""
    asked: dict[str, object] = {"model": "random", "prompt": list(request.prompt), "stream": True}
    asked["max_tokens"] = request.output_tokens
    if way == PRIORITY:
        asked["priority"] = TIERS.index(request.tier)
    body, seen = json.dumps(asked).encode(), Seen(request.tier)
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    ended = asyncio.Event()

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        now_s = time.perf_counter() - began_s
        if message["type"] == "http.response.start":
            seen.status = message["status"]
            return
        made = message.get("body", b"").count(b'{"t":')
        if made and seen.first_s is None:
            seen.first_s = now_s
        seen.tokens += made
        seen.last_s = now_s
        if not message.get("more_body", False):
            ended.set()

    headers = [(b"host", b"gpu"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if way == ADMISSION:
        headers.append((b"x-priority", request.tier.encode()))
    await app(_scope(headers), receive, send)
    return seen


def _scope(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, object]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": PATH,
        "raw_path": PATH.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": list(headers),
        "client": ("127.0.0.1", 40_000),
        "server": ("127.0.0.1", 8000),
        "state": {},
        "extensions": {},
    }


def play_all(
    model: Model, places: int, requests: Sequence[PlannedRequest], rounds: int, say: Callable[[str], None]
) -> list[Played]:
    """Every way in turn, `rounds` times."""
    found = []
    for number in range(rounds):
        for way in WAYS:
            played = asyncio.run(play(way, model, places, requests))
            say(f"round {number + 1}, {way}: {played.whole_s:.1f} s, {played.tokens_per_s:.0f} tokens/s")
            found.append(played)
    return found
