"""ASGI middleware: requests to the policy's endpoints are admitted first; all others pass or are refused."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from sidecar.admission.controller import AdmissionController
from sidecar.admission.dry_run.request import DryRunRequest
from sidecar.admission.forwarding import pass_on
from sidecar.admission.request import RequestHandler
from sidecar.admission.request_path import guarded_endpoint
from sidecar.admission.self_view import is_self_view, send_self_view
from sidecar.admission.unguarded import pass_or_refuse
from sidecar.policy.endpoint import Cors


class ReadModel(NamedTuple):
    """The controller of the model that a request's body names, and when the request came."""

    controller: AdmissionController
    received_us: int


def serve_scope(
    front: AdmissionController,
    lifespan: ASGIApp,
    scope: Scope,
    receive: Receive,
    send: Send,
    *,
    model: ReadModel | None = None,
) -> Awaitable[None]:
    """Serves one ASGI scope with the app of `front`; `lifespan` serves the server's.

    `model` is the model of a request that passes, where each has a pool of its own and its body was read for it.
    The coroutines around an app are resumed whenever the app is, for every chunk of a stream. So this is none of them.
    """
    endpoint = guarded_endpoint(front.snapshot.endpoints, scope)
    if endpoint is not None and not front.snapshot.is_observing:
        return RequestHandler(front, endpoint, scope, receive, send).run()
    if scope["type"] == "lifespan":
        front.begin_lifespan()
        return lifespan(scope, receive, send)
    controller, received_us = (front, front.pool.now_us()) if model is None else model
    if endpoint is not None:
        return DryRunRequest(front, controller, endpoint, scope, receive, send, received_us).run()
    if front.snapshot.is_passing:
        return pass_on(controller, scope, receive, send)
    if is_self_view(scope):
        return send_self_view(front, scope, send)
    return pass_or_refuse(controller, scope, receive, send)


def with_cors(app: ASGIApp, cors: Cors) -> ASGIApp:
    """The app for the browsers of these origins (CORS), too: Starlette's middleware around ours.

    It answers a browser's preflight itself: that needs no key, and never waits. It adds its headers to every response,
    refusals and streams that have begun while they waited included, in place of the app's own of the same names.
    Without credentials, which for a browser are cookies: keys are headers that the page sets itself. So `*` in what is
    exposed means every header, the engine's own as well.
    """
    from starlette.middleware.cors import CORSMiddleware  # a tenth of the import, and few policies ask for it

    return CORSMiddleware(
        app,
        allow_origins=cors.origins,
        allow_methods=("*",),
        allow_headers=("*",) if cors.headers is None else cors.headers,
        expose_headers=("*",),
    )
