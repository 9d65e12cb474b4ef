"""Edits of members of an answer's JSON on its way to the client: of a whole answer, or of each event of a stream.

An answer that is neither, a compressed one, or one that is no JSON passes as it is; an error does, but for its words
(`Edit.instead_of`). So does what is larger than `LARGEST_EDITED`: one answer, or one line of a stream. The length of an
edited answer is not declared: its head goes out before its body is known.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from functools import reduce
from typing import NamedTuple

import msgspec
from starlette.types import Message, Receive, Scope, Send

from sidecar.admission.answer import without_files
from sidecar.admission.client import has_type, may_be_edited, without_length
from sidecar.admission.controller import AdmissionController
from sidecar.admission.forwarding import call_and_show, forwarded_headers
from sidecar.admission.handover import WRITE_KEY, Write
from sidecar.admission.intake import CONTENT_ENCODING, NOT_PACKED
from sidecar.admission.model_names import with_model
from sidecar.errors import AdmissionError
from sidecar.events import Headers
from sidecar.payload.content_codings import packed_body

LARGEST_EDITED = 8 * 1024 * 1024
"""Bytes of a whole answer, or of a line of a stream, that are held until the end has come. A token has four to five,
with the log probabilities of twenty others 2 KiB."""

_DATA = re.compile(rb"(data:(?<![^\r\n]data:)[ \t]*)(\{[^\r\n]*\})(?=[ \t]*(?:[\r\n]|\Z))")
"""An event's object. It is one line at every engine: a line break is escaped in JSON."""
_LINE_END = re.compile(rb"[\r\n]")
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Edit(NamedTuple):
    """Sets the member at the end of `path` to `value`, which is JSON.

    Where it is not there, it is added beside the member `beside`; without one it is only replaced. In the words of an
    error it takes the place of the name `instead_of`.
    """

    path: tuple[str, ...]
    value: bytes
    beside: str | None = None
    instead_of: str | None = None

    def in_words(self, error: bytes) -> bytes:
        """An error's body with the value in the place of the other name, where that stands as a whole word."""
        if self.instead_of is None:
            return error
        name = re.escape(msgspec.json.encode(self.instead_of)[1:-1])
        word = rb"(?<![\w/:@+-])(?<![\w]\.)%b(?![\w/:@+-])(?!\.\w)" % name
        return re.sub(word, lambda _: self.value[1:-1], error)


def edited(body: bytes, edits: Sequence[Edit]) -> bytes:
    """A JSON object with its members edited; the same bytes where nothing is to change, or they are no object."""
    try:
        for edit in edits:
            body = _edited(body, edit.path, edit)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    return body


def _edited(raw: bytes, path: tuple[str, ...], edit: Edit) -> bytes:
    members, name, after = _decode_members(raw), path[0], edit.value
    if len(path) == 1:
        is_unchanged = name not in members and edit.beside not in members
    else:
        inner = bytes(members.get(name, b""))
        is_unchanged = inner[:1] != b"{" or (after := _edited(inner, path[1:], edit)) is inner
    return raw if is_unchanged else msgspec.json.encode({**members, name: msgspec.Raw(after)})


class AnswerEditor:
    """An ASGI `send` that edits the answer which it is sent. `edits` may change before the answer begins.

    Of a stream every complete line passes at once. The beginning of a line is held until its end has come, and a whole
    answer until it is complete.
    """

    __slots__ = ("_has_begun_line", "_held", "_is_error", "_is_stream", "_is_whole", "_send", "edits")

    def __init__(self, send: Send, edits: Sequence[Edit]) -> None:
        self.edits = edits
        self._send = send
        self._held = bytearray()
        self._is_stream = self._is_whole = self._is_error = False
        self._has_begun_line = False

    def send(self, message: Message) -> Awaitable[None]:
        """See ASGI's `send`."""
        if message["type"] == "http.response.start":
            return self._send(self._begun(message))
        if message["type"] != "http.response.body" or not (self._is_stream or self._is_whole):
            return self._send(message)
        body, is_last = bytes(message.get("body", b"")), not message.get("more_body", False)
        shown = self._lines(body, is_last=is_last) if self._is_stream else self._whole(body, is_last=is_last)
        # Also without bytes: the head may wait for this message, and `engine_time` asks so whether the client reads.
        return self._send({**message, "body": shown})

    def write(self, write: Write, body: bytes) -> bool:
        """See `handover.Write`, around another: whole lines of a stream are edited, and written at once."""
        if self._held or self._has_begun_line or self._is_whole or not body.endswith((b"\n", b"\r")):
            return False
        return write(self._edit_lines(body) if self._is_stream else body)

    def _begun(self, message: Message) -> Message:
        """The response's start."""
        self._is_error = message["status"] >= 400 and any(edit.instead_of for edit in self.edits)
        headers, is_edited = message.get("headers", ()), may_be_edited(message, errors=self._is_error)
        self._is_stream = is_edited and has_type(headers)
        self._is_whole = is_edited and has_type(headers, b"application/json")
        return without_length(message) if self._is_stream or self._is_whole else message

    def _whole(self, body: bytes, *, is_last: bool) -> bytes:
        held = self._held
        held += body
        if not is_last and len(held) <= LARGEST_EDITED:
            return b""
        shown = bytes(held)
        held.clear()
        self._is_whole = False  # what follows is the rest of one that is too large
        if self._is_error:
            return reduce(lambda error, edit: edit.in_words(error), self.edits, shown)
        return edited(shown, self.edits) if is_last else shown

    def _lines(self, body: bytes, *, is_last: bool) -> bytes:
        """The lines that are complete."""
        held = self._held
        end = len(body) if is_last else max(body.rfind(b"\n"), body.rfind(b"\r")) + 1
        if not end and not is_last:
            held += body
            if len(held) <= LARGEST_EDITED and not self._has_begun_line:
                return b""
            begun_line = bytes(held)
            held.clear()
            self._has_begun_line = True
            return begun_line
        lines = bytes(held) + body[:end]
        held[:] = body[end:]
        since = 0
        if self._has_begun_line:
            self._has_begun_line = False
            since = len(lines) if (found := _LINE_END.search(lines)) is None else found.end()
        return lines[:since] + self._edit_lines(lines[since:])

    def _edit_lines(self, lines: bytes) -> bytes:
        return _DATA.sub(lambda found: found[1] + edited(found[2], self.edits), lines)


# -- Models of requests that pass without a lease: the body is read for its `model`, and goes on, perhaps renamed.
#
# So it is with what an engine answers without running a model, such as `/tokenize`, and with everything in `mode:
# observe` and `mode: pass`. A name that no engine knows is replaced there as well: nothing could answer it.


class _Named(msgspec.Struct):
    model: str | None = None


class ReadBody(msgspec.Struct, frozen=True):
    """A body that was read for its model. `text` is it unpacked, None where it is no JSON, too large or incomplete.

    `receive` gives the client's messages again, and then the next ones.
    """

    receive: Receive
    text: bytes | None = None
    model: str | None = None


async def read_for_model(headers: Headers, receive: Receive, most_bytes: int, most_s: float | None = None) -> ReadBody:
    """Reads a body of so many bytes at most, for so long at most."""
    read: list[Message] = []
    body = None
    with suppress(asyncio.TimeoutError):
        body = await asyncio.wait_for(_whole(most_bytes, receive, read), most_s)
    again = _again(read, receive)
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError, AdmissionError):
        if body is not None:
            packed = packed_body(headers, most_bytes)
            text = body if packed is None else packed.feed(body, is_last=True)
            return ReadBody(again, text, msgspec.json.decode(text, type=_Named).model if text else None)
    return ReadBody(again)


async def _whole(most_bytes: int, receive: Receive, read: list[Message]) -> bytes | None:
    """The body, whose messages are added to `read`; None where it is too large, or not complete."""
    chunks: list[bytes] = []
    size = 0
    while size <= most_bytes:
        message = await receive()
        read.append(message)
        if message["type"] != "http.request":
            return None
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if not message.get("more_body", False):
            return b"".join(chunks)
    return None


def _again(read: list[Message], receive: Receive) -> Receive:
    """The messages that were read already, and then the next ones."""
    read.reverse()

    async def read_again() -> Message:
        return read.pop() if read else await receive()

    return read_again


def model_edits(name: str, engine_model: str) -> tuple[Edit, ...]:
    """Edits by which an answer of any API, whole or streamed, has this name in place of the engine's."""
    value = msgspec.json.encode(name)
    events = (Edit(path, value) for path in (("response", "model"), ("message", "model")))
    return (Edit(("model",), value, instead_of=engine_model), *events)


async def call_renamed(
    controller: AdmissionController, scope: Scope, for_app: Scope, receive: Receive, send: Send
) -> None:
    """Calls the app as `call_app` does, with the engine's name where the body's model is an alias."""
    names, most_bytes = controller.snapshot.names, controller.policy.max_body_bytes
    body = await read_for_model(for_app["headers"], receive, most_bytes)
    engine_model, receive_for_app = names.renamed.get(body.model), body.receive
    if engine_model is not None and body.text is not None and body.model is not None:
        text = with_model(body.text, engine_model)
        added = (NOT_PACKED, (b"content-length", b"%d" % len(text)))
        headers = forwarded_headers(for_app["headers"], (CONTENT_ENCODING, b"transfer-encoding"), added)
        for_app = {**for_app, "headers": headers, "extensions": without_files(for_app)}
        for_app.pop(WRITE_KEY, None)  # the answer is edited
        receive_for_app = _again([{"type": "http.request", "body": text, "more_body": False}], receive)
        send = AnswerEditor(send, model_edits(body.model, engine_model)).send
    await call_and_show(controller, scope, for_app, receive_for_app, send)
