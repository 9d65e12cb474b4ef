"""Bytes of a prompt in the order in which an engine reads them, for the prediction of prefix hits.

The order is that of chat templates: tools, then the system's text, then the turns with their roles. The bytes are not
the engine's own: they are equal where the engine's are, and differ where its differ. So text is the same as a string
or as content parts, `cache_control` (a mark that clients move from turn to turn) is left out, and a medium stands for
itself as a digest of the size that `decode.MEDIA_TOKENS` tokens of text have.

This is a second reading of a body that `decode.decode` has accepted, so only requests of pools with several engines
pay for it. It is bounded: a body above `LONGEST_DECODED` is taken as it was sent, from the prompt's first byte on, and
of any prompt only `LONGEST_READ` bytes are used. A conversation that grows past the first bound is not recognized once.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import msgspec

from sidecar.apis import Api
from sidecar.payload.decode import MEDIA_TOKENS
from sidecar.payload.prompt_size import MEDIA_TYPES

LONGEST_DECODED = 2**19
"""Bytes of a body whose text is decoded: 130,000 tokens. Above it, decoding would cost more than half a millisecond."""
LONGEST_READ = 2**20
"""Bytes of a prompt that are used: 260,000 tokens. What comes after them is never predicted to be a hit."""
LONGEST_NAME = 256
"""Characters of a session's name. A longer one is not used."""
_SEARCHED = 2**18
"""Bytes of a long body in which its prompt must begin."""
_MEDIUM_BYTES = MEDIA_TOKENS * 4
_DIGEST_BYTES = 8
_COMPLETIONS, _RESPONSES = Api.COMPLETIONS, Api.RESPONSES
_TEXT_TYPES = frozenset(("text", "input_text", "output_text", "message"))
_TEXT_NAMES = frozenset(("role", "type", "text", "content", "cache_control"))


class PromptBytes(msgspec.Struct, gc=False):
    """The bytes of one request's prompt, at most `LONGEST_READ`.

    `root` is what two prompts must share beside their bytes to share a prefix: API family, model, `cache_salt`.
    `size` is the number of bytes that the whole prompt has. `cache_key` is the body's `prompt_cache_key`, None where
    it is absent or no short string. `is_single` says that the engine's count of cached tokens is about these bytes:
    of several prompts engines report the last one, or the sum.
    """

    root: Hashable
    data: bytes
    size: int
    cache_key: str | None = None
    is_single: bool = True


NO_PROMPT = PromptBytes(None, b"", 0)


_Raw = msgspec.Raw | msgspec.UnsetType


class _Body(msgspec.Struct, gc=False):
    model: Any = None
    tools: _Raw = msgspec.UNSET
    system: Any = None
    instructions: Any = None
    messages: Any = None
    input: Any = None
    prompt: _Raw = msgspec.UNSET
    cache_salt: Any = None
    extra_key: Any = None
    prompt_cache_key: Any = None


class _Root(msgspec.Struct):
    """Members that are decoded of a long body: the prompt is skipped, in half a millisecond for each megabyte."""

    model: Any = None
    cache_salt: Any = None
    extra_key: Any = None
    prompt_cache_key: Any = None


# A number may be too large for a double: its digits are as good.
_decode_body = msgspec.json.Decoder(_Body, float_hook=str).decode
_decode_root = msgspec.json.Decoder(_Root, float_hook=str).decode
_decode_text = msgspec.json.Decoder(str).decode


def prompt_bytes(api: Api, body: bytes) -> PromptBytes:
    """The prompt of a body that `decode.decode` accepted. Raises nothing: what cannot be read has no bytes."""
    if api is Api.EMBEDDINGS:  # engines keep no prefixes of pooling requests
        return NO_PROMPT
    try:
        return _decode(api, body) if len(body) <= LONGEST_DECODED else _scan(api, body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError, TypeError):
        return NO_PROMPT


def short_name(value: object) -> str | None:
    """The value where it can name a session: a string, not empty, of at most `LONGEST_NAME` characters."""
    return value if isinstance(value, str) and 0 < len(value) <= LONGEST_NAME else None


def _decode(api: Api, body: bytes) -> PromptBytes:
    fields = _decode_body(body)
    root = _root(api, fields)
    is_single = True
    if api is _COMPLETIONS:
        data, is_single = _completion(fields.prompt)
    else:
        out: list[str] = []
        if not isinstance(fields.tools, msgspec.UnsetType):
            out.append(bytes(fields.tools).decode())
        first, turns = (fields.instructions, fields.input) if api is _RESPONSES else (fields.system, fields.messages)
        if first is not None:
            _write(first, out)
        _write(turns, out)
        data = "\0".join(out).encode("utf-8", "replace")
    return PromptBytes(root, data[:LONGEST_READ], len(data), short_name(fields.prompt_cache_key), is_single)


def _root(api: Api, fields: _Body | _Root) -> Hashable:
    return api is _COMPLETIONS, _salt(fields.model), _salt(fields.cache_salt), _salt(fields.extra_key)


def _salt(value: object) -> int | None:
    """The whole of it: two salts that only end differently separate prompts, too."""
    return hash(value) if isinstance(value, str) else None


def _completion(prompt: _Raw) -> tuple[bytes, bool]:
    """A string's text; a list as it was sent: decoding a long prompt's token ids would cost more than all the rest."""
    raw = b"" if isinstance(prompt, msgspec.UnsetType) else bytes(prompt)
    if raw[:1] == b'"':
        return _decode_text(raw).encode("utf-8", "replace"), True
    return raw, raw[1:].lstrip()[:1].isdigit()


def _write(item: Any, out: list[str]) -> None:
    """Appends the text in turns and content parts, in their order; everything else in them as JSON."""
    if type(item) is str:
        out.append(item)
    elif type(item) is list:
        for child in item:
            if type(child) is dict and len(child) == 2 and "role" in child:  # most turns: this is the fastest way
                content = child.get("content")
                if type(content) is str:
                    out.append(str(child["role"]))
                    out.append(content)
                    continue
            _write(child, out)
    elif type(item) is dict:
        kind = item.get("type")
        if kind in MEDIA_TYPES:
            out.append(_medium(item))
            return
        if "role" in item:
            out.append(str(item["role"]))
        if kind is not None and kind not in _TEXT_TYPES:
            out.append(str(kind))
        for name in ("text", "content"):
            if name in item:
                _write(item[name], out)
        if not item.keys() <= _TEXT_NAMES:
            rest = {name: value for name, value in item.items() if name not in _TEXT_NAMES}
            out.append(msgspec.json.encode(rest).decode())
    elif item is not None:
        out.append(str(item))


def _medium(part: dict[str, Any]) -> str:
    kept = {name: value for name, value in part.items() if name != "cache_control"}
    digest = hash(msgspec.json.encode(kept)) & (2**32 - 1)
    return f"{digest:0{_DIGEST_BYTES}x}" * (_MEDIUM_BYTES // _DIGEST_BYTES)


_PROMPT_NAMES: dict[Api, bytes] = {
    Api.CHAT: b'"messages"',
    Api.MESSAGES: b'"messages"',
    Api.RESPONSES: b'"input"',
    Api.COMPLETIONS: b'"prompt"',
}


def _scan(api: Api, body: bytes) -> PromptBytes:
    """A long body from its prompt's name on. In a string the name's quotes are escaped, so it is not found there.

    Its salt and its model count as in a short one: else a client with another salt each time would seem to be cached,
    and an engine would get as many such prompts at once as it can hold.
    """
    start = body.find(_PROMPT_NAMES[api], 0, _SEARCHED)
    if start < 0:
        return NO_PROMPT
    end = min(len(body), start + LONGEST_READ)
    fields = _decode_root(body)
    root = "undecoded", _root(api, fields)
    return PromptBytes(root, body[start:end], len(body) - start, short_name(fields.prompt_cache_key), is_single=False)
