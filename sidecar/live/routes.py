"""The pages of the admin port that show the pool live: `/`, `/overview`, `/overview/stream` and `/observed`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from sidecar.live.generations import Generations
from sidecar.live.overview import Live
from sidecar.live.own import Sources
from sidecar.live.page import HEADERS, PAGE
from sidecar.live.stream import Stream

_encode = msgspec.json.Encoder().encode


class LivePages:
    """What shows the pool. `open` and `close` belong to the server's start and end, `close` before the pool's own."""

    def __init__(self, sources: Sources, generations: Generations | None = None) -> None:
        self.live = Live(sources, generations=generations)
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
