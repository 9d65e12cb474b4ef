"""An app that is its own engine, with the middleware mounted in it. It counts the requests that it runs.

`GET /counts` answers what it counted. A streamed answer has a chunk every 10 ms, `max_tokens` of them; another comes
after as long. The first chunk takes `prefill_ms` of the body.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from sidecar import AdmissionMiddleware

STEP_S = 0.01


class CountingEngine:
    """Runs requests, without any bound of its own, until their clients disconnect."""

    def __init__(self) -> None:
        self.running = self.most = self.served = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise NotImplementedError  # no lifespan of its own
        if scope["path"] == "/counts":
            await answer(send, {"running": self.running, "most": self.most, "served": self.served})
            return
        body = json.loads((await receive())["body"])
        run, left = asyncio.ensure_future(self.counted(body, send)), asyncio.ensure_future(receive())
        try:
            await asyncio.wait((run, left), return_when=asyncio.FIRST_COMPLETED)
        finally:
            run.cancel()
            left.cancel()

    async def counted(self, body: dict[str, Any], send: Send) -> None:
        """Runs a request. It is not counted as running once its last byte is sent."""
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(body.get("prefill_ms", 0) / 1000)
            await self.run(body, send)
            self.served += 1
        finally:
            self.running -= 1

    async def run(self, body: dict[str, Any], send: Send) -> None:
        """Answers a chat."""
        steps = body["max_tokens"]
        if not body.get("stream"):
            await asyncio.sleep(steps * STEP_S)
            await answer(send, {"choices": [{"message": {"content": "x" * steps}}]})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for _ in range(steps):
            piece = b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(STEP_S)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def answer(send: Send, document: Any) -> None:
    """Sends JSON."""
    start: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
    await send(start)
    await send({"type": "http.response.body", "body": json.dumps(document).encode(), "more_body": False})


app = AdmissionMiddleware(CountingEngine())
