"""Routes of the admin port for engines and models: drain, undrain, load and the like.

`GET /engines`, `POST /engines/{name}/drain` and `POST /engines/{name}/resume`. With `?wait=true` a drain is answered
when the engine is empty: as the preStop hook of a rolling update, it keeps the engine alive until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from html import escape
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidecar.admin.answers import FRESH, Handler, RefusedByPage, flag, json_answer, refused
from sidecar.admin.operations import routes_for
from sidecar.admin.routes import receive_disconnect
from sidecar.durations import short_duration
from sidecar.engines.view import DrainEnd, EngineDocument, PoolEngines
from sidecar.fleet.models import ModelsController
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


# -- Routes of the admin port where models have pools of their own: each pool has its pages at `/models/{model}/`.
#
# `/models` lists them, and `/` links to them. A page of one pool (`/overview`, `/observed`) is found without the
# model's name only where there is one model. A request's explanation is looked for in all pools, `/engines` lists
# the engines of all, and one of them is drained in its own pool. Everything else is the process's own: metrics,
# health, state.

FOLDER = "/models"
_POLICY = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'", **FRESH}


class PoolLink(msgspec.Struct, frozen=True):
    """One model's pool. `path` is where its pages are; `reasons` are why it admits no request, empty where it does."""

    model: str
    aliases: list[str]
    pool: str
    path: str
    reasons: list[str]


class Pools(msgspec.Struct, frozen=True):
    """The answer of `GET /models`."""

    models: list[PoolLink]


def model_routes(
    front: ModelsController,
    own: Sequence[BaseRoute],
    of_models: Mapping[str, Sequence[BaseRoute]],
) -> Sequence[BaseRoute]:
    """The admin port's routes: those of each model's pool, those of all pools together, and the front's `own`."""
    pages = _ModelPages(front, Router(own), {name: Router(routes) for name, routes in of_models.items()})
    metrics = [route for route in own if getattr(route, "path", None) == "/metrics"]
    found: list[BaseRoute] = []
    for name in sorted(of_models, key=len, reverse=True):  # a name may have slashes: the longest one that fits counts
        found.append(Route(f"{FOLDER}/{name}", partial(_to_its_folder, name)))
        found.append(Mount(f"{FOLDER}/{name}", routes=[*metrics, *of_models[name]]))
    found += [Mount(FOLDER, app=pages.no_model), *routes_for(pages.of_all())]
    if len(of_models) == 1:
        found += next(iter(of_models.values()))
    return [*found, *routes_for(pages.of_several()), *own]


async def _to_its_folder(name: str, _: Request) -> Response:
    """The links of a page begin in its folder."""
    return Response(status_code=307, headers={"location": f"{quote(name.rpartition('/')[2])}/"})


class _ModelPages:
    """Pages about all pools, by the names of their operations."""

    def __init__(self, front: ModelsController, own: ASGIApp, of_models: Mapping[str, ASGIApp]) -> None:
        self._front = front
        self._own = own
        self._of_models = of_models

    def of_all(self) -> Mapping[str, Handler]:
        """Pages that look into every pool."""
        explained = dict.fromkeys(("request", "requestById", "requestPage"), self._story)
        of_engine = dict.fromkeys(("drainEngine", "resumeEngine"), self._engine)
        return {"models": self._models, "engines": self._engines, **of_engine, **explained}

    def of_several(self) -> Mapping[str, Handler]:
        """Pages that show one pool, where there are several."""
        return {"livePage": self._index, **dict.fromkeys(("overview", "overviewStream", "observed"), self._none)}

    async def no_model(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The answer where no model has the name."""
        await self._unknown("no model is called so")(scope, receive, send)

    async def _models(self, _: Request) -> ASGIApp:
        return json_answer(Pools(_links(self._front)))

    async def _engines(self, _: Request) -> ASGIApp:
        return json_answer(Engines(_engines(self._front)))

    async def _engine(self, request: Request) -> ASGIApp:
        """The drain or resume of one engine: by the pool that it belongs to."""
        engine = request.path_params["name"]
        for name, app in self._of_models.items():
            view = self._front.controllers[name].engines
            if view is not None and any(row.name == engine for row in view.documents()):
                return app
        names = ", ".join(dict.fromkeys(row.name for row in _engines(self._front)))
        raise RefusedByPage(404, "unknown_engine", f"no engine is called {engine!r}; the engines are {names}")

    async def _index(self, _: Request) -> ASGIApp:
        return HTMLResponse(_index(self._front), headers=_POLICY)

    async def _none(self, request: Request) -> ASGIApp:
        path = request.url.path
        why = f"each model has a pool of its own, and {path} shows one; a command takes --admin URL/models/NAME"
        return self._unknown(why)

    def _unknown(self, why: str) -> Response:
        paths = ", ".join(link.path for link in _links(self._front))
        return refused(404, "unknown_model", f"{why}; the pools' pages are at {paths}")

    async def _story(self, _: Request) -> ASGIApp:
        return self._explain

    async def _explain(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request is known to the pool of its model, or was refused before it had one."""
        for app in self._of_models.values():
            attempt = _Attempt(send)
            await app(scope, receive, attempt.send)
            if not attempt.is_unknown:
                return
        await self._own(scope, receive, send)


class _Attempt:
    """The answer of one of several apps, which is dropped where that is a 404."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_unknown = False

    async def send(self, message: Message) -> None:
        self.is_unknown |= message.get("status") == 404
        if not self.is_unknown:
            await self._send(message)


def _engines(front: ModelsController) -> list[EngineDocument]:
    views = (controller.engines for controller in front.controllers.values())
    return [row for view in views if view is not None for row in view.documents()]


def _links(front: ModelsController) -> list[PoolLink]:
    return [
        PoolLink(
            name,
            [alias for alias, model in front.snapshot.names.called.items() if name == model != alias],
            controller.policy.pool,
            f"{FOLDER}/{quote(name)}/",
            [*controller.engine_watch.readiness(), *controller.pool.readiness()],
        )
        for name, controller in front.controllers.items()
    ]


def _index(front: ModelsController) -> str:
    rows = "".join(
        f'<li><a href="{escape(link.path.removeprefix("/"))}">{escape(link.model)}</a> '
        f"{escape('; '.join(link.reasons) or 'ready')}</li>"
        for link in _links(front)
    )
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>sidecar: models</title>'
        '<meta name="color-scheme" content="light dark"><style>body{font:16px system-ui;margin:2em}</style>'
        f"<h1>A pool for each model</h1><ul>{rows}</ul></html>\n"
    )
