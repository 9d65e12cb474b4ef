"""Overview as server-sent events, one a second, built once for all viewers and only while there is a viewer.

A viewer gets the newest overview when it has taken the one before. A slow viewer skips some. A viewer that takes
nothing for ten seconds is disconnected. Neither costs more than its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable

from starlette.types import Message, Receive, Scope, Send

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

EVERY_S = 1.0
MOST_VIEWERS = 32
STALLED_S = 10.0

_log = logging.getLogger("sidecar.admin")
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
        self._viewers: set[_Viewer] = set()
        self._building: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def viewers(self) -> int:
        """How many look at it now."""
        return len(self._viewers)

    def close(self) -> None:
        """Ends every stream, and takes no viewer any more: the server is about to close its port."""
        self._is_closed = True
        for viewer in self._viewers:
            viewer.end()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one viewer until it leaves, stalls, or the stream is closed."""
        if scope["method"] == "HEAD":
            await _answer(send, 200, b"")
            return
        if self._is_closed or len(self._viewers) >= MOST_VIEWERS:
            reason = (
                "the server stops" if self._is_closed else f"{MOST_VIEWERS} look at this already; try GET /overview"
            )
            await _answer(send, 503, f"{reason}\n".encode())
            return
        viewer = _Viewer(receive)
        self._viewers.add(viewer)
        try:
            await self._serve(viewer, send)
        finally:
            self._viewers.discard(viewer)
            viewer.forget()
            if not self._viewers and self._building is not None:
                self._building.cancel()
                self._building = None

    async def _serve(self, viewer: _Viewer, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        viewer.show(self._event())
        if self._building is None:
            self._building = asyncio.get_running_loop().create_task(self._build(), name="sidecar overview")
        with contextlib.suppress(asyncio.TimeoutError):  # stalled: what is left is for the server to cut off
            while (event := await viewer.next()) is not None:
                async with timeout(self._stalled_s):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            async with timeout(self._stalled_s):
                await send({"type": "http.response.body", "body": b""})

    async def _build(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                event = self._event()
            except Exception:
                _log.exception("a defect in the sidecar; the overview goes on without this second")
                continue
            for viewer in self._viewers:
                viewer.show(event)

    def _event(self) -> bytes:
        return b"retry: 2000\ndata: " + self._document() + b"\n\n"  # JSON has no line ends of its own


class _Viewer:
    """One connection: the newest event that it has not been sent, and whether it is still there."""

    def __init__(self, receive: Receive) -> None:
        self._event: bytes | None = None
        self._is_over = False
        self._changed = asyncio.Event()
        self._disconnect = asyncio.ensure_future(receive_disconnect(receive))
        self._disconnect.add_done_callback(lambda _: self.end())

    def show(self, event: bytes) -> None:
        self._event = event
        self._changed.set()

    def end(self) -> None:
        self._is_over = True
        self._changed.set()

    def forget(self) -> None:
        self._disconnect.cancel()

    async def next(self) -> bytes | None:
        """The newest event, as soon as there is one that it has not seen. None where it is over."""
        while not self._is_over:
            if self._event is not None:
                event, self._event = self._event, None
                return event
            self._changed.clear()
            await self._changed.wait()
        return None


async def receive_disconnect(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    message: Message = {"type": "http.request"}
    while message["type"] != "http.disconnect":
        message = await receive()


async def _answer(send: Send, status: int, body: bytes) -> None:
    kind = b"text/event-stream" if status == 200 else b"text/plain; charset=utf-8"
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), (b"retry-after", b"2")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
