"""Mounted engines: real processes that serve their own engines, on one pool in a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from tests.fleet.mounted import MountedApp, mounted_app, mounted_apps, until
from tests.support.redis_servers import RedisServer
from tests.support.shared_pools import begun_store

pytestmark = pytest.mark.anyio


@dataclass
class Pair:
    """Two processes, `a` and `b`, on one store. Half of their 8 requests is reserved for the high tier."""

    folder: Path
    store: RedisServer
    stack: ExitStack
    apps: list[MountedApp]

    def start(self, name: str) -> MountedApp:
        """One more process, which has just begun."""
        return self.stack.enter_context(mounted_app(self.folder, name, self.folder / "policy.yaml", self.store.url))

    def restart(self, number: int) -> MountedApp:
        """The same process anew."""
        self.apps[number] = self.start(self.apps[number].name)
        return self.apps[number]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("mounted")
    with begun_store(folder) as store, ExitStack() as stack:
        reserve = "reserve: 50%, lend: 0%"
        apps = stack.enter_context(mounted_apps(folder, ["a", "b"], store.url, high=reserve))
        yield Pair(folder, store, stack, apps)


@asynccontextmanager
async def client_of(pair: Pair) -> AsyncIterator[aiohttp.ClientSession]:
    """A client, when each process knows the engines of both and nothing runs."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        for app in pair.apps:
            await until(lambda app=app: app.rows(client), lambda rows: set(rows) == {"a", "b"})
            await until(
                lambda app=app: app.pool(client),
                lambda pool: (pool["capacity"]["requests"], pool["leases"], pool["waiting"]) == (8, 0, 0),
            )
        yield client


@pytest.mark.long
async def test_the_pool_is_the_sum_and_no_engine_gets_more_than_its_own(pair: Pair) -> None:
    apps = pair.apps
    async with client_of(pair) as client:
        pool = await apps[0].pool(client)
        assert pool["capacity"] == {"tokens": 200_000, "requests": 8}
        asked = [*apps[0].begin(client, 20, steps=30, tier="high"), *apps[1].begin(client, 12, steps=30, tier="high")]
        answers = await asyncio.gather(*asked)
        assert {status for status, _, _ in answers} == {200}
        served = [headers["x-admission-engine"] for _, headers, _ in answers]
        assert served == ["a"] * 20 + ["b"] * 12
        counts = [await app.counts(client) for app in apps]
        assert counts == [
            {"running": 0, "most": 4, "served": 20},
            {"running": 0, "most": 4, "served": 12},
        ]
        rows = await until(
            lambda: apps[1].rows(client), lambda rows: all(row["held"]["requests"] == 0 for row in rows.values())
        )
        assert {name: (row["state"], row["unprefilled_tokens"]) for name, row in rows.items()} == {
            "a": ("ready", 0),
            "b": ("ready", 0),
        }


@pytest.mark.long
async def test_a_queue_at_one_does_not_keep_others_from_another(pair: Pair) -> None:
    """100 requests wait for the first engine: one that came later, at the other, enters it at once."""
    a, b = pair.apps
    async with client_of(pair) as client:
        waiting = a.begin(client, 104, steps=500, tier="high")
        await until(lambda: a.pool(client), lambda pool: pool["waiting"] == 100)
        status, _, _ = await asyncio.wait_for(b.ask(client, steps=1, tier="high"), 60)
        assert status == 200
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.long
async def test_a_process_that_starts_again_at_once_is_another_incarnation(pair: Pair) -> None:
    """What the process before it held is never charged to its engine."""
    a, b = pair.apps
    async with client_of(pair) as client:
        lost = a.begin(client, 4, steps=2000, tier="high")
        await until(lambda: b.pool(client), lambda pool: pool["leases"] == 4)
        first = (await a.rows(client))["a"]["id"]
        a.process.kill()
        await asyncio.gather(*lost, return_exceptions=True)
        again = pair.restart(0)
        await until(lambda: asked(client, again), lambda status: status == 200)
        rows = (await again.get(client, "/engines"))["engines"]
        own = rows[-2]
        assert (own["name"], rows[-1]["name"]) == ("a", "b")
        assert int(own["id"].partition("#")[2]) > int(first.partition("#")[2])
        answers = await asyncio.gather(*again.begin(client, 4, steps=5, tier="high"))
        assert {status for status, _, _ in answers} == {200}
        assert (await again.counts(client))["most"] == 4


@pytest.mark.long
async def test_of_two_processes_with_one_name_the_later_one_has_it(pair: Pair) -> None:
    first = pair.apps[0]
    async with client_of(pair) as client:
        later = pair.start("a")
        await until(lambda: asked(client, later), lambda status: status == 200)
        said = await until(lambda: first.get(client, "/readyz"), lambda page: page["reasons"])
        assert said["reasons"] == [
            "engine a, of this process: a process that began later has its name, a; "
            "give each process a SIDECAR_ENGINE_NAME of its own"
        ]
        assert (await later.get(client, "/readyz"))["reasons"] == []
        later.process.terminate()
        await until(lambda: first.get(client, "/readyz"), lambda page: not page["reasons"])
        assert (await first.ask(client, tier="high"))[0] == 200


async def asked(client: aiohttp.ClientSession, app: MountedApp) -> int:
    try:
        return (await app.ask(client, steps=2, tier="high"))[0]
    except aiohttp.ClientConnectionError:
        return 0


@pytest.mark.long
async def test_a_drained_process_serves_what_it_has_and_leaves_the_pool(pair: Pair) -> None:
    a, b = pair.apps
    async with client_of(pair) as client:
        under_way = a.begin(client, 6, steps=400, tier="high")  # two of them wait, for longer than pages may take
        await until(lambda: a.pool(client), lambda pool: pool["leases"] == 4 and pool["waiting"] == 2)
        drain = asyncio.ensure_future(a.post(client, "/engines/a/drain?wait=true"))
        await until(lambda: a.rows(client), lambda rows: rows["a"]["state"] == "draining")
        assert not drain.done()
        status, headers, body = await a.ask(client)
        assert (status, b'"draining"' in body, "retry-after" in {name.lower() for name in headers}) == (503, True, True)
        async with client.get(f"{a.admin}/readyz") as page:
            said = (page.status, (await page.json())["reasons"])
        assert said == (503, ["engine a, of this process, is draining"])
        assert {status for status, _, _ in await asyncio.gather(*under_way)} == {200}
        assert (await drain)[1]["drained"] is True
        await until(lambda: b.pool(client), lambda pool: pool["capacity"]["requests"] == 4)
        assert (await b.ask(client, tier="high"))[0] == 200
        assert await a.post(client, "/engines/b/drain") == (
            404, {"error": {"code": "unknown_engine", "message": "no engine is called 'b'; the engines are a"}},
        )  # fmt: skip
        assert (await a.post(client, "/engines/a/resume"))[0] == 200
        await until(lambda: b.pool(client), lambda pool: pool["capacity"]["requests"] == 8)
        assert (await a.ask(client, tier="high"))[0] == 200


async def test_one_process_without_a_store(tmp_path: Path) -> None:
    """Its name is the host's with a random end."""
    with mounted_apps(tmp_path, [""]) as (app,):
        async with aiohttp.ClientSession() as client:
            answers = await asyncio.gather(*app.begin(client, 10, steps=5))
            assert {status for status, _, _ in answers} == {200}
            assert (await app.counts(client))["most"] == 4
            (row,) = (await app.get(client, "/engines"))["engines"]
            assert row["capacity"] == {"tokens": 100_000, "requests": 4}
            assert {headers["x-admission-engine"] for _, headers, _ in answers} == {row["name"]}
            page = await app.get(client, "/overview")
            assert [engine["state"] for engine in page["engines"]] == ["ready"]


@pytest.mark.long
async def test_the_dry_run_holds_nothing_back(tmp_path: Path, pair: Pair) -> None:
    """It shares the store with the others, and no pool."""
    with mounted_apps(tmp_path, ["a"], pair.store.url, more="mode: observe\npool: observed") as (app,):
        async with aiohttp.ClientSession() as client:
            answers = await asyncio.gather(*app.begin(client, 10, steps=20))
            assert {status for status, _, _ in answers} == {200}
            assert (await app.counts(client))["most"] == 10
            pool = await until(lambda: app.pool(client), lambda pool: not pool["leases"] and not pool["waiting"])
            assert pool["capacity"]["requests"] == 4
            await app.post(client, "/engines/a/drain?wait=true")
            assert (await app.ask(client))[0] == 200
