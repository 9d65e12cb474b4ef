"""An app that could not be made, for servers that would not notice.

Starlette builds its middleware when the lifespan starts, and uvicorn takes an exception there for an app without a
lifespan: it says "startup complete" and answers every request with a 500. `lifespan.startup.failed` is what stops it.
Starlette's TestClient waits for the app's end after that message, and hangs where the app ends without an exception.
"""

from __future__ import annotations

from sidecar.asgi.types import Message, Receive, Scope, Send


class FailedStart:
    """Tells the server that the start failed, and why, and raises the mistake, then and for every request."""

    def __init__(self, mistake: Exception) -> None:
        self.mistake = mistake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope."""
        if scope["type"] == "lifespan":
            await receive()
            await send(startup_failed(self.mistake))
        raise self.mistake.with_traceback(None)  # else it would grow with every request


def startup_failed(mistake: Exception) -> Message:
    """What a server is sent when its app cannot start. The app must raise `mistake` after it."""
    return {"type": "lifespan.startup.failed", "message": str(mistake)}
