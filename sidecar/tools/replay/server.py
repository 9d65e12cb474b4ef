"""The server under test before it gets any work: its model, its engine, its context length, its tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from sidecar.engines import Engine
from sidecar.engines.discovery import engine_by_owner
from sidecar.errors import CapacityUnknown, Draining, InvalidApiKey, InvalidBody, StoreUnavailable
from sidecar.tools.loadgen.answer import read_problem
from sidecar.tools.loadgen.pages import why_not

TIMEOUT_S = 10.0
ADMISSION_CODES = frozenset(
    error.code for error in (InvalidBody, InvalidApiKey, CapacityUnknown, StoreUnavailable, Draining)
)
"""Codes with which admission control refuses an empty body, whatever state it is in."""


class ServerNoAnswer(Exception):
    """The server cannot be asked. One line, with what it said."""


class _Card(msgspec.Struct):
    id: str
    owned_by: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Code(msgspec.Struct):
    code: str | int | None = None


class _Refusal(msgspec.Struct):
    error: _Code


class _Count(msgspec.Struct):
    count: int


@dataclass(frozen=True, slots=True)
class Model:
    """The model that is served first. `engine` is None where the server does not say, as is `context_tokens`."""

    name: str
    engine: type[Engine] | None
    context_tokens: int | None


class AskedServer(AbstractAsyncContextManager["AskedServer"]):
    """Asks a server about itself. An async context manager."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def model(self) -> Model:
        """The first of `/v1/models`. Raises ServerNoAnswer."""
        body = await self._ask("GET", "/v1/models")
        try:
            cards = msgspec.json.decode(body, type=_Cards).data
        except (msgspec.MsgspecError, RecursionError):
            raise ServerNoAnswer(f"{self.url}/v1/models answers something else than a list of models") from None
        if not cards:
            raise ServerNoAnswer(f"{self.url}/v1/models has no model; is the engine still loading it?")
        card = cards[0]
        return Model(card.id, engine_by_owner(card.owned_by), card.max_model_len)

    async def count(self, body: Mapping[str, Any]) -> int | None:
        """The tokens of a prompt, by the engine's own `/tokenize`; None where it has none, or not for such a body.

        vLLM takes `prompt` or `messages`, SGLang `prompt`; both answer with `count`.
        """
        try:
            return msgspec.json.decode(await self._ask("POST", "/tokenize", body), type=_Count).count
        except (ServerNoAnswer, msgspec.MsgspecError):
            return None

    async def enforces(self, path: str) -> bool:
        """True if admission control answers here, by its refusal of an empty body. Raises ServerNoAnswer."""
        status, headers, body = await self._exchange("POST", path, {})
        try:
            code = msgspec.json.decode(body, type=_Refusal).error.code
        except (msgspec.MsgspecError, RecursionError):
            code = None
        return status >= 400 and "x-request-id" in headers and code in ADMISSION_CODES

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        status, _, answer = await self._exchange(method, path, body)
        if status != 200:
            said = read_problem(answer)
            raise ServerNoAnswer(f"{self.url}{path} answers {status}" + (f": {said}" if said else ""))
        return answer

    async def _exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[int, Mapping[str, str], bytes]:
        try:
            async with self._session.request(method, self.url + path, json=body) as response:
                return response.status, response.headers, await response.read()
        except asyncio.TimeoutError:  # in Python 3.10 not yet the builtin TimeoutError
            raise ServerNoAnswer(f"{self.url} does not answer within {TIMEOUT_S:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ServerNoAnswer(f"{self.url} cannot be reached: {why_not(error)}") from None
