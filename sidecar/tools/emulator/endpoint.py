"""Generating endpoint: plain ASGI, one object per request, with a constant watch for the client's disconnect.

Two tasks serve a request: the server's own, which writes, and one that waits for `http.disconnect`. The engine has to
abort a request at once, also while it waits in the queue and nothing is written.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from sidecar.apis import Api
from sidecar.engines import Sglang, Vllm
from sidecar.tools.emulator import responses
from sidecar.tools.emulator.dialects.base import EngineRefusal
from sidecar.tools.emulator.engine import EmulatedEngine
from sidecar.tools.emulator.generation import Generation, token_text
from sidecar.tools.emulator.prompt_blocks import PromptChain, read_chains
from sidecar.tools.emulator.request import InvalidField, read_ask
from sidecar.tools.emulator.responses import ANSWERS, DONE, STREAMS, StreamFormat, event

_EVENT_STREAM = {
    "type": "http.response.start",
    "status": int(HTTPStatus.OK),
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")],
}


class GeneratingEndpoint:
    """One API of one engine."""

    def __init__(self, api: Api, engine: EmulatedEngine) -> None:
        self.api = api
        self.engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            generation = self._submit(await request.body(), request.headers)
        except ClientDisconnect:
            return
        except EngineRefusal as refusal:
            await _refuse(refusal, scope, receive, send)
            return
        await self._serve(generation, scope, receive, send)

    async def _serve(self, generation: Generation, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, and aborts a request whose client leaves."""
        watcher = asyncio.ensure_future(self._watch(receive, generation))
        try:
            await self._answer(generation, scope, receive, send)
        finally:
            watcher.cancel()
            self.engine.abort_late(generation)

    def _submit(self, raw: bytes, headers: Mapping[str, str]) -> Generation:
        """Everything between a body and a place in the queue. Raises Refusal."""
        dialect, config = self.engine.dialect, self.engine.config
        chains: tuple[PromptChain, ...] = ()
        try:
            body = msgspec.json.decode(raw, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise dialect.broken_json(self.api, str(error)) from error
        try:
            dialect.check(self.api, body)
            rank = dialect.rank(self.api, body, headers)
            ask = read_ask(self.api, body, config.model)
            if config.prefix_cache:
                chains = read_chains(self.api, body, ask.model, config.block_size)
        except InvalidField as mistake:
            raise dialect.invalid(self.api, mistake) from mistake
        return self.engine.submit(ask, rank, chains)

    async def _watch(self, receive: Receive, generation: Generation) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.engine.abort_late(generation)

    async def _answer(self, generation: Generation, scope: Scope, receive: Receive, send: Send) -> None:
        created = int(time.time())
        if generation.ask.stream:
            await self._stream(STREAMS[self.api](generation, created), send)
            return
        await generation.ready()
        if generation.refusal is not None:
            await _refuse(generation.refusal, scope, receive, send)
        elif generation.is_cut or not generation.remaining:
            await JSONResponse(ANSWERS[self.api](generation, created))(scope, receive, send)

    async def _stream(self, stream: StreamFormat, send: Send) -> None:
        generation = stream.generation
        if self.engine.dialect.kick_starts_streams:
            await generation.ready()
        await send(_EVENT_STREAM)
        opening = stream.opening()
        while chunk := await _next_chunk(stream):
            await send({"type": "http.response.body", "body": opening + chunk, "more_body": True})
            opening = b""
        if generation.refusal is not None:
            body = generation.refusal.body
            tail = event(body if "error" in body else {"error": dict(body)}) + DONE
        elif generation.is_cut:
            tail = stream.cut()
        elif generation.remaining:
            return  # the client has disconnected
        else:
            tail = stream.closing()
        await send({"type": "http.response.body", "body": tail})


async def _next_chunk(stream: StreamFormat) -> bytes:
    """The next events of all choices that have something to say; empty once it is over."""
    generation = stream.generation
    events = []
    for choice in await generation.take():
        while count := choice.due():
            text = token_text(choice.sent, count)
            choice.sent += count
            events.append(stream.token(choice.index, text, choice.sent == choice.output))
    return b"".join(events)


async def _refuse(refusal: EngineRefusal, scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse(refusal.body, refusal.status)(scope, receive, send)


# -- Background responses, as vLLM (VLLM_ENABLE_RESPONSES_API_STORE=1) and SGLang (--enable-response-store) run them.
#
# `background: true` is answered at once with a queued response, or with a stream that the client may leave. The
# response runs on either way, and its id gives its state. Without the store both engines refuse it; TensorRT-LLM
# ignores it.

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
