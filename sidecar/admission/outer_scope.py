"""The scope of the middlewares around ours: an app that gets a copy of it writes into the copy.

Routers, and what comes with them, say in the scope what they found: `route`, `endpoint`, `path_params`, `user`. The
middlewares around look there when the response begins, and when the app has returned. So at both moments they are shown
what the app has written. Its headers and its path are not: those of the copy may be ours, with the engine's key.
"""

from __future__ import annotations

from collections.abc import Awaitable

from starlette.types import Message, Receive, Scope, Send

from sidecar.admission.controller import AdmissionController
from sidecar.admission.pending_aborts import CALL_KEY, ENGINE_ID_KEY
from sidecar.context import SCOPE_KEY

_OURS = frozenset(("headers", "path", "raw_path", SCOPE_KEY, CALL_KEY, ENGINE_ID_KEY))
_LEAST_OURS = 2
"""Keys that every copy has, and the scope outside has not: the grant and the call."""
_BEGINNINGS = frozenset(("http.response.start", "websocket.accept", "websocket.http.response.start"))


def show_outside(written: Scope | None, scope: Scope, *, is_shown: bool = False) -> None:
    """Shows in the `scope` of the middlewares around what an app has written into its copy; None: there is no app.

    Of one that `is_shown` already, as its answer began, only more keys are looked for: hardly any app writes then.
    """
    if written is None or (is_shown and len(written) <= len(scope) + _LEAST_OURS):
        return
    shown = {**written}  # at once: a handler's thread may write meanwhile
    for name in _OURS:
        shown.pop(name, None)
    scope.update(shown)


def call_app(
    controller: AdmissionController, scope: Scope, for_app: Scope, receive: Receive, send: Send
) -> Awaitable[None]:
    """Calls the app with the scope `for_app`, which is `scope` itself or a copy."""
    if for_app is scope or controller.is_proxied:  # around our own proxy there is no one
        return controller.app(for_app, receive, send)
    return _call_and_show(controller, scope, for_app, receive, send)


async def _call_and_show(
    controller: AdmissionController, scope: Scope, for_app: Scope, receive: Receive, send: Send
) -> None:
    def send_and_show(message: Message) -> Awaitable[None]:
        if message["type"] in _BEGINNINGS:
            show_outside(for_app, scope)
        return send(message)

    try:
        await controller.app(for_app, receive, send_and_show)
    finally:
        show_outside(for_app, scope)
