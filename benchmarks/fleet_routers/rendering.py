"""Rendered prompts: vLLM's `/v1/chat/completions/render` and `/v1/completions/render`, the prompt as token ids.

Routers ask for them, to find a prompt among those that they sent before (vllm-router with its cache-aware rule).
`vllm serve` has them beside the other endpoints (`vllm/entrypoints/scale_out/render/api_router.py` of 0.32).
A token is four bytes of text as everywhere here, and its id is those bytes: the same text has the same ids.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from sidecar.apis import Api
from sidecar.tools.emulator.config import EmulatorConfig
from sidecar.tools.emulator.dialects.base import Dialect, EngineRefusal
from sidecar.tools.emulator.prompt_blocks import Piece, read_prompts
from sidecar.tools.emulator.request import BYTES_PER_TOKEN, Body, InvalidField, read_ask

RENDERED = {Api.CHAT: "/v1/chat/completions/render", Api.COMPLETIONS: "/v1/completions/render"}
"""The page for each API that has one."""


class Rendering:
    """One page. It computes nothing, and the queue knows nothing of it."""

    def __init__(self, api: Api, dialect: Dialect, config: EmulatorConfig) -> None:
        self.api = api
        self._dialect = dialect
        self._config = config
        self._numbers = itertools.count(1)

    async def respond(self, request: Request) -> Response:
        """Answers for the page."""
        try:
            rendered = self._render(await request.body())
        except ClientDisconnect:
            return Response()
        except EngineRefusal as refusal:
            return JSONResponse(refusal.body, refusal.status)
        return JSONResponse(rendered[0] if self.api is Api.CHAT else rendered)

    def _render(self, raw: bytes) -> list[dict[str, Any]]:
        """A `GenerateRequest` of vLLM for each prompt, as far as a router reads it. Raises EngineRefusal."""
        try:
            body: Body = msgspec.json.decode(raw, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._dialect.broken_json(self.api, str(error)) from error
        try:
            self._dialect.check(self.api, body)
            ask = read_ask(self.api, body, self._config.model)
        except InvalidField as mistake:
            raise self._dialect.invalid(self.api, mistake) from mistake
        most = self._config.output_tokens if ask.output_tokens is None else ask.output_tokens
        return [
            {
                "request_id": f"chatcmpl-{next(self._numbers):08d}",
                "token_ids": token_ids(pieces),
                "sampling_params": {"max_tokens": most},
                "model": ask.model,
                "stream": ask.stream,
            }
            for pieces in read_prompts(self.api, body)
        ]


def token_ids(pieces: Iterable[Piece]) -> list[int]:
    """The tokens of a prompt, at least one, as many as the engine counts; a short last one is filled with zeros."""
    data = b"".join(piece.data for piece in pieces)
    return array("I", data + bytes(-len(data) % BYTES_PER_TOKEN)).tolist() or [0]
