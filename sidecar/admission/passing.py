"""Requests in `mode: pass`: they go to the app as they came. Nothing of the body is read, and the pool is not asked.

Two changes are necessary. A path that the policy maps with `forward_to` is mapped, because the engine need not know it.
And the engine's own key, where there is one, replaces the client's, which the engine would refuse. A request without a
key gets it only where the policy has a tier for such requests, or a gateway or the app names its tenant: else everyone
would have the engine.
"""

from __future__ import annotations

from collections.abc import Awaitable

from starlette.types import Receive, Scope, Send

from sidecar.admission.client_channel import ClientChannel
from sidecar.admission.controller import AdmissionController
from sidecar.admission.forwarding import forwarded_headers, forwarded_scope
from sidecar.admission.intake import CONTENT_ENCODING, SizedRequest
from sidecar.admission.outer_scope import call_app
from sidecar.admission.request_path import endpoint_of
from sidecar.chunks import with_write
from sidecar.classify import TenantClaims, said_by_app


def pass_on(controller: AdmissionController, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
    """Serves an ASGI scope, other than a lifespan's, with the app alone."""
    return call_app(controller, scope, _for_app(controller, scope), receive, send)


def _for_app(controller: AdmissionController, scope: Scope) -> Scope:
    policy, credentials = controller.policy, controller.snapshot.credentials
    if credentials.added:
        taken, said = credentials.taken(dict(scope["headers"])), said_by_app.get()
        said_by_app.set(None)  # the app may have another admission controller in it
        if taken or policy.anonymous is not None or isinstance(said, TenantClaims):
            scope = {**scope, "headers": forwarded_headers(scope["headers"], taken, credentials.added)}
    if scope["type"] == "http" and scope["method"].upper() == "POST":
        endpoint = endpoint_of(controller.snapshot.named_endpoints, scope)
        if endpoint is not None:
            return forwarded_scope(scope, endpoint, scope["headers"])
    return scope


def pass_read(
    controller: AdmissionController, scope: Scope, request: SizedRequest, receive: Receive, client: ClientChannel
) -> Awaitable[None]:
    """The same of a `request` that was read, and may have waited. `receive` begins with its body again."""
    for_app = {**scope}
    with_write(for_app, None)  # the client may have got comments before
    taken, added = [], []
    if client.keepalive is not None:  # comments have begun the answer, as plain text
        taken.append(b"accept-encoding")
    if CONTENT_ENCODING in request.taken:  # the body was unpacked
        taken.append(CONTENT_ENCODING)
        if b"content-length" in request.headers:
            added.append((b"content-length", b"%d" % len(request.body)))
    if taken:
        for_app["headers"] = forwarded_headers(scope["headers"], taken, added)
    return call_app(controller, scope, _for_app(controller, for_app), receive, client.send)
