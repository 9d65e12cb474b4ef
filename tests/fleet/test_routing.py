"""The failure table of several engines, row by row, through a real sidecar: what the client gets, and what is left."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from sidecar.fleet import routing
from tests.fleet.engines import LocalEngine, engines, fleet_of
from tests.fleet.routed import (
    Act,
    engines_of,
    fleet_before,
    ok,
    refusing,
    reset,
    reset_after_byte,
    reset_after_head,
    routed,
    rude,
    silent,
    silent_after_head,
    static,
    write_policy,
)
from tests.support.ports import free_ports
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("in_a_hurry")]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_connection_is_no_error_and_the_engine_gets_no_more_requests(
    tmp_path: Path, stream: bool
) -> None:
    gone = LocalEngine()
    await gone.start()
    async with rude(ok) as (b,):
        policy = write_policy(tmp_path / "policy.yaml", static(f"http://127.0.0.1:{gone.port}", b.url), every="10s")
        async with routed(policy) as sidecar:
            await gone.stop()
            found = await asyncio.gather(*(sidecar.ask(stream=stream) for _ in range(8)))
            assert {(reply.status, reply.engine) for reply in found} == {(200, "b")}
            assert sidecar.replays["unreached"] >= 1
            assert set(sidecar.replays) == {"unreached"}
            assert b.count == 8
            assert [story.end.outcome.value for story in sidecar.recorder.stories] == ["completed"] * 8


@pytest.mark.parametrize(("status", "header"), [(429, None), (503, "20"), (529, "9" * 400)])
async def test_an_engine_that_says_it_is_full_is_capped_and_the_request_goes_elsewhere(
    tmp_path: Path, status: int, header: str | None
) -> None:
    headers = () if header is None else (f"retry-after: {header}",)
    async with fleet_before(tmp_path, refusing(status, *headers), ok) as (sidecar, a, _b):
        before_us = sidecar.pool.now_us()
        found = await sidecar.ask()
        assert (found.status, found.engine) == (200, "b")
        member = sidecar.fleet.members()[0]
        assert before_us <= member.capped_until_us - 10**5 <= sidecar.pool.now_us()
        assert member.ejections == {}, "not a failure"
        assert sidecar.replays == {"full": 1}
        assert a.count == 1


async def test_an_engine_that_refuses_again_is_left_alone_for_longer_and_no_longer_than_it_says() -> None:
    async with engines(1) as (engine,), fleet_of([engine.address("a")]) as fleet:
        member, now_us = fleet.members()[0], fleet.now_us()
        with mock.patch.object(fleet, "now_us", side_effect=lambda: now_us):
            capped_s = []
            for retry_after_s in (20, 20, 20, 20, 20, 3, 3):
                capped_s.append(member.refused(retry_after_s))
                assert member.refused(retry_after_s) == capped_s[-1], "by what was sent before"
                now_us = member.capped_until_us
            assert capped_s == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3, 3])
            member.answered(now_us)
            assert member.refused(20) == pytest.approx(0.1)


@pytest.mark.parametrize("act", [reset, reset_after_head])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_connection_that_breaks_before_the_first_byte_is_replayed_elsewhere(
    tmp_path: Path, act: Act, stream: bool
) -> None:
    async with fleet_before(tmp_path, act, ok) as (sidecar, a, b):
        found = await sidecar.ask(stream=stream)
        assert (found.status, found.engine) == (200, "b")
        assert (a.count, b.count) == (1, 1)
        assert sidecar.replays == {"broken": 1}


async def test_after_the_first_byte_the_error_passes_on_and_real_use_is_settled(tmp_path: Path) -> None:
    async with fleet_before(tmp_path, reset_after_byte, ok) as (sidecar, _a, b):
        found = await sidecar.ask(stream=True, max_tokens=1000)
        assert found.status == 200
        assert found.error is not None, "half an answer must not look complete"
        assert found.body.count(b"data:") == 3
        assert (found.engine, b.count, sidecar.replays) == ("a", 0, {})
        await sidecar.nothing_left()
        end: Any = sidecar.recorder.stories[0].end
        assert (end.outcome.value, end.error) == ("failed", "ResponseCut")
        assert 0 < end.tokens_used < 100, "what was used, and not what was held"


@pytest.mark.parametrize("act", [silent, silent_after_head])
async def test_a_slow_engine_never_gets_its_request_twice_nor_does_another(tmp_path: Path, act: Act) -> None:
    async with fleet_before(tmp_path, act, ok) as (sidecar, a, b):
        asking = sidecar.begin(stream=True)
        await until(lambda: a.count == 1)
        await asyncio.sleep(0.5)  # several probes
        assert not asking.done()
        assert (a.count, b.count) == (1, 0)
        assert sidecar.held == {"a#1": 1}
        assert sidecar.unprefilled > 0
        asking.cancel()
        await sidecar.nothing_left()
        assert (a.count, b.count, sidecar.replays) == (1, 0, {})


@pytest.mark.parametrize("act", [silent, silent_after_head])
async def test_the_time_of_a_slow_engine_ends_and_no_other_gets_its_request(tmp_path: Path, act: Act) -> None:
    async with fleet_before(tmp_path, act, ok, more="timeouts: {first_byte: 200ms}") as (sidecar, a, b):
        found = await sidecar.ask(stream=True)
        assert (found.status, found.code) == (504, "engine_timeout")
        await sidecar.nothing_left()
        assert (a.count, b.count, sidecar.replays) == (1, 0, {})
        end: Any = sidecar.recorder.stories[0].end
        assert (end.outcome.value, end.error, end.tokens_used) == ("failed", "engine_timeout", 0)


async def test_a_request_that_breaks_two_engines_gets_a_502_that_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet_before(tmp_path, reset, reset, ok) as (sidecar, a, b, c):
        found = await sidecar.ask()
        assert (found.status, found.code) == (502, "engine_unreachable")
        assert "2 engines closed the connection" in json.loads(found.body)["error"]["message"]
        assert (a.count, b.count, c.count) == (1, 1, 0)
        assert found.headers["x-admission-engine"] == "b"
        end: Any = sidecar.recorder.stories[0].end
        assert (end.outcome.value, end.error, end.tokens_used) == ("failed", "engine_unreachable", 0)
        assert not any(one.first.samples for one in sidecar.routing.speeds.engines.values()), (
            "our own answer teaches nothing"
        )


async def test_without_replays_the_first_break_is_the_clients(tmp_path: Path) -> None:
    async with rude(reset, ok) as (a, b):
        policy = write_policy(tmp_path / "policy.yaml", engines_of([a, b]), replay="{before_first_byte: 0}")
        async with routed(policy) as sidecar:
            found = await sidecar.ask()
            assert (found.status, found.code) == (502, "engine_unreachable")
            assert "1 engines" not in json.loads(found.body)["error"]["message"]
            assert (a.count, b.count) == (1, 0)


async def test_a_request_that_broke_the_only_engine_is_not_left_to_wait_for_another(tmp_path: Path) -> None:
    async with rude(reset) as (a,), routed(write_policy(tmp_path / "policy.yaml", engines_of([a]))) as sidecar:
        found = await asyncio.wait_for(sidecar.ask(), 30)
        assert (found.status, found.code) == (502, "engine_unreachable")
        assert a.count == 1


async def test_the_budget_bounds_replays_of_an_engine_that_lives_on(tmp_path: Path) -> None:
    async with rude(reset, ok) as (a, b):
        policy = write_policy(tmp_path / "policy.yaml", engines_of([a, b]), capacity="{tokens: 1M, requests: 100}")
        async with routed(policy) as sidecar:
            found = await asyncio.gather(*(sidecar.ask() for _ in range(60)))
            broken = a.count
            assert broken > 15
            assert sidecar.replays == {"broken": 10}, "ten a minute at the least"
            assert sorted(reply.status for reply in found) == [200] * (60 - broken + 10) + [502] * (broken - 10)


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
async def test_a_crash_of_an_engine_with_thirty_requests_without_a_first_byte_is_unseen(
    tmp_path: Path, stream: bool
) -> None:
    async with rude(silent, ok) as (a, b):
        policy = write_policy(
            tmp_path / "policy.yaml",
            engines_of([a, b]),
            capacity="{tokens: 1M, requests: 30}",
            max_wait="2s",
        )
        async with routed(policy) as sidecar:
            sidecar.fleet.drain("b")
            asking = [sidecar.begin(stream=stream) for _ in range(30)]
            await until(lambda: a.count == 30)
            await asyncio.sleep(2.1)  # longer than any may wait: the time at an engine that crashes is no wait
            sidecar.fleet.resume("b")
            await a.crash()
            found = await asyncio.gather(*asking)
            assert {(reply.status, reply.engine) for reply in found} == {(200, "b")}
            assert b.count == 30
            assert sidecar.replays == {"crashed": 30}


async def test_the_queue_is_held_while_every_engine_is_down_and_served_in_order_when_one_returns(
    tmp_path: Path,
) -> None:
    port = free_ports(2)
    policy = write_policy(
        tmp_path / "policy.yaml",
        static(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"),
        capacity="{tokens: 100k, requests: 1}",
    )
    async with routed(policy) as sidecar:
        asking = []
        for number in range(10):
            asking.append(sidecar.begin(text=str(number)))
            await until(lambda number=number: sidecar.waiting == number + 1)
        hurried = await sidecar.ask(headers={"x-admission-max-wait": "300ms"})
        assert (hurried.status, hurried.code) == (503, "no_engine")
        assert sidecar.waiting == 10
        order: list[str] = []
        engine = LocalEngine()
        engine.port = port + 1
        await engine.start(_App(order))
        found = await asyncio.gather(*asking)
        assert [reply.status for reply in found] == [200] * 10
        assert order == [str(number) for number in range(10)]
        await engine.stop()


class _App:
    """An engine that answers at once, and notes the order."""

    def __init__(self, order: list[str]) -> None:
        self.order = order

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            return
        if scope["method"] == "POST":
            message = await receive()
            self.order.append(json.loads(message["body"])["messages"][0]["content"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


async def test_a_request_that_every_engine_refuses_again_and_again_gets_the_refusal(tmp_path: Path) -> None:
    async with fleet_before(tmp_path, refusing(), refusing()) as (sidecar, a, b):
        found = await sidecar.ask(stream=True)
        assert (found.status, found.body) == (503, b'{"error": "full"}')
        assert a.count + b.count == routing.MOST_REFUSALS + 1
        assert sidecar.learned_prefills == 0, "a refusal is no prefill"
