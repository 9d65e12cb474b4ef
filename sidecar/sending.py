"""Agreements between the sidecar's own server and the apps that it serves. Other servers do without them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, Protocol

from starlette.types import Send


class _Sent(Awaitable[None]):
    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


SENT = _Sent()
"""What `send` returns where it has done its work already: no one has to wait for it."""
SendChunk = Callable[[bytes, bytes], Awaitable[None]]
"""Sends bytes of a body, never none and never the last: given them, and the same framed as a chunk of HTTP/1.1."""
BODY_FOLLOWS = "sidecar.body_follows"
"""Set in an `http.response.start` whose app sends a byte of the body next, and waits for nothing before: the server
may write both at once."""
CLIENT_KEY = "sidecar.client"
"""In a scope: the `ClientWatch` of its request."""


class ResponseCut(Exception):
    """The response breaks off. Raised to the server, which must not end it cleanly: half of it never looks complete."""


class ClientWatch(Protocol):
    """The client's connection. An app that watches it needs no task that waits in `receive` for a disconnect.

    What gives an app another `receive`, with disconnects of its own, takes it out of the scope.
    """

    def begin(self, on_disconnect: Callable[[], None]) -> None:
        """Calls `on_disconnect` when the client has disconnected before its response ended; at once where it has."""

    def end(self) -> None:
        """Calls it no more."""

    def left(self) -> None:
        """For the app, the client has disconnected now."""

    @property
    def is_slow(self) -> bool:
        """Whether the client does not read what it was sent, so that no more is."""


def chunk_path(send: Send) -> SendChunk | None:
    """What may be called in place of `send` for the next chunks, with the same effect; None where nothing may.

    A stream has hundreds of chunks, and a message for each costs more than to write it. An object whose method `send`
    is says it by its own `chunk_path`. So a `send` of someone else's, around ours, gets every message.
    """
    own = getattr(getattr(send, "__self__", None), "chunk_path", None)
    return None if own is None else own()
