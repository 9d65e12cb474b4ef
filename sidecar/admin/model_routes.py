"""Routes of the admin port where models have pools of their own: each pool has its pages at `/models/{model}/`.

`/models` lists them, and `/` links to them. A page of one pool (`/overview`, `/observed`) is found without the model's
name only where there is one model. A request's explanation is looked for in all pools, `/engines` lists the engines of
all, and one of them is drained in its own pool. Everything else is the process's own: metrics, health, state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidecar.admin.answers import FRESH, Handler, RefusedByPage, json_answer, refused
from sidecar.admin.engine_routes import Engines
from sidecar.admin.operations import routes_for
from sidecar.engines.view import EngineDocument
from sidecar.fleet.models import ModelsController

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
