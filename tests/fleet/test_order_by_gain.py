"""Several engines and `order: gain`, with real requests: the most for the engine's time goes first, on any engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sidecar.policy.store import STORE_VARIABLE
from tests.fleet.routed import Act, Routed, Rude, engines_of, ok, routed, rude, write_policy
from tests.support.engine import Connection, Received
from tests.support.shared_pools import begun_store
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
SLO = "max_wait: 30s}, slo: {ttft: 25s, tpot: 100ms}, gain: {weight: 4}}"


@pytest.fixture(autouse=True, params=["one process", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where the pool is kept."""
    if request.param == "one process":
        yield
    else:
        with begun_store(tmp_path) as server:
            monkeypatch.setenv(STORE_VARIABLE, server.url)
            yield


class Held:
    """Engines that answer one request after the other. `came` are the requests' names, in the order of arrival."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self._answers = asyncio.Semaphore(0)

    async def serve(self, waiting: list[asyncio.Task]) -> list[str]:
        """Answers one after the other until all are served. Returns who came meanwhile, in order."""
        before = len(self.came)
        for number in range(len(waiting)):
            self._answers.release()
            await until(lambda number=number: len(self.came) == before + number + 1)
        for _ in range(9):
            self._answers.release()
        assert {reply.status for reply in await asyncio.gather(*waiting)} == {200}
        return self.came[before:]

    def act(self) -> Act:
        async def answer(connection: Connection, request: Received) -> None:
            self.came += [name.decode() for name in request.all(b"x-name")]
            await self._answers.acquire()
            await ok(connection, request)

        return answer


def by_gain(folder: Path, engines: list[Rude], **settings: str) -> Path:
    settings = {"capacity": "{tokens: 100k, requests: 1}", "more": "order: gain", **settings}
    path = write_policy(folder / "policy.yaml", engines_of(engines), **settings)
    path.write_text(path.read_text().replace("normal: {queue: {max_wait: 30s}}", f"normal: {{queue: {{{SLO}"))
    return path


@asynccontextmanager
async def stand(folder: Path, **settings: str) -> AsyncIterator[tuple[Routed, Held]]:
    """Two engines, both busy."""
    held = Held()
    async with rude(held.act(), held.act()) as engines, routed(by_gain(folder, engines, **settings)) as sidecar:
        running = [sidecar.begin(headers=named("running")) for _ in range(2)]
        await until(lambda: len(held.came) == 2)
        yield sidecar, held
        assert {reply.status for reply in await asyncio.gather(*running)} == {200}


def named(name: str, headers: dict[str, str] | None = None) -> dict[str, str]:
    return {"x-name": name, **(headers or {"x-priority": "normal"})}


async def in_queue(sidecar: Routed, *requests: dict[str, str]) -> list[asyncio.Task]:
    """Requests that wait, one after the other."""
    begun = []
    before = sidecar.waiting
    for number, headers in enumerate(requests):
        tokens = 4_000 if headers["x-name"].startswith("long") else 5
        begun.append(sidecar.begin(headers=headers, max_tokens=tokens))
        await until(lambda number=number: sidecar.waiting == before + number + 1)
    return begun


async def test_what_costs_less_of_the_engines_time_goes_first_on_any_engine(tmp_path: Path) -> None:
    async with stand(tmp_path) as (sidecar, held):
        waiting = await in_queue(
            sidecar,
            named("bulk", {"x-priority": "batch"}),
            named("long"),
            named("long too"),
            named("short"),
            named("short too"),
        )
        found = await held.serve(waiting)
        assert found == ["short", "short too", "long", "long too", "bulk"]
