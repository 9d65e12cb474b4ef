"""Call of the app for one request: what is current while it runs, and how its answer ends."""

from __future__ import annotations

from collections.abc import Awaitable
from contextvars import Token
from typing import Any

import msgspec
from starlette.types import Message, Scope, Send

from sidecar.context import Granted, Holder, current
from sidecar.events import AppTrace

BODIES = frozenset(("http.response.body", "http.response.pathsend", "http.response.zerocopysend"))
"""The messages that are an answer's body: its bytes, or a file that the server reads (ASGI's extensions)."""


def body_of(message: Message) -> bytes | None:
    """The bytes of a part of an answer's body, None where it has none. Those of a file are not read: none is there."""
    body: bytes | None = message.get("body")
    return body or (None if message["type"] == "http.response.body" else b"")


def without_files(scope: Scope) -> dict[str, Any]:
    """The server's extensions without those for files: the app then sends bytes, which are read or framed here."""
    return {name: value for name, value in (scope.get("extensions") or {}).items() if name not in BODIES}


class AppCall(msgspec.Struct, eq=False, gc=False):
    """One call of the app: between `current.set` and `returned` in the context of its task.

    `granted` is None from the request's end on. `trace` is the request's trace, where there is one.
    """

    granted: Granted | None
    _trace: AppTrace | None

    def returned(self, token: Token[Holder | None]) -> None:
        """The app has returned."""
        current.reset(token)
        if self._trace is not None:
            self._trace.detach()

    def send_last(self, send: Send, message: Message) -> Awaitable[None]:
        """Sends the last part of the answer.

        A server may begin the next request of the connection while it does so, as a task that inherits the context: so
        nothing of this request is in it (uvicorn, where the next one has come already).
        """
        self.granted = None
        return send(message) if self._trace is None else self._trace.outside(send, message)
