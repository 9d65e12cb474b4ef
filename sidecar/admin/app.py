"""ASGI app of the admin port: health, readiness and state of the process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from sidecar.admin import openapi
from sidecar.admin.answers import Liveness, Readiness, json_answer, refused
from sidecar.admin.operations import PATH, routes_for


def admin_app(
    *,
    state: Callable[[], Mapping[str, object]],
    readiness: Callable[[], Sequence[str]],
    notices: Callable[[], Sequence[str]] = tuple,
    routes: Sequence[BaseRoute] = (),
) -> ASGIApp:
    """An app with `/healthz` (200 while the process lives), `/readyz`, `/state`, `/openapi.json`, and the `routes`.

    `readiness` returns the reasons not to send requests here, none when ready; `notices` what is out of order though
    they may come; `state` anything that JSON can hold. All are called on the event loop for every request, so they must
    be quick.
    """

    async def healthz(_: Request) -> Response:
        return json_answer(Liveness())

    async def readyz(_: Request) -> Response:
        reasons = list(readiness())
        answer = Readiness("not ready" if reasons else "ready", reasons, list(notices()))
        return json_answer(answer, 503 if reasons else 200)

    async def show_state(_: Request) -> Response:
        return JSONResponse(dict(state()))

    async def description(_: Request) -> Response:
        return Response(openapi.text(), media_type="application/json")

    own = routes_for({"health": healthz, "readiness": readyz, "state": show_state, "description": description})
    handlers = {404: _no_page, 405: _no_method}
    return Starlette(routes=[*own, *routes], exception_handlers=handlers)


async def _no_page(request: Request, _: Exception) -> Response:
    message = f"the admin port has no page {request.scope['path']!r}; GET {PATH} describes those that it has"
    return refused(404, "unknown_page", message)


async def _no_method(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow", "")
    message = f"{request.scope['path']} takes {allowed}, not {request.method}; GET {PATH} describes the pages"
    return refused(405, "method_not_allowed", message, {"allow": allowed})
