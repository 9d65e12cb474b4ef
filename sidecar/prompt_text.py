"""The text in a part of a request's body: how many bytes of it will be tokenized, and which media stand beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

MEDIA_TYPES = frozenset(
    (
        *("image_url", "input_image", "image", "audio_url", "input_audio", "audio", "video_url", "video"),
        *("file", "input_file", "document"),
    )
)
_ENCODED = MEDIA_TYPES | {"url", "data", "file_data", "file_url", "image_data"}
"""Members of a media part that hold the medium itself, or point to it. What else it says is text."""
_FILES = frozenset(("file", "input_file", "document"))
_REFERENCES = frozenset(
    (
        # A name for what a server keeps, or for a tool whose definition is written once more for each mention.
        *("item_reference", "tool_reference"),
        # Tensors: a saved one may say with a stride of zero that a few bytes are a million rows.
        *("image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"),
    )
)
_NAMES = frozenset(
    (
        *("role", "content", "type", "text", "name", "id", "image_url", "input_image", "image", "audio_url"),
        *("input_audio", "audio", "video_url", "video", "file", "input_file", "document", "url", "data", "file_data"),
        *("file_url", "file_id", "image_data", "filename", "format", "detail", "media_type", "source", "cache_control"),
        *("tool_calls", "tool_call_id", "function", "arguments", "call_id", "output", "input", "tool_use_id"),
        *("is_error", "status", "summary", "thinking", "reasoning", "reasoning_content", "signature", "annotations"),
        *("refusal", "title", "phase", "encrypted_content"),
    )
)
"""Names of members that messages have. A chat template does not write them, or writes a token or two; other names may
be as long as a client likes, and count as text."""
_KEPT_ELSEWHERE = frozenset(("file_id", "file_url"))
_SCALAR = " " * 4
"""A number, a boolean or a null counts as a token: a list of them may be written into the prompt."""


class Reference(NamedTuple):
    """Something in a part that its bytes cannot size, by the name of its member or type."""

    name: str


class Measured(NamedTuple):
    """A part of the prompt. `unsized` is the first thing in it that cannot be sized, None where all can be."""

    text_bytes: int
    media: int
    unsized: str | None


def measured(part: bytes) -> Measured:
    """Measures JSON that a chat template writes into the prompt: what is text of it, and what media."""
    if is_plain(part):
        return Measured(len(part), 0, None)
    text_bytes = media = 0
    unsized: str | None = None
    for found in _texts(part):
        if isinstance(found, str):
            text_bytes += len(found.encode("utf-8", "replace"))
        elif found is None:
            media += 1
        else:
            unsized = unsized or found.name
    return Measured(text_bytes, media, unsized)


def json_bytes(part: bytes) -> int:
    """The size of JSON that is written into the prompt as it is, names and all: a tool's definition, a schema."""
    return len(part) if b"\\u" not in part else len(msgspec.json.encode(_decode(part)))


def text_of(part: bytes) -> str:
    """What a tokenizer would count of a part that is `measured`."""
    if is_plain(part):
        return part.decode("utf-8", "replace")
    return "\n".join(text for text in _texts(part) if isinstance(text, str))


def is_plain(part: bytes) -> bool:
    """Whether its size says how much text there is: no escapes of six bytes a character, and no content parts."""
    return b"\\u" not in part and b'"type"' not in part


# A number may be one that no double holds: it is no text, and so of no interest.
_decode = msgspec.json.Decoder(float_hook=len).decode


def _texts(part: bytes) -> Iterator[str | Reference | None]:
    """All text in JSON, in order, None for every media part, of which the encoded medium is no text, and references.

    Iterative, because the depth is the client's.
    """
    pending = [(_decode(part), False)]
    while pending:
        item, in_media = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, list):
            pending.extend((child, in_media) for child in reversed(item))
        elif not isinstance(item, dict):
            yield _SCALAR
        else:
            kind = item.get("type")
            if isinstance(kind, str):
                if kind in MEDIA_TYPES:
                    in_media = True
                    yield None
                if reference := _reference(kind, item):
                    yield reference
            if not item.keys() <= _NAMES:
                yield from (name for name in item if name not in _NAMES)
            skipped = _ENCODED if in_media and kind != "text" else ()
            pending.extend((item[key], in_media) for key in reversed(item) if key not in skipped)


def _reference(kind: str, item: dict[str, object]) -> Reference | None:
    """What a part points to and its bytes cannot size. A medium that is no file counts the same wherever it is."""
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
