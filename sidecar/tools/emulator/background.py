"""Background responses, as vLLM (VLLM_ENABLE_RESPONSES_API_STORE=1) and SGLang (--enable-response-store) run them.

`background: true` is answered at once with a queued response, or with a stream that the client may leave. The response
runs on either way, and its id gives its state. Without the store both engines refuse it; TensorRT-LLM ignores it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from sidecar.apis import Api
from sidecar.engines import Sglang, Vllm
from sidecar.tools.emulator import responses
from sidecar.tools.emulator.endpoint import GeneratingEndpoint
from sidecar.tools.emulator.engine import EmulatedEngine
from sidecar.tools.emulator.generation import Generation

MOST_STORED = 10_000
_NOT_STORED = {
    Vllm: (
        "This vLLM engine does not support `store=True` and therefore does not support the background mode. "
        "To enable these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching "
        "the vLLM server."
    ),
    Sglang: ("Response store is disabled. Stateful Responses require --enable-response-store on a standalone server."),
}
ENGINES = frozenset(_NOT_STORED)
"""The engines that run responses in the background."""


class Stored(NamedTuple):
    """One background response."""

    generation: Generation
    created: int

    @property
    def status(self) -> str:
        """The response as the engine reports it."""
        if self.generation.over:
            return "completed" if not self.generation.remaining else "cancelled"
        return "queued" if self.generation.admitted_s is None else "in_progress"

    def answer(self) -> dict[str, Any]:
        """The response as it stands."""
        return {**responses.response(self.generation, self.created, self.status), "background": True}


class Responses(GeneratingEndpoint):
    """`/v1/responses` of an engine that knows background responses, with or without a store for them."""

    def __init__(self, engine: EmulatedEngine) -> None:
        super().__init__(Api.RESPONSES, engine)
        self._stored: OrderedDict[str, Stored] = OrderedDict()

    async def _serve(self, generation: Generation, scope: Scope, receive: Receive, send: Send) -> None:
        stored = self._stored.get(responses.identifier(generation))
        if stored is None:
            await super()._serve(generation, scope, receive, send)
        elif generation.ask.stream:
            await self._answer(generation, scope, receive, send)
        else:
            await JSONResponse(stored.answer())(scope, receive, send)

    async def retrieve(self, request: Request) -> Response:
        """GET by the response's id."""
        stored = self._stored.get(request.path_params["response_id"])
        return self._missing(request) if stored is None else JSONResponse(stored.answer())

    async def cancel(self, request: Request) -> Response:
        """POST to the response's `/cancel`."""
        stored = self._stored.get(request.path_params["response_id"])
        if stored is None:
            return self._missing(request)
        self.engine.abort(stored.generation)
        return JSONResponse(stored.answer())

    def _submit(self, raw: bytes, headers: Mapping[str, str]) -> Generation:
        if not _is_background(raw):
            return super()._submit(raw, headers)
        config = self.engine.config
        if not config.response_store:
            raise self.engine.dialect.refuse(self.api, HTTPStatus.BAD_REQUEST, _NOT_STORED[config.engine])
        generation = super()._submit(raw, headers)
        self._stored[responses.identifier(generation)] = Stored(generation, int(time.time()))
        if len(self._stored) > MOST_STORED:
            self._stored.popitem(last=False)
        return generation

    def _missing(self, request: Request) -> Response:
        message = f"Response with id '{request.path_params['response_id']}' not found."
        refusal = self.engine.dialect.refuse(self.api, HTTPStatus.NOT_FOUND, message)
        return JSONResponse(refusal.body, refusal.status)


def _is_background(raw: bytes) -> bool:
    """As pydantic reads it; what is no boolean is left to the checks of every request."""
    try:
        flag = msgspec.json.decode(raw, type=dict[str, Any]).get("background")
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return flag if isinstance(flag, bool) else flag is not None and _is_yes(flag)


def _is_yes(flag: object) -> bool:
    from pydantic import TypeAdapter, ValidationError  # a third of the emulator's start, for what few clients send

    try:
        return TypeAdapter(bool).validate_python(flag)
    except ValidationError:
        return False
