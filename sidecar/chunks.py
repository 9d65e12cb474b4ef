"""The short way of a stream's chunk, from the engine's connection to the client's, where both are ours.

A chunk that is sent by ASGI's `send` wakes a task, which awaits a coroutine: that costs more than all the rest. So the
server of `sidecar serve` offers a `write` in the scope's `extensions`, and the proxy calls it where it reads a chunk.
Middleware that wraps `send` puts a `write` of its own there, or takes it out (`with_write`): no chunk passes it unseen.
Other servers offer none, and then each chunk is sent.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Scope

_EXTENSION = "admission_sidecar.write"
Write = Callable[[bytes], bool]
"""Writes bytes of a body, never none and never the last, at once. False where it has not: then they have to be sent. So
it is before the head is out, where the body does not go in chunks, and while the client does not read."""


def write_of(scope: Scope) -> Write | None:
    """The `write` of a request's response; None where there is none."""
    write: Write | None = (scope.get("extensions") or {}).get(_EXTENSION)
    return write


def with_write(scope: Scope, write: Write | None) -> None:
    """Puts a `write` into the scope, or takes the one out that is there."""
    extensions = scope.get("extensions") or {}
    if write is not None:
        scope["extensions"] = {**extensions, _EXTENSION: write}
    elif _EXTENSION in extensions:
        scope["extensions"] = {name: value for name, value in extensions.items() if name != _EXTENSION}
