"""ASGI middleware: requests to the policy's endpoints are admitted first; all others pass or are refused."""

from __future__ import annotations

import posixpath
from collections.abc import Awaitable

from starlette.types import Receive, Scope, Send

from sidecar.middleware.controller import AdmissionController
from sidecar.middleware.dry_run.request import DryRunRequest
from sidecar.middleware.generic_request import GenericRequest
from sidecar.middleware.request import RequestHandler
from sidecar.middleware.self_view import is_self_view, send_self_view
from sidecar.middleware.unguarded import pass_or_refuse, route_path
from sidecar.policy.model import Endpoint


def serve_scope(controller: AdmissionController, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
    """Serves one ASGI scope with the controller's app.

    The coroutines around an app are resumed whenever the app is, for every chunk of a stream. So this is none of them.
    """
    endpoint = guarded_endpoint(controller, scope)
    if endpoint is None:
        if is_self_view(scope):
            return send_self_view(controller, scope, send)
        return pass_or_refuse(controller, scope, receive, send)
    if controller.snapshot.is_observing:
        return DryRunRequest(controller, endpoint, scope, receive, send).run()
    # A copy of the list: uvicorn appends trailers to its own, after the headers have been checked.
    scope = {**scope, "headers": list(scope["headers"])}
    handler = RequestHandler if endpoint.size is None else GenericRequest
    return handler(controller, endpoint, scope, receive, send).run()


def guarded_endpoint(controller: AdmissionController, scope: Scope) -> Endpoint | None:
    """The policy's endpoint for a request; None where none guards it."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    path, endpoints = route_path(scope), controller.snapshot.endpoints
    endpoint = endpoints.get(path)
    if endpoint is None and ("//" in path or "/." in path or path.endswith("/")):
        # A server after this one may read it as a guarded path: nginx merges slashes and resolves dots.
        endpoint = endpoints.get(posixpath.normpath("/" + path.lstrip("/")))
    return endpoint
