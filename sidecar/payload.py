"""What a request body says of itself: only the fields that decide admission are decoded.

Each API keeps its prompt and its maximum output in places of its own; `read` turns them into one `Payload`. Everything
else in the body is skipped over, and never re-encoded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from sidecar.errors import InvalidBody
from sidecar.policy.policy import Api

MEDIA_TOKENS = 1024
"""What an image, audio or file part counts for. Vision encoders use 256 to about 2,000 tokens an image; the encoded
bytes say nothing, and counting them as text would turn a small photo into hundreds of thousands of tokens."""

_MEDIA_TYPES = frozenset(
    ("image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file", "input_file", "document")
)
_Raw = msgspec.Raw | msgspec.UnsetType
_Count = int | None


@dataclass(slots=True)
class Payload:
    """A request, as far as admission is concerned.

    `prompt_bytes` is the UTF-8 size of the text to be tokenized, `prompt_tokens` what is known exactly (token ids) or
    fixed (media parts); the prompt is the sum of both. `prompts` times `choices` sequences run at the engine, each for
    up to `max_output_tokens` (None: the client set no maximum). `priority` and `nvext` are undecoded, None if absent.
    """

    model: str | None
    stream: bool
    prompt_bytes: int
    prompt_tokens: int
    prompts: int
    choices: int
    max_output_tokens: int | None
    priority: bytes | None
    nvext: bytes | None
    text: Callable[[], str]


class _Fields(msgspec.Struct, gc=False):
    """What every API has. `rename` is not needed: the wire's names are ours."""

    model: str | None = None
    stream: bool | None = None
    priority: _Raw = msgspec.UNSET
    nvext: _Raw = msgspec.UNSET


class _Chat(_Fields, gc=False):
    messages: _Raw = msgspec.UNSET
    tools: _Raw = msgspec.UNSET
    max_tokens: _Count = None
    max_completion_tokens: _Count = None
    n: _Count = None


class _Completion(_Fields, gc=False):
    prompt: str | list[str | int | list[int]] | None = None
    max_tokens: _Count = None
    n: _Count = None
    best_of: _Count = None


class _Response(_Fields, gc=False):
    input: _Raw = msgspec.UNSET
    instructions: _Raw = msgspec.UNSET
    tools: _Raw = msgspec.UNSET
    max_output_tokens: _Count = None


class _Message(_Fields, gc=False):
    messages: _Raw = msgspec.UNSET
    system: _Raw = msgspec.UNSET
    tools: _Raw = msgspec.UNSET
    max_tokens: _Count = None


class _Embedding(_Fields, gc=False):
    input: str | list[str | int | list[int]] | None = None
    messages: _Raw = msgspec.UNSET


def read(api: Api, body: bytes) -> Payload:
    """Decodes a body. Raises InvalidBody with what is wrong and where."""
    decode, interpret = _READERS[api]
    try:
        fields = decode(body)
    except RecursionError:
        raise InvalidBody("the body is nested too deeply to be read; flatten it") from None
    except msgspec.ValidationError as error:
        raise InvalidBody(_sentence(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidBody(f"the body is not valid JSON: {error}") from None
    return interpret(fields)


def _sentence(error: msgspec.ValidationError) -> str:
    """`Expected `int`, got `str` - at `$.max_tokens`` becomes `max_tokens: expected int, got str`."""
    what, _, where = str(error).replace("`", "").partition(" - at ")
    what = (what[:1].lower() + what[1:]).replace(" | null", "").replace(" int", " a whole number")
    if not where:
        return f"the body must be a JSON object: {what}"
    return f"{where.removeprefix('$.').split('[')[0]}: {what}"


def _chat(fields: _Chat) -> Payload:
    maximum = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    name = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    messages = _required_list("messages", fields.messages)
    return _payload(fields, [messages, _given(fields.tools)], _at_least(0, name, maximum), fields.n)


def _completion(fields: _Completion) -> Payload:
    choices = max(_at_least(1, "n", fields.n) or 1, _at_least(1, "best_of", fields.best_of) or 1)
    if fields.prompt is None:
        raise InvalidBody("prompt: missing; send a string, a list of strings, or token ids")
    return _prompts(fields, "prompt", fields.prompt, _at_least(0, "max_tokens", fields.max_tokens), choices)


def _response(fields: _Response) -> Payload:
    source = _given(fields.input)
    if source[:1] not in (b'"', b"["):
        raise InvalidBody("input: missing or of the wrong type; send a string or a list")
    parts = [source, _given(fields.instructions), _given(fields.tools)]
    return _payload(fields, parts, _at_least(0, "max_output_tokens", fields.max_output_tokens), None)


def _message(fields: _Message) -> Payload:
    messages = _required_list("messages", fields.messages)
    parts = [messages, _given(fields.system), _given(fields.tools)]
    return _payload(fields, parts, _at_least(0, "max_tokens", fields.max_tokens), None)


def _embedding(fields: _Embedding) -> Payload:
    if fields.input is None:  # some engines embed a conversation
        return _payload(fields, [_required_list("input", fields.messages)], 0, None)
    return _prompts(fields, "input", fields.input, 0, 1)


def _payload(fields: _Fields, parts: list[bytes], maximum: int | None, n: int | None) -> Payload:
    prompt_bytes = media = 0
    for part in parts:
        if b"\\u" in part or b'"type"' in part:  # escapes, or content parts: the size alone would mislead
            size, found = _measure(msgspec.json.decode(part))
            prompt_bytes, media = prompt_bytes + size, media + found
        else:
            prompt_bytes += len(part)
    return Payload(
        model=fields.model,
        stream=bool(fields.stream),
        prompt_bytes=prompt_bytes,
        prompt_tokens=media * MEDIA_TOKENS,
        prompts=1,
        choices=_at_least(1, "n", n) or 1,
        max_output_tokens=maximum,
        priority=_given(fields.priority) or None,
        nvext=_given(fields.nvext) or None,
        text=lambda: b"".join(parts).decode("utf-8", "replace"),
    )


def _prompts(
    fields: _Fields, name: str, prompt: str | list[str | int | list[int]], maximum: int | None, choices: int
) -> Payload:
    texts, tokens, prompts = _sequences(name, prompt)
    return Payload(
        model=fields.model,
        stream=bool(fields.stream),
        prompt_bytes=sum(len(text.encode("utf-8", "replace")) for text in texts),
        prompt_tokens=tokens,
        prompts=prompts,
        choices=choices,
        max_output_tokens=maximum,
        priority=_given(fields.priority) or None,
        nvext=_given(fields.nvext) or None,
        text=lambda: "\n".join(texts),
    )


def _sequences(name: str, prompt: str | list[str | int | list[int]]) -> tuple[list[str], int, int]:
    """Texts to be tokenized, tokens known exactly, and how many prompts there are."""
    if isinstance(prompt, str):
        return [prompt], 0, 1
    if not prompt:
        raise InvalidBody(f"{name}: an empty list; send at least one prompt")
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [], len(prompt), 1
    if kinds == {str}:
        return [item for item in prompt if isinstance(item, str)], 0, len(prompt)
    if kinds == {list}:
        return [], sum(len(item) for item in prompt if isinstance(item, list)), len(prompt)
    raise InvalidBody(f"{name}: a list that mixes strings and token ids; send one kind")


def _measure(value: Any) -> tuple[int, int]:
    """UTF-8 bytes of all text in decoded JSON, and how many media parts it has. Iterative: depth is the client's."""
    size = media = 0
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            size += len(item.encode("utf-8", "replace"))
        elif isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, dict):
            if item.get("type") in _MEDIA_TYPES:
                media += 1
            else:
                pending.extend(item.values())
    return size, media


def _required_list(name: str, raw: _Raw) -> bytes:
    given = _given(raw)
    if not given:
        raise InvalidBody(f"{name}: missing; send a list")
    if given[:1] != b"[":
        raise InvalidBody(f"{name}: expected a list, got {given[:20].decode('utf-8', 'replace')!r}")
    return given


def _given(raw: _Raw) -> bytes:
    """The bytes of a field, empty where it is absent or null."""
    if isinstance(raw, msgspec.UnsetType):
        return b""
    given = bytes(raw)
    return b"" if given == b"null" else given


def _at_least(least: int, name: str, value: int | None) -> int | None:
    if value is not None and value < least:
        raise InvalidBody(f"{name}: {value} is too small; send {least} or more")
    return value


_READERS: dict[Api, tuple[Callable[[bytes], Any], Callable[[Any], Payload]]] = {
    Api.CHAT: (msgspec.json.Decoder(_Chat).decode, _chat),
    Api.COMPLETIONS: (msgspec.json.Decoder(_Completion).decode, _completion),
    Api.RESPONSES: (msgspec.json.Decoder(_Response).decode, _response),
    Api.MESSAGES: (msgspec.json.Decoder(_Message).decode, _message),
    Api.EMBEDDINGS: (msgspec.json.Decoder(_Embedding).decode, _embedding),
}
