"""ASGI app of the emulator: every endpoint of one engine."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Lifespan, Receive, Scope, Send

from sidecar.apis import Api
from sidecar.engines import Dynamo, Engine, Sglang, TensorRtLlm, Vllm
from sidecar.tools.emulator import engine_pages
from sidecar.tools.emulator.config import EmulatorConfig
from sidecar.tools.emulator.dialects.base import Dialect
from sidecar.tools.emulator.dialects.dynamo import DynamoDialect
from sidecar.tools.emulator.dialects.sglang import SglangDialect
from sidecar.tools.emulator.dialects.tensorrt_llm import TrtllmDialect
from sidecar.tools.emulator.dialects.vllm import VllmDialect
from sidecar.tools.emulator.endpoint import ENGINES, GeneratingEndpoint, Responses
from sidecar.tools.emulator.engine import EmulatedEngine
from sidecar.tools.emulator.faults import Faults

DIALECTS: Mapping[type[Engine], type[Dialect]] = {
    TensorRtLlm: TrtllmDialect,
    Vllm: VllmDialect,
    Sglang: SglangDialect,
    Dynamo: DynamoDialect,
}

LOG_PATH = "/_emulator/log"
"""The record of every request."""
PATHS = {
    "/v1/chat/completions": Api.CHAT,
    "/v1/completions": Api.COMPLETIONS,
    "/v1/responses": Api.RESPONSES,
    "/v1/messages": Api.MESSAGES,
    "/v1/embeddings": Api.EMBEDDINGS,
}


class _App(Starlette):
    """The engine behind its faults. They come before every middleware: some need the server's own `send`."""

    def __init__(self, faults: Faults, routes: Sequence[BaseRoute], lifespan: Lifespan[Starlette]) -> None:
        super().__init__(routes=routes, lifespan=lifespan)
        self._faults = faults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._faults.serve(super().__call__, scope, receive, send)


class Emulator:
    """One emulated engine: `app` for an ASGI server, `engine` to look inside, `faults` to make it rude.

    Nothing runs until the first request. The lifespan's end, or `engine.stop()`, aborts what is left.
    """

    def __init__(self, config: EmulatorConfig) -> None:
        self.config = config
        self.dialect = DIALECTS[config.engine](config)
        self.engine = EmulatedEngine(config, self.dialect)
        self._started = int(time.time())
        self.faults = Faults(PATHS, config.faults)
        self.app: Starlette = _App(self.faults, self._routes(), self._lifespan)

    def __repr__(self) -> str:
        return f"<Emulator {self.engine!r}>"

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        del app
        yield
        await self.engine.stop()

    def _routes(self) -> list[BaseRoute]:
        config, kind, engine = self.config, self.config.engine, self.engine
        metrics_path, write = engine_pages.METRICS_TEXT[kind]
        routes: list[BaseRoute] = [*self._responses()]
        routes += [Route(path, GeneratingEndpoint(api, engine), methods=["POST"]) for path, api in PATHS.items()]
        routes += [
            _page("/v1/models", lambda: engine_pages.models(config, self.dialect, self._started)),
            _page("/health", self._health),
            _page("/_emulator", lambda: engine_pages.emulator_state(engine)),
            _page(LOG_PATH, lambda: [asdict(served) for served in engine.log]),
            _page(metrics_path, lambda: Response(write(engine), media_type=engine_pages.Exposition.content_type)),
            _page("/openapi.json", lambda: engine_pages.openapi(config)),
        ]
        if kind in (TensorRtLlm, Vllm):
            routes.append(_page("/version", lambda: {"version": engine_pages.VERSIONS[kind]}))
        if info := engine_pages.server_info(config):
            routes.append(_page("/server_info", lambda: info))
        if kind is Sglang:
            routes += self._sglang_pages(info)
        return routes

    def _sglang_pages(self, info: Mapping[str, Any] | None) -> list[BaseRoute]:
        """SGLang's own; the names that begin with `get_` are older ones, which it answers too."""
        model_info = engine_pages.sglang_model_info(self.config)
        return [
            *(_page(path, lambda: model_info) for path in ("/model_info", "/get_model_info")),
            _page("/get_server_info", lambda: info),
            _page("/v1/loads", lambda: engine_pages.sglang_loads(self.engine)),
        ]

    def _health(self) -> Response | dict[str, Any]:
        """SGLang's is 503 as soon as it drains (`http_server.health_generate`); seen running, vLLM's stays 200."""
        if self.config.engine is Dynamo:
            return engine_pages.dynamo_health(self.config)
        is_unwell = self.config.engine is Sglang and self.engine.is_stopping
        return Response(status_code=HTTPStatus.SERVICE_UNAVAILABLE if is_unwell else HTTPStatus.OK)

    def _responses(self) -> list[BaseRoute]:
        """Routes of an engine that runs responses in the background; they go before the plain one."""
        if self.config.engine not in ENGINES:
            return []
        responses = Responses(self.engine)
        return [
            Route("/v1/responses", responses, methods=["POST"]),
            Route("/v1/responses/{response_id}", responses.retrieve),
            Route("/v1/responses/{response_id}/cancel", responses.cancel, methods=["POST"]),
        ]


def _page(path: str, answer: Callable[[], Any]) -> Route:
    """A page to read; an answer that is no response yet is written as JSON."""

    async def respond(request: Request) -> Response:
        del request
        found = answer()
        return found if isinstance(found, Response) else JSONResponse(found)

    return Route(path, respond)
