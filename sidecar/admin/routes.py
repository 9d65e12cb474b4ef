"""Routes of the admin port: live page, overview and its stream, dry-run report, metrics, explanation of a request.

The live page's markup, style and script are files beside this one; it loads nothing else. Its Content-Security-Policy
names this style and this script by their hashes, and allows connections to its own server only. A script that a
request's text smuggles into the page does not run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from sidecar.admin.answers import FRESH, headers, json_answer, read_text, refused
from sidecar.admin.operations import routes_for
from sidecar.admin.request_page import LONGEST_ID, request_routes, unknown_request
from sidecar.cluster.document import Overview
from sidecar.cluster.overview import PoolOverview
from sidecar.explain.builder import ExplanationBuilder
from sidecar.tasks import timeout
from sidecar.telemetry.setup import MetricsEndpoint, MetricsUnavailable

# -- Overview as server-sent events, one a second, made once for all viewers and only while there is a viewer.
#
# A viewer gets the newest overview when it has taken the one before. A slow viewer skips some. A viewer that takes
# nothing for ten seconds is disconnected. Neither costs more than its connection.
#
# `sse-starlette` (3.7) would not do: its import replaces `uvicorn.Server.handle_exit` in whatever process mounts us,
# it makes events for each viewer, and it sends pings, for which an event a second leaves no need.

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


class LivePages:
    """The pages that show the pool. The server's end closes `stream`, so that the admin port can close."""

    def __init__(self, live: PoolOverview) -> None:
        self._live = live
        self.stream = OverviewStream(self._document)

    def routes(self) -> Sequence[BaseRoute]:
        """For the admin port."""

        async def page(_: Request) -> Response:
            return Response(PAGE, media_type="text/html", headers=HEADERS)

        async def overview(_: Request) -> Response:
            return Response(self._document(), 200, FRESH, "application/json")

        async def observed(_: Request) -> Response:
            return json_answer(self._live.observed())

        pages = routes_for({"livePage": page, "observed": observed, "overview": overview})
        return [Route("/overview/stream", self.stream, methods=["GET"]), *pages]

    def _document(self) -> bytes:
        return msgspec.json.encode(self._live.overview())


def metrics_routes(scrape: MetricsEndpoint) -> Sequence[BaseRoute]:
    """`GET /metrics`, all metrics in Prometheus' format: 404 with a sentence where there are no metrics here."""

    def metrics(request: Request) -> Response:
        # No coroutine, so that it is run in a thread: the pool's figures come from this event loop.
        try:
            text, content_type = scrape.text(request.headers.get("accept"))
        except MetricsUnavailable as reason:
            return PlainTextResponse(f"{reason}\n", status_code=404)
        return Response(text, headers={"content-type": content_type})

    return [Route("/metrics", metrics)]


def story_routes(builder: ExplanationBuilder, overview: Callable[[], Overview]) -> Sequence[BaseRoute]:
    """The explanation of one request: `/requests/{id}` as JSON, `/request?id=` as a page. `overview` is the pool's."""

    async def explain(request: Request) -> Response:
        wanted = request.path_params.get("id", request.query_params.get("id", ""))[: LONGEST_ID + 1]
        story = builder.explain(wanted)
        if story is None:
            return refused(404, "unknown_request", unknown_request(builder, wanted))
        return json_answer(story)

    # As a path: a client's own request id may hold slashes. As a parameter: a browser cannot ask for the path `..`.
    return [*routes_for({"request": explain, "requestById": explain}), *request_routes(builder, overview)]


_STYLE, _SCRIPT = read_text("page.css"), read_text("page.js")
PAGE = read_text("page.html").replace("/*style*/", _STYLE).replace("/*script*/", _SCRIPT).encode()
HEADERS = headers(_STYLE, _SCRIPT)
