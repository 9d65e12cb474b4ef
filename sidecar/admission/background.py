"""Background responses (`background: true`): answered at once, and followed with their lease until they end.

The engine keeps such a response under an id, and runs it whether or not its client stays connected. So the lease is not
released with the answer: the middleware asks for the response by its id until the engine says how it ended, with its
usage.

A client's disconnect is not passed on to the app. The answer contains the id, and a stream that is read to its end
shows how the response ended without any question.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from starlette.types import ASGIApp, Message, Scope, Send

from sidecar.admission.engine_pages import fetch_page
from sidecar.admission.handover import INTERNAL_REQUEST, WRITE_KEY
from sidecar.admission.policy_snapshot import KEY_HEADERS
from sidecar.context import SCOPE_KEY
from sidecar.engines.pages import Page, Unread
from sidecar.events import Outcome
from sidecar.payload.decode import Payload

LONGEST_LINE = 32 * 2**20
"""Bytes of an answer that are kept until its id is found: it repeats the request's instructions and tools."""
_NOT_FOUND_TIMES = 3
"""After so many answers of 404 in a row a response is lost: an engine stores it a moment after it has sent the id."""
_ID = re.compile(r"[A-Za-z0-9_-]{1,256}")
_ENDS = {
    "completed": (Outcome.COMPLETED, None),
    "incomplete": (Outcome.COMPLETED, None),  # it reached its output maximum
    "cancelled": (Outcome.CLIENT_LEFT, None),
    "failed": (Outcome.FAILED, "response_failed"),
}
_KEPT_HEADERS = frozenset((b"host", *KEY_HEADERS))

_log = logging.getLogger("sidecar.background")


@dataclass(frozen=True, slots=True)
class FollowLimits:
    """How long a response is followed, in seconds. After `most_s` it is canceled at the engine.

    After `gone_s` of silence the engine and its responses count as lost. `every_s` is the shortest and the longest time
    between two questions; the time grows with the response's age.
    """

    most_s: float = 3600.0
    gone_s: float = 30.0
    every_s: tuple[float, float] = (0.1, 2.0)


class BackgroundEnd(NamedTuple):
    """How a background response ended. `error` is a word from a small set; the tokens are the engine's own count."""

    outcome: Outcome
    error: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    input_tokens: int | None = None
    output_tokens: int | None = None


class _Response(msgspec.Struct, gc=False):
    id: str | None = None
    status: str | None = None
    usage: _Usage | None = None


class _Event(msgspec.Struct, gc=False):
    type: str | None = None
    response: _Response | None = None


_decode_response = msgspec.json.Decoder(_Response).decode
_decode_event = msgspec.json.Decoder(_Event).decode


class BackgroundRequest:
    """One background request: finds the response's id in the answer as it passes. `scope` is the app's."""

    __slots__ = ("_id", "_is_over", "_pending", "_stream", "ask", "since_s")

    def __init__(self, app: ASGIApp, scope: Scope, payload: Payload) -> None:
        self.ask = ResponseQuery(app, scope)
        self.since_s = time.monotonic()
        self._stream = payload.stream
        self._id: str | None = None
        self._is_over = False
        self._pending = b""

    async def receive(self) -> Message:
        """The app's messages after the body: none, because the response runs on without its client."""
        never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return await never  # canceled with the request

    def sender(self, send: Send) -> Send:
        """The client's `send`, without an error where the client has disconnected."""

        async def send_if_connected(message: Message) -> None:
            with suppress(OSError):
                await send(message)

        return send_if_connected

    def feed(self, body: bytes | memoryview) -> None:
        """Takes the next bytes of the answer."""
        self._pending += body
        if self._stream:
            *lines, self._pending = self._pending.split(b"\n")
            for line in lines:
                self._read_line(line)
        if len(self._pending) > LONGEST_LINE:
            self._pending = b""

    def running_id(self) -> str | None:
        """The id of the response, where it runs on after the answer has ended; else None."""
        if not self._stream and self._id is None and self._pending:
            with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self._note(_decode_response(self._pending))
        return None if self._is_over or self._id is None or not _ID.fullmatch(self._id) else self._id

    def _read_line(self, line: bytes) -> None:
        if not line.startswith(b"data:") or self._is_over:
            return
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            event = _decode_event(line[5:])
            if event.response is not None:
                self._note(event.response)

    def _note(self, response: _Response) -> None:
        self._id = response.id or self._id
        self._is_over = response.status is None or response.status in _ENDS


class ResponseQuery:
    """Asks the app for one background response, with the headers of the client that began it, in the app's `scope`."""

    def __init__(self, app: ASGIApp, scope: Scope) -> None:
        self._path = scope["path"].rstrip("/")
        self._app = app
        self._scope = {key: value for key, value in scope.items() if key not in (SCOPE_KEY, WRITE_KEY)}
        kept = [(name, value) for name, value in scope["headers"] if name in _KEPT_HEADERS]
        self._scope |= {"headers": kept, "query_string": b"", "extensions": {INTERNAL_REQUEST: {}}}

    async def __call__(self, method: str, response_id: str) -> Page:
        """The engine's page: GET for the response, POST to cancel it. Raises Unread."""
        path = f"{self._path}/{response_id}" + ("/cancel" if method == "POST" else "")
        return await fetch_page(self._app, {**self._scope, "method": method, "path": path, "raw_path": path.encode()})


async def followed_to_end(
    ask: Callable[[str, str], Awaitable[Page]], response_id: str, limits: FollowLimits, since_s: float
) -> BackgroundEnd:
    """Returns when a response has ended, for any reason. `since_s` is when it began, by `time.monotonic`."""
    answered_s, missing = time.monotonic(), 0
    shortest_s, longest_s = limits.every_s
    while (age_s := time.monotonic() - since_s) < limits.most_s:
        await asyncio.sleep(min(longest_s, max(shortest_s, age_s / 20)))
        try:
            page = await ask("GET", response_id)
        except Unread:
            page = Page(502, "")
        if page.status in (200, 404):
            answered_s = time.monotonic()
            missing = missing + 1 if page.status == 404 else 0
            ended = _ended(page)
            if ended is not None or missing == _NOT_FOUND_TIMES:
                return ended or BackgroundEnd(Outcome.FAILED, "response_not_found")
        elif time.monotonic() - answered_s > limits.gone_s:
            return BackgroundEnd(Outcome.FAILED, "engine_unreachable")
    with suppress(Unread):
        await ask("POST", response_id)
    return BackgroundEnd(Outcome.FAILED, "background_timeout")


def _ended(page: Page) -> BackgroundEnd | None:
    """How the response ended, by the engine's page about it; None while it runs."""
    if page.status != 200:
        return None
    try:
        response = _decode_response(page.text.encode())
    except (msgspec.MsgspecError, RecursionError):
        return None
    if response.status not in _ENDS:
        return None
    usage = response.usage or _Usage()
    return BackgroundEnd(*_ENDS[response.status], usage.input_tokens, usage.output_tokens)


class BackgroundResponses:
    """All background responses that are followed. `close` is called at the server's end, before the pool's."""

    def __init__(self, limits: FollowLimits = FollowLimits()) -> None:
        self.limits = limits
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def is_due(self, request: BackgroundRequest) -> bool:
        """True if a request is older than a response may be."""
        return time.monotonic() - request.since_s > self.limits.most_s

    async def emptied(self) -> None:
        """Returns when no response is followed any more."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def follow(self, request: BackgroundRequest, response_id: str, settle: Callable[[BackgroundEnd], None]) -> None:
        """Calls `settle` once, when the response has ended or the server ends."""
        task = asyncio.get_running_loop().create_task(self._run(request, response_id, settle))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stops following: the engine computes on, and the log says for how many responses."""
        if self._tasks:
            message = "%d background responses run on at the engine without a lease: this server stops"
            _log.warning(message, len(self._tasks), extra={"event": "background_left"})
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, request: BackgroundRequest, response_id: str, settle: Callable[[BackgroundEnd], None]) -> None:
        ended = BackgroundEnd(Outcome.FAILED, "canceled")
        try:
            ended = await followed_to_end(request.ask, response_id, self.limits, request.since_s)
        finally:
            settle(ended)
        if ended.error is not None and ended.error != "response_failed":
            message = "a background response is followed no longer: %s"
            _log.warning(message, ended.error, extra={"event": "background_ended", "error": ended.error})
