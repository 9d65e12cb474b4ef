"""Requests wait with the size of when they came, and are sized again at their admission."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from sidecar import AdmissionMiddleware
from tests.support.middleware import CHAT, Caller, answer, chat, whole_body
from tests.support.serving import serving
from tests.support.shared_pools import begun_store
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
LARGE = "large"


class Engine:
    """Its answers have `output` tokens. `answer` lets so many more of them go, `large_ends` those of another model."""

    def __init__(self) -> None:
        self.output = 10
        self.running = self.answered = 0
        self.large_ends = asyncio.Event()
        self._turns = asyncio.Semaphore(0)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_large = json.loads(await whole_body(receive))["model"] == LARGE
        self.running += 1
        await (self.large_ends.wait() if is_large else self._turns.acquire())
        self.running -= 1
        self.answered += 1
        usage = {"prompt_tokens": 4, "completion_tokens": self.output}
        await answer(send, json.dumps({"usage": usage}).encode())

    def answer(self, requests: int) -> None:
        for _ in range(requests):
            self._turns.release()


class Queue:
    """Clients of a middleware before an engine, in this process."""

    def __init__(self, engine: Engine, middleware: AdmissionMiddleware) -> None:
        self.engine, self._middleware = engine, middleware
        self._asked: list[asyncio.Task[None]] = []
        self._callers: list[Caller] = []

    def ask(self, requests: int, **fields: Any) -> None:
        """Requests that come at once."""
        body = json.dumps(chat(**{"max_tokens": 3900, **fields})).encode()
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


@pytest.fixture(params=["one process", "a store"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with begun_store(tmp_path) if request.param == "a store" else nullcontext() as server:
        yield "" if server is None else f"store: {server.url}\n"


@asynccontextmanager
async def queueing(folder: Path, store: str) -> AsyncIterator[Queue]:
    path = folder / "policy.yaml"
    path.write_text(POLICY + store)
    engine = Engine()
    middleware = AdmissionMiddleware(engine, path)
    async with serving(middleware):
        yield Queue(engine, middleware)


async def test_a_queue_that_came_before_lengths_were_learned_runs_at_once_when_they_are(
    tmp_path: Path, store: str
) -> None:
    """By the sizes with which they came the pool holds ten of them."""
    async with queueing(tmp_path, store) as queue:
        queue.ask(QUEUED)
        await until(lambda: queue.waiting == QUEUED - 10)
        queue.engine.answer(100)
        await until(lambda: queue.engine.running == QUEUED - 100)
        assert queue.held_tokens <= POOL_TOKENS
        await queue.end()


async def test_a_queue_that_came_before_answers_became_long_does_not_overfill_the_engine(
    tmp_path: Path, store: str
) -> None:
    """By the sizes with which they came the pool holds all of them."""
    async with queueing(tmp_path, store) as queue:
        queue.ask(100)
        queue.engine.answer(100)
        await until(lambda: queue.engine.answered == 100 and not queue.held_tokens)
        queue.ask(1, model=LARGE, max_tokens=POOL_TOKENS - 1000)
        await until(lambda: queue.engine.running == 1)
        queue.ask(QUEUED)
        await until(lambda: queue.engine.running == 1 + 49)
        queue.engine.output = 3000
        queue.engine.answer(49)
        await until(lambda: queue.engine.answered >= 100 + 49)
        queue.engine.large_ends.set()
        await until(lambda: queue.held_tokens > POOL_TOKENS * 0.9)
        assert queue.held_tokens < POOL_TOKENS * 1.25
        assert queue.engine.running < QUEUED / 4
        await queue.end()
