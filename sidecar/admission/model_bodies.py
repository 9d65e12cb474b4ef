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
from sidecar.admission.handover import with_write
from sidecar.admission.intake import is_upload
from sidecar.admission.model_names import ModelNames, with_model
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


def model_edits(name: str) -> tuple[Edit, ...]:
    """Edits by which an answer of any API, whole or streamed, has this model."""
    value = msgspec.json.encode(name)
    return tuple(Edit(path, value) for path in (("model",), ("response", "model"), ("message", "model")))


async def renamed(
    names: ModelNames, most_bytes: int, scope: Scope, receive: Receive, send: Send
) -> tuple[Scope, Receive, Send]:
    """The three of ASGI for an app, where the body's model has another name at the engine; else as they are."""
    if is_upload(dict(scope["headers"])):
        return scope, receive, send
    body = await read_for_model(scope["headers"], receive, most_bytes)
    engine_model = names.renamed.get(body.model)
    if engine_model is None or body.text is None or body.model is None:
        return scope, body.receive, send
    text = with_model(body.text, engine_model)
    replaced = {b"content-encoding", b"content-length", b"accept-encoding"}
    headers = [pair for pair in scope["headers"] if pair[0] not in replaced]
    headers += [(b"content-length", b"%d" % len(text)), (b"accept-encoding", b"identity")]
    scope = {**scope, "headers": headers, "extensions": without_files(scope)}
    with_write(scope, None)  # the answer is edited
    editor = AnswerEditor(send, model_edits(body.model))
    return scope, _again([{"type": "http.request", "body": text, "more_body": False}], receive), editor.send
