"""Stand-in for the engine in a process that has none: its own code calls the engine."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send


class NoEngineHere:
    """An ASGI app without any path, and without a lifespan."""

    async def __call__(self, scope: Scope, _: Receive, send: Send) -> None:
        """Serves one ASGI scope."""
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
