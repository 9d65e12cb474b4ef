"""What a request body says of itself: only the fields that decide admission are decoded.

Each API keeps its prompt and its maximum output in places of its own; `read` turns them into one `Payload`. Everything
else in the body is skipped over, and never re-encoded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from sidecar.errors import InvalidBody
from sidecar.policy.policy import Api

MEDIA_TOKENS = 1024
"""What an image, audio or file part counts for. Vision encoders use 256 to about 2,000 tokens an image; the encoded
bytes say nothing, and counting them as text would turn a small photo into hundreds of thousands of tokens."""

LARGEST_COUNT = 2**31 - 1
"""The largest `max_tokens` or `n`: engines keep them in 32 bits, and Redis scripts count exactly up to 2**53 only."""

_MEDIA_TYPES = frozenset(
    (
        *("image_url", "input_image", "image", "audio_url", "input_audio", "audio", "video_url", "video"),
        *("file", "input_file", "document"),
    )
)
_ENCODED = _MEDIA_TYPES | {"url", "data", "file_data", "file_url", "image_data"}
"""Members of a media part that hold the medium itself, or point to it. What else it says is text."""
_Raw = msgspec.Raw | msgspec.UnsetType
_Count = int | float | None
_Prompt = str | list[str | int | list[int]]


class Payload(msgspec.Struct):
    """A request, as far as admission is concerned.

    `prompt_bytes` is the UTF-8 size of the text to be tokenized, `prompt_tokens` what is known exactly (token ids) or
    fixed (media parts); the prompt is the sum of both. `prompts` times `choices` sequences run at the engine, each for
    up to `max_output_tokens` (None: the client set no maximum). `priority` and `nvext` are undecoded, None if absent.
    A null is present: it would overrule a priority that is put in beside it. `text` is what a tokenizer would count.
    `background` says that the response is to run on after its answer, `names_response` that the client chose its id.
    `other_maximum` is the one that does not count where two are named: some engine may go by it.
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
    other_maximum: int | None = None
    background: bool = False
    names_response: bool = False


class _Fields(msgspec.Struct, gc=False):
    """What every API has."""

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
    prompt: _Prompt | None = None
    max_tokens: _Count = None
    n: _Count = None
    best_of: _Count = None


class _Response(_Fields, gc=False):
    input: _Raw = msgspec.UNSET
    instructions: _Raw = msgspec.UNSET
    tools: _Raw = msgspec.UNSET
    max_output_tokens: _Count = None
    background: _Raw = msgspec.UNSET
    request_id: _Raw = msgspec.UNSET


class _Message(_Fields, gc=False):
    messages: _Raw = msgspec.UNSET
    system: _Raw = msgspec.UNSET
    tools: _Raw = msgspec.UNSET
    max_tokens: _Count = None


class _Embedding(_Fields, gc=False):
    input: _Prompt | None = None
    messages: _Raw = msgspec.UNSET


def read(api: Api, body: bytes) -> Payload:
    """Decodes a body. Raises InvalidBody with what is wrong and where."""
    decode, interpret = _READERS[api]
    try:
        fields = decode(body)
        _refuse_duplicates(body, fields)
        return interpret(fields)
    except RecursionError:
        raise InvalidBody("the body is nested too deeply to be read; flatten it") from None
    except UnicodeDecodeError:
        raise InvalidBody("the body is not valid JSON: it has text that is not UTF-8") from None
    except msgspec.ValidationError as error:
        raise InvalidBody(_sentence(error)) from None
    except msgspec.DecodeError as error:
        reason = str(error).removeprefix("JSON is malformed: ").replace("Input data was truncated", "it ends too early")
        raise InvalidBody(f"the body is not valid JSON: {reason}") from None


_PLAIN_NAMES = {
    "int": "a whole number",
    "float": "a number with a fraction",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_EXPECTED = re.compile(r"Expected `([^`]*)`, got `([^`]*)`")
_HINTS = {"prompt": "send a string, a list of strings, or token ids", "input": "send a string or a list"}


def _sentence(error: msgspec.ValidationError) -> str:
    """`Expected `int`, got `str` - at `$.n`` becomes `n: expected a whole number, got a string`."""
    what, _, where = str(error).partition(" - at ")
    field = re.match(r"`\$\.(\w+)", where)
    found = _EXPECTED.match(what)
    if found is None:
        return f"{field.group(1)}: a number out of range" if field else "the body has a number that is out of range"
    got = "a boolean" if found.group(2) == "bool" else _PLAIN_NAMES.get(found.group(2), found.group(2))
    if field is None:
        return f"the body must be a JSON object, not {got}"
    name = field.group(1)
    if name in _HINTS:
        return f"{name}: {got} is not expected here; {_HINTS[name]}"
    kinds = [kind for kind in found.group(1).split(" | ") if kind not in ("null", "float")]
    return f"{name}: expected {' or '.join(_PLAIN_NAMES.get(kind, kind) for kind in kinds)}, got {got}"


def _refuse_duplicates(body: bytes, fields: _Fields) -> None:
    """A priority that is stated twice means one thing here and another at an engine that reads the other one."""
    if fields.priority is msgspec.UNSET and fields.nvext is msgspec.UNSET:
        return
    if b"\\u" in body or body.count(b"priority") > 1 or body.count(b"nvext") > 1:
        members = json.loads(body, object_pairs_hook=tuple, parse_int=str, parse_float=str)
        _once_each([(key, value) for key, value in members if key in ("priority", "nvext")])
    if fields.nvext is not msgspec.UNSET:
        json.loads(bytes(fields.nvext), object_pairs_hook=_once_each, parse_int=str, parse_float=str)


def _once_each(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) < len(members):
        twice = next(key for index, (key, _) in enumerate(members) if key in dict(members[:index]))
        raise InvalidBody(f"{_shown(twice)}: given twice; send it once")
    return found


def _chat(fields: _Chat) -> Payload:
    maximum = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    name = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    messages = _required_list("messages", fields.messages)
    choices = _count(1, "n", fields.n) or 1
    payload = _payload(fields, [messages, _given(fields.tools)], _count(0, name, maximum), choices)
    if fields.max_completion_tokens is not None:
        payload.other_maximum = _count(0, "max_tokens", fields.max_tokens)
    return payload


def _completion(fields: _Completion) -> Payload:
    choices = max(_count(1, "n", fields.n) or 1, _count(1, "best_of", fields.best_of) or 1)
    if fields.prompt is None:
        raise InvalidBody("prompt: missing; send a string, a list of strings, or token ids")
    return _prompts(fields, "prompt", fields.prompt, _count(0, "max_tokens", fields.max_tokens), choices)


def _response(fields: _Response) -> Payload:
    source = _given(fields.input)
    if source[:1] not in (b'"', b"["):
        raise InvalidBody(f"input: {'of the wrong type' if source else 'missing'}; {_HINTS['input']}")
    if source[:1] == b"[":
        _required_list("input", fields.input)
    parts = [source, _given(fields.instructions), _given(fields.tools)]
    payload = _payload(fields, parts, _count(0, "max_output_tokens", fields.max_output_tokens))
    if not isinstance(fields.background, msgspec.UnsetType):
        payload.background = _flag("background", _given(fields.background))
        payload.names_response = bool(_given(fields.request_id))
    return payload


def _message(fields: _Message) -> Payload:
    messages = _required_list("messages", fields.messages)
    parts = [messages, _given(fields.system), _given(fields.tools)]
    return _payload(fields, parts, _count(0, "max_tokens", fields.max_tokens))


def _embedding(fields: _Embedding) -> Payload:
    if fields.input is None:  # some engines embed a conversation
        if not _given(fields.messages):
            raise InvalidBody("input: missing; send a string, a list of strings, or token ids")
        return _payload(fields, [_required_list("messages", fields.messages)], 0)
    return _prompts(fields, "input", fields.input, 0, 1)


def _payload(fields: _Fields, parts: list[bytes], maximum: int | None, choices: int = 1) -> Payload:
    prompt_bytes = media = 0
    for part in parts:
        if _is_plain(part):
            prompt_bytes += len(part)
        else:
            for text in _texts(part):
                media += text is None
                prompt_bytes += 0 if text is None else len(text.encode("utf-8", "replace"))
    return Payload(
        model=fields.model,
        stream=bool(fields.stream),
        prompt_bytes=prompt_bytes,
        prompt_tokens=media * MEDIA_TOKENS,
        prompts=1,
        choices=choices,
        max_output_tokens=maximum,
        priority=_stated(fields.priority),
        nvext=_stated(fields.nvext),
        text=lambda: "\n".join(map(_text_of, parts)),
    )


def _prompts(fields: _Fields, name: str, prompt: _Prompt, maximum: int | None, choices: int) -> Payload:
    texts, tokens, prompts = _sequences(name, prompt)
    return Payload(
        model=fields.model,
        stream=bool(fields.stream),
        prompt_bytes=sum(len(text.encode("utf-8", "replace")) for text in texts),
        prompt_tokens=tokens,
        prompts=prompts,
        choices=choices,
        max_output_tokens=maximum,
        priority=_stated(fields.priority),
        nvext=_stated(fields.nvext),
        text=lambda: "\n".join(texts),
    )


def _sequences(name: str, prompt: _Prompt) -> tuple[list[str], int, int]:
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
        if not all(prompt):
            raise InvalidBody(f"{name}: a prompt without token ids; send at least one for each")
        return [], sum(len(item) for item in prompt if isinstance(item, list)), len(prompt)
    raise InvalidBody(f"{name}: a list that mixes strings and token ids; send one kind")


def _is_plain(part: bytes) -> bool:
    """Whether its size says how much text there is: no escapes of six bytes a character, and no content parts."""
    return b"\\u" not in part and b'"type"' not in part


def _text_of(part: bytes) -> str:
    if _is_plain(part):
        return part.decode("utf-8", "replace")
    return "\n".join(text for text in _texts(part) if text is not None)


# A number may be one that no double holds: it is no text, and so of no interest.
_decode = msgspec.json.Decoder(float_hook=len).decode


def _texts(part: bytes) -> Iterator[str | None]:
    """All text in JSON, in order, and None for every media part, of which the encoded medium is no text.

    Iterative, because the depth is the client's.
    """
    pending = [(_decode(part), False)]
    while pending:
        item, in_media = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, list):
            pending.extend((child, in_media) for child in reversed(item))
        elif isinstance(item, dict):
            kind = item.get("type")
            if isinstance(kind, str) and kind in _MEDIA_TYPES:
                in_media = True
                yield None
            skipped = _ENCODED if in_media and kind != "text" else ()
            pending.extend((item[key], in_media) for key in reversed(item) if key not in skipped)


_KINDS = {b'"': "a string", b"{": "an object", b"t": "a boolean", b"f": "a boolean", b"n": "null"}


def _required_list(name: str, raw: _Raw) -> bytes:
    given = _given(raw)
    if not given:
        raise InvalidBody(f"{name}: missing; send a list")
    if given[:1] != b"[":
        # Its kind, not the thing itself: it may be a prompt, and this goes into logs and traces.
        raise InvalidBody(f"{name}: expected a list, got {_KINDS.get(given[:1], 'a number')}")
    if not given[1:-1].strip():
        raise InvalidBody(f"{name}: an empty list; send at least one")
    return given


def _given(raw: _Raw) -> bytes:
    """The bytes of a field, empty where it is absent or null."""
    if isinstance(raw, msgspec.UnsetType):
        return b""
    given = bytes(raw)
    return b"" if given == b"null" else given


def _stated(raw: _Raw) -> bytes | None:
    return None if isinstance(raw, msgspec.UnsetType) else bytes(raw)


_TRUE = frozenset((True, "1", "on", "t", "true", "y", "yes"))
_FALSE = frozenset((False, "0", "off", "f", "false", "n", "no"))


def _flag(name: str, given: bytes) -> bool:
    """A boolean as pydantic reads one for the engines: `"yes"`, `1` and `1.0` are true. False where it is absent."""
    if not given:
        return False
    try:
        value = msgspec.json.decode(given)
    except (msgspec.MsgspecError, RecursionError):
        value = None
    if isinstance(value, str):
        value = value.lower()
    if isinstance(value, str | int | float) and value in _TRUE | _FALSE:
        return value in _TRUE
    raise InvalidBody(f"{name}: expected true or false, got {_KINDS.get(given[:1], 'another value')}")


def _count(least: int, name: str, value: _Count) -> int | None:
    """A whole number in range; `5.0` is one, as it is to the engines."""
    if value is None:
        return None
    if isinstance(value, float):
        if not value.is_integer():
            raise InvalidBody(f"{name}: expected a whole number, got {value:g}")
        value = int(value)
    if value < least:
        raise InvalidBody(f"{name}: {_shown(str(value))} is too small; send {least} or more")
    if value > LARGEST_COUNT:
        raise InvalidBody(f"{name}: {_shown(str(value))} is too large; send {LARGEST_COUNT} or less")
    return value


def _shown(text: str) -> str:
    return text if len(text) <= 20 else text[:20] + "…"


_READERS: dict[Api, tuple[Callable[[bytes], Any], Callable[[Any], Payload]]] = {
    Api.CHAT: (msgspec.json.Decoder(_Chat).decode, _chat),
    Api.COMPLETIONS: (msgspec.json.Decoder(_Completion).decode, _completion),
    Api.RESPONSES: (msgspec.json.Decoder(_Response).decode, _response),
    Api.MESSAGES: (msgspec.json.Decoder(_Message).decode, _message),
    Api.EMBEDDINGS: (msgspec.json.Decoder(_Embedding).decode, _embedding),
}
