"""Engines for a fleet's tests: emulated ones in this event loop that can be killed and started again, and rude ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from fractions import Fraction
from typing import Any

from sidecar.engines import Engine, Vllm
from sidecar.engines.pages import Health
from sidecar.engines.watch import EngineCheck
from sidecar.fleet.discovery import StaticDiscovery
from sidecar.fleet.fleet import Fleet
from sidecar.policy.capacity import Capacity
from sidecar.policy.choices import CapacitySource
from sidecar.policy.fleet import EngineAddress, FleetPolicy
from sidecar.policy.rules import UNLIMITED
from sidecar.tools.emulator import Emulator, EmulatorConfig, StepModel
from tests.support.middleware import answer
from tests.support.redis_servers import free_port
from tests.support.serving import serving
from tests.support.waiting import now_us

WRITTEN = Capacity(tokens=1000, requests=8)
READ = Capacity(read_from=CapacitySource.ENGINE, fraction=Fraction(1), waiting=2)
FAST = Health("/health", every_s=0.05, fail=3, rise=2)


class LocalEngine:
    """An emulated engine on a port of its own: `start`, `stop` and `start` again is a restart."""

    def __init__(self, kind: type[Engine] = Vllm, kv_tokens: int | None = 20_000) -> None:
        self.port = free_port()
        self.kind = kind
        self.kv_tokens = kv_tokens
        self.app: Any = None
        self._stack: AsyncExitStack | None = None

    def address(self, name: str, capacity: Capacity = WRITTEN, **more: Any) -> EngineAddress:
        """This engine as discovery names it."""
        return EngineAddress(name, f"http://127.0.0.1:{self.port}", capacity, **{"prefill": UNLIMITED, **more})

    async def start(self, app: Any = None) -> None:
        """Listens, and answers from now on, as an emulated engine or as `app`."""
        steps = StepModel(kv_tokens=self.kv_tokens)
        self.app = app or Emulator(EmulatorConfig(engine=self.kind, steps=steps)).app
        self._stack = AsyncExitStack()
        await self._stack.enter_async_context(serving(self.app, port=self.port))

    async def stop(self) -> None:
        """Closes the port and every connection."""
        stack, self._stack = self._stack, None
        if stack is not None:
            await stack.aclose()


@asynccontextmanager
async def engines(count: int, **settings: Any) -> AsyncIterator[list[LocalEngine]]:
    """So many engines, all started."""
    found = [LocalEngine(**settings) for _ in range(count)]
    try:
        for engine in found:
            await engine.start()
        yield found
    finally:
        for engine in found:
            await engine.stop()


@asynccontextmanager
async def fleet_of(
    addresses: Sequence[EngineAddress],
    health: Health = FAST,
    on_change: Callable[[Fleet], None] = lambda _: None,
    check: EngineCheck = EngineCheck.ON,
) -> AsyncIterator[Fleet]:
    """An open fleet of these engines."""
    fleet = Fleet(Vllm, FleetPolicy(health=health, slow_start_s=30.0), StaticDiscovery(addresses), now_us, check=check)
    fleet.on_change = lambda: on_change(fleet)
    await fleet.open()
    try:
        yield fleet
    finally:
        await fleet.close()


def listed(fleet: Fleet, addresses: Sequence[EngineAddress]) -> None:
    """Discovery names these engines from now on."""
    assert isinstance(fleet.discovery, StaticDiscovery)
    fleet.discovery.change(addresses)


def states(fleet: Fleet) -> Mapping[str, str]:
    """State by engine id."""
    return {member.id: member.state.value for member in fleet.members()}


class RudeEngine:
    """An app with the pages of a vLLM, each of which may be slow or an error. A chat streams until `ends` is set."""

    def __init__(self, started_s: float | None = None) -> None:
        self.status = 200
        self.delay_s = 0.0
        self.started_s = started_s
        self.waiting = 0
        self.kv_tokens = 5000
        self.preemptions = 0
        self.chats = 0
        self.ends = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["path"].startswith("/v1/chat"):
            await self._chat(send)
            return
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        pages = {
            "/health": b"",
            "/v1/models": b'{"data": [{"id": "m", "owned_by": "vllm"}]}',
            "/metrics": self._metrics(),
        }
        found = pages.get(scope["path"])
        status = 404 if found is None else 200
        await answer(send, found or b"", status if self.status == 200 else self.status)

    def _metrics(self) -> bytes:
        started = "" if self.started_s is None else f"process_start_time_seconds {self.started_s}\n"
        return (
            f'{started}vllm:cache_config_info{{kv_cache_size_tokens="{self.kv_tokens}"}} 1\n'
            f"vllm:num_requests_running 1\nvllm:num_requests_waiting {self.waiting}\n"
            f"vllm:num_preemptions_total {self.preemptions}\n"
        ).encode()

    async def _chat(self, send: Any) -> None:
        self.chats += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while not self.ends.is_set():
                await send({"type": "http.response.body", "body": b"data: token\n\n", "more_body": True})
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.ends.wait(), 0.02)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self.chats -= 1


async def _lifespan(receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})
