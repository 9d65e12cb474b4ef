"""The pages of the admin port that show the pool live: `/`, `/overview`, `/overview/stream` and `/observed`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from sidecar.admin.routes import HEADERS, PAGE
from sidecar.admin.stream import Stream
from sidecar.cluster.generations import Generations
from sidecar.cluster.overview import PoolOverview
from sidecar.cluster.report import Sources
from sidecar.explain.builder import ExplanationBuilder
from sidecar.telemetry.journal import Journal

_encode = msgspec.json.Encoder().encode


class LivePages:
    """What shows the pool. `open` and `close` belong to the server's start and end, `close` before the pool's own."""

    def __init__(self, sources: Sources, generations: Generations | None = None) -> None:
        self.live = PoolOverview(sources, generations=generations)
        self.stream = Stream(self._document)

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


LONGEST_ID = 128
"""A request id that is longer is not taken over from the client."""


def routes(journal: Journal, *, tiers: Callable[[], Sequence[str]], pool: str, is_shared: bool) -> Sequence[BaseRoute]:
    """The page. `tiers` are the names of the policy in force, most important first."""
    teller = ExplanationBuilder(journal, tiers, pool, is_shared)

    async def explain(request: Request) -> Response:
        wanted = request.path_params["id"][: LONGEST_ID + 1]
        story = teller.tell(wanted)
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
