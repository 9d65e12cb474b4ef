"""What users of routers for inference complain about, each as a test of the same situation. Issues are on GitHub."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path

import pytest

from sidecar.engines import Vllm
from sidecar.policy.compiler import load as load_policy
from sidecar.pools import Pool
from sidecar.pools.base import Ask
from sidecar.pools.engines import WEIGHT_PERCENT, EngineOffer
from sidecar.tools.emulator import Emulator, EmulatorConfig, StepModel
from tests.fleet.engines import LocalEngine
from tests.fleet.routed import Routed, engines_of, fleet_before, ok, routed, rude, silent, static, write_policy
from tests.fleet.test_affinity_end_to_end import caching, turns
from tests.fleet.test_route_moments import streams_forever
from tests.support.engine import Connection, Received
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("in_a_hurry")]


async def test_a_request_that_runs_for_hours_keeps_what_it_holds(tmp_path: Path) -> None:
    """llm-d-router#2295: a reaper took requests that lived longer than it expected for dead, and the engines that
    still computed them looked idle.
    """
    now_us = 0
    policy = load_policy(write_policy(tmp_path / "policy.yaml", static("http://127.0.0.1:1")))
    pool = Pool(policy, lambda: now_us, weight_percent=WEIGHT_PERCENT)
    pool.set_engines([EngineOffer("a#1", 1000, 2, 2**53 - 1, 1000, True)])
    lease = await pool.enter(Ask(1, "t", 1, 600, 1, prompt=500))
    waiting = await pool.enter(Ask(1, "t", 1, 600, 1, prompt=500))
    for hours in (1, 10, 100):
        now_us = hours * 3600 * 10**6
        pool.set_engines([EngineOffer("a#1", 1000, 2, 2**53 - 1, 1000, True)])
        (state,) = pool.engines()
        assert (state.held_tokens, state.held_requests, state.unprefilled_tokens) == (600, 1, 500)
        assert waiting.grant is None
    lease.settle(600)
    assert waiting.grant is not None
    await pool.close()


async def test_requests_that_come_at_once_do_not_all_choose_the_same_engine(tmp_path: Path) -> None:
    """dynamo#589: each decision was made by figures that the ones before it had not changed yet."""
    async with fleet_before(tmp_path, *[silent] * 4) as (sidecar, *stands):
        asking = [sidecar.begin() for _ in range(24)]
        await until(lambda: sum(stand.count for stand in stands) == 24)
        assert [stand.count for stand in stands] == [6] * 4
        for one in asking:
            one.cancel()


async def test_no_engine_is_idle_while_a_queue_waits(tmp_path: Path) -> None:
    """dynamo#12864, dynamo#737: 83 requests waited at one worker, drawn by their prefix, beside idle ones."""
    settings = {"capacity": "{tokens: 50k, requests: 2}", "affinity": "{prefix: true}"}
    idle = waited = 0
    async with caching(tmp_path, **settings) as (sidecar, _):
        same = "the same beginning for all " * 120
        asking = [sidecar.begin(same + str(number), max_tokens=30) for number in range(80)]
        await until(lambda: sidecar.waiting > 40)
        while sidecar.waiting > 16:
            held = sidecar.held
            waited += 1
            idle += len(held) < 4
            await asyncio.sleep(0.005)
        assert [(await one).status for one in asking] == [200] * 80
    assert waited > 20
    assert idle <= 0.1 * waited, (idle, waited)


async def test_the_busiest_engine_does_not_look_idle_after_its_first_bytes(tmp_path: Path) -> None:
    """production-stack#1073: a request stopped to count at its first token, and the engine that generated most looked
    the least loaded.
    """
    async with fleet_before(tmp_path, streams_forever, streams_forever) as (sidecar, a, b):
        sidecar.fleet.drain("b")
        running = [sidecar.begin(stream=True, max_tokens=500) for _ in range(6)]
        await until(lambda: a.count == 6 and sidecar.unprefilled == 0)
        sidecar.fleet.resume("b")
        more = [sidecar.begin(stream=True, max_tokens=500) for _ in range(3)]
        await until(lambda: b.count == 3)
        assert a.count == 6
        for one in (*running, *more):
            one.cancel()


async def test_some_imbalance_does_not_cost_the_hits(tmp_path: Path) -> None:
    """NeMo-Gym#3345: a gate on imbalance was so tight that the hit rate was 65 instead of 84%."""
    async with caching(tmp_path, affinity="{prefix: true}", capacity="{tokens: 50k, requests: 8}") as (sidecar, _):
        most = asked = 0

        async def conversation(number: int) -> None:
            nonlocal most, asked
            before = 0
            for turn in range(1, 2 + number % 5 + 3):
                messages = turns(number, turn)
                size = sum(len(message["content"]) for message in messages)
                most, asked, before = most + before, asked + size, size
                assert (await sidecar.ask(messages=messages)).status == 200

        await asyncio.gather(*(conversation(number) for number in range(14)))
        cached = sum(sidecar.routing.cached_tokens.values())
        ideal = most / 4
        assert cached > 0.9 * ideal, (cached, ideal)


async def test_a_crash_costs_each_prompt_one_prefill_more_at_the_most(tmp_path: Path) -> None:
    """Fastllm-proxy#21: on failover a prompt of 150k tokens was prefilled again at one engine after the other."""
    prompts: list[Counter[bytes]] = [Counter(), Counter(), Counter()]

    def counting(number: int, act: object) -> object:
        async def counted(connection: Connection, request: Received) -> None:
            prompts[number][re.findall(rb"number \d+", request.body)[0]] += 1
            await act(connection, request)  # type: ignore[operator]

        return counted

    async with rude(silent, ok, ok) as stands:
        for number, stand in enumerate(stands):
            stand.act = counting(number, stand.act)  # type: ignore[assignment]
        a = stands[0]
        policy = write_policy(tmp_path / "policy.yaml", engines_of(stands), prefill="8k")
        async with routed(policy) as sidecar:
            asking = [sidecar.begin("long " * 800 + f"number {number}") for number in range(40)]
            await until(lambda: a.count > 3 and sum(stand.count for stand in stands) > 20)
            await a.crash()
            assert {(await one).status for one in asking} == {200}
            assert sidecar.replays["crashed"] + sidecar.replays.get("unreached", 0) >= a.count
            assert max(max(seen.values()) for seen in prompts) == 1, "none is sent to one engine twice"
            assert sum((prompts[1] + prompts[2]).values()) == 40, "nor to a third one"


async def test_a_rolling_update_cuts_no_stream(tmp_path: Path) -> None:
    """vllm#24885, kserve#5496: pods that were replaced took their streams with them."""
    found = [LocalEngine() for _ in range(3)]

    async def start(engine: LocalEngine) -> None:
        config = EmulatorConfig(engine=Vllm, steps=StepModel(max_sequences=64, step_us=10_000), output_tokens=20)
        await engine.start(Emulator(config).app)

    for engine in found:
        await start(engine)
    policy = write_policy(tmp_path / "policy.yaml", static(*(f"http://127.0.0.1:{it.port}" for it in found)))
    async with routed(policy) as sidecar:
        ends: list[tuple[int, bool]] = []
        is_over = False

        async def client() -> None:
            while not is_over:
                reply = await sidecar.ask(stream=True, max_tokens=20)
                ends.append((reply.status, reply.body.endswith(b"data: [DONE]\n\n") and reply.error is None))

        clients = [asyncio.ensure_future(client()) for _ in range(10)]
        for name, engine in zip("abc", found, strict=True):
            await _replaced(sidecar, name, engine)
            await start(engine)
            await until(lambda name=name: sidecar.fleet.member(f"{name}#2") is not None)
        is_over = True
        await asyncio.gather(*clients)
        assert set(ends) == {(200, True)}
        assert len(ends) > 15
        assert set(sidecar.replays) <= {"unreached"}
    for engine in found:
        await engine.stop()


async def _replaced(sidecar: Routed, name: str, engine: LocalEngine) -> None:
    """As a preStop hook does: the engine is stopped when its last request has ended."""
    sidecar.fleet.drain(name)
    await until(lambda: all(engine_id.partition("#")[0] != name for engine_id in sidecar.held))
    await engine.stop()
    await until(lambda: sidecar.fleet._members[name].state.value == "down")
