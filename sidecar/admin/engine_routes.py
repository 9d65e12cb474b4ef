"""Engines of the pool on the admin port: the list of them, and the drain and resume of one.

`GET /engines`, `POST /engines/{name}/drain` and `POST /engines/{name}/resume`. With `?wait=true` a drain is answered
when the engine is empty: as the preStop hook of a rolling update, it keeps the engine alive until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sidecar.admin.answers import RefusedByPage, flag, json_answer
from sidecar.admin.operations import routes_for
from sidecar.admin.stream import receive_disconnect
from sidecar.durations import short_duration
from sidecar.engines.view import DrainEnd, EngineDocument, PoolEngines
from sidecar.policy.units import duration_s
from sidecar.tasks import end

NO_ENGINES = "this pool has one engine: its policy has no `engines`. GET /state shows the engine as `engine`"


class Engines(msgspec.Struct, frozen=True):
    """The answer of `GET /engines`."""

    engines: list[EngineDocument]


class Drained(msgspec.Struct, frozen=True):
    """The answer to a drain or a resume: the engine, and whether a drain found it empty."""

    engine: EngineDocument
    drained: bool


class EngineRoutes:
    """Routes for the admin port. `view` is None where the pool has one engine. `close` ends all waits for drains."""

    def __init__(self, view: Callable[[], PoolEngines | None]) -> None:
        self._view = view
        self._is_closed = asyncio.Event()

    def close(self) -> None:
        """The server is about to close its port: a wait for a drain is answered, and the engine drains on."""
        self._is_closed.set()

    def routes(self) -> Sequence[BaseRoute]:
        """See the module."""
        return routes_for({"engines": self._list, "drainEngine": self._drain, "resumeEngine": self._resume})

    async def _list(self, _: Request) -> Response:
        return json_answer(Engines(list(self._engines().documents())))

    async def _drain(self, request: Request) -> Response:
        view, name = self._engines(), request.path_params["name"]
        waits, within_s = flag(request, "wait"), _within_s(request, view.drain_timeout_s)
        row = await _change(view.drain, view, name)
        ended = await self._wait(request, view, name, within_s) if waits else await view.drained(name, 0)
        if ended is DrainEnd.TIMED_OUT and waits:
            raise RefusedByPage(504, "drain_timeout", _too_late(_document_for(view, name) or row, within_s))
        if ended is DrainEnd.RESUMED:
            raise RefusedByPage(
                409, "resumed", f"engine {name} was resumed before it was empty, and gets requests again"
            )
        return json_answer(Drained(_document_for(view, name) or row, drained=ended is DrainEnd.EMPTY))

    async def _resume(self, request: Request) -> Response:
        view, name = self._engines(), request.path_params["name"]
        return json_answer(Drained(await _change(view.resume, view, name), drained=False))

    async def _wait(self, request: Request, view: PoolEngines, name: str, within_s: float) -> DrainEnd:
        """The end of the drain. Nothing is left of the wait where the client disconnects, or the server stops."""
        drained = asyncio.ensure_future(view.drained(name, within_s))
        left = asyncio.ensure_future(receive_disconnect(request.receive))
        stops = asyncio.ensure_future(self._stopped())
        try:
            await asyncio.wait((drained, left, stops), return_when=asyncio.FIRST_COMPLETED)
            if drained.done():
                return drained.result()
            if left.done():
                raise RefusedByPage(499, "client_left", "the client disconnected")  # for no one
            raise RefusedByPage(503, "stopping", f"this sidecar stops; engine {name} drains on")
        finally:
            for task in (drained, left, stops):
                await end(task)

    async def _stopped(self) -> None:
        await self._is_closed.wait()

    def _engines(self) -> PoolEngines:
        view = self._view()
        if view is None:
            raise RefusedByPage(404, "no_engines", NO_ENGINES)
        return view


async def _change(change: Callable[[str], Awaitable[None]], view: PoolEngines, name: str) -> EngineDocument:
    """The engine after a change."""
    before = _document_for(view, name)
    try:
        await change(name)
    except KeyError:
        names = list(dict.fromkeys(row.name for row in view.documents() if row.for_s is not None))
        known = f"the engines are {', '.join(names)}" if names else "there are none now"
        raise RefusedByPage(404, "unknown_engine", f"no engine is called {name!r}; {known}") from None
    row = _document_for(view, name) or before
    assert row is not None
    return row


def _document_for(view: PoolEngines, name: str) -> EngineDocument | None:
    """The latest incarnation of an engine; None where discovery names it no more, and nothing of it is left."""
    return next((row for row in reversed(view.documents()) if row.name == name), None)


def _too_late(row: EngineDocument, within_s: float) -> str:
    return (
        f"engine {row.name} is not empty after {short_duration(within_s)}: it holds {row.held.requests} requests "
        f"({row.held.tokens} tokens), and {row.in_flight} of this process are under way there; it gets no new ones. "
        f"Send the same again to wait on, or POST /engines/{row.name}/resume to end the drain"
    )


def _within_s(request: Request, longest_s: float) -> float:
    """The client's own timeout, or the policy's."""
    written = request.query_params.get("timeout")
    if written is None:
        return longest_s
    try:
        return float(duration_s(written))
    except ValueError as mistake:
        raise RefusedByPage(400, "bad_parameter", f"timeout: {mistake}") from None
