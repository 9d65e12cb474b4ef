"""Usage of streams that did not ask for it: the engine is asked all the same, and the client does not see the answer.

An engine says the usage of a chat's or a text completion's stream only where `stream_options` ask for it, in one more
event, without choices, before the end. Its other events are the same, asked or not (read from vLLM 0.32, SGLang 0.5.23,
TensorRT-LLM and Dynamo 1.6): where they have a null `usage`, they have it in either case. One thing differs: vLLM has
its `system_fingerprint` in the last event, which is then the one that is taken out.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import Any

import msgspec
from starlette.types import Message, Send

from sidecar.admission.intake import SizedRequest
from sidecar.admission.sse_keepalive import is_stream
from sidecar.admission.usage import UsageReader
from sidecar.apis import Api
from sidecar.engines.base import Engine
from sidecar.payload.edit import insert, remove

_CHAT, _COMPLETIONS = Api.CHAT, Api.COMPLETIONS
"""The APIs whose streams have to be asked; those of the others always say their usage. An enumeration's attribute costs
as much as a call."""
LARGEST_USAGE = 16 * 1024
"""Bytes of an event that may be one of usage. The beginning of a larger one passes before its end has come."""
_NOT_ASKED = (None, False, "false", "0", "no", "off", "n", "f")
"""Values of `include_usage` that do not ask, as engines read them (pydantic)."""
_WITHOUT_USAGE = (b"}]}\n\n", b'"usage":null}\n\n')
"""Ends of an event without usage. The event of usage is the last but for `[DONE]`: no chunk that ends so has it."""
_END = re.compile(rb"\r?\n\r?\n|\r\r")


class _Options(msgspec.Struct):
    include_usage: Any = msgspec.UNSET


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: msgspec.Raw = msgspec.Raw()


_decode_options = msgspec.json.Decoder(_Options).decode
_decode_event = msgspec.json.Decoder(_Event).decode


def ask_for_usage(request: SizedRequest, engine: Engine | None, usage: UsageReader) -> bytes | None:
    """The `stream_options` that ask the engine for usage in the client's place.

    None where there is nothing to ask: the client asks itself, the answer is no stream of events, or the options are
    none that an engine accepts. Where no engine is asked, `usage` measures the text of the answer instead.
    """
    if request.api is not _CHAT and request.api is not _COMPLETIONS:
        return None
    if engine is None:
        usage.text_bytes = 0
    elif request.payload.stream:
        return _asking_options(request.payload.stream_options, engine)
    return None


def _asking_options(written: bytes | None, engine: Engine) -> bytes | None:
    options = b"{}"
    if written is not None and written != b"null":
        try:
            asked = _decode_options(written).include_usage
        except msgspec.ValidationError:
            return None
        if asked is msgspec.UNSET:
            asked = engine.asks_usage_by_default
        if (asked.lower() if isinstance(asked, str) else asked) not in _NOT_ASKED:
            return None
        options = written
    for name, value in engine.usage_options.items():
        options = insert(remove(options, (name,)), name, value)
    return options


class UsageHider:
    """An ASGI `send` that takes the event of usage out of a stream. Every other byte passes, and whole events at once.

    The beginning of an event is held until its end has come.
    """

    __slots__ = ("_held", "_is_stream", "_send")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held = b""
        self._is_stream = False

    def send(self, message: Message) -> Awaitable[None]:
        """See ASGI's `send`."""
        if not self._is_stream:
            return self._send(self._begun(message) if message["type"] == "http.response.start" else message)
        body = message.get("body")
        if body is None or self.passes(body := bytes(body)):  # Starlette lets apps send a memoryview
            return self._send(message)
        shown = self._shown(body, is_last=not message.get("more_body", False))
        # Also without bytes: the head may wait for this message, and `engine_time` asks so whether the client reads.
        return self._send({**message, "body": shown})

    def passes(self, body: bytes) -> bool:
        """Whether the stream's next bytes are shown as they are: so are nearly all. Else they have to be sent."""
        return not self._is_stream or (not self._held and body.endswith(_WITHOUT_USAGE))

    def _begun(self, message: Message) -> Message:
        """The response's start. A stream that is shorter than its engine says has no length."""
        headers = message.get("headers", ())
        is_coded = any(name.lower() == b"content-encoding" for name, _ in headers)
        self._is_stream = message["status"] < 300 and is_stream(headers) and not is_coded
        if not self._is_stream:
            return message
        return {**message, "headers": [pair for pair in headers if pair[0].lower() != b"content-length"]}

    def _shown(self, body: bytes, *, is_last: bool = False) -> bytes:
        """What the client sees of the stream's next bytes, and of those held before."""
        window = self._held + body
        shown, since = [], 0
        for end in _END.finditer(window):
            event, since = window[since : end.end()], end.end()
            if not _is_usage(event):
                shown.append(event)
        rest = window[since:]
        if is_last and not _is_usage(rest):
            shown.append(rest)
        elif len(rest) > LARGEST_USAGE:
            begun = rest.rstrip(b"\r\n")  # what is left may be half of the event's end
            shown.append(begun)
            rest = rest[len(begun) :]
        self._held = rest
        return b"".join(shown)


def _is_usage(event: bytes) -> bool:
    """Whether the event has no choices, and says the usage."""
    if b'"usage"' not in event or len(event) > LARGEST_USAGE:
        return False
    lines = [line.removeprefix(b"data:") for line in event.splitlines() if line.startswith(b"data:")]
    try:
        found = _decode_event(b"\n".join(lines))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return found.choices == [] and bytes(found.usage)[:1] == b"{"
