"""Sizes of prompts: the text and media in a field, and the fields beside an API's own.

The engines accept about a hundred fields beside OpenAI's and Anthropic's own, and more with every release. The rule is
safe for new ones: a field that is not listed here as harmless counts as prompt, by its bytes.

Read from vLLM 0.33, SGLang 0.5.23, TensorRT-LLM f996de06 and Dynamo 1.6.1. One table serves all engines: a field that
an engine ignores is sent to it only by mistake.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Set
from enum import Enum
from typing import NamedTuple

import msgspec

COMMON: tuple[str, ...] = (
    *("temperature", "top_p", "stop", "stream_options", "user", "seed", "frequency_penalty", "presence_penalty"),
    *("tool_choice", "parallel_tool_calls", "logprobs", "top_logprobs", "metadata", "reasoning_effort", "store"),
    *("reasoning", "stop_sequences", "top_k", "min_p", "repetition_penalty", "skip_special_tokens", "ignore_eos"),
    *("min_tokens", "encoding_format"),
)
"""Harmless fields that many clients send. A body with these alone is read in one pass."""

HARMLESS: frozenset[str] = frozenset(
    (
        *COMMON,
        # How tokens are chosen.
        *("top_p_min", "typical_p", "length_penalty", "early_stopping", "use_beam_search", "logit_bias", "bad_words"),
        *("allowed_token_ids", "watermarking", "repetition_detection", "prompt_ignore_length", "custom_params"),
        *("custom_logit_processor", "thinking_token_budget", "thinking"),
        # Where the answer ends: these can only make it shorter.
        *("stop_token_ids", "stop_regex", "no_stop_trim", "include_stop_str_in_output", "max_tool_calls"),
        *("truncation", "truncate_prompt_tokens", "truncation_side"),
        # The form of the answer, and how it is sent.
        *("prompt_logprobs", "logprob_token_ids", "echo", "detokenize", "spaces_between_special_tokens"),
        *("stream_interval", "stream_reasoning", "separate_reasoning", "include_reasoning", "include", "modalities"),
        *("audio", "verbosity", "dimensions", "return_tokens_as_token_ids", "return_token_ids", "return_prompt_text"),
        *("return_token_offsets", "return_prompt_token_ids", "return_hidden_states", "return_routed_experts"),
        *("return_cached_tokens_details", "return_meta_info", "return_context_logits", "enable_response_messages"),
        "background",
        # A grammar bounds what is generated; the model does not read it.
        *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema"),
        *("guided_decoding_backend", "guided_whitespace_pattern", "regex", "ebnf"),
        # How the model's own template is filled in.
        *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
        # Names for people, caches and routers.
        *("client_metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("request_id", "rid", "session_id", "cache_salt", "extra_key", "custom_labels", "conversation_params"),
        *("agent_hierarchy", "lora_path", "lora_request", "ngram_corpus_id", "data_parallel_rank", "routed_dp_rank"),
        *("disagg_prefill_dp_rank", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
    )
)
"""Fields that never reach the prompt, whatever they hold."""

UNSIZED = frozenset(
    (
        # References to data on another server: only that server knows the size.
        *("previous_response_id", "conversation", "prompt", "session_params"),
        # A program with loops that writes the prompt.
        "chat_template",
        # Tensors: by a stride of zero a few saved bytes may be a million rows.
        "prompt_embeds",
    )
)
"""Fields whose prompt cannot be sized from the body. `prompt` is one where it is not the API's own prompt: a template's
name (`/v1/responses`)."""

_TRANSFER_NAMES = frozenset(
    (
        *("do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_block_ids", "remote_host"),
        *("remote_port", "remote_request_id", "tp_size", "transfer_id"),
    )
)
_DYNAMO_NAMES = frozenset(
    (
        *("agent_hints", "greed_sampling", "use_raw_prompt", "annotations", "backend_instance_id", "extra_fields"),
        *("max_thinking_tokens", "prefill_worker_id", "decode_worker_id", "dp_rank", "prefill_dp_rank"),
        "request_timestamp_ms",
    )
)
_TOKEN_IDS = frozenset(("input_ids", "prompt_token_ids", "token_data"))
_SHORTEST_TOKEN = 4
"""Least bytes that an item of a list counts for: `[1,1,1]` has two bytes an item, and may have a token for each."""
_NUMBERS = b"0123456789+-.eE, \t\r\n"
_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(b"[]"))

_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Carried(msgspec.Struct):
    """The prompt in the fields beside an API's own.

    `tokens` are exact, in `prompts` prompts. `texts` are fields whose JSON is tokenized with the prompt. `unread_bytes`
    is the size of fields that are not known, and `unsized` the name of one whose prompt cannot be sized.
    `template_arguments` are the JSON of `chat_template_kwargs`, which are among the texts, too.
    """

    tokens: int = 0
    prompts: int = 0
    texts: list[bytes] = []
    unread_bytes: int = 0
    unsized: str | None = None
    template_arguments: bytes = b""


NOTHING = Carried()


def carried(others: Mapping[str, bytes]) -> Carried:
    """Sizes the fields that are neither an API's own nor harmless, by their names. The values are JSON."""
    found = Carried()
    for name, value in others.items():
        if value != b"null":
            _CARRIERS.get(name, _unread)(found, name, value)
    return found


def _unread(found: Carried, name: str, value: bytes) -> None:
    items = value.count(b",") + 1
    found.unread_bytes += max(len(name) + len(value), items * _SHORTEST_TOKEN)


def _unsized(found: Carried, name: str, value: bytes) -> None:  # noqa: ARG001  # whatever it holds
    found.unsized = name


def _template_arguments(found: Carried, name: str, value: bytes) -> None:
    _text(found, name, value)
    found.template_arguments = value


def _text(found: Carried, name: str, value: bytes) -> None:  # noqa: ARG001  # whatever it is called
    found.texts.append(value)


def _token_ids(found: Carried, name: str, value: bytes) -> None:
    """A list of token ids, or one for each prompt."""
    brackets = _brackets(value)
    if not brackets:
        _unread(found, name, value)
        return
    found.tokens += value.count(b",") + 1
    found.prompts = max(found.prompts, brackets.count(b"[]"))


def _embeddings(found: Carried, name: str, value: bytes) -> None:
    """A list of rows of numbers, a row for each token, or a list of such lists, one for each prompt."""
    brackets = _brackets(value)
    if brackets[:2] != b"[[":
        _unread(found, name, value)
        return
    found.tokens += brackets.count(b"[]")
    found.prompts = max(found.prompts, brackets[1:].count(b"[["), 1)


def _brackets(value: bytes) -> bytes:
    """The brackets of a list of numbers, however deep; empty for anything else."""
    is_numbers = value[:1] == b"[" and not value.translate(None, _NUMBERS + b"[]")
    return value.translate(None, _ALL_BUT_BRACKETS) if is_numbers else b""


def _encoded_token_ids(found: Carried, name: str, value: bytes) -> None:  # noqa: ARG001  # the same
    """Base64 of 32-bit token ids: 16 characters carry three of them."""
    found.tokens += -(-len(value) * 3 // 16)
    found.prompts = max(found.prompts, 1)


def _object(harmless: frozenset[str]) -> _Carrier:
    """An object whose members are sized in turn, except those that never reach the prompt."""

    def size(found: Carried, name: str, value: bytes) -> None:
        if value[:1] != b"{":
            _unread(found, name, value)
            return
        for member, raw in _members(value).items():
            inner = bytes(raw)
            if member not in harmless and inner != b"null":
                (_token_ids if member in _TOKEN_IDS else _unread)(found, member, inner)

    return size


_Carrier = Callable[[Carried, str, bytes], None]
_CARRIERS: Mapping[str, _Carrier] = {
    **dict.fromkeys(UNSIZED, _unsized),
    **dict.fromkeys(_TOKEN_IDS, _token_ids),
    "prompt_token_ids_b64": _encoded_token_ids,
    "input_embeds": _embeddings,
    "kv_transfer_params": _object(_TRANSFER_NAMES),
    "nvext": _object(_DYNAMO_NAMES),
    "chat_template_kwargs": _template_arguments,
    **dict.fromkeys(
        (
            *(
                "documents",
                "previous_input_messages",
                "previous_response",
                "functions",
                "tools",
            ),
            *("response_format", "prediction", "suffix", "system", "instructions"),
        ),
        _text,
    ),
}


MEDIA_FIELDS = frozenset(("image_url", "audio_url", "video_url", "input_image", "input_audio", "image_pil"))
"""Members that make their part a medium, with a `type` or without: vLLM takes both."""
MEDIA_TYPES = MEDIA_FIELDS | {
    *("image", "audio", "video", "file", "input_file", "document", "computer_screenshot", "image_generation_call")
}
_ENCODED = MEDIA_TYPES | {"url", "data", "file_data", "file_url", "image_data", "result"}
"""Members of a media part that hold the medium itself, or point to it. Its other members are text."""
_DATA_URL = "data:"
"""What such a member begins with in a part whose type says nothing."""
_FILES = frozenset(("file", "input_file", "document"))
TOOL_REFERENCE = "tool_reference"
_TENSORS = frozenset(("image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"))
"""As in `UNSIZED`: types, and members with a `type` or without."""
_REFERENCES = _TENSORS | {"item_reference", TOOL_REFERENCE}
"""Beside tensors, references to data on a server, or to a tool, which `Measured` counts."""
_OPAQUE = frozenset(("encrypted_content", "signature"))
"""Members that only the server which wrote them can read: no chat template writes them."""
_OPAQUE_DATA = frozenset(("redacted_thinking", "reasoning.encrypted"))
"""Types whose `data` is such a member."""
_UNWRITTEN = _OPAQUE | _TENSORS
_VERBATIM = frozenset(("arguments", "input"))
"""What a tool is called with. A chat template writes it as JSON: nothing in it is a medium."""
_NAMES = frozenset(
    (
        *("role", "content", "type", "text", "name", "id", "image_url", "input_image", "image", "audio_url"),
        *("input_audio", "audio", "video_url", "video", "file", "input_file", "document", "url", "data", "file_data"),
        *("file_url", "file_id", "image_data", "filename", "format", "detail", "media_type", "source", "cache_control"),
        *("tool_calls", "tool_call_id", "function", "arguments", "call_id", "output", "input", "tool_use_id"),
        *("is_error", "status", "summary", "thinking", "reasoning", "reasoning_content", "signature", "annotations"),
        *("refusal", "title", "phase", "encrypted_content", "image_pil", "uuid", "result"),
    )
)
"""Names of members that messages have. A chat template does not write them, or writes a token or two. Other names may
be of any length, and count as text."""
_KEPT_ELSEWHERE = frozenset(("file_id", "file_url"))
_SCALAR = " " * 4
"""A number, a boolean or a null counts as a token: a list of them may be written into the prompt."""


class Reference(NamedTuple):
    """A member or type in a part that its bytes cannot size."""

    name: str


class Measured(NamedTuple):
    """A part of the prompt. `unsized` is the first thing in it that cannot be sized, None where all can be.

    For each of the `tool_references` a template may write the definition of one of the request's tools.
    """

    text_bytes: int
    media: int
    unsized: str | None
    tool_references: int = 0


def measured(part: bytes) -> Measured:
    """Measures JSON that a chat template writes into the prompt: its text and its media."""
    if is_plain(part):
        return Measured(len(part), 0, None)
    text_bytes = media = tool_references = 0
    unsized: str | None = None
    for found in _texts(part):
        if isinstance(found, str):
            text_bytes += len(found.encode("utf-8", "replace"))
        elif found is None:
            media += 1
        elif found.name == TOOL_REFERENCE:
            tool_references += 1
        else:
            unsized = unsized or found.name
    return Measured(text_bytes, media, unsized, tool_references)


def largest_item(part: bytes) -> int:
    """The bytes of the largest item of a list in JSON; 0 for what is no list, or empty."""
    items = msgspec.json.decode(part, type=list[msgspec.Raw]) if part[:1] == b"[" else ()
    return max(map(len, items), default=0)


def json_bytes(part: bytes) -> int:
    """The size of JSON that is written into the prompt unchanged, with its names: a tool's definition, a schema."""
    return len(part) if b"\\u" not in part else len(msgspec.json.encode(_decode(part)))


def part_text(part: bytes) -> str:
    """The text that a tokenizer would count in a part that is `measured`."""
    if is_plain(part):
        return part.decode("utf-8", "replace")
    return "\n".join(text for text in _texts(part) if isinstance(text, str))


def is_plain(part: bytes) -> bool:
    """True if its size is the text's size: no escapes of six bytes a character, and no content parts."""
    # Few conversations have a backslash, or a bracket after the first byte, and one byte is found many times as fast as
    # two. `in` tries bytes as a number.
    return (
        (_BACKSLASH not in part or part.find(b"\\u") < 0)
        and part.find(b'"type"') < 0
        and (part.rfind(b"[") < 1 or _find_untyped_part(part) is None)
    )


_BACKSLASH = ord("\\")
_find_untyped_part = re.compile(
    b'"(?:%b|(?:%b)")'
    % (_DATA_URL.encode(), b"|".join(name.encode() for name in sorted(MEDIA_FIELDS | _TENSORS | _OPAQUE)))
).search
# A number may be too large for a double: it is no text, and its value is not needed.
_decode = msgspec.json.Decoder(float_hook=len).decode


class _Place(Enum):
    """Where something in JSON stands: among parts, inside a medium, or in what is written as it is."""

    PART = 1
    MEDIUM = 2
    VERBATIM = 3


_IN_PART, _IN_MEDIUM, _IN_VERBATIM = _Place  # looked up once: an enumeration's attribute costs as much as a call


def _texts(part: bytes) -> Iterator[str | Reference | None]:
    """All text in JSON, in order; None for every medium, without its encoding; and references.

    It is iterative, because the client chooses the depth.
    """
    pending = [(_decode(part), _IN_PART)]
    while pending:
        item, place = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, list):
            pending.extend((child, place) for child in reversed(item))
        elif not isinstance(item, dict):
            yield _SCALAR
        elif place is _IN_VERBATIM:
            yield from item
            pending.extend((item[key], place) for key in reversed(item))
        else:
            kind = item.get("type")
            if not isinstance(kind, str):
                kind = ""
            is_medium = kind in MEDIA_TYPES
            if is_medium:
                place = _IN_MEDIUM
            media = _media(item, place)
            yield from (None,) * max(len(media), is_medium)
            if reference := _reference(kind, item):
                yield reference
            if not item.keys() <= _NAMES:
                yield from (name for name in item if name not in _NAMES)
            skipped = media | _unwritten(kind, place)
            pending.extend(
                (item[key], _IN_VERBATIM if key in _VERBATIM else place) for key in reversed(item) if key not in skipped
            )


def _media(item: dict[str, object], place: _Place) -> Set[str]:
    """The members of a part that are media, whatever its type."""
    media = _find_given(item, MEDIA_FIELDS)
    if place is _IN_PART:
        media |= {name for name in item.keys() & _ENCODED if _is_data_url(item[name])}
    return media


def _find_given(item: dict[str, object], names: Set[str]) -> Set[str]:
    """Members that are given. A null is one only beside the `uuid` of a medium that the engine has seen before."""
    found = item.keys() & names
    if found and item.get("uuid") is None:
        return {name for name in found if item[name] is not None}
    return found


def _unwritten(kind: str, place: _Place) -> Set[str]:
    """The members of a part of a type that no chat template writes, whatever they hold."""
    if kind in _OPAQUE_DATA:
        return _UNWRITTEN | {"data"}
    return _UNWRITTEN | _ENCODED if place is _IN_MEDIUM and kind != "text" else _UNWRITTEN


def _is_data_url(value: object) -> bool:
    return isinstance(value, str) and value.startswith(_DATA_URL)


def _reference(kind: str, item: dict[str, object]) -> Reference | None:
    """The reference in a part, which its bytes cannot size. A medium that is no file counts the same everywhere."""
    if tensors := _find_given(item, _TENSORS):
        return Reference(min(tensors))
    if kind in _REFERENCES:
        return Reference(kind)
    if kind in MEDIA_TYPES and kind not in _FILES:
        return None
    for holder in (item, item.get(kind)):
        if isinstance(holder, dict) and holder.keys() & _KEPT_ELSEWHERE:
            return Reference(f"{kind}.{min(holder.keys() & _KEPT_ELSEWHERE)}")
    source = item.get("source")
    is_linked = isinstance(source, dict) and source.get("type") == "url"
    return Reference(f"{kind}.source") if is_linked else None
