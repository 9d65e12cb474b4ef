"""Several engines behind two sidecars on one store: what one of them does with an engine holds for the other, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sidecar.engines.view import EngineDocument
from sidecar.policy.store import STORE_VARIABLE
from tests.fleet.routed import Routed, engines_of, ok, routed, rude, static, write_policy
from tests.support.ports import free_ports
from tests.support.shared_pools import begun_store
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("in_a_hurry")]
REQUESTS = 4
"""Of each engine."""
UNNAMED = "the engine list of this process does not name it; another replica's does"


@asynccontextmanager
async def sharing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *lists: str, known: int
) -> AsyncIterator[tuple[Routed, Routed]]:
    """A sidecar for each list of engines, on one store, when both know that many engines."""
    capacity = f"{{tokens: 80k, requests: {REQUESTS}}}"
    with begun_store(folder) as store:
        monkeypatch.setenv(STORE_VARIABLE, store.url)
        one, other = (  # of two different policies: else both would have one pool in this process
            write_policy(folder / f"{number}.yaml", engines, capacity=capacity, more=f"max_choices: {number + 1}")
            for number, engines in enumerate(lists)
        )
        async with routed(one) as first, routed(other) as second:
            for sidecar in (first, second):
                await until(lambda sidecar=sidecar: len(rows(sidecar)) == known)
            yield first, second


def rows(sidecar: Routed) -> Mapping[str, EngineDocument]:
    """The engines as its operator sees them, by name."""
    assert sidecar.controller.engines is not None
    return {row.name: row for row in sidecar.controller.engines.documents()}


async def served_by(sidecar: Routed, count: int) -> set[str | None]:
    """The engines that answered so many requests at once."""
    found = await asyncio.gather(*(sidecar.ask() for _ in range(count)))
    assert {reply.status for reply in found} == {200}
    return {reply.engine for reply in found}


async def test_a_drain_at_one_is_the_others_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rude(ok, ok) as engines:
        urls = engines_of(engines)
        async with sharing(tmp_path, monkeypatch, urls, urls, known=2) as (one, other):
            assert one.controller.engines is not None
            assert other.controller.engines is not None
            await one.controller.engines.drain("a")
            await until(lambda: rows(other)["a"].state == "draining")
            assert await served_by(one, 4) | await served_by(other, 4) == {"b"}
            await other.controller.engines.resume("a")
            await until(lambda: rows(one)["a"].state == "ready")
            assert await served_by(one, 8) == {"a", "b"}


async def test_an_engine_that_one_cannot_reach_or_does_not_know_is_used_by_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rude(ok, ok, ok) as engines:
        a, b, c = (engine.url for engine in engines)
        lists = static(a, b), static(a, f"http://127.0.0.1:{free_ports(1)}", c)
        async with sharing(tmp_path, monkeypatch, *lists, known=3) as (one, other):
            assert (rows(one)["c"].state, rows(one)["c"].reason) == ("unreachable", UNNAMED)
            await until(lambda: rows(other)["b"].state == "unreachable")
            assert rows(one)["b"].state == "ready"
            by_one, by_other = await asyncio.gather(served_by(one, 8), served_by(other, 8))
            assert {"b"} <= by_one <= {"a", "b"}
            assert {"c"} <= by_other <= {"a", "c"}
