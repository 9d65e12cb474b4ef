"""A small engine of our own that counts its own peak, and notices a disconnect only some time later."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

_TOKEN = re.compile(r"\d{1,2}|\s+|[^\d\s]{1,4}")
"""What our engine takes for a token: two digits, any run of white space, four other characters."""
_LARGEST_BODY = 2**26
ANSWER_HEADER = "x-answer-s"
"""A request with this header is answered after so many seconds."""


class Engine:
    """Answers every POST after `answer_s`, or when `gate` is open; all else is a 404.

    `running` counts the requests that it works on, `peak` the most at once. A request whose client disconnects goes on
    for `notice_s`. Attributes may be set at any time.
    """

    def __init__(self, *, answer_s: float = 0.0, notice_s: float = 0.0) -> None:
        self.answer_s = answer_s
        self.notice_s = notice_s
        self.gate: asyncio.Event | None = None
        self.running = self.peak = self.answered = self.aborted = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        """One request, from its body's end to its answer."""
        body = await request.json()
        answer_s = float(request.headers.get(ANSWER_HEADER, self.answer_s))
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await (asyncio.sleep(answer_s) if self.gate is None else self.gate.wait())
        except asyncio.CancelledError:  # the client has disconnected
            self.aborted += 1
            asyncio.get_running_loop().call_later(self.notice_s, self._release)
            raise
        self._release()
        self.answered += 1
        return web.json_response(answer_to(body))

    def _release(self) -> None:
        self.running -= 1


def answer_to(body: dict[str, Any]) -> dict[str, Any]:
    """A whole answer in the form of chat and of text completions, with its usage."""
    usage = {"prompt_tokens": prompt_tokens(body), "completion_tokens": 1}
    usage["total_tokens"] = sum(usage.values())
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "text": "x", "finish_reason": "stop"}
    return {
        "id": "answer",
        "object": "chat.completion",
        "model": body.get("model"),
        "choices": [choice],
        "usage": usage,
    }


def prompt_tokens(body: dict[str, Any]) -> int:
    """All that the model reads: token ids wherever they are, and the text of messages, prompts and documents."""
    read = ("messages", "prompt", "input", "documents", "input_ids", "prompt_token_ids")
    return sum(_tokens(body[name]) for name in read if name in body)


def _tokens(value: Any) -> int:
    if isinstance(value, str):
        return len(_TOKEN.findall(value))
    if isinstance(value, dict):
        return sum(_tokens(member) for name, member in value.items() if name != "role")
    if isinstance(value, list):
        return sum(_tokens(item) for item in value)
    return 1 if isinstance(value, int) else 0


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[Engine]:
    """Serves it on a free port of loopback, in this process's event loop."""
    app = web.Application(client_max_size=_LARGEST_BODY)
    app.router.add_post("/{path:.*}", engine.answer)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()


def body_of(value: object) -> bytes:
    """JSON on the wire."""
    return json.dumps(value).encode()
