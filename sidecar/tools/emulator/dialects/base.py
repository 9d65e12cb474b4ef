"""Dialect of an emulated engine: where it reads a priority, what it refuses, and in which words.

A dialect decides and never waits. It answers with a `EngineRefusal`, whose body is the JSON that the engine would send.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, ClassVar, NamedTuple

from sidecar.apis import Api
from sidecar.tools.emulator.config import EmulatorConfig, Scheduling
from sidecar.tools.emulator.request import Body, InvalidField, check_bounds
from sidecar.tools.step_model.queue import ORDERS, Order, Rank, first_come

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class EngineRefusal(Exception):
    """An answer instead of tokens: a status and the body that the engine would send with it."""

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body


class CachedPrompt(NamedTuple):
    """Tokens of one prompt that were found in the prefix cache, and those that it added there."""

    found: int
    created: int


class Dialect(ABC):
    """One engine's contract; engines.md has the sources of every line.

    `overload` is the status and the message for a request that finds the queue full.
    `kick_starts_streams`: the status line waits for the first token. `refuses_inside_streams`: a full queue is then an
    error event under a 200. `displaces`: a full queue lets a more important newcomer throw out the worst waiting one.
    """

    owned_by: ClassVar[str]
    overload: ClassVar[tuple[int, str]]
    kick_starts_streams: ClassVar[bool] = False
    refuses_inside_streams: ClassVar[bool] = False
    displaces: ClassVar[bool] = False

    def __init__(self, config: EmulatorConfig) -> None:
        self.config = config

    @property
    def queue_order(self) -> Order:
        """The waiting queue's order, which is the engine's own only with its switch on."""
        return ORDERS[self.config.engine] if self.config.scheduling is Scheduling.PRIORITY else first_come

    def check(self, api: Api, body: Body) -> None:  # noqa: B027 - most engines refuse no field by its name
        """Refuses fields that the engine does not know. Raises EngineRefusal."""

    @abstractmethod
    def rank(self, api: Api, body: Body, headers: Mapping[str, str]) -> Rank:
        """The request's priority as the engine reads it, headers included. Raises EngineRefusal or InvalidField."""

    @abstractmethod
    def refuse(self, api: Api, status: int, message: str) -> EngineRefusal:
        """An error of the engine's own making, in its shape."""

    def invalid(self, api: Api, mistake: InvalidField) -> EngineRefusal:
        """A request that does not fit the schema."""
        return self.refuse(api, HTTPStatus.BAD_REQUEST, pydantic_errors(mistake))

    def broken_json(self, api: Api, reason: str) -> EngineRefusal:
        """A body that is no JSON object."""
        return self.invalid(api, InvalidField("body", "json_invalid", f"JSON decode error: {reason}"))

    def too_long(self, api: Api, tokens: int, most: int) -> EngineRefusal:
        """Prompt and output cannot fit the model's context or the KV cache."""
        message = f"This model's maximum context length is {most} tokens. However, you requested {tokens} tokens."
        return self.refuse(api, HTTPStatus.BAD_REQUEST, message)

    def queue_length(self, api: Api, waiting: int, running: int) -> int | None:
        """The count that `max_queued` bounds; None where this endpoint is never refused.

        Waiting alone unless overridden.
        """
        del api, running
        return waiting

    def queue_full(self, api: Api) -> EngineRefusal:
        """The answer to a request beyond `max_queued`."""
        return self.refuse(api, *self.overload)

    def prompt_tokens_details(self, api: Api, prompts: Sequence[CachedPrompt]) -> dict[str, int] | None:
        """`usage.prompt_tokens_details`; None where the engine leaves it out.

        TensorRT-LLM always has it, without a switch (`tensorrt_llm/serve/postprocess_handlers.py`), and so has Dynamo
        before vLLM (`build_prompt_tokens_details` of its vLLM worker, which
        `lib/llm/src/protocols/openai/delta_common.rs` passes on). What they say in the Messages API was not read.
        """
        return None if api is Api.MESSAGES else {"cached_tokens": sum(prompt.found for prompt in prompts)}

    def responses_cached_tokens(self, prompts: Sequence[CachedPrompt]) -> int:
        """The Responses API's `cached_tokens`, where the member is never left out."""
        return sum(prompt.found for prompt in prompts)

    def stopping(self, api: Api) -> EngineRefusal | None:
        """The answer to a request that comes after SIGTERM; None where it is served like any other."""
        del api
        return None

    def stopped(self, api: Api) -> EngineRefusal:
        """The answer to a request that is not done when the time for draining is over."""
        return self.refuse(api, HTTPStatus.INTERNAL_SERVER_ERROR, "The engine has stopped.")

    def displaced(self, api: Api) -> EngineRefusal:
        """The answer to a waiting request that a more important one threw out; only where `displaces`."""
        return self.queue_full(api)


def pydantic_errors(mistake: InvalidField) -> str:
    """The text of a FastAPI RequestValidationError: the list of pydantic's errors."""
    location = ("body",) if mistake.field == "body" else ("body", mistake.field)
    return str([{"type": mistake.kind, "loc": location, "msg": mistake.message, "input": mistake.value}])


def read_integer(field: str, value: object, least: int, most: int) -> int:
    """An integer as pydantic reads one: `5.0` and `"5"` pass, `1.5` does not. Raises InvalidField."""
    if isinstance(value, float) and not value.is_integer():
        kind, message = "int_from_float", "Input should be a valid integer, got a number with a fractional part"
        raise InvalidField(field, kind, message, value)
    try:
        number = int(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        number = None
    if number is None:
        raise InvalidField(field, "int_parsing", "Input should be a valid integer", value)
    check_bounds(field, value, number, least, most)
    return number


def header_integer(headers: Mapping[str, str], name: str) -> int | None:
    """A header that counts only when it parses; anything else is as if it were not there."""
    try:
        return int(headers[name])
    except (KeyError, ValueError):
        return None
