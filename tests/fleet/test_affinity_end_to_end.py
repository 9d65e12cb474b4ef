"""Affinity through a real sidecar and emulated engines with prefix caches: where the turns of a conversation go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar.engines import Vllm
from sidecar.tools.emulator import Emulator, EmulatorConfig, StepModel
from tests.fleet.engines import LocalEngine
from tests.fleet.routed import Routed, changed, fleet_before, ok, refusing, routed, sequence, static, write_policy
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
ENGINES = 4


@asynccontextmanager
async def caching(tmp_path: Path, *, reports: bool = True, **settings: str) -> AsyncIterator[tuple[Routed, Path]]:
    """A sidecar before engines that cache prefixes, and report what they found, or do not."""
    found = [LocalEngine() for _ in range(ENGINES)]
    for engine in found:
        steps = StepModel(kv_tokens=50_000, step_us=2_000)
        config = EmulatorConfig(engine=Vllm, steps=steps, prefix_cache=True, cache_report=reports, output_tokens=4)
        await engine.start(Emulator(config).app)
    try:
        urls = [f"http://127.0.0.1:{engine.port}" for engine in found]
        policy = write_policy(tmp_path / "policy.yaml", static(*urls), **settings)
        async with routed(policy) as sidecar:
            yield sidecar, policy
    finally:
        for engine in found:
            await engine.stop()


def turns(number: int, count: int) -> list[dict[str, str]]:
    """The first turns of a conversation that shares nothing with others."""
    found = [{"role": "system", "content": f"conversation {number}: " + f"rule {number} " * 150}]
    for turn in range(count):
        found += [{"role": "user", "content": f"question {turn} " * 40}, {"role": "assistant", "content": "yes " * 10}]
    return found[:-1]


async def converse(sidecar: Routed, number: int, count: int, **headers: str) -> list[str | None]:
    """Goes through the turns of one conversation. Returns the engine of each."""
    engines = []
    for turn in range(1, count + 1):
        reply = await sidecar.ask(messages=turns(number, turn), headers=headers)
        assert reply.status == 200, reply.body
        engines.append(reply.engine)
    return engines


@pytest.mark.parametrize("stream", [False, True])
async def test_the_turns_of_a_conversation_land_on_one_engine_and_the_hits_are_counted(
    tmp_path: Path, stream: bool
) -> None:
    async with caching(tmp_path, affinity="{prefix: true}") as (sidecar, _):
        found = await asyncio.gather(*(converse(sidecar, number, 4) for number in range(8)))
        assert all(len(set(engines)) == 1 for engines in found), found
        assert len({engines[0] for engines in found}) == ENGINES, "they are spread"
        predicted, cached = sidecar.routing.predicted_tokens, sidecar.routing.cached_tokens
        assert sum(predicted.values()) > 8 * 3 * 300
        assert abs(sum(predicted.values()) - sum(cached.values())) < 0.2 * sum(cached.values())


async def test_without_affinity_nothing_is_predicted_and_a_reload_brings_it(tmp_path: Path) -> None:
    async with caching(tmp_path, affinity="{prefix: false}") as (sidecar, policy):
        await asyncio.gather(*(converse(sidecar, number, 4) for number in range(8)))
        assert sum(sidecar.routing.predicted_tokens.values()) == 0
        text = policy.read_text()
        policy.write_text(text.replace("affinity: {prefix: false}", "affinity: {prefix: true, weight: 3}"))
        changed(sidecar, policy)
        assert sidecar.pool._rules.affinity_percent == 300
        found = await asyncio.gather(*(converse(sidecar, 100 + number, 3) for number in range(8)))
        assert all(len(set(engines)) == 1 for engines in found), found


@pytest.mark.parametrize("source", ["x-session-id", "prompt_cache_key"])
async def test_a_session_stays_at_its_engine_though_its_prompts_share_no_beginning(tmp_path: Path, source: str) -> None:
    settings = {"affinity": f"{{prefix: false, session: [{source}]}}"}
    async with caching(tmp_path, reports=False, **settings) as (sidecar, _):

        async def session(number: int) -> set[str | None]:
            engines: set[str | None] = set()
            for turn in range(5):
                more: dict[str, Any] = {} if source == "x-session-id" else {source: f"s{number}"}
                headers = {source: f"s{number}"} if source == "x-session-id" else {}
                text = f"{turn} of {number} " * 200
                engines.add((await sidecar.ask(text, headers=headers, **more)).engine)
            return engines

        found = await asyncio.gather(*(session(number) for number in range(ENGINES)))
        assert sum(len(engines) == 1 for engines in found) >= ENGINES - 1, found


async def test_a_refusal_makes_no_session(tmp_path: Path) -> None:
    """An engine that answered an error has nothing of the session."""
    settings = {"affinity": "{prefix: false, session: [x-session-id]}"}
    headers = {"x-session-id": "s"}
    act = sequence(refusing(400), ok)
    async with fleet_before(tmp_path, act, act, **settings) as (sidecar, _a, _b):
        affinity = sidecar.routing.affinity
        assert (await sidecar.ask(headers=headers)).status == 400
        await sidecar.nothing_left()
        assert len(affinity.sessions) == 0
        assert (await sidecar.ask(headers=headers)).status == 200
        await until(lambda: len(affinity.sessions) == 1)
