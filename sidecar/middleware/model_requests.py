"""Requests to the front of several models' pools: each goes on with the controller of its model.

In `mode: observe` a request passes as soon as its body says which model it is for. One for a model that no pool serves
goes to an engine all the same, which answers what it would have answered; the report has it as refused.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec
from starlette.types import Message, Receive, Scope, Send

from sidecar.errors import AdmissionError
from sidecar.events import Headers
from sidecar.middleware.controller import AdmissionController
from sidecar.middleware.dry_run.request import DryRunRequest, RequestWatcher
from sidecar.middleware.intake import SizedRequest, is_upload
from sidecar.middleware.middleware import guarded_endpoint
from sidecar.middleware.model_list import asked_model, send_models
from sidecar.middleware.models import ModelsController
from sidecar.middleware.passing import pass_on
from sidecar.middleware.request import RequestHandler
from sidecar.middleware.request_path import exact_paths
from sidecar.middleware.self_view import is_self_view, send_self_view
from sidecar.middleware.unguarded import is_refused, pass_or_refuse
from sidecar.payload.content_codings import packed_body
from sidecar.payload.decode import decode
from sidecar.policy.model import Endpoint


async def serve_models(front: ModelsController, scope: Scope, receive: Receive, send: Send) -> None:
    """Serves one ASGI scope: see `middleware.serve_scope`."""
    endpoint = guarded_endpoint(front, scope)
    if endpoint is not None:
        if front.is_observing:
            await _observe(front, endpoint, scope, receive, send)
        else:
            await RequestHandler(front, endpoint, scope, receive, send).run()
    elif (asked := asked_model(scope)) is not None:
        await send_models(front, asked, scope, send)
    elif front.is_passing and scope["type"] != "lifespan":
        controller, receive = await _by_model(front, scope, receive)
        await pass_on(controller, scope, receive, send)
    elif is_self_view(scope):
        await send_self_view(front, scope, send)
    elif _is_harmless(front, scope) and not is_refused(front, scope):
        controller, receive = await _by_model(front, scope, receive)
        await pass_or_refuse(controller, scope, receive, send)
    else:
        await pass_or_refuse(front, scope, receive, send)


def _is_harmless(front: ModelsController, scope: Scope) -> bool:
    """Whether a request asks an engine something that generates nothing, such as `/tokenize`."""
    is_post = scope["type"] == "http" and scope["method"] == "POST"
    return is_post and any(map(front.snapshot.routes.harmless_route, exact_paths(scope)))


async def _by_model(front: ModelsController, scope: Scope, receive: Receive) -> tuple[AdmissionController, Receive]:
    """The controller of the model that a request's body names, else the front, with any engine; and the body again."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return front, receive
    read: list[Message] = []
    body = None
    with suppress(asyncio.TimeoutError):
        most_s = front.policy.body_timeout_s
        body = await asyncio.wait_for(_body(front.policy.max_body_bytes, receive, read), most_s)
    model = None if body is None else front.names.meant(_named(body))
    return front if model is None else front.controllers[model], _again(read, receive)


class _Named(msgspec.Struct):
    model: str | None = None


def _named(body: bytes) -> str | None:
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
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


# -- the dry run


async def _observe(front: ModelsController, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body, as far as the policy allows, and passes the request on with all that was read.

    Nothing of an upload is read: it names no model.
    """
    read: list[Message] = []
    is_unread = endpoint.size is not None and is_upload(dict(scope["headers"]))
    body = b"{}" if is_unread else await _body(front.policy.max_body_bytes, receive, read)
    read_again = _again(read, receive)
    controller = None if body is None else _controller_of(front, endpoint, body, scope["headers"])
    if controller is None:
        await _RequestOfNoModel(front, endpoint, scope, read_again, send).run()
    else:
        await DryRunRequest(controller, endpoint, scope, read_again, send).run()


def _controller_of(
    front: ModelsController, endpoint: Endpoint, body: bytes, headers: Headers
) -> AdmissionController | None:
    try:
        packed = packed_body(headers, front.policy.max_body_bytes)
        if packed is not None:
            body = packed.feed(body, is_last=True)
        return front.controllers[front.names.model_of(decode(endpoint.api, body).model, body)]
    except AdmissionError:
        return None


class _RequestOfNoModel(DryRunRequest):
    """Passes a request that no pool serves."""

    __slots__ = ()
    _controller: ModelsController

    def _new_watcher(self) -> RequestWatcher:
        return _WatcherOfNoModel(self._controller, self._endpoint, self._scope)


class _WatcherOfNoModel(RequestWatcher):
    """Watches it: enforcing would refuse it, for its model at the latest."""

    __slots__ = ()
    _controller: ModelsController

    def _begin_shadow(self, request: SizedRequest) -> None:
        try:
            self._controller.controller_of(request)
        except AdmissionError as refusal:
            self._refuse(refusal)
