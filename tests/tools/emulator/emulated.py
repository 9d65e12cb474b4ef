"""A real server with an emulated engine, and a client that says what it got."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from sidecar.engines import Dynamo, Engine, Sglang, TensorRtLlm, Vllm
from sidecar.tools.emulator import Emulator, EmulatorConfig, StepModel
from sidecar.tools.emulator.engine import EmulatedEngine
from tests.support.serving import serving

TRTLLM, VLLM, SGLANG, DYNAMO = (
    TensorRtLlm,
    Vllm,
    Sglang,
    Dynamo,
)
ENGINES = (TRTLLM, VLLM, SGLANG, DYNAMO)

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "embeddings": "/v1/embeddings",
}

MESSAGES = [{"role": "user", "content": "hello engine"}]
BODIES: Mapping[str, dict[str, Any]] = {
    "chat": {"messages": MESSAGES, "model": "m", "max_tokens": 3},
    "completions": {"prompt": "hello engine", "model": "m", "max_tokens": 3},
    "responses": {"input": "hello engine", "model": "m", "max_output_tokens": 3},
    "messages": {"messages": MESSAGES, "model": "m", "max_tokens": 3},
    "embeddings": {"input": "hello engine", "model": "m"},
}


@dataclass
class Client:
    """A server's engine to look into, and its HTTP side."""

    engine: EmulatedEngine
    url: str
    session: aiohttp.ClientSession

    async def post(
        self, api: str = "chat", *, headers: Mapping[str, str] | None = None, raw: bytes | None = None, **fields: Any
    ) -> tuple[int, Any]:
        """Status and decoded JSON. A field that is None is left out of the body."""
        body = {key: value for key, value in {**BODIES[api], **fields}.items() if value is not None}
        data = json.dumps(body).encode() if raw is None else raw
        sent = {"content-type": "application/json", **(headers or {})}
        async with self.session.post(self.url + PATHS[api], data=data, headers=sent) as response:
            return response.status, await response.json()

    async def events(self, api: str = "chat", **fields: Any) -> tuple[int, list[Any]]:
        """Status and every `data:` line of a stream, decoded but for `[DONE]`."""
        async with self.session.post(self.url + PATHS[api], json={**BODIES[api], "stream": True, **fields}) as response:
            lines = (await response.read()).decode().splitlines()
            assert response.content_type == "text/event-stream"
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return response.status, [item if item == "[DONE]" else json.loads(item) for item in data]

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.text()

    async def until(self, condition: Callable[[EmulatedEngine], bool]) -> None:
        """Waits for the engine to get there; it needs milliseconds on an idle machine."""
        for _ in range(20_000):
            if condition(self.engine):
                return
            await asyncio.sleep(0.001)
        raise AssertionError(f"never happened: {self.engine!r}")

    async def occupied(self, **fields: Any) -> asyncio.Task[Any]:
        """Fills the only slot until the task is canceled, so that what comes next has to wait."""
        task = asyncio.create_task(self.post(max_tokens=100_000, **fields))
        await self.until(lambda engine: engine.running == 1 and engine.generated_tokens > 0)
        return task

    async def released(self, busy: asyncio.Task[Any], *waiting: asyncio.Task[Any]) -> list[tuple[int, Any]]:
        """Empties the slot and returns what those that waited for it got."""
        busy.cancel()
        return list(await asyncio.gather(*waiting))

    async def queued(self, *args: Any, **kwargs: Any) -> asyncio.Task[Any]:
        """Sends one request and returns when it waits in the engine's queue."""
        before = self.engine.waiting
        task = asyncio.create_task(self.post(*args, **kwargs))
        await self.until(lambda engine: engine.waiting > before)
        return task


@asynccontextmanager
async def emulated(
    engine: type[Engine],
    *,
    slots: int = 1,
    step_s: float = 0.001,
    extend: Callable[[Emulator], None] = lambda _: None,
    **settings: Any,
) -> AsyncIterator[Client]:
    """One engine on a free port: one slot and a step a millisecond, unless said otherwise. `extend` adds pages."""
    settings.setdefault("steps", StepModel(max_sequences=slots, step_us=step_s * 1e6))
    emulator = Emulator(EmulatorConfig(engine=engine, **settings))
    extend(emulator)
    async with serving(emulator.app) as served, aiohttp.ClientSession() as session:
        yield Client(emulator.engine, served.url, session)


def served_order(engine: EmulatedEngine) -> list[float | None]:
    """The priorities in the order of their first tokens, the request that filled the slot left out."""
    served = sorted(
        (line for line in engine.log if line.first_token_s is not None), key=lambda line: line.first_token_s or 0
    )
    return [line.priority for line in served][1:]
