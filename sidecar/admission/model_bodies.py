"""Models of requests that pass without a lease: the body is read for its `model`, and goes on, perhaps renamed.

So it is with what an engine answers without running a model, such as `/tokenize`, and with everything in
`mode: observe` and `mode: pass`. A name that no engine knows is replaced there as well: nothing could answer it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec
from starlette.types import Message, Receive, Scope, Send

from sidecar.admission.answer import without_files
from sidecar.admission.answer_edits import AnswerEditor, Edit
from sidecar.admission.controller import AdmissionController
from sidecar.admission.forwarding import call_and_show, forwarded_headers
from sidecar.admission.handover import WRITE_KEY
from sidecar.admission.intake import CONTENT_ENCODING, NOT_PACKED
from sidecar.admission.model_names import with_model
from sidecar.errors import AdmissionError
from sidecar.events import Headers
from sidecar.payload.content_codings import packed_body


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
