"""Answers of the admin port's routes: JSON, refusals, and switches in the query."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

FRESH = {"cache-control": "no-store"}
"""Headers of an answer that no cache keeps."""
_YES, _NO = frozenset(("true", "1", "yes", "")), frozenset(("false", "0", "no"))

Handler = Callable[[Request], Awaitable[Response]]


class RefusedByPage(Exception):
    """Answered as `response`."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.response = refused(status, code, message)


def refused(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error as every page of the port answers it."""
    error = {"error": {"code": code, "message": message}}
    return JSONResponse(error, status, {**FRESH, **(headers or {})})


def page(path: str, **handlers: Handler) -> Route:
    """A route by method: `GET=...`. What a handler raises as `RefusedByPage` is answered.

    All methods of a path have one route, so that the refusal of any other method names every one of them.
    """

    async def answered(request: Request) -> Response:
        try:
            return await handlers["GET" if request.method == "HEAD" else request.method](request)
        except RefusedByPage as refusal:
            return refusal.response

    return Route(path, answered, methods=list(handlers))


def flag(request: Request, name: str) -> bool:
    """A switch in the query; False where it is not there. Raises RefusedByPage."""
    written = request.query_params.get(name, "false").lower()
    if written in _YES:
        return True
    if written in _NO:
        return False
    raise RefusedByPage(400, "bad_parameter", f"{name}: {written!r} is neither true nor false")


def json_answer(document: msgspec.Struct, status: int = 200) -> Response:
    """A document as JSON, which no cache keeps."""
    return Response(msgspec.json.encode(document), status, FRESH, "application/json")
