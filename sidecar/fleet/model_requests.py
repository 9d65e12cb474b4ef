"""Requests to the front of several models' pools: each goes on with the controller of its model.

In `mode: observe` a request passes as soon as its body says which model it is for. One for a model that no pool serves
goes to an engine all the same, which answers what it would have answered; the report has it as refused.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidecar.admission.controller import AdmissionController
from sidecar.admission.intake import is_upload
from sidecar.admission.request_path import exact_paths, guarded_endpoint
from sidecar.admission.unguarded import is_refused
from sidecar.errors import AdmissionError
from sidecar.events import Headers
from sidecar.fleet.model_list import asked_model, send_models
from sidecar.fleet.models import ModelsController
from sidecar.middleware import ReadModel, serve_scope
from sidecar.payload.content_codings import packed_body
from sidecar.policy.endpoint import Endpoint


async def serve_models(front: ModelsController, lifespan: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Serves one ASGI scope, as `middleware.serve_scope` does, and the pages that list the models."""
    endpoint, received_us = guarded_endpoint(front.snapshot.endpoints, scope), front.pool.now_us()
    if endpoint is None and (asked := asked_model(scope)) is not None:
        await send_models(front, asked, scope, send)
        return
    controller: AdmissionController = front
    passes = front.is_observing if endpoint is not None else front.is_passing or _is_harmless(front, scope)
    if passes:
        controller, receive = await _by_model(front, scope, receive, endpoint)
    await serve_scope(front, lifespan, scope, receive, send, model=ReadModel(controller, received_us))


def _is_harmless(front: ModelsController, scope: Scope) -> bool:
    """True if a request may ask an engine something that generates nothing, such as `/tokenize`."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    return any(map(front.snapshot.routes.harmless_route, exact_paths(scope))) and not is_refused(front, scope)


async def _by_model(
    front: ModelsController, scope: Scope, receive: Receive, endpoint: Endpoint | None = None
) -> tuple[AdmissionController, Receive]:
    """The controller of the model that a request's body names, else the front, with any engine; and the body again.

    Nothing of an upload to an endpoint is read: it names no model. Elsewhere a body that comes too slowly names none.
    """
    if scope["type"] != "http" or scope["method"].upper() != "POST":
        return front, receive
    if endpoint is not None and endpoint.size is not None and is_upload(dict(scope["headers"])):
        return front, receive
    read: list[Message] = []
    body = None
    with suppress(asyncio.TimeoutError):
        most_s = front.policy.body_timeout_s if endpoint is None else None
        body = await asyncio.wait_for(_body(front.policy.max_body_bytes, receive, read), most_s)
    model = None if body is None else front.names.meant(_find_name(front, scope["headers"], body))
    return front if model is None else front.controllers[model], _again(read, receive)


class _Named(msgspec.Struct):
    model: str | None = None


def _find_name(front: ModelsController, headers: Headers, body: bytes) -> str | None:
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError, AdmissionError):
        if (packed := packed_body(headers, front.policy.max_body_bytes)) is not None:
            body = packed.feed(body, is_last=True)
        return msgspec.json.decode(body, type=_Named).model
    return None


async def _body(most: int, receive: Receive, read: list[Message]) -> bytes | None:
    """The body, whose messages are added to `read`; None where it is too large, or not complete."""
    chunks: list[bytes] = []
    size = 0
    while size <= most:
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
