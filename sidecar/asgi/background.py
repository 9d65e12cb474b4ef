"""Background responses (`background: true`): answered at once, and followed with their lease until they have ended.

The engine keeps such a response under an id, and runs it whether or not its client stays. So the request is not settled
with its answer: the response is asked for by its id until the engine says how it ended, with the usage of that.

A client's disconnect is not passed on to the app: the answer is where the id comes from, and a stream that is read to
its end tells the end at no cost.
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

from sidecar.asgi.pages import OWN, page_of
from sidecar.asgi.types import ASGIApp, Message, Scope, Send
from sidecar.engines.pages import Page, Unread
from sidecar.errors import BackgroundNotAllowed, InvalidBody
from sidecar.events import Outcome
from sidecar.granted import SCOPE_KEY
from sidecar.payload import Payload
from sidecar.policy.model import Background, Endpoint

LONGEST_LINE = 32 * 2**20
"""Bytes of an answer that are kept while its id is looked for: it repeats the request's instructions and tools."""
_NOT_FOUND_TIMES = 3
"""Answers of 404 in a row after which a response is lost: an engine stores it a moment after it has told the id."""
_ID = re.compile(r"[A-Za-z0-9_-]{1,256}")
_ENDS = {
    "completed": (Outcome.COMPLETED, None),
    "incomplete": (Outcome.COMPLETED, None),  # it reached its maximum, as an answer does
    "cancelled": (Outcome.CLIENT_LEFT, None),
    "failed": (Outcome.FAILED, "response_failed"),
}
_KEPT_HEADERS = frozenset((b"host", b"authorization", b"x-api-key"))

_log = logging.getLogger("sidecar.background")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a response is followed, in seconds. After `most_s` it is canceled at the engine.

    `gone_s` is how long an engine may stay silent before its responses are taken for lost with it. `every_s` are the
    shortest and the longest time between two questions; they grow with the response's age.
    """

    most_s: float = 3600.0
    gone_s: float = 30.0
    every_s: tuple[float, float] = (0.1, 2.0)


class Ended(NamedTuple):
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


def refuse_background(payload: Payload, choice: Background) -> None:
    """Raises BackgroundNotAllowed where the policy refuses it, and InvalidBody for one that could not be followed."""
    if not payload.background:
        return
    if choice is Background.REFUSE:
        raise BackgroundNotAllowed(
            "background: true is not allowed here, because such a response runs on after its request is answered; "
            "leave it out, and send stream: true for a long answer (the policy's `background: hold` would allow it)"
        )
    if payload.names_response:
        raise InvalidBody("request_id: a background response is followed by the id that the engine gives; leave it out")


class BackgroundRequest:
    """One background request at the app: its answer as it passes, and how its response is asked for afterwards.

    `scope` is what the app is called with.
    """

    __slots__ = ("_id", "_is_over", "_pending", "_stream", "ask", "since_s")

    def __init__(self, app: ASGIApp, scope: Scope, endpoint: Endpoint, payload: Payload) -> None:
        self.ask = Asking(app, scope, endpoint)
        self.since_s = time.monotonic()
        self._stream = payload.stream
        self._id: str | None = None
        self._is_over = False
        self._pending = b""

    async def receive(self) -> Message:
        """What comes for the app behind the body: nothing, for the response runs on without its client."""
        never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return await never  # canceled with the request

    def sender(self, send: Send) -> Send:
        """The client's `send`, which does not fail where the client has left."""

        async def send_if_there(message: Message) -> None:
            with suppress(OSError):
                await send(message)

        return send_if_there

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
        """The id of a response that runs on although its answer has ended; None where there is none."""
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


class Asking:
    """Asks the app for one background response, as the client whose request made it."""

    def __init__(self, app: ASGIApp, scope: Scope, endpoint: Endpoint) -> None:
        root = scope.get("root_path", "")
        mounted = root if root and scope["path"].startswith(root) else ""
        self._path = mounted + (endpoint.forward_to or endpoint.path).rstrip("/")
        self._app = app
        self._scope = {key: value for key, value in scope.items() if key != SCOPE_KEY}
        kept = [(name, value) for name, value in scope["headers"] if name in _KEPT_HEADERS]
        self._scope |= {"headers": kept, "query_string": b"", "extensions": {OWN: {}}}

    async def __call__(self, method: str, response_id: str) -> Page:
        """The engine's answer: GET for the response, POST to cancel it. Raises Unread."""
        path = f"{self._path}/{response_id}" + ("/cancel" if method == "POST" else "")
        return await page_of(self._app, {**self._scope, "method": method, "path": path, "raw_path": path.encode()})


async def followed(
    ask: Callable[[str, str], Awaitable[Page]], response_id: str, patience: Patience, since_s: float
) -> Ended:
    """Returns when a response has ended, whatever ended it. `since_s` is when it began, by `time.monotonic`."""
    answered_s, missing = time.monotonic(), 0
    shortest_s, longest_s = patience.every_s
    while (age_s := time.monotonic() - since_s) < patience.most_s:
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
                return ended or Ended(Outcome.FAILED, "response_not_found")
        elif time.monotonic() - answered_s > patience.gone_s:
            return Ended(Outcome.FAILED, "engine_unreachable")
    with suppress(Unread):
        await ask("POST", response_id)
    return Ended(Outcome.FAILED, "background_timeout")


def _ended(page: Page) -> Ended | None:
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
    return Ended(*_ENDS[response.status], usage.input_tokens, usage.output_tokens)


class Followed:
    """All background responses that one middleware follows. `close` belongs to the server's end, before the pool's."""

    def __init__(self, patience: Patience = Patience()) -> None:
        self.patience = patience
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def is_due(self, request: BackgroundRequest) -> bool:
        """Whether a request has been answered for longer than any response is followed."""
        return time.monotonic() - request.since_s > self.patience.most_s

    async def emptied(self) -> None:
        """Returns when no response is followed any more."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def follow(self, request: BackgroundRequest, response_id: str, settle: Callable[[Ended], None]) -> None:
        """Calls `settle` once, when the response has ended or the server ends."""
        task = asyncio.get_running_loop().create_task(self._run(request, response_id, settle))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Gives up following: the engine computes on, and the log says for how many."""
        if self._tasks:
            message = "%d background responses run on at the engine without a lease: this server stops"
            _log.warning(message, len(self._tasks), extra={"event": "background_left"})
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, request: BackgroundRequest, response_id: str, settle: Callable[[Ended], None]) -> None:
        ended = Ended(Outcome.FAILED, "canceled")
        try:
            ended = await followed(request.ask, response_id, self.patience, request.since_s)
        finally:
            settle(ended)
        if ended.error is not None and ended.error != "response_failed":
            message = "a background response is followed no longer: %s"
            _log.warning(message, ended.error, extra={"event": "background_ended", "error": ended.error})
