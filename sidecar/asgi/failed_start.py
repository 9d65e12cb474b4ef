"""An app that could not be made, for servers that would not notice.

Starlette builds its middleware when the lifespan starts, and uvicorn takes an exception there for an app without a
lifespan: it says "startup complete" and answers every request with a 500. `lifespan.startup.failed` is what stops it.
"""

from __future__ import annotations

from sidecar.asgi.types import Receive, Scope, Send


class FailedStart:
    """Tells the server that the start failed, and why. Anything else that it asks raises the same mistake."""

    def __init__(self, mistake: Exception) -> None:
        self.mistake = mistake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope."""
        if scope["type"] != "lifespan":
            raise self.mistake
        await receive()
        await send({"type": "lifespan.startup.failed", "message": str(self.mistake)})
