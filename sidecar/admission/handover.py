"""Fields of a request's scope, beyond ASGI, that our server, the middleware and our proxy hand one another.

Each works without the others: a scope has only what the one around put there.

- `write`, from server to proxy: the short way of a stream's chunk. A chunk that is sent by ASGI's `send` wakes a task,
  which awaits a coroutine, and that costs more than all the rest. So the proxy calls `write` where it reads a chunk.
  Middleware that wraps `send` puts a `write` of its own there, or takes it out: no chunk passes it unseen.
- The `AppCall` of an admitted request, from middleware to proxy, which reports a failure to it before it answers.
- The engine of a request's grant, from middleware to fleet, where the pool has several.
- The mark of a request of the sidecar's own, to proxy and fleet: its caller reports its errors itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from starlette.types import Scope

from sidecar.errors import AdmissionError

CALL_KEY = "sidecar.engine_call"
ENGINE_ID_KEY = "sidecar.engine_id"
"""`name#incarnation`."""
INTERNAL_REQUEST = "sidecar.own"
"""In the scope's `extensions`."""
WRITE_KEY = "sidecar.write"
Write = Callable[[bytes], bool]
"""Writes bytes of a body, never none and never the last, at once. False where it has not: then they have to be sent. So
it is before the head is out, where the body does not go in chunks, and while the client does not read."""


class AppCall(Protocol):
    """An admitted request's call of the app."""

    def failed(self, error: AdmissionError, *, was_sent: bool) -> bool:
        """The proxy has an error for the request. Whether it answers with it: else the request waits again.

        `was_sent`: the engine may have received the request.
        """


def is_internal(scope: Scope) -> bool:
    """True if the sidecar itself asks."""
    return INTERNAL_REQUEST in scope.get("extensions", {})
