"""Routes of the admin port: live page, overview and its stream, dry-run report, metrics, explanation of a request.

The live page's markup, style and script are files beside this one; it loads nothing else. Its Content-Security-Policy
names this style and this script by their hashes, and allows connections to its own server only. A script that a
request's text smuggles into the page does not run.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from hashlib import sha256
from importlib.resources import files

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from sidecar.admin.stream import OverviewStream
from sidecar.cluster.overview import Generations, PoolOverview
from sidecar.cluster.report import Sources
from sidecar.explain.builder import ExplanationBuilder
from sidecar.telemetry.journal import Journal
from sidecar.telemetry.setup import MetricsEndpoint, MetricsUnavailable

_encode = msgspec.json.Encoder().encode


class LivePages:
    """The pages that show the pool.

    `open` and `close` belong to the server's start and end, `close` before the pool's own.
    """

    def __init__(self, sources: Sources, generations: Generations | None = None) -> None:
        self.live = PoolOverview(sources, generations=generations)
        self.stream = OverviewStream(self._document)

    async def open(self) -> None:
        """Begins to watch who waits, and to hear of the other replicas."""
        await self.live.open()

    async def close(self) -> None:
        """Ends that, and every stream, so that the admin port can close."""
        self.stream.close()
        await self.live.close()

    def routes(self) -> Sequence[BaseRoute]:
        """For the admin port."""

        async def page(_: Request) -> Response:
            return Response(PAGE, media_type="text/html", headers=HEADERS)

        async def overview(_: Request) -> Response:
            headers = {"cache-control": "no-store"}
            return Response(self._document(), media_type="application/json", headers=headers)

        async def observed(_: Request) -> Response:
            headers = {"cache-control": "no-store"}
            return Response(_encode(self.live.observed()), media_type="application/json", headers=headers)

        return [
            Route("/", page),
            Route("/observed", observed),
            Route("/overview", overview),
            Route("/overview/stream", self.stream, methods=["GET"]),
        ]

    def _document(self) -> bytes:
        return _encode(self.live.overview())


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


LONGEST_ID = 128
"""A request id that is longer is not taken over from the client."""


def routes(journal: Journal, *, tiers: Callable[[], Sequence[str]], pool: str, is_shared: bool) -> Sequence[BaseRoute]:
    """The page. `tiers` are the names of the policy in force, most important first."""
    teller = ExplanationBuilder(journal, tiers, pool, is_shared)

    async def explain(request: Request) -> Response:
        wanted = request.path_params["id"][: LONGEST_ID + 1]
        story = teller.explain(wanted)
        if story is None:
            return JSONResponse({"error": {"code": "unknown_request", "message": _unknown(teller, wanted)}}, 404)
        return Response(msgspec.json.encode(story), media_type="application/json")

    # As a path: a client's own request id may hold slashes.
    return [Route("/requests/{id:path}", explain)]


def _unknown(teller: ExplanationBuilder, wanted: str) -> str:
    minutes = teller.journal.retention_s / 60
    sentence = (
        f"no request with the id or trace id {wanted!r} is known here: this process keeps what waits or runs, and "
        f"for at most {minutes:g} minutes the last that ended, since it started"
    )
    return f"{sentence}; the pool is shared, so ask the other replicas, too" if teller.is_shared else sentence


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


_STYLE, _SCRIPT = _text("page.css"), _text("page.js")
PAGE = _text("page.html").replace("/*style*/", _STYLE).replace("/*script*/", _SCRIPT).encode()
POLICY = (
    f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
