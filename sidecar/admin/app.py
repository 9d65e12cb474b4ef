"""ASGI app of the admin port: health, readiness and state of the process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp


def admin_app(
    *,
    state: Callable[[], Mapping[str, object]],
    readiness: Callable[[], Sequence[str]],
    notices: Callable[[], Sequence[str]] = tuple,
    routes: Sequence[BaseRoute] = (),
) -> ASGIApp:
    """An app with `/healthz` (200 while the process lives), `/readyz` and `/state`, and the `routes` given.

    `readiness` returns the reasons not to send requests here, none when ready; `notices` what is out of order though
    they may come; `state` anything that JSON can hold. All are called on the event loop for every request, so they must
    be quick.
    """

    async def healthz(_: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def readyz(_: Request) -> Response:
        reasons = list(readiness())
        status = "not ready" if reasons else "ready"
        answer = {"status": status, "reasons": reasons, "notices": list(notices())}
        return JSONResponse(answer, status_code=503 if reasons else 200)

    async def show_state(_: Request) -> Response:
        return JSONResponse(dict(state()))

    own = [Route("/healthz", healthz), Route("/readyz", readyz), Route("/state", show_state)]
    return Starlette(routes=[*own, *routes])
