"""Requests to the front of several models' pools: each goes on with the controller of its model.

In `mode: observe` a request passes as soon as its body says which model it is for. One for a model that no pool serves
goes to an engine all the same, which answers what it would have answered; the report has it as refused.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from sidecar.admission.controller import AdmissionController
from sidecar.admission.intake import is_upload
from sidecar.admission.model_bodies import read_for_model
from sidecar.admission.request_path import exact_paths, guarded_endpoint
from sidecar.admission.unguarded import is_refused
from sidecar.middleware import ReadModel, serve_scope
from sidecar.policy.endpoint import Endpoint


async def serve_models(
    front: AdmissionController, lifespan: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """Serves one ASGI scope, as `middleware.serve_scope` does."""
    endpoint, received_us = guarded_endpoint(front.snapshot.endpoints, scope), front.pool.now_us()
    controller: AdmissionController = front
    passes = front.is_observing if endpoint is not None else front.is_passing or _is_harmless(front, scope)
    if passes:
        controller, receive = await _by_model(front, scope, receive, endpoint)
    await serve_scope(front, lifespan, scope, receive, send, model=ReadModel(controller, received_us))


def _is_harmless(front: AdmissionController, scope: Scope) -> bool:
    """True if a request may ask an engine something that generates nothing, such as `/tokenize`."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    return any(map(front.snapshot.routes.harmless_route, exact_paths(scope))) and not is_refused(front, scope)


async def _by_model(
    front: AdmissionController, scope: Scope, receive: Receive, endpoint: Endpoint | None = None
) -> tuple[AdmissionController, Receive]:
    """The controller of the model that a request's body names, else the front, with any engine; and the body again.

    Nothing of an upload to an endpoint is read: it names no model. Elsewhere a body that comes too slowly names none.
    """
    if scope["type"] != "http" or scope["method"].upper() != "POST":
        return front, receive
    if endpoint is not None and endpoint.size is not None and is_upload(dict(scope["headers"])):
        return front, receive
    most_s = front.policy.body_timeout_s if endpoint is None else None
    body = await read_for_model(scope["headers"], receive, front.policy.max_body_bytes, most_s)
    model = None if body.text is None else front.snapshot.names.meant(body.model)
    return front if model is None else front.controllers[model], body.receive
