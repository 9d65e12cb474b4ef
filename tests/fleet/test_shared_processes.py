"""Several engines behind several `sidecar serve` on one store: all are processes of their own, stopped and killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from anyio.from_thread import start_blocking_portal

from tests.cluster.replicas import CHAT, address, started
from tests.fleet.served import ServedFleet
from tests.fleet.test_processes import Engines, emulated
from tests.support.fault_proxy import FaultProxy
from tests.support.ports import free_ports
from tests.support.redis_servers import RedisServer, first_binary
from tests.support.shared_pools import begun

pytestmark = pytest.mark.anyio
ENGINES = 3
REQUESTS = 4
FOREVER = 15_000
"""Tokens: at 20 ms each, longer than any test."""
POLICY = f"""\
pool: {{pool}}
engine: vllm
on_store_loss: divide
engines:
  static: [{{static}}]
  capacity: {{{{tokens: 80k, requests: {REQUESTS}}}}}
  health: {{{{path: /health, every: 200ms, fail: 2, rise: 1}}}}
  slow_start: 0s
tiers:
  high: {{{{}}}}
default_tier: high
anonymous: high
endpoints: {{{{/v1/chat/completions: {{{{}}}}}}}}
"""
Lists = Sequence[Mapping[str, str]]


@dataclass
class Shared:
    """Sidecars on one store, and their engines."""

    sidecars: list[ServedFleet]
    engines: Engines
    client: aiohttp.ClientSession

    async def counts(self) -> list[Any]:
        """`/_emulator` of every engine."""
        return [
            await self._get(f"http://127.0.0.1:{self.engines.port + number}/_emulator") for number in range(ENGINES)
        ]

    async def pool(self, number: int) -> Any:
        """The pool as a sidecar shows it."""
        return (await self._get(f"{self.sidecars[number].admin}/state"))["pool"]

    async def held(self, number: int) -> dict[str, int]:
        """Requests that each engine holds, by the ledgers that a sidecar shows."""
        return {it["engine"]: it["held"]["requests"] for it in (await self.pool(number))["engines"]}

    async def rows(self, number: int) -> Any:
        return await self.sidecars[number].rows(self.client)

    async def until(
        self, what: str, found: Callable[[], Any], wanted: Callable[[Any], bool], within_s: float = 60
    ) -> Any:
        """Waits until what `found` returns is as `wanted`."""
        for _ in range(round(within_s / 0.05)):
            seen = await found()
            if wanted(seen):
                return seen
            await asyncio.sleep(0.05)
        raise AssertionError(f"{what}: not within {within_s:g} s: {seen}")

    async def holds(self, number: int, *requests: int) -> None:
        """Waits until the ledgers are exactly these, e0 first, and nothing is un-prefilled."""
        await self.until("ledgers", lambda: self.held(number), lambda held: tuple(held.values()) == requests)
        assert [it["unprefilled_tokens"] for it in (await self.pool(number))["engines"]] == [0] * len(requests)

    async def change(self, number: int, engine: str, to: str) -> None:
        """A sidecar is asked to drain an engine, or to resume it."""
        async with self.client.post(f"{self.sidecars[number].admin}/engines/{engine}/{to}") as response:
            assert response.status == 200, await response.text()

    async def _get(self, url: str) -> Any:
        async with self.client.get(url) as response:
            return await response.json()


class Lab:
    """The processes of this module: a store, the engines e0 to e2, and two sidecars that have all of them.

    The way of the second sidecar to e1 is a proxy. A sidecar that has ended is started again for the next test.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.store = stack.enter_context(RedisServer(first_binary(), folder))
        port = free_ports(ENGINES)
        sizes = ("--max-num-seqs", "64", "--kv-tokens", "2000000")
        self.engines = stack.enter_context(emulated(folder, ENGINES, port, *sizes))
        self.urls = {f"e{number}": f"http://127.0.0.1:{port + number}" for number in range(ENGINES)}
        self.loop = stack.enter_context(start_blocking_portal())
        self.way = stack.enter_context(self.loop.wrap_async_context_manager(FaultProxy("127.0.0.1", port + 1)))
        self.sidecars: list[ServedFleet] = []

    def start(self, lists: Lists, pool: str, stack: ExitStack | None = None) -> list[ServedFleet]:
        """A sidecar for each list of engines, by name, all of one pool."""
        logs = []
        begun(self.store, pool)
        for number, urls in enumerate(lists):
            policy, log = self.folder / f"{pool}-{number}.yaml", self.folder / f"{pool}-{number}.log"
            static = ", ".join(f"{{name: {name}, url: '{url}'}}" for name, url in urls.items())
            policy.write_text(POLICY.format(static=static, pool=pool))
            arguments = ("serve", "--policy", str(policy), "--port", "0", "--admin-port", "0")
            process = (stack or self._stack).enter_context(started(log, *arguments, SIDECAR_STORE=self.store.url))
            logs.append((process, log))
        return [
            ServedFleet(process, address(process, log), address(process, log), self.engines) for process, log in logs
        ]

    def two(self) -> list[ServedFleet]:
        """The two sidecars, both running."""
        if any(sidecar.process.poll() is not None for sidecar in self.sidecars):
            for sidecar in self.sidecars:
                sidecar.process.kill()
                sidecar.process.wait()
            self.store.command("FLUSHALL")
            self.sidecars = []
        if not self.sidecars:
            lists = (self.urls, {**self.urls, "e1": f"http://127.0.0.1:{self.way.port}"})
            self.sidecars = self.start(lists, "shared")
        return self.sidecars


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with ExitStack() as stack:
        yield Lab(tmp_path_factory.mktemp("shared"), stack)


@asynccontextmanager
async def shared(lab: Lab, sidecars: list[ServedFleet]) -> AsyncIterator[Shared]:
    """The sidecars, when they share all engines, and nothing runs."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        found = Shared(sidecars, lab.engines, client)
        for number in range(len(sidecars)):
            await found.until("shared", lambda number=number: found.pool(number), _is_shared(len(sidecars)))
            await found.until("empty", lambda number=number: found.held(number), lambda held: not any(held.values()))
        yield found


def _is_shared(replicas: int) -> Callable[[Any], bool]:
    return lambda pool: (pool["store"]["state"], pool["store"]["replicas"]) == ("shared", replicas)


@asynccontextmanager
async def streams(pool: Shared, number: int, count: int) -> AsyncIterator[list[aiohttp.ClientResponse]]:
    """So many streams by one sidecar, each with its first byte; the clients hang up at the end."""
    body = {"model": "m", "stream": True, "max_tokens": FOREVER, "messages": [{"role": "user", "content": "hello"}]}
    found = []
    try:
        for _ in range(count):
            found.append(await pool.client.post(pool.sidecars[number].url + CHAT, json=body))
            assert found[-1].status == 200
            await found[-1].content.readline()
        yield found
    finally:
        for response in found:
            response.close()


def engine_of(response: aiohttp.ClientResponse) -> str:
    return response.headers["x-admission-engine"]


@pytest.mark.long
async def test_two_sidecars_never_give_an_engine_more_than_it_can_and_leave_nothing_behind(lab: Lab) -> None:
    async with shared(lab, lab.two()) as pool:
        before = [it["counts"]["finished"] for it in await pool.counts()]
        asks = [pool.sidecars[number % 2].ask(pool.client, output=8, text=f"hello {number}") for number in range(60)]
        answers = await asyncio.gather(*asks)
        assert {answer.status for answer in answers} == {200}
        counts = await pool.counts()
        assert [it["most"]["requests"] <= REQUESTS for it in counts] == [True] * ENGINES, counts
        finished = [it["counts"]["finished"] - was for it, was in zip(counts, before, strict=True)]
        assert sum(finished) == 60
        assert min(finished) >= 8, "all engines got some"
        for number in range(2):
            await pool.holds(number, 0, 0, 0)


@pytest.mark.long
async def test_a_drain_on_one_sidecar_is_the_others_too(lab: Lab) -> None:
    async with shared(lab, lab.two()) as pool:
        one, other = pool.sidecars
        async with streams(pool, 1, 3) as running:
            await pool.change(0, "e0", "drain")
            assert sorted(map(engine_of, running)) == ["e0", "e1", "e2"]
            await other.until(pool.client, "e0", "draining")
            before = (await pool.counts())[0]["counts"]["finished"]
            answers = await asyncio.gather(*(sidecar.ask(pool.client, output=2) for sidecar in [one, other] * 6))
            assert {engine_of(it) for it in answers} <= {"e1", "e2"}
            assert (await pool.counts())[0]["counts"]["finished"] == before
            await pool.change(1, "e0", "resume")
            await one.until(pool.client, "e0", "ready")
            answers = await asyncio.gather(*(one.ask(pool.client, output=2) for _ in range(9)))
            assert "e0" in {engine_of(it) for it in answers}


@pytest.mark.long
async def test_an_engine_that_one_sidecar_cannot_reach_is_used_by_the_other(lab: Lab) -> None:
    async with shared(lab, lab.two()) as pool:
        one, other = pool.sidecars
        await other.until(pool.client, "e1", "ready")
        lab.way.refuse = True
        lab.loop.call(lab.way.drop_connections)
        row = await other.until(pool.client, "e1", "unreachable")
        assert row["reason"]
        assert (await pool.rows(0))["e1"]["state"] == "ready"
        theirs, mine = await asyncio.gather(
            asyncio.gather(*(other.ask(pool.client, output=3) for _ in range(16))),
            asyncio.gather(*(one.ask(pool.client, output=3) for _ in range(16))),
        )
        assert {it.status for it in (*theirs, *mine)} == {200}
        assert {engine_of(it) for it in theirs} == {"e0", "e2"}
        assert "e1" in {engine_of(it) for it in mine}
        lab.way.refuse = False
        await other.until(pool.client, "e1", "ready")


@pytest.mark.long
async def test_the_ledgers_are_exact_after_the_store_was_killed_and_is_back(lab: Lab) -> None:
    async with shared(lab, lab.two()) as pool:
        async with streams(pool, 0, 4), streams(pool, 1, 2):
            await pool.until("leases", lambda: pool.held(0), lambda held: sum(held.values()) == 6)
            lab.store.kill()
            for number in range(2):
                await pool.until("alone", lambda number=number: pool.pool(number), _is_away)
            answers = await asyncio.gather(*(it.ask(pool.client, output=2) for it in pool.sidecars for _ in range(3)))
            assert {it.status for it in answers} == {200}
            lab.store.restart()
            for number in range(2):
                await pool.until("shared", lambda number=number: pool.pool(number), _is_shared(2))
            counts = [it["now"]["requests"] for it in await pool.counts()]
            assert sum(counts) == 6
            for number in range(2):
                await pool.holds(number, *counts)
        for number in range(2):
            await pool.holds(number, 0, 0, 0)
        assert all(it["most"]["requests"] <= REQUESTS for it in await pool.counts())


def _is_away(pool: Any) -> bool:
    return pool["store"]["state"] != "shared"


@pytest.mark.long
async def test_sidecars_with_other_lists_of_engines_share_what_both_know_and_show_the_rest(lab: Lab) -> None:
    lists = [{name: lab.urls[name] for name in names} for names in (("e0", "e1"), ("e1", "e2"))]
    with ExitStack() as stack:
        sidecars = lab.start(lists, "lists", stack)
        async with shared(lab, sidecars) as pool:
            await check_lists(pool)


async def check_lists(pool: Shared) -> None:
    """What sidecars with the engines e0 and e1, and e1 and e2, share and show."""
    known = ["e0#1", "e1#1", "e2#1"]  # of both lists
    await pool.until("lists", lambda: pool.pool(0), lambda page: [it["engine"] for it in page["engines"]] == known)
    full = ENGINES * REQUESTS  # once all are ready
    await pool.until("capacity", lambda: pool.pool(0), lambda page: page["capacity"]["requests"] == full)
    row = await pool.sidecars[0].until(pool.client, "e2", "unreachable")
    assert row["reason"] == "the engine list of this process does not name it; another replica's does"
    for number, names in ((0, {"e0", "e1"}), (1, {"e1", "e2"})):
        answers = await asyncio.gather(*(pool.sidecars[number].ask(pool.client, output=3) for _ in range(12)))
        assert {it.status for it in answers} == {200}
        assert {engine_of(it) for it in answers} == names
    assert all(it["most"]["requests"] <= REQUESTS for it in await pool.counts())


@pytest.mark.long
async def test_the_leases_of_a_killed_sidecar_end_and_nothing_is_stuck(lab: Lab) -> None:
    async with shared(lab, lab.two()) as pool:
        one, other = pool.sidecars
        async with streams(pool, 1, ENGINES * REQUESTS - 1), streams(pool, 0, 1):
            waiting = asyncio.ensure_future(one.ask(pool.client, output=2))
            await pool.until("one waits", lambda: pool.pool(0), lambda it: it["waiting"] == 1)
            other.process.kill()
            answer = await asyncio.wait_for(waiting, 60)
            assert answer.status == 200
            await pool.until("leases", lambda: pool.held(0), lambda held: sum(held.values()) == 1)
            answers = await asyncio.gather(*(one.ask(pool.client, output=2) for _ in range(ENGINES * REQUESTS * 2)))
            assert {it.status for it in answers} == {200}
            assert (await pool.pool(0))["store"]["replicas"] == 1
        await pool.holds(0, 0, 0, 0)
