"""Requests wait with the size of when they came, and are sized again at their admission: `pools/test_sized_anew`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar import AdmissionMiddleware
from tests.support.middleware import CHAT, Caller, answer, chat, whole_body
from tests.support.serving import serving
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

POOL_TOKENS = 40_000
POLICY = f"""\
engine: none
capacity: {{tokens: {POOL_TOKENS}, learn: full}}
tiers: {{normal: {{}}}}
anonymous: normal
endpoints: {{{CHAT}: {{}}}}
"""
QUEUED = 600


class Engine:
    """Its answers have 10 tokens. `answer` lets so many more of them go."""

    def __init__(self) -> None:
        self.running = 0
        self._turns = asyncio.Semaphore(0)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await whole_body(receive)
        self.running += 1
        await self._turns.acquire()
        self.running -= 1
        await answer(send, b'{"usage": {"prompt_tokens": 4, "completion_tokens": 10}}')

    def answer(self, requests: int) -> None:
        for _ in range(requests):
            self._turns.release()


class Queue:
    """Clients of a middleware before an engine, in this process."""

    def __init__(self, engine: Engine, middleware: AdmissionMiddleware) -> None:
        self.engine, self._middleware = engine, middleware
        self._asked: list[asyncio.Task[None]] = []
        self._callers: list[Caller] = []

    def ask(self, requests: int) -> None:
        """Requests that come at once."""
        body = json.dumps(chat(max_tokens=3900)).encode()
        callers = [Caller(self._middleware, body) for _ in range(requests)]
        self._callers += callers
        self._asked += [caller.begin() for caller in callers]

    @property
    def waiting(self) -> int:
        return int(self._pool["waiting"])

    @property
    def held_tokens(self) -> int:
        return int(self._pool["tiers"][0]["held"]["tokens"])

    @property
    def _pool(self) -> Any:
        return self._middleware.controller.state()["pool"]

    async def end(self) -> None:
        """All are answered."""
        self.engine.answer(len(self._asked))
        await asyncio.wait_for(asyncio.gather(*self._asked), 60)
        assert {caller.status for caller in self._callers} == {200}


@asynccontextmanager
async def queueing(folder: Path) -> AsyncIterator[Queue]:
    path = folder / "policy.yaml"
    path.write_text(POLICY)
    engine = Engine()
    middleware = AdmissionMiddleware(engine, path)
    async with serving(middleware):
        yield Queue(engine, middleware)


async def test_a_queue_that_came_before_lengths_were_learned_runs_at_once_when_they_are(tmp_path: Path) -> None:
    """By the sizes with which they came the pool holds ten of them."""
    async with queueing(tmp_path) as queue:
        queue.ask(QUEUED)
        await until(lambda: queue.waiting == QUEUED - 10)
        queue.engine.answer(100)
        await until(lambda: queue.engine.running == QUEUED - 100)
        assert queue.held_tokens <= POOL_TOKENS
        await queue.end()
