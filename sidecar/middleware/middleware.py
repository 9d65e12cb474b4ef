"""ASGI middleware: requests to the policy's endpoints are admitted first; all others pass or are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from sidecar.middleware.client_channel import ClientChannel
from sidecar.middleware.controller import AdmissionController
from sidecar.middleware.dry_run.request import DryRunRequest
from sidecar.middleware.event_reporter import reporter_of
from sidecar.middleware.generic_request import GenericRequest
from sidecar.middleware.intake import RequestIntake
from sidecar.middleware.passing import pass_on
from sidecar.middleware.pending_aborts import EngineCall
from sidecar.middleware.request import RequestHandler
from sidecar.middleware.request_path import endpoint_of
from sidecar.middleware.response_headers import request_id
from sidecar.middleware.self_view import is_self_view, send_self_view
from sidecar.middleware.timed_request import TimedRequest
from sidecar.middleware.unguarded import pass_or_refuse
from sidecar.middleware.usage import UsageReader
from sidecar.policy.model import Endpoint

Handler = TypeVar("Handler", bound=RequestHandler)


def serve_scope(controller: AdmissionController, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
    """Serves one ASGI scope with the controller's app.

    The coroutines around an app are resumed whenever the app is, for every chunk of a stream. So this is none of them.
    """
    endpoint = guarded_endpoint(controller, scope)
    if endpoint is None:
        if controller.snapshot.is_passing and scope["type"] != "lifespan":
            return pass_on(controller, scope, receive, send)
        if is_self_view(scope):
            return send_self_view(controller, scope, send)
        return pass_or_refuse(controller, scope, receive, send)
    if controller.snapshot.is_observing:
        return DryRunRequest(controller, controller, endpoint, scope, receive, send).run()
    kind = TimedRequest if endpoint.size is None else GenericRequest
    return handler_of(kind, controller, endpoint, scope, receive, send).run()


def guarded_endpoint(controller: AdmissionController, scope: Scope) -> Endpoint | None:
    """The policy's endpoint for a request; None where none guards it."""
    if scope["type"] != "http" or scope["method"].upper() != "POST":
        return None
    return endpoint_of(controller.snapshot.endpoints, scope)


def handler_of(  # noqa: PLR0917  # the three of ASGI, and what they belong to
    kind: type[Handler],
    controller: AdmissionController,
    endpoint: Endpoint,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> Handler:
    """The handler, of some kind, of a request that has just come."""
    snapshot, now_us, observer = controller.snapshot, controller.pool.now_us, controller.observer
    pairs, received_us = [*scope["headers"]], now_us()  # a copy: uvicorn appends trailers to its own list
    headers = dict(pairs)
    own_id = request_id(headers)
    intake = RequestIntake(snapshot, endpoint, headers, snapshot.names_read[tuple(headers)], received_us)
    return kind(
        controller,
        snapshot,
        endpoint,
        scope,
        receive,
        now_us,
        received_us,
        pairs,
        headers,
        own_id,
        ClientChannel(receive, send, now_us),
        reporter_of(observer, scope, own_id, received_us, now_us, intake),
        intake,
        UsageReader(),
        EngineCall(controller.engine_watch),
        asyncio.current_task(),
    )
