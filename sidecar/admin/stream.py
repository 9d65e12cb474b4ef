"""Overview as server-sent events, one a second, made once for all viewers and only while there is a viewer.

A viewer gets the newest overview when it has taken the one before. A slow viewer skips some. A viewer that takes
nothing for ten seconds is disconnected. Neither costs more than its connection.

`sse-starlette` (3.7) would not do: its import replaces `uvicorn.Server.handle_exit` in whatever process mounts us, it
makes events for each viewer, and it sends pings, for which an event a second leaves no need.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from starlette.responses import PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from sidecar.tasks import timeout

EVERY_S = 1.0
MOST_VIEWERS = 32
STALLED_S = 10.0

_log = logging.getLogger("sidecar.admin")
_RETRY = {"retry-after": "2"}
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would hold it back
    (b"x-content-type-options", b"nosniff"),
]


class OverviewStream:
    """An ASGI app. `document` makes the overview as JSON; it is called in the event loop.

    `every_s` and `stalled_s` are for tests.
    """

    def __init__(
        self, document: Callable[[], bytes], *, every_s: float = EVERY_S, stalled_s: float = STALLED_S
    ) -> None:
        self._document = document
        self._every_s = every_s
        self._stalled_s = stalled_s
        self._closed = asyncio.Event()
        self._event = b""
        self._made_s = float("-inf")
        self.viewers = 0

    def close(self) -> None:
        """Ends every stream, and takes no viewer any more: the server is about to close its port."""
        self._closed.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one viewer until it leaves, stalls, or the stream is closed."""
        if scope["method"] == "HEAD":
            await Response(headers=_RETRY, media_type="text/event-stream")(scope, receive, send)
        elif self._closed.is_set():
            await PlainTextResponse("the server stops\n", 503, _RETRY)(scope, receive, send)
        elif self.viewers >= MOST_VIEWERS:
            reason = f"{MOST_VIEWERS} look at this already; try GET /overview\n"
            await PlainTextResponse(reason, 503, _RETRY)(scope, receive, send)
        else:
            ends: list[asyncio.Task[Any]] = [
                asyncio.ensure_future(receive_disconnect(receive)),
                asyncio.ensure_future(self._closed.wait()),
            ]
            self.viewers += 1
            try:
                with contextlib.suppress(asyncio.TimeoutError):  # stalled: what is left is for the server to cut off
                    await self._serve(send, ends)
            finally:
                self.viewers -= 1
                for end in ends:
                    end.cancel()

    async def _serve(self, send: Send, ends: Sequence[asyncio.Task[Any]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        while not any(end.done() for end in ends):
            async with timeout(self._stalled_s):
                await send({"type": "http.response.body", "body": self._newest(), "more_body": True})
            await asyncio.wait(ends, timeout=self._every_s, return_when=asyncio.FIRST_COMPLETED)
        async with timeout(self._stalled_s):
            await send({"type": "http.response.body", "body": b""})

    def _newest(self) -> bytes:
        """The newest event. Viewers whose seconds nearly coincide get the same."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._made_s >= self._every_s / 2:
            try:
                self._event = b"retry: 2000\ndata: " + self._document() + b"\n\n"  # JSON has no line ends of its own
                self._made_s = now_s
            except Exception:
                _log.exception("a defect in the sidecar; the overview goes on without this second")
                return b""
        return self._event


async def receive_disconnect(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    message: Message = {"type": "http.request"}
    while message["type"] != "http.disconnect":
        message = await receive()
