"""Faults of the emulated engine: rude things that it does on purpose, so that what stands before it can be tested.

| kind | what a request gets |
|---|---|
| `refuse` | `status` (503), with `retry_after` where that is written, before anything is computed |
| `reset` | a connection that is reset after the request was read, without a byte of an answer |
| `cut` | the answer's beginning with its first tokens, then a connection that is reset |
| `silent` | nothing: the connection stays open until the client closes it |
| `slow_headers` | its answer, but not a byte of it for `delay_s`; the engine computes meanwhile |

Every fault is set by `POST /_emulator/faults`, by `--fault`, or before the start by the config. The first one that
applies to a request is done. They count the requests that came since they were set.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections import Counter
from collections.abc import Collection, Sequence
from http import HTTPStatus
from typing import Any, Literal

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PATH = "/_emulator/faults"

_FLUSH_S = 0.05
"""Between the last bytes and the reset, so that they arrive: a reset overtakes what is not sent yet."""


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One fault. `every` N: each N-th request. `count`: at most so many times. `for_s`: so long after it was set.

    `status` and `retry_after` are for `refuse` alone, `delay_s` for `slow_headers`. `pages`: /health, /metrics and the
    other pages do it, too, and not only requests that generate.
    """

    kind: Literal["refuse", "reset", "cut", "silent", "slow_headers"]
    status: int = 503
    retry_after: str | int | None = None
    delay_s: float = 5.0
    every: int = 1
    count: int | None = None
    for_s: float | None = None
    pages: bool = False

    def __post_init__(self) -> None:
        if not 400 <= self.status <= 599:
            raise ValueError("status must be between 400 and 599, such as 429, 503 or 529")
        if self.every < 1 or (self.count is not None and self.count < 1):
            raise ValueError("every and count must be at least 1")
        if self.delay_s < 0 or (self.for_s is not None and self.for_s <= 0):
            raise ValueError("delay_s must not be negative, and for_s must be above 0")
        if self.retry_after is not None and not str(self.retry_after).isprintable():
            raise ValueError("retry_after must be printable: seconds, or a date")


def read_fault(text: str) -> Fault:
    """A fault as the command line writes it: `KIND`, or `KIND,name=value,...`. Raises ValueError."""
    kind, *settings = text.split(",")
    found: dict[str, Any] = {"kind": kind}
    for setting in settings:
        name, is_there, value = setting.partition("=")
        if not is_there:
            raise ValueError(f"{setting!r} has no value; write it like refuse,status=429,every=10")
        found[name] = value
    try:
        return msgspec.convert(found, Fault, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{text!r} is no fault: {error}; write one like refuse,status=429,every=10") from None


class _Active:
    """A fault that is set, and how often it applied."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.seen = self.done = 0
        self._set_at_s = time.monotonic()

    def applies(self, *, generates: bool) -> bool:
        """True if this request gets it. Counts the request."""
        fault = self.fault
        if not generates and not fault.pages:
            return False
        if fault.for_s is not None and time.monotonic() - self._set_at_s >= fault.for_s:
            return False
        if fault.count is not None and self.done >= fault.count:
            return False
        self.seen += 1
        if self.seen % fault.every:
            return False
        self.done += 1
        return True


class Faults:
    """The faults of one engine. `done` counts them by kind since the engine's start.

    `generating` are the paths of requests that compute. The kinds that break a connection need uvicorn.
    """

    def __init__(self, generating: Collection[str], faults: Sequence[Fault] = ()) -> None:
        self.done = Counter[str]()
        self._generating = frozenset(generating)
        self._active = [_Active(fault) for fault in faults]

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope, by `app` where no fault applies. `send` must be the server's own."""
        if scope["type"] == "http" and scope["path"] == PATH:
            await self._page(scope, receive, send)
            return
        fault = self._next(scope) if self._active and scope["type"] == "http" else None
        if fault is None:
            await app(scope, receive, send)
            return
        self.done[fault.kind] += 1
        if fault.kind == "slow_headers":
            await app(scope, receive, _late(send, fault.delay_s))
        elif fault.kind == "cut":
            await app(scope, receive, _cutting(send))
        else:
            await self._without_answer(fault, scope, receive, send)

    def set(self, faults: Sequence[Fault]) -> None:
        """Replaces those that are set."""
        self._active = [_Active(fault) for fault in faults]

    def _next(self, scope: Scope) -> Fault | None:
        path = scope["path"]
        if path.startswith("/_emulator"):
            return None
        generates = scope["method"] == "POST" and path in self._generating
        return next((one.fault for one in self._active if one.applies(generates=generates)), None)

    async def _without_answer(self, fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect):
            await Request(scope, receive).body()
            if fault.kind == "refuse":
                await _refusal(fault)(scope, receive, send)
                return
            if fault.kind == "reset":
                _reset(send)
            while (await receive())["type"] != "http.disconnect":
                pass

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`GET` shows the faults, `POST` replaces them by those of its body, `DELETE` ends them all."""
        request = Request(scope, receive)
        if request.method == "POST":
            try:
                self.set(msgspec.json.decode(await request.body() or b"[]", type=list[Fault]))
            except (msgspec.MsgspecError, ValueError) as error:
                example = '[{"kind": "refuse", "status": 503, "retry_after": 2, "every": 10}]'
                answer = JSONResponse({"error": f"{error}; write a list like {example}"}, HTTPStatus.BAD_REQUEST)
                await answer(scope, receive, send)
                return
        elif request.method == "DELETE":
            self.set([])
        elif request.method not in ("GET", "HEAD"):
            refused = JSONResponse({"error": "use GET, POST or DELETE"}, HTTPStatus.METHOD_NOT_ALLOWED)
            await refused(scope, receive, send)
            return
        await JSONResponse(self.state())(scope, receive, send)

    def state(self) -> dict[str, Any]:
        """The faults that are set, with how often each was done, and all that were done since the start."""
        active = [{**msgspec.to_builtins(one.fault), "done": one.done} for one in self._active]
        return {"active": active, "done": dict(self.done)}


def _refusal(fault: Fault) -> JSONResponse:
    headers = {} if fault.retry_after is None else {"retry-after": str(fault.retry_after)}
    error = {"message": "this fault was asked for", "type": "emulated_fault", "code": fault.status}
    return JSONResponse({"error": error}, fault.status, headers)


def _late(send: Send, delay_s: float) -> Send:
    """The answer's first bytes wait, and the rest after them."""
    is_first = True

    async def later(message: Message) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            await asyncio.sleep(delay_s)
        await send(message)

    return later


def _cutting(send: Send) -> Send:
    """The answer ends with its first body bytes; what comes later meets a closed connection."""
    is_over = False

    async def cut(message: Message) -> None:
        nonlocal is_over
        if is_over:
            return
        if message["type"] != "http.response.body" or not message.get("body"):
            await send(message)
            return
        is_over = True
        # Never the whole answer, whatever it says about itself.
        await send({**message, "body": message["body"][: max(1, len(message["body"]) - 1)], "more_body": True})
        await asyncio.sleep(_FLUSH_S)
        _reset(send)

    return cut


def _reset(send: Send) -> None:
    """Resets the connection. Raises RuntimeError where `send` is no method of uvicorn, which knows its transport."""
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if transport is None:
        raise RuntimeError("this server does not show its connections; resets need uvicorn")
    connection = transport.get_extra_info("socket")
    if connection is not None:  # closing with nothing to linger for sends a reset
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
