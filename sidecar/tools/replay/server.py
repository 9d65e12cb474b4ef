"""The server under test before it gets any work: its model, its engine, its context length, its tokenizer.

And a neutral control of a replay: the same arrivals at an engine that treats all of them alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from sidecar.apis import Api
from sidecar.engines.discovery import Identity, identify_by_models
from sidecar.engines.pages import Page
from sidecar.errors import CapacityUnknown, Draining, InvalidApiKey, InvalidBody, StoreUnavailable
from sidecar.tools.loadgen.connection import read_problem
from sidecar.tools.loadgen.pages import why_not

PATHS = {Api.CHAT: "/v1/chat/completions", Api.COMPLETIONS: "/v1/completions"}
TIMEOUT_S = 10.0
ADMISSION_CODES = frozenset(
    error.code for error in (InvalidBody, InvalidApiKey, CapacityUnknown, StoreUnavailable, Draining)
)
"""Codes with which admission control refuses an empty body, whatever state it is in."""


class ServerNoAnswer(Exception):
    """The server cannot be asked. One line, with its answer."""


class _Code(msgspec.Struct):
    code: str | int | None = None


class _Refusal(msgspec.Struct):
    error: _Code


class _Count(msgspec.Struct):
    count: int


class AskedServer(AbstractAsyncContextManager["AskedServer"]):
    """Asks a server about itself. An async context manager."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @property
    def host(self) -> object | None:
        """It runs elsewhere."""
        return None

    async def get(self, path: str) -> Page:
        """See `Pages.get`. Raises ServerNoAnswer for all but an answer of 200."""
        return Page(200, (await self._ask("GET", path)).decode("utf-8", "replace"))

    async def identity(self) -> Identity:
        """The model that is served first, and the engine, by `/v1/models`. Raises ServerNoAnswer where it has none."""
        found = await identify_by_models(self)
        if found.model is None:
            raise ServerNoAnswer(f"{self.url}/v1/models has no model; is the engine still loading it?")
        return found

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
            problem = read_problem(answer)
            raise ServerNoAnswer(f"{self.url}{path} answers {status}" + (f": {problem}" if problem else ""))
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


class NotNeutral(ValueError):
    """The control would be under admission control. The text names the server, and what to do.

    A sidecar that enforces is no place for one: each request there is under some tier's limit, queue bound and maximum
    wait, and under its tenant's limits. A control under these would refuse requests that the other run serves, and
    those that remain would look fast. So the control goes to the engine itself, or to a sidecar that observes.
    """


@dataclass(frozen=True, slots=True)
class Control:
    """The servers that get the control's requests, and the key that all of them send, None for none.

    `is_named` says that the servers were given for the control alone. They get no tenant's key.
    """

    urls: Sequence[str]
    api_key: str | None = field(repr=False)
    is_named: bool


async def require_neutral(control: Control, api: Api) -> None:
    """Asks every server of the control whether admission control is in force there. It generates nothing for that.

    Raises NotNeutral, and ServerNoAnswer for a server that cannot be asked or that refuses the key.
    """
    option = "--control-upstream" if control.is_named else "--control"
    for url in control.urls:
        async with AskedServer(url, control.api_key) as server:
            if await server.enforces(PATHS[api]):
                raise NotNeutral(
                    f"{option}: {url} enforces admission control: a control there is under one tier's limits, and "
                    "refuses requests that the other run serves; write --control-upstream URL with the address of "
                    "the engine itself (docs/tools.md#replay says what to do where it has none)"
                )
            if control.is_named:
                await server.identity()
