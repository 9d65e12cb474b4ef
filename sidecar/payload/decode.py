"""Decoding of a request's body: only the fields that decide admission.

Each API has its own fields for the prompt and the maximum output; `decode` turns them into one `Payload`. A field that
is neither one of these nor known to be harmless (`prompt_size`) counts as prompt, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from sidecar.apis import Api
from sidecar.errors import InvalidBody
from sidecar.payload.prompt_size import (
    COMMON,
    HARMLESS,
    NOTHING,
    Carried,
    carried,
    is_plain,
    json_bytes,
    largest_item,
    measured,
    part_text,
)
from sidecar.payload.traits import (
    NO_TRAITS,
    Traits,
    is_given,
    read_choice,
    read_effort,
    read_reasoning_effort,
    read_template_effort,
    read_thinking_effort,
)

MEDIA_TOKENS = 1024
"""Tokens of an image, audio or file part. Vision encoders use 256 to about 2,000 tokens an image. The encoded bytes do
not show it: counted as text, a small photo would be hundreds of thousands of tokens."""

BYTES_PER_TOKEN = 4
"""Of the JSON of a tool."""

LARGEST_COUNT = 2**31 - 1
"""The largest `max_tokens` or `n`: engines keep them in 32 bits, and Redis scripts count exactly up to 2**53 only."""

_Raw = msgspec.Raw | msgspec.UnsetType
_UNSET = msgspec.UNSET  # looked up once
_Count = int | float | None
_Prompt = str | list[str | int | list[int]]


class Payload(msgspec.Struct, gc=False):
    """The fields of a request that decide admission.

    The prompt is the sum of `prompt_bytes`, the UTF-8 size of the text to be tokenized, and `prompt_tokens`, which are
    known exactly (token ids) or fixed (media parts). `prompts` times `choices` sequences run at the engine, each for up
    to `max_output_tokens` (None: the client set no maximum). `priority`, `nvext` and `service_tier` are undecoded, None
    if absent. A null counts as present, because it would overrule a priority that is inserted beside it. `parts` of the
    prompt are text, or JSON (bytes) of which a chat template writes the text. `background` says that the response runs
    on after its answer, `names_response` that the client chose its id.

    `unread_bytes` is the size of fields that are not known to be harmless, and so count as prompt. `unsized` names a
    field with a prompt whose size the body does not say. `is_understood` says that the prompt is only text in the API's
    own fields: only then the engine's count of it shows how many bytes a token has. `traits` say something about the
    answer's length. `hidden_choices` are those of `choices` that are no part of the answer: of `best_of` it has `n`.
    `stream_options` are undecoded, None if absent or if the API has none. `body` is all of it, as it came.
    """

    model: str | None
    stream: bool
    max_output_tokens: int | None = None
    prompt_bytes: int = 0
    parts: Sequence[str | bytes] = ()
    prompt_tokens: int = 0
    prompts: int = 1
    choices: int = 1
    priority: bytes | None = None
    nvext: bytes | None = None
    service_tier: bytes | None = None
    background: bool = False
    names_response: bool = False
    unread_bytes: int = 0
    unsized: str | None = None
    is_understood: bool = True
    traits: Traits = NO_TRAITS
    hidden_choices: int = 0
    stream_options: bytes | None = None
    body: bytes = b""

    def drop_text(self) -> None:
        """Frees the text, which may be megabytes, once it is forwarded or never will be."""
        self.body = b""
        self.parts = ()

    def text(self) -> str:
        """The text that a tokenizer would count."""
        return "\n".join([part if isinstance(part, str) else part_text(part) for part in self.parts])

    @property
    def sequences(self) -> int:
        """The sequences that run at the engine: one for every choice of every prompt, or for every input."""
        return self.prompts * self.choices

    def requests(self, most: int) -> int:
        """The requests that it holds in a pool where one may hold so many.

        The engine queues a list of prompts or inputs itself: it holds no more than that. The choices of one prompt
        start together.
        """
        return min(self.sequences, max(self.choices, most))

    @property
    def shown_sequences(self) -> int:
        """Sequences that the answer has."""
        return self.prompts * (self.choices - self.hidden_choices)


class _Fields(msgspec.Struct, gc=False):
    """The fields of every API."""

    model: str | None = None
    stream: bool | None = None
    priority: _Raw = msgspec.UNSET
    nvext: _Raw = msgspec.UNSET
    service_tier: _Raw = msgspec.UNSET
    tool_choice: _Raw = msgspec.UNSET
    reasoning_effort: _Raw = msgspec.UNSET
    reasoning: _Raw = msgspec.UNSET
    thinking: _Raw = msgspec.UNSET
    stop: _Raw = msgspec.UNSET
    stop_sequences: _Raw = msgspec.UNSET


class _Chat(_Fields, gc=False):
    messages: _Raw = msgspec.UNSET
    tools: _Raw = msgspec.UNSET
    response_format: _Raw = msgspec.UNSET
    max_tokens: _Count = None
    max_completion_tokens: _Count = None
    n: _Count = None
    best_of: _Count = None
    stream_options: _Raw = msgspec.UNSET


class _Completion(_Fields, gc=False):
    prompt: _Prompt | None = None
    max_tokens: _Count = None
    n: _Count = None
    best_of: _Count = None
    stream_options: _Raw = msgspec.UNSET


class _Response(_Fields, gc=False):
    input: _Raw = msgspec.UNSET
    instructions: _Raw = msgspec.UNSET
    tools: _Raw = msgspec.UNSET
    text: _Raw = msgspec.UNSET
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


class _GenericFields(_Fields, gc=False):
    pass


def decode(api: Api, body: bytes) -> Payload:
    """Decodes a body. Raises InvalidBody, which names the mistake and its field."""
    reader, others = _READERS[api], NOTHING
    try:
        try:
            fields = reader.decode(body)
        except msgspec.ValidationError as error:
            fields, others = reader.decode_all(body, error)
        if (
            fields.priority is _UNSET
            and fields.nvext is _UNSET
            and fields.service_tier is _UNSET
            and fields.reasoning_effort is _UNSET
            and fields.reasoning is _UNSET
            and fields.thinking is _UNSET
            and fields.tool_choice is _UNSET
            and fields.stop is _UNSET
            and fields.stop_sequences is _UNSET
            and others is NOTHING
        ):
            return reader.interpret(fields, others)  # so are most requests
        if fields.nvext is not _UNSET and others is NOTHING and api is not Api.GENERIC:
            others = carried({"nvext": bytes(fields.nvext)})
        _refuse_duplicates(body, fields)
        payload = reader.interpret(fields, others)
        _add_others(payload, fields, others)
        return payload
    except RecursionError:
        raise InvalidBody("the body is nested too deeply to be read; flatten it") from None
    except UnicodeDecodeError:
        raise InvalidBody("the body is not valid JSON: it has text that is not UTF-8") from None
    except msgspec.ValidationError as error:
        raise InvalidBody(_sentence(error), param=_field(error)) from None
    except msgspec.DecodeError as error:
        raise InvalidBody(f"the body is not valid JSON: {_defect(error, body)}") from None


_TRUNCATED = "Input data was truncated"
_ends_in_half_a_pair = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}.{,5}\Z", re.DOTALL).search


def _defect(error: msgspec.DecodeError, body: bytes) -> str:
    """Defect of malformed JSON, in words. msgspec takes half of a surrogate pair near the end for an early end."""
    defect = str(error).removeprefix("JSON is malformed: ")
    if defect != _TRUNCATED:
        return defect
    return "its last string has half of a surrogate pair" if _ends_in_half_a_pair(body[-12:]) else "it ends too early"


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


def _field(error: msgspec.ValidationError) -> str | None:
    """The member that is wrong; None where the body itself is."""
    found = re.match(r"`\$\.(\w+)", str(error).partition(" - at ")[2])
    return None if found is None else found[1]


def _sentence(error: msgspec.ValidationError) -> str:
    """`Expected `int`, got `str` - at `$.n`` becomes `n: expected a whole number, got a string`."""
    name, found = _field(error), _EXPECTED.match(str(error))
    if found is None:
        return f"{name}: a number out of range" if name else "the body has a number that is out of range"
    got = "a boolean" if found.group(2) == "bool" else _PLAIN_NAMES.get(found.group(2), found.group(2))
    if name is None:
        return f"the body must be a JSON object, not {got}"
    if name in _HINTS:
        return f"{name}: {got} is not expected here; {_HINTS[name]}"
    kinds = [kind for kind in found.group(1).split(" | ") if kind not in ("null", "float")]
    return f"{name}: expected {' or '.join(_PLAIN_NAMES.get(kind, kind) for kind in kinds)}, got {got}"


def _refuse_duplicates(body: bytes, fields: _Fields) -> None:
    """Raises InvalidBody for a priority that is stated twice: an engine might read the other one."""
    if fields.priority is _UNSET and fields.nvext is _UNSET:
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
        raise InvalidBody(f"{_shorten(twice)}: given twice; send it once")
    return found


def _chat(fields: _Chat, _others: Carried) -> Payload:
    messages = _required_list("messages", fields.messages)
    tools = b"" if fields.tools is _UNSET else _read(fields.tools)
    newer, older = fields.max_completion_tokens, fields.max_tokens
    if newer is None:
        most = _maximum("max_tokens", older)
    else:
        # vLLM and today's SGLang go by the newer field, earlier versions of SGLang by the older one.
        counts = _maximum("max_completion_tokens", newer), _maximum("max_tokens", older)
        most = max(counts[0] or 0, counts[1] or 0) or None
    if tools or not is_plain(messages):
        payload = _conversation(fields, (messages,), tools, most)
    else:  # so are most requests
        payload = Payload(fields.model, fields.stream is True, most, len(messages), (messages, ""))
    if fields.n is not None or fields.best_of is not None:
        _add_choices(payload, fields.n, fields.best_of)
    if fields.response_format is not _UNSET:
        _add_format(payload, _read(fields.response_format))
    if fields.stream_options is not _UNSET:
        payload.stream_options = bytes(fields.stream_options)
    return payload


def _completion(fields: _Completion, others: Carried) -> Payload:
    if fields.prompt is not None:
        payload = _prompts(fields, "prompt", fields.prompt)
    elif others.prompts or others.unsized:  # the prompt travels elsewhere
        payload = _conversation(fields, ())
    else:
        raise InvalidBody("prompt: missing; send a string, a list of strings, or token ids", param="prompt")
    payload.max_output_tokens = _count(0, "max_tokens", fields.max_tokens)
    if fields.stream_options is not _UNSET:
        payload.stream_options = bytes(fields.stream_options)
    _add_choices(payload, fields.n, fields.best_of)
    return payload


def _response(fields: _Response, others: Carried) -> Payload:
    source, tools = _read(fields.input), _read(fields.tools)
    if source[:1] not in (b'"', b"[") and (source or not others.unsized):
        raise InvalidBody(f"input: {'of the wrong type' if source else 'missing'}; {_HINTS['input']}", param="input")
    if source[:1] == b"[":
        _required_list("input", fields.input)
    most = _maximum("max_output_tokens", fields.max_output_tokens)
    payload = _conversation(fields, (source, _read(fields.instructions)), tools, most)
    if fields.background is not _UNSET:
        payload.background = _flag("background", _read(fields.background))
        payload.names_response = bool(_read(fields.request_id))
    _add_format(payload, _read(fields.text))
    if tools:  # a tool that the server runs itself means one more prompt, and `usage` has the sum
        payload.is_understood = False
    return payload


def _message(fields: _Message, _others: Carried) -> Payload:
    parts = (_required_list("messages", fields.messages), _read(fields.system))
    return _conversation(fields, parts, _read(fields.tools), _maximum("max_tokens", fields.max_tokens))


def _embedding(fields: _Embedding, _others: Carried) -> Payload:
    if fields.input is not None:
        payload = _prompts(fields, "input", fields.input)
    elif _read(fields.messages):  # some engines embed a conversation
        payload = _conversation(fields, (_required_list("messages", fields.messages),))
    else:
        raise InvalidBody("input: missing; send a string, a list of strings, or token ids", param="input")
    payload.max_output_tokens = 0
    return payload


def _add_choices(payload: Payload, n: _Count, best_of: _Count) -> None:
    """Adds the larger number: `best_of` choices are generated, but `n` at engines that know no `best_of`."""
    shown = _count(1, "n", n) or 1
    payload.choices = max(shown, _count(1, "best_of", best_of) or 1)
    if best_of is not None:
        payload.hidden_choices = payload.choices - shown


def _conversation(fields: _Fields, parts: tuple[bytes, ...], tools: bytes = b"", most: int | None = None) -> Payload:
    """One prompt: a chat template writes the text of `parts`, and the JSON of `tools` unchanged."""
    text_bytes, media, unsized, references = 0, 0, None, 0
    for part in parts:
        if is_plain(part):
            text_bytes += len(part)
        else:
            size = measured(part)
            text_bytes, media, unsized = text_bytes + size.text_bytes, media + size.media, unsized or size.unsized
            references += size.tool_references
    payload = Payload(fields.model, fields.stream is True, most, text_bytes, (*parts, _to_text(tools)))
    if media or unsized is not None:
        payload.prompt_tokens, payload.unsized, payload.is_understood = media * MEDIA_TOKENS, unsized, False
    if references:  # the definition of any of its tools, each time
        payload.prompt_tokens += references * (largest_item(tools) // BYTES_PER_TOKEN + 1)
        payload.is_understood = False
    if tools:
        payload.prompt_bytes += json_bytes(tools)
        payload.traits = NO_TRAITS._replace(tools=is_given(tools))
    return payload


def _to_text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _prompts(fields: _Fields, name: str, prompt: _Prompt) -> Payload:
    """A prompt, or a list of prompts, without a template."""
    texts, tokens, prompts = _sequences(name, prompt)
    text_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
    payload = Payload(fields.model, fields.stream is True, None, text_bytes, texts)
    payload.prompt_tokens, payload.prompts, payload.is_understood = tokens, prompts, not tokens
    return payload


def _add_others(payload: Payload, fields: _Fields, others: Carried) -> None:
    """Adds what only some requests have: a priority, traits, and a prompt in the fields beside the API's own."""
    payload.priority = None if fields.priority is _UNSET else bytes(fields.priority)
    payload.nvext = None if fields.nvext is _UNSET else bytes(fields.nvext)
    payload.service_tier = None if fields.service_tier is _UNSET else bytes(fields.service_tier)
    payload.prompt_bytes += sum(map(json_bytes, others.texts))
    payload.parts = (*payload.parts, *map(_to_text, others.texts))
    payload.prompt_tokens += others.tokens
    payload.prompts = max(payload.prompts, others.prompts)
    payload.unread_bytes += others.unread_bytes
    payload.unsized = others.unsized or payload.unsized
    payload.is_understood &= others == NOTHING
    payload.traits = _traits(fields, others, payload.traits)


def _traits(fields: _Fields, others: Carried, of_api: Traits) -> Traits:
    """The traits `of_api`, tools and a format, with those that the fields of every API say."""
    effort: str | None = None
    if fields.reasoning_effort is not _UNSET:
        effort = read_effort(_read(fields.reasoning_effort))
    elif fields.reasoning is not _UNSET:
        effort = read_reasoning_effort(_read(fields.reasoning))
    elif fields.thinking is not _UNSET:
        effort = read_thinking_effort(_read(fields.thinking))
    if effort is None and others.template_arguments:
        effort = read_template_effort(others.template_arguments)
    choice = None if fields.tool_choice is _UNSET else read_choice(_read(fields.tool_choice))
    has_stop = is_given(_read(fields.stop)) or is_given(_read(fields.stop_sequences))
    if effort is None and choice is None and not has_stop:
        return of_api
    return of_api._replace(effort=effort, tool_choice=choice, stop=has_stop)


def _add_format(payload: Payload, schema: bytes) -> None:
    """Adds the response format. It counts, because some templates write it into the prompt."""
    if schema:
        payload.unread_bytes += json_bytes(schema)
        payload.is_understood = False
        payload.traits = payload.traits._replace(format=True)


def _sequences(name: str, prompt: _Prompt) -> tuple[list[str], int, int]:
    """Texts to be tokenized, tokens known exactly, and how many prompts there are."""
    if isinstance(prompt, str):
        return [prompt], 0, 1
    if not prompt:
        raise InvalidBody(f"{name}: an empty list; send at least one prompt", param=name)
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [], len(prompt), 1
    if kinds == {str}:
        return [item for item in prompt if isinstance(item, str)], 0, len(prompt)
    if kinds == {list}:
        if not all(prompt):
            raise InvalidBody(f"{name}: a prompt without token ids; send at least one for each", param=name)
        return [], sum(len(item) for item in prompt if isinstance(item, list)), len(prompt)
    raise InvalidBody(f"{name}: a list that mixes strings and token ids; send one kind", param=name)


_SPACE = b" \t\r\n"
_SPACE_OR_END = frozenset((b" ", b"\t", b"\r", b"\n", b"]"))
_KINDS = {b'"': "a string", b"{": "an object", b"t": "a boolean", b"f": "a boolean", b"n": "null"}


def _required_list(name: str, raw: _Raw) -> bytes:
    given = b"" if raw is _UNSET else b"" + raw  # costs less than `bytes(raw)`
    if given[:2] == b"[{":  # so are nearly all
        return given
    if given in (b"", b"null"):
        raise InvalidBody(f"{name}: missing; send a list", param=name)
    if given[:1] != b"[":
        # Its kind, not the value: it may be a prompt, and the message goes into logs and traces.
        raise InvalidBody(f"{name}: expected a list, got {_KINDS.get(given[:1], 'a number')}", param=name)
    if given[1:2] in _SPACE_OR_END and not given[1:-1].strip():
        raise InvalidBody(f"{name}: an empty list; send at least one", param=name)
    return given


def _read(raw: _Raw) -> bytes:
    """The bytes of a field, empty where it is absent or null."""
    if raw is _UNSET:
        return b""
    given = bytes(raw)
    return b"" if given == b"null" else given


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
    raise InvalidBody(f"{name}: expected true or false, got {_KINDS.get(given[:1], 'another value')}", param=name)


def _count(least: int, name: str, value: _Count) -> int | None:
    """A whole number in range; `5.0` is one, as it is to the engines."""
    if type(value) is int and least <= value <= LARGEST_COUNT:
        return value
    if value is None:
        return None
    if isinstance(value, float):
        if not value.is_integer():
            raise InvalidBody(f"{name}: expected a whole number, got {value:g}", param=name)
        value = int(value)
    if value < least:
        raise InvalidBody(f"{name}: {_shorten(str(value))} is too small; send {max(1, least)} or more", param=name)
    if value > LARGEST_COUNT:
        raise InvalidBody(f"{name}: {_shorten(str(value))} is too large; send {LARGEST_COUNT} or less", param=name)
    return value


def _maximum(name: str, value: _Count) -> int | None:
    """The output maximum of an API with a chat template: engines treat 0 there as none."""
    return _count(0, name, value) or None


def _shorten(text: str) -> str:
    return text if len(text) <= 20 else text[:20] + "…"


class _GenericReader:
    """Reads only what each body may have, whatever its shape: the policy says how large its requests are."""

    def __init__(self) -> None:
        self._decode: Callable[[bytes], _Fields] = msgspec.json.Decoder(_GenericFields).decode

    def decode(self, body: bytes) -> _Fields:
        """See `_Reader`. A body that is no object has no fields."""
        if body.lstrip(_SPACE)[:1] == b"{":
            return self._decode(body)
        msgspec.json.decode(body)  # raises where it is no JSON
        return _GenericFields()

    @staticmethod
    def decode_all(body: bytes, error: msgspec.ValidationError) -> tuple[_Fields, Carried]:  # noqa: ARG004
        """See `_Reader`. Its other fields were no mistake."""
        raise error

    @staticmethod
    def interpret(fields: _Fields, others: Carried) -> Payload:  # noqa: ARG004  # each reader is asked alike
        """It generates nothing that is counted."""
        return Payload(fields.model, fields.stream is True, 0, is_understood=False)


class _Reader:
    """Reads the bodies of one API.

    `decode` reads the API's own fields, and raises ValidationError where the body has fields that it does not know:
    most bodies have none, and are scanned once. `interpret` gets what those others carry, too.
    """

    def __init__(self, fields: type[_Fields], interpret: Callable[[Any, Carried], Payload]) -> None:
        self._own = frozenset(fields.__struct_fields__)
        self._known = self._own | HARMLESS
        harmless = [(name, _Raw, msgspec.UNSET) for name in COMMON if name not in self._own]
        strict = msgspec.defstruct(
            f"{fields.__name__}Body", harmless, bases=(fields,), forbid_unknown_fields=True, gc=False
        )
        self.decode: Callable[[bytes], Any] = msgspec.json.Decoder(strict).decode
        self.interpret = interpret

    def decode_all(self, body: bytes, error: msgspec.ValidationError) -> tuple[_Fields, Carried]:
        """The API's own fields, and the other fields' prompt. Raises `error` where it says something else of them."""
        if not str(error).startswith("Object contains unknown field"):
            raise error
        members = _members(body)
        own = b",".join(b'"%b":%b' % (name.encode(), members[name]) for name in members.keys() & self._own)
        others = {name: bytes(raw) for name, raw in members.items() if name not in self._known or name == "nvext"}
        return self.decode(b"{%b}" % own), carried(others)


_members: Callable[[bytes], Mapping[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_READERS: Mapping[Api, _Reader | _GenericReader] = {
    Api.CHAT: _Reader(_Chat, _chat),
    Api.COMPLETIONS: _Reader(_Completion, _completion),
    Api.RESPONSES: _Reader(_Response, _response),
    Api.MESSAGES: _Reader(_Message, _message),
    Api.EMBEDDINGS: _Reader(_Embedding, _embedding),
    Api.GENERIC: _GenericReader(),
}
