"""An app's lifespan as its server runs it: for our own server, and for a process that serves nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message

from sidecar.server import CannotServe


class AppLifespan:
    """Starts and ends an app. `state` is what the app has put there for its requests."""

    def __init__(self, app: ASGIApp) -> None:
        self.state: dict[str, Any] = {}
        self._app = app
        self._task: asyncio.Task[None] | None = None
        self._is_startup_sent = False
        self._ends = asyncio.Event()
        self._answer: asyncio.Future[Message] | None = None

    @property
    def is_running(self) -> bool:
        """True if it has begun to start, and has not ended."""
        return self._task is not None and not self._task.done()

    async def start(self) -> None:
        """Returns when the app has started. Raises CannotServe with the app's reason, or what the app raises."""
        self._answer = asyncio.get_running_loop().create_future()
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": self.state}
        self._task = asyncio.ensure_future(self._app(scope, self._receive, self._send))
        await asyncio.wait((self._answer, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not self._answer.done():
            self._task.result()
            raise CannotServe("the app ended before it had started")
        answer = self._answer.result()
        if answer["type"] == "lifespan.startup.failed":
            await asyncio.wait((self._task,))
            self._task.exception()  # it raises what its message says
            raise CannotServe(answer.get("message") or "the app failed to start")

    async def end(self) -> None:
        """Returns when the app has ended, also where its start was canceled. Raises what the app raises."""
        if self._task is not None and self.is_running:
            self._ends.set()
            await self._task

    async def _receive(self) -> Message:
        if not self._is_startup_sent:
            self._is_startup_sent = True
            return {"type": "lifespan.startup"}
        await self._ends.wait()
        return {"type": "lifespan.shutdown"}

    async def _send(self, message: Message) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(message)
