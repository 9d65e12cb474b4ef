"""Request to the engine, read from the five body shapes: prompt tokens, output length, streaming or not.

Only the fields that decide scheduling are read. Text counts a token for every four bytes of UTF-8; token ids count
exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from sidecar.apis import Api

Body: TypeAlias = Mapping[str, Any]

BYTES_PER_TOKEN = 4
MAX_CHOICES = 128  # OpenAI's own limit for `n`


class InvalidField(Exception):
    """A field of the wrong type or range. `kind` is pydantic's name for the mistake."""

    def __init__(self, field: str, kind: str, message: str, value: object = None) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.kind = kind
        self.message = message
        self.value = value


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request. `prompts`: the tokens of each. `output_tokens` is None where the client set no maximum."""

    api: Api
    model: str
    prompts: tuple[int, ...]
    choices: int
    output_tokens: int | None
    stream: bool
    include_usage: bool

    @property
    def prompt_tokens(self) -> int:
        """All prompts together, as `usage` reports them."""
        return sum(self.prompts)


MAXIMUM_FIELDS: Mapping[Api, tuple[str, ...]] = {
    Api.CHAT: ("max_completion_tokens", "max_tokens"),
    Api.COMPLETIONS: ("max_tokens",),
    Api.RESPONSES: ("max_output_tokens",),
    Api.MESSAGES: ("max_tokens",),
    Api.EMBEDDINGS: (),
}


def read_ask(api: Api, body: Body, default_model: str) -> EngineRequest:
    """Reads a decoded body. Raises InvalidField for what every engine refuses."""
    model = body.get("model") or default_model
    if not isinstance(model, str):
        raise InvalidField("model", "string_type", "Input should be a valid string", model)
    stream = _flag(body, "stream")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, Mapping):
        raise InvalidField("stream_options", "dict_type", "Input should be a valid dictionary", options)
    if options and not stream:
        raise InvalidField("stream_options", "value_error", "stream_options can only be set if stream is true", options)
    return EngineRequest(
        api=api,
        model=model,
        prompts=_prompts(api, body),
        choices=_integer(body, "n", 1, MAX_CHOICES) or 1 if api in (Api.CHAT, Api.COMPLETIONS) else 1,
        output_tokens=0 if api is Api.EMBEDDINGS else _maximum(api, body),
        stream=stream and api is not Api.EMBEDDINGS,
        include_usage=bool(options and options.get("include_usage")),
    )


def _maximum(api: Api, body: Body) -> int | None:
    values = [_integer(body, field, 1, 2**31 - 1) for field in MAXIMUM_FIELDS[api]]
    found = next((value for value in values if value is not None), None)
    if found is None and api is Api.MESSAGES:
        raise InvalidField("max_tokens", "missing", "Field required")
    return found


def _flag(body: Body, field: str) -> bool:
    value = body.get(field)
    if value is not None and not isinstance(value, bool):
        raise InvalidField(field, "bool_type", "Input should be a valid boolean", value)
    return bool(value)


def _integer(body: Body, field: str, least: int, most: int) -> int | None:
    value = body.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidField(field, "int_type", "Input should be a valid integer", value)
    check_bounds(field, value, value, least, most)
    return value


def check_bounds(field: str, value: object, number: float, least: int, most: int) -> None:
    """Raises InvalidField for a number out of its bounds; `value` is how it was written."""
    if number < least:
        raise InvalidField(field, "greater_than_equal", f"Input should be greater than or equal to {least}", value)
    if number > most:
        raise InvalidField(field, "less_than_equal", f"Input should be less than or equal to {most}", value)


def _prompts(api: Api, body: Body) -> tuple[int, ...]:
    if api is Api.COMPLETIONS:
        return _prompt_list("prompt", body)
    if api is Api.EMBEDDINGS:
        return _prompt_list("input", body)
    if api is Api.RESPONSES:
        if not isinstance(body.get("input"), (str, list)):
            raise _missing_or_type("input", body, "Input should be a valid string or list")
        return (_tokens(body["input"], body.get("instructions")),)
    if not isinstance(body.get("messages"), list):
        raise _missing_or_type("messages", body, "Input should be a valid list")
    return (_tokens(body["messages"], body.get("system")),)


def _prompt_list(field: str, body: Body) -> tuple[int, ...]:
    """A string, a list of strings, token ids, or a list of lists of token ids."""
    value = body.get(field)
    if isinstance(value, str):
        return (_tokens(value),)
    if isinstance(value, list) and value:
        if all(_is_token(item) for item in value):
            return (len(value),)
        if all(isinstance(item, str) for item in value):
            return tuple(map(_tokens, value))
        if all(isinstance(item, list) and item and all(map(_is_token, item)) for item in value):
            return tuple(len(item) for item in value)
    raise _missing_or_type(field, body, "Input should be a string, token ids, or a non-empty list of either")


def _missing_or_type(field: str, body: Body, message: str) -> InvalidField:
    if field not in body:
        return InvalidField(field, "missing", "Field required")
    return InvalidField(field, "type_error", message, body[field])


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tokens(*texts: object) -> int:
    return max(1, -(-sum(len(read_text(text)) for text in texts) // BYTES_PER_TOKEN))


def read_text(value: object) -> bytes:
    """Every text in messages, content parts and input items, in their order; images and the like are left out."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, list):
        return b"".join(map(read_text, value))
    if isinstance(value, Mapping):
        return read_text(value.get("content")) + read_text(value.get("text"))
    return b""
