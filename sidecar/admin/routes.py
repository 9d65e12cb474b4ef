"""Routes of the admin port: live page, overview and its stream, dry-run report, metrics, explanation of a request.

The live page's markup, style and script are files beside this one; it loads nothing else. Its Content-Security-Policy
names this style and this script by their hashes, and allows connections to its own server only. A script that a
request's text smuggles into the page does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from sidecar.admin.answers import FRESH, json_answer, refused
from sidecar.admin.operations import routes_for
from sidecar.admin.page_files import headers, read_text
from sidecar.admin.request_page import LONGEST_ID, request_routes, unknown_request
from sidecar.admin.stream import OverviewStream
from sidecar.cluster.document import Overview
from sidecar.cluster.overview import PoolOverview
from sidecar.explain.builder import ExplanationBuilder
from sidecar.telemetry.setup import MetricsEndpoint, MetricsUnavailable


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
