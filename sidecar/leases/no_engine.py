"""What stands in the engine's place in a process that has none: its own code calls the engine."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class NoEngineHere:
    """An ASGI app without any path, and without a lifespan."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope."""
        if scope["type"] == "http":
            await Response(status_code=404)(scope, receive, send)
