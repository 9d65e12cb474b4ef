"""Routes of the admin port where models have pools of their own: each pool has its pages at `/models/{model}/`.

`/models` lists them, and `/` links to them. A page of one pool (`/overview`, `/observed`) is found without the model's
name only where there is one model. A request's explanation is looked for in all pools, `/engines` lists the engines of
all, and one of them is drained in its own pool. Everything else is the process's own: metrics, health, state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from urllib.parse import quote

import msgspec
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidecar.admin.answers import refused
from sidecar.admin.engine_routes import Engines
from sidecar.engines.view import EngineDocument
from sidecar.fleet.models import ModelsController

FOLDER, _ENGINES = "/models", "/engines"
_OF_ONE_POOL = ("/", "/overview", "/overview/stream", "/observed")
_FRESH = {"cache-control": "no-store"}
_POLICY = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'", **_FRESH}


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
    """The admin port's routes: the front's `own`, and those of each model's pool."""
    apps = {name: Router(routes) for name, routes in of_models.items()}
    return [Mount("", app=_ModelPages(front, Router(own), apps))]


class _ModelPages:
    def __init__(self, front: ModelsController, own: ASGIApp, of_models: Mapping[str, ASGIApp]) -> None:
        self._front = front
        self._own = own
        self._of_models = of_models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one HTTP scope."""
        root = scope.get("root_path", "")
        path = scope["path"].removeprefix(root)
        if path.startswith(f"{FOLDER}/"):
            await self._serve_model(scope, receive, send, root, path)
        elif path == FOLDER:
            answer = msgspec.json.encode(Pools(_links(self._front)))
            await Response(answer, media_type="application/json", headers=_FRESH)(scope, receive, send)
        elif path in _OF_ONE_POOL:
            await self._serve_pool(scope, receive, send, path)
        elif path == _ENGINES:
            answer = msgspec.json.encode(Engines(_engines(self._front)))
            await Response(answer, media_type="application/json", headers=_FRESH)(scope, receive, send)
        elif path.startswith(f"{_ENGINES}/"):
            await self._serve_engine(scope, receive, send, path)
        elif path.startswith("/request"):
            await self._explain(scope, receive, send)
        else:
            await self._own(scope, receive, send)

    async def _serve_model(self, scope: Scope, receive: Receive, send: Send, root: str, path: str) -> None:
        """`/models/{model}/...`. A model's name may have slashes; the longest one that fits counts."""
        inside = path.removeprefix(f"{FOLDER}/")
        fitting = [name for name in self._of_models if inside == name or inside.startswith(f"{name}/")]
        if not fitting:
            await self._unknown(scope, receive, send, "no model is called so")
            return
        name = max(fitting, key=len)
        prefix = f"{root}{FOLDER}/{name}"
        if inside == name:  # the page's own links begin in its folder
            link = f"{quote(name.rpartition('/')[2])}/"
            await Response(status_code=307, headers={"location": link})(scope, receive, send)
        elif inside == f"{name}/metrics":
            await self._own({**scope, "path": f"{root}/metrics"}, receive, send)
        else:
            await self._of_models[name]({**scope, "root_path": prefix}, receive, send)

    async def _serve_pool(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        if len(self._of_models) == 1:
            await next(iter(self._of_models.values()))(scope, receive, send)
        elif path == "/":
            await HTMLResponse(_index(self._front), headers=_POLICY)(scope, receive, send)
        else:
            await self._unknown(
                scope,
                receive,
                send,
                f"each model has a pool of its own, and {path} shows one; a command takes --admin URL/models/NAME",
            )

    async def _serve_engine(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        """The drain or resume of one engine: by the pool that it belongs to."""
        engine = path.removeprefix(f"{_ENGINES}/").rpartition("/")[0]
        for name, app in self._of_models.items():
            view = self._front.controllers[name].engines
            if view is not None and any(row.name == engine for row in view.documents()):
                await app(scope, receive, send)
                return
        names = ", ".join(dict.fromkeys(row.name for row in _engines(self._front)))
        message = f"no engine is called {engine!r}; the engines are {names}"
        await refused(404, "unknown_engine", message)(scope, receive, send)

    async def _unknown(self, scope: Scope, receive: Receive, send: Send, why: str) -> None:
        paths = ", ".join(link.path for link in _links(self._front))
        await refused(404, "unknown_model", f"{why}; the pools' pages are at {paths}")(scope, receive, send)

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
    models = front.policy.models
    return [
        PoolLink(
            name,
            list(models[name].aliases),
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
