"""ASGI middleware: requests to the policy's endpoints are admitted first; all others pass or are refused."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from sidecar.middleware.controller import AdmissionController
from sidecar.middleware.dry_run.request import DryRunRequest
from sidecar.middleware.passing import pass_on
from sidecar.middleware.request import RequestHandler
from sidecar.middleware.request_path import endpoint_of
from sidecar.middleware.self_view import is_self_view, send_self_view
from sidecar.middleware.unguarded import pass_or_refuse
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
        return DryRunRequest(controller, controller, endpoint, scope, receive, send, controller.pool.now_us()).run()
    return RequestHandler(controller, endpoint, scope, receive, send).run()


def guarded_endpoint(controller: AdmissionController, scope: Scope) -> Endpoint | None:
    """The policy's endpoint for a request; None where none guards it."""
    if scope["type"] != "http" or scope["method"].upper() != "POST":
        return None
    return endpoint_of(controller.snapshot.endpoints, scope)
