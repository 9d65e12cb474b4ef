"""What the server behind the sidecar is given, said in the response."""

from __future__ import annotations

from typing import Any


class Seen:
    """A middleware for between the sidecar and vLLM: adds `x-seen-priority`, the header that vLLM reads."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = scope.get("headers", ())
        seen = [value for name, value in headers if name == b"x-vllm-priority"]

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-seen-priority", b" ".join(seen))]
            await send(message)

        await self.app(scope, receive, sent)
