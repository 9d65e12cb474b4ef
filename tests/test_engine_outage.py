"""An engine that dies under load: it costs no request its place.

Everything that can be timed is loose: the machines that run this are slow. The order, the counts and the limits are
exact.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sidecar.engines import Vllm
from sidecar.tools.emulator import Emulator, EmulatorConfig, StepModel
from tests.support.in_process import serving_sidecar
from tests.support.redis_servers import free_port
from tests.support.serving import serving
from tests.support.shared_pools import begun_store

pytestmark = pytest.mark.anyio

KEY = "acme-key-acme-key-acme"
POLICY = """
engine: vllm
capacity: {tokens: 100k, requests: 4}
tiers:
  high: {reserve: 25%, queue: {max_requests: 500, max_wait: 90s}}
  batch: {reserve: 5%, queue: {max_requests: 500, max_wait: 90s}}
default_tier: batch
anonymous: high
tenants: tenants/*.yaml
keep_alive: 1s
"""
TENANT = f"""
tenant: acme
keys: ["sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"]
tier: batch
max_tier: high
limits: {{requests_per_minute: 600, tokens_per_minute: 1M, concurrent_requests: 400, burst: 60s}}
"""

CUT = "cut"
"""The code of an answer that broke off after its head: no error can be sent any more."""


@dataclass
class Answer:
    """A request's end. `at_s` is when it came."""

    number: int
    tier: str
    status: int
    at_s: float
    headers: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def code(self) -> str:
        return str(self.body.get("error", {}).get("code"))


class Engine:
    """An emulated vLLM, always on the same port."""

    def __init__(self, step_ms: int = 10) -> None:
        self.port = free_port()
        self._config = EmulatorConfig(engine=Vllm, steps=StepModel(step_us=step_ms * 1000))
        self._stack = AsyncExitStack()
        self._connections: set[Any] = set()

    async def start(self) -> None:
        served = await self._stack.enter_async_context(serving(Emulator(self._config).app, port=self.port))
        self._connections = served.server.server_state.connections

    async def kill(self) -> None:
        """As the system does it: every connection is reset before anything could be answered."""
        for connection in list(self._connections):
            connection.transport.abort()
        await self._stack.aclose()

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()


class Sidecar:
    """A sidecar, and a client of it."""

    def __init__(self, url: str, admin: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.admin = admin
        self.session = session

    async def ask(
        self, number: int, tier: str = "high", *, path: str = "/v1/completions", tokens: int = 20, **headers: str
    ) -> Answer:
        body: dict[str, Any] = {"model": "emulated", "max_tokens": tokens}
        body |= {"prompt": "hi"} if "messages" not in path else {"messages": [{"role": "user", "content": "hi"}]}
        own = {"authorization": f"Bearer {KEY}", "x-priority": tier, "x-request-id": f"r{number}"}
        sent = {**own, **{name.replace("_", "-"): value for name, value in headers.items()}}
        async with self.session.post(self.url + path, json=body, headers=sent) as response:
            try:
                status, said = response.status, await response.json(content_type=None)
            except aiohttp.ClientPayloadError:  # the engine was killed between the two writes of its answer
                status, said = 0, {"error": {"code": CUT}}
            return Answer(
                number,
                tier,
                status,
                time.monotonic(),
                {name.lower(): value for name, value in response.headers.items()},
                said,
            )

    async def page(self, path: str) -> Any:
        async with self.session.get(self.admin + path) as response:
            return await response.json(content_type=None)

    async def until(self, path: str, condition: Any, within_s: float = 60.0) -> Any:
        ends_s = time.monotonic() + within_s
        while not condition(found := await self.page(path)):
            assert time.monotonic() < ends_s, found
            await asyncio.sleep(0.05)
        return found

    async def waits(self, number: int) -> None:
        await self.until("/state", lambda state: state["pool"]["waiting"] >= number)

    async def engine_is(self, state: str) -> None:
        await self.until("/state", lambda found: found["engine"]["state"] == state)


@asynccontextmanager
async def sidecar(
    folder: Path, upstream_port: int, policy: str = POLICY, tenant: str = TENANT
) -> AsyncIterator[Sidecar]:
    (folder / "tenants").mkdir(parents=True, exist_ok=True)
    (folder / "policy.yaml").write_text(policy)
    (folder / "tenants" / "acme.yaml").write_text(tenant)
    async with (
        serving_sidecar(folder, f"http://127.0.0.1:{upstream_port}") as (url, admin),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        yield Sidecar(url, admin, session)


async def send(to: Sidecar, count: int, first: int = 0, **how: Any) -> list[asyncio.Task[Answer]]:
    """Requests in a row, every other one of tier batch, each sent before the next."""
    tasks = []
    for number in range(first, first + count):
        tasks.append(asyncio.create_task(to.ask(number, "high" if number % 2 else "batch", **how)))
        await asyncio.sleep(0.005)
    return tasks


async def nothing_is_left(of: Sidecar) -> None:
    """No lease, no ticket, and the tenant's requests are all over."""

    def is_over(state: dict[str, Any]) -> bool:
        counts = (state["under_way"], state["pool"]["leases"], state["pool"]["waiting"])
        held = [tier["held"] for tier in state["pool"]["tiers"]]
        return counts == (0, 0, 0) and held == [{"tokens": 0, "requests": 0}] * 2

    await of.until("/state", is_over)  # of a store's figures, with the next heartbeat


def in_order(answers: Sequence[Answer], tier: str) -> list[int]:
    return [answer.number for answer in sorted(answers, key=lambda one: one.at_s) if answer.tier == tier]


@pytest.mark.long
async def test_a_killed_engine_that_comes_back_costs_no_queued_request_anything(tmp_path: Path) -> None:
    async with Engine() as engine, sidecar(tmp_path, engine.port) as proxy:
        tasks = await send(proxy, 104, tokens=60)
        await proxy.waits(70)
        await engine.kill()
        await proxy.engine_is("down")
        await asyncio.sleep(1)
        assert (await proxy.page("/state"))["pool"]["leases"] == 0
        ready = await proxy.page("/readyz")
        assert "the engine does not answer: connection refused" in ready["reasons"][0]
        await engine.start()
        answers = await asyncio.gather(*tasks)
        failed = [answer for answer in answers if answer.status != 200]
        assert len(failed) <= 4  # those that the engine had taken
        assert {answer.code for answer in failed} <= {"engine_unreachable", CUT}
        served = [answer for answer in answers if answer.status == 200]
        waited = [a for a in served if float(a.headers["x-admission-wait-ms"]) > 1000]
        # Four run at once, and may end in any order among themselves.
        for tier in ("high", "batch"):
            order = in_order(waited, tier)
            assert all(abs(place - sorted(order).index(number)) <= 4 for place, number in enumerate(order)), order
        await nothing_is_left(proxy)
        assert "starved" not in (await proxy.page(f"/requests/r{in_order(waited, 'high')[-1]}"))["conclusion"]


@pytest.mark.long
async def test_an_engine_that_does_not_come_back_is_a_503_at_each_requests_own_time(tmp_path: Path) -> None:
    tenant = TENANT.replace("requests_per_minute: 600", "requests_per_minute: 20")
    async with Engine(step_ms=50) as engine, sidecar(tmp_path, engine.port, tenant=tenant) as proxy:
        running = await send(proxy, 4, tokens=2000)
        await proxy.until("/state", lambda state: state["pool"]["leases"] == 4)
        short = await send(proxy, 8, first=4, x_admission_max_wait="4s")
        longer = await send(proxy, 2, first=12, x_admission_max_wait="6s", path="/v1/messages")
        await proxy.waits(10)
        await asyncio.sleep(0.3)  # a connection that broke sooner may have been stale: the proxy would try again
        await engine.kill()
        for answer in await asyncio.gather(*running):
            assert (answer.status, answer.code) == (502, "engine_unreachable")
            assert 1 <= int(answer.headers["retry-after"]) <= 2
        for answer in await asyncio.gather(*short):
            assert (answer.status, answer.code) == (503, "no_engine"), answer
            assert answer.body["error"]["message"].startswith("the engine has not answered for ")
            assert int(answer.headers["retry-after"]) >= 1
            # The wait is counted from the queue: the request had come a moment before.
            assert float(answer.headers["x-admission-wait-ms"]) >= 3900
        assert not any(task.done() for task in longer), "each at its own time"
        for answer in await asyncio.gather(*longer):
            assert (answer.status, answer.body["type"], answer.code) == (503, "error", "no_engine")
            assert answer.body["error"]["type"] == "overloaded_error"
        await nothing_is_left(proxy)
        # Those that the engine failed count no more, of 20 at once; without that some 8 would be left.
        await engine.start()
        await proxy.engine_is("up")
        left = int((await proxy.ask(99)).headers["x-ratelimit-remaining-requests"])
        assert left in (18, 19)
        overview = await proxy.page("/overview")
        codes = Counter(one["code"] for one in overview["refusals"])
        assert codes == {"engine_unreachable": 4, "no_engine": 10}
        story = await proxy.page("/requests/r1")
        assert story["state"] == "failed"
        assert "the engine could not be reached, or broke off before it answered" in story["conclusion"]
        assert story["ended"]["tokens_used"] == 0


@pytest.mark.long
async def test_clients_leave_a_held_queue_and_comments_go_on(tmp_path: Path) -> None:
    async with Engine() as engine, sidecar(tmp_path, engine.port) as proxy:
        await engine.kill()
        await proxy.engine_is("down")
        tasks = await send(proxy, 10)
        body = {"model": "emulated", "prompt": "hi", "max_tokens": 5, "stream": True}
        async with proxy.session.post(proxy.url + "/v1/completions", json=body) as streamed:
            assert (await streamed.content.readuntil(b"\n\n")).startswith(b": queued, ")
            for task in tasks[:9]:
                task.cancel()
            await proxy.until("/state", lambda state: state["pool"]["waiting"] == 2)
            await engine.start()
            rest = (await streamed.content.read()).decode()
            assert ": admitted after " in rest
            assert rest.rstrip().endswith("data: [DONE]")
        answer = await tasks[9]
        assert answer.status == 200
        await nothing_is_left(proxy)


@pytest.mark.long
async def test_a_replica_that_is_cut_off_keeps_its_queue_and_does_not_hold_up_another(tmp_path: Path) -> None:
    with begun_store(tmp_path) as server:
        policy = POLICY + f"store: {server.url}\n"
        async with (
            Engine() as one,
            Engine() as other,
            sidecar(tmp_path / "a", one.port, policy=policy) as near,
            sidecar(tmp_path / "b", other.port, policy=policy + "max_choices: 3\n") as far,
        ):
            await near.until("/state", lambda state: state["pool"]["store"]["replicas"] == 2)
            tasks = await send(far, 40, tokens=100)
            await far.waits(20)
            await other.kill()
            await far.engine_is("down")
            answers = await asyncio.wait_for(asyncio.gather(*await send(near, 30, first=100)), 60)
            assert {answer.status for answer in answers} == {200}
            waiting = [task for task in tasks if not task.done()]
            assert len(waiting) >= 20
            await near.until("/state", lambda found: found["pool"]["leases"] == 0)
            await far.until("/state", lambda found: found["pool"]["store"]["own"]["waiting"] == len(waiting))
            await other.start()
            answers = await asyncio.wait_for(asyncio.gather(*waiting), 60)
            assert {answer.status for answer in answers} == {200}
            order = in_order(answers, "high")
            assert all(abs(place - sorted(order).index(number)) <= 5 for place, number in enumerate(order)), order
            for each in (near, far):
                await nothing_is_left(each)


@pytest.mark.long
async def test_a_replica_without_store_and_without_engine_holds_its_queue(tmp_path: Path) -> None:
    with begun_store(tmp_path) as server:
        policy = POLICY + f"store: {server.url}\n"
        async with Engine() as engine, sidecar(tmp_path, engine.port, policy=policy) as proxy:
            tasks = await send(proxy, 30, tokens=100)
            await proxy.waits(15)
            server.kill()
            await proxy.until("/state", lambda state: state["pool"]["store"]["state"] == "divided")
            await engine.kill()
            await proxy.engine_is("down")
            tasks += await send(proxy, 5, first=50)
            await asyncio.sleep(1)
            server.restart()  # from this thread: the kernel ends it with the thread that started it
            await proxy.until("/state", lambda state: state["pool"]["store"]["state"] == "shared")
            await asyncio.sleep(1)
            assert (await proxy.page("/state"))["pool"]["leases"] == 0
            await engine.start()
            answers = await asyncio.wait_for(asyncio.gather(*tasks), 60)
            assert sum(answer.status != 200 for answer in answers) <= 4, Counter(a.code for a in answers)
            await nothing_is_left(proxy)
