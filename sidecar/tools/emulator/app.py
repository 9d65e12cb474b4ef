"""ASGI app of the emulator: every endpoint of one engine."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from sidecar.apis import Api
from sidecar.engines import Dynamo, Engine, Sglang, TensorRtLlm, Vllm
from sidecar.tools.emulator import background, engine_pages
from sidecar.tools.emulator.config import EmulatorConfig
from sidecar.tools.emulator.dialects.base import Dialect
from sidecar.tools.emulator.dialects.dynamo import DynamoDialect
from sidecar.tools.emulator.dialects.sglang import SglangDialect
from sidecar.tools.emulator.dialects.tensorrt_llm import TrtllmDialect
from sidecar.tools.emulator.dialects.vllm import VllmDialect
from sidecar.tools.emulator.endpoint import Endpoint
from sidecar.tools.emulator.engine import EmulatedEngine
from sidecar.tools.emulator.metrics import METRICS_TEXT, Exposition, trtllm_iterations

DIALECTS: Mapping[type[Engine], type[Dialect]] = {
    TensorRtLlm: TrtllmDialect,
    Vllm: VllmDialect,
    Sglang: SglangDialect,
    Dynamo: DynamoDialect,
}

PATHS = {
    "/v1/chat/completions": Api.CHAT,
    "/v1/completions": Api.COMPLETIONS,
    "/v1/responses": Api.RESPONSES,
    "/v1/messages": Api.MESSAGES,
    "/v1/embeddings": Api.EMBEDDINGS,
}


class Emulator:
    """One emulated engine: `app` for an ASGI server, `engine` to look inside.

    Nothing runs until the first request. The lifespan's end, or `engine.stop()`, aborts what is left.
    """

    def __init__(self, config: EmulatorConfig) -> None:
        self.config = config
        self.dialect = DIALECTS[config.engine](config)
        self.engine = EmulatedEngine(config, self.dialect)
        self._started = int(time.time())
        self.app = Starlette(routes=self._routes(), lifespan=self._lifespan)

    def __repr__(self) -> str:
        return f"<Emulator {self.engine!r}>"

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        del app
        yield
        await self.engine.stop()

    def _routes(self) -> list[BaseRoute]:
        metrics_path, _ = METRICS_TEXT[self.config.engine]
        routes: list[BaseRoute] = [*self._responses()]
        routes += [Route(path, Endpoint(api, self.engine), methods=["POST"]) for path, api in PATHS.items()]
        routes += [
            Route("/v1/models", self._models),
            Route("/health", self._health),
            Route(metrics_path, self._metrics_text),
        ]
        if self.config.engine is TensorRtLlm:
            routes.append(Route("/metrics", self._iterations))
        if self.config.engine in (TensorRtLlm, Vllm):
            routes.append(_constant("/version", {"version": engine_pages.VERSIONS[self.config.engine]}))
        if info := engine_pages.server_info(self.config):
            routes.append(_constant("/server_info", info))
        if self.config.engine is Sglang:
            routes.append(Route("/v1/loads", self._loads))
        routes.append(_constant("/openapi.json", engine_pages.openapi(self.config)))
        return routes

    def _responses(self) -> list[BaseRoute]:
        """Those of an engine that runs responses in the background; they go before the plain one."""
        if self.config.engine not in background.ENGINES:
            return []
        responses = background.Responses(self.engine)
        return [
            Route("/v1/responses", responses, methods=["POST"]),
            Route("/v1/responses/{response_id}", responses.retrieve),
            Route("/v1/responses/{response_id}/cancel", responses.cancel, methods=["POST"]),
        ]

    async def _models(self, request: Request) -> Response:
        del request
        return JSONResponse(engine_pages.models(self.config, self.dialect, self._started))

    async def _health(self, request: Request) -> Response:
        del request
        if self.config.engine is Dynamo:
            return JSONResponse(engine_pages.dynamo_health(self.config))
        return Response(status_code=200)

    async def _metrics_text(self, request: Request) -> Response:
        del request
        _, write = METRICS_TEXT[self.config.engine]
        return Response(write(self.engine), headers={"content-type": Exposition.content_type})

    async def _loads(self, request: Request) -> Response:
        del request
        return JSONResponse(engine_pages.sglang_loads(self.config, self.engine.load))

    async def _iterations(self, request: Request) -> Response:
        del request
        return JSONResponse(trtllm_iterations(self.engine))


def _constant(path: str, answer: Mapping[str, Any]) -> Route:
    async def respond(request: Request) -> Response:
        del request
        return JSONResponse(answer)

    return Route(path, respond)
