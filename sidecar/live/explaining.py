"""`GET /requests/{id}` on the admin port: why a request waited, by its own id or its trace's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from sidecar.live.telling import Teller
from sidecar.telemetry.journal import Journal

LONGEST_ID = 128
"""A request id that is longer is not taken over from the client."""


def routes(journal: Journal, *, tiers: Callable[[], Sequence[str]], pool: str, is_shared: bool) -> Sequence[BaseRoute]:
    """The page. `tiers` are the names of the policy in force, most important first."""
    teller = Teller(journal, tiers, pool, is_shared)

    async def explain(request: Request) -> Response:
        wanted = request.path_params["id"][: LONGEST_ID + 1]
        story = teller.tell(wanted)
        if story is None:
            return JSONResponse({"error": {"code": "unknown_request", "message": _unknown(teller, wanted)}}, 404)
        return Response(msgspec.json.encode(story), media_type="application/json")

    # As a path: a client's own request id may hold slashes.
    return [Route("/requests/{id:path}", explain)]


def _unknown(teller: Teller, wanted: str) -> str:
    minutes = teller.journal.retention_s / 60
    sentence = (
        f"no request with the id or trace id {wanted!r} is known here: this process keeps what waits or runs, and "
        f"for at most {minutes:g} minutes the last that ended, since it started"
    )
    return f"{sentence}; the pool is shared, so ask the other replicas, too" if teller.is_shared else sentence
