"""Disconnects, comments, preemption and background responses at each moment of a request's way through engines."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from sidecar.engines import Vllm
from sidecar.server.http_protocol import BoundedHttpProtocol
from sidecar.tools.emulator import Emulator, EmulatorConfig, StepModel
from tests.fleet.engines import LocalEngine
from tests.fleet.routed import (
    OK_BODY,
    Routed,
    engines_of,
    fleet_before,
    ok,
    refusing,
    reset,
    reset_after_head,
    response,
    routed,
    rude,
    sequence,
    silent,
    silent_after_head,
    static,
    write_policy,
)
from tests.support.engine import Connection, Received
from tests.support.ports import free_ports
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("in_a_hurry")]


async def streams_forever(connection: Connection, _: Received) -> None:
    """Streams until its client has gone."""
    await connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        await connection.send_chunk(b'data: {"choices": [{"delta": {"content": "w"}}]}\n\n')
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("act", [silent, silent_after_head, streams_forever])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_a_running_request_leaves_nothing(tmp_path: Path, act: Any, stream: bool) -> None:
    async with fleet_before(tmp_path, act, ok) as (sidecar, a, b):
        asking = sidecar.begin(stream=stream)
        await until(lambda: a.count == 1)
        await asyncio.sleep(0.05)
        assert sidecar.held == {"a#1": 1}
        asking.cancel()
        await sidecar.nothing_left()
        assert (a.count, b.count, sidecar.replays) == (1, 0, {})


async def test_a_client_that_leaves_while_its_request_waits_again(tmp_path: Path) -> None:
    async with fleet_before(tmp_path, refusing(503, "retry-after: 60")) as (sidecar, a):
        asking = sidecar.begin()
        await until(lambda: a.count == 1 and sidecar.waiting == 1)
        asking.cancel()
        await sidecar.nothing_left()


async def test_a_client_that_leaves_while_the_broken_engine_is_judged(tmp_path: Path) -> None:
    """The engine's pages hang: whether it lives is known only after a second."""
    hangs, is_over = False, asyncio.Event()

    async def hanging(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal hangs
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"POST"):
                    hangs = True
                    await asyncio.sleep(0.3)
                    writer.transport.abort()
                    return
                if hangs:
                    await is_over.wait()
                writer.write(response(b"{}", "404 Not Found"))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(hanging, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    policy = write_policy(tmp_path / "policy.yaml", static(url, url + "/b"))
    async with server, routed(policy) as sidecar:
        asking = sidecar.begin()
        await until(lambda: hangs)
        await asyncio.sleep(0.5)
        asking.cancel()
        await sidecar.nothing_left()
        is_over.set()


@pytest.mark.parametrize("second", [ok, silent])
async def test_comments_go_on_over_every_attempt_and_the_answer_follows_them(tmp_path: Path, second: Any) -> None:
    """A stream whose comments have begun has its 200 already: a refusal, a break and a wait must not show in it."""
    acts = [sequence(refusing(503, "retry-after: 2", times=1), reset_after_head), second]
    more = "keep_alive: 100ms"
    async with fleet_before(tmp_path, *acts, more=more, capacity="{tokens: 100k, requests: 1}") as (sidecar, a, b):
        sidecar.fleet.drain("b")
        asking = sidecar.begin(stream=True)
        await until(lambda: a.count == 1 and sidecar.waiting == 1)
        await asyncio.sleep(0.5)
        sidecar.fleet.resume("b")
        if second is silent:
            await until(lambda: b.count == 1)
            asking.cancel()
            return
        found = await asking
        assert found.status == 200
        assert found.body.startswith(b": queued, 0 ahead")
        assert found.body.endswith(OK_BODY + b"\n\n")
        assert b"error" not in found.body


async def test_a_stream_with_comments_gets_no_engine_as_an_event(tmp_path: Path) -> None:
    urls = static(f"http://127.0.0.1:{free_ports(1)}")
    policy = write_policy(tmp_path / "policy.yaml", urls, max_wait="500ms", more="keep_alive: 100ms")
    async with routed(policy) as sidecar:
        found = await sidecar.ask(stream=True)
        assert found.status == 200
        last = re.findall(rb"data: (\{.*\})", found.body)[-1]
        assert json.loads(last)["error"]["code"] == "no_engine"


async def test_a_stream_with_comments_whose_request_breaks_two_engines_ends_with_the_error(tmp_path: Path) -> None:
    settings = {"more": "keep_alive: 100ms", "capacity": "{tokens: 100k, requests: 1}"}
    async with fleet_before(tmp_path, sequence(ok, reset), reset, **settings) as (sidecar, _a, _b):
        sidecar.fleet.drain("a")
        sidecar.fleet.drain("b")
        asking = sidecar.begin(stream=True)
        await asyncio.sleep(0.3)
        sidecar.fleet.resume("a")
        await until(lambda: not sidecar.waiting)
        assert (await asking).body.endswith(OK_BODY + b"\n\n")
        sidecar.fleet.drain("a")
        asking = sidecar.begin(stream=True)
        await asyncio.sleep(0.3)
        sidecar.fleet.resume("a")
        sidecar.fleet.resume("b")
        found = await asking
        last = re.findall(rb"data: (\{.*\})", found.body)[-1]
        assert json.loads(last)["error"]["code"] == "engine_unreachable"


HIGH = {"x-priority": "high"}
BATCH = {"x-priority": "batch"}


@pytest.mark.parametrize("http", ["httptools", BoundedHttpProtocol], ids=["uvicorn's server", "our own"])
async def test_a_preempted_request_waits_again_and_is_served_elsewhere_or_later(tmp_path: Path, http: Any) -> None:
    async with rude(sequence(silent, ok)) as engines:
        policy = write_policy(tmp_path / "policy.yaml", engines_of(engines), capacity="{tokens: 100k, requests: 1}")
        async with routed(policy, http=http) as sidecar:
            low = sidecar.begin("low", BATCH)
            await until(lambda: engines[0].count == 1)
            high = await sidecar.ask("high", HIGH)
            assert high.status == 200
            found = await low
            assert (found.status, found.headers["x-admission-preempted"]) == (200, "1")
            assert engines[0].count == 3
            assert sidecar.replays == {}, "a preemption is none"


@pytest.mark.parametrize("act", [refusing(503, times=2), sequence(reset, ok)])
async def test_a_preemptible_request_that_its_engine_does_not_answer_waits_again(tmp_path: Path, act: Any) -> None:
    async with fleet_before(tmp_path, act, ok) as (sidecar, _a, _b):
        found = await sidecar.ask("low", BATCH, stream=True)
        assert (found.status, found.engine) == (200, "b")
        assert "x-admission-preempted" not in found.headers


async def test_an_engine_that_breaks_while_a_request_is_preempted(tmp_path: Path) -> None:
    async def slow_reset(connection: Connection, _: Received) -> None:
        await connection.hung_up()
        connection.abort()
        raise ConnectionResetError

    async with fleet_before(tmp_path, slow_reset, capacity="{tokens: 100k, requests: 1}") as (sidecar, a):
        lows = [sidecar.begin("low", BATCH) for _ in range(3)]
        await until(lambda: a.count == 1)
        a.act = ok
        high = await sidecar.ask("high", HIGH)
        assert high.status == 200
        assert [(await low).status for low in lows] == [200] * 3


async def background_engine() -> LocalEngine:
    """An engine that keeps responses."""
    engine = LocalEngine()
    steps = StepModel(max_sequences=8, step_us=20_000, kv_tokens=20_000)
    await engine.start(Emulator(EmulatorConfig(engine=Vllm, response_store=True, steps=steps)).app)
    return engine


async def test_a_background_response_is_followed_at_the_engine_that_has_it(tmp_path: Path) -> None:
    a, b = await background_engine(), await background_engine()
    urls = static(*(f"http://127.0.0.1:{engine.port}" for engine in (a, b)))
    policy = write_policy(tmp_path / "policy.yaml", urls, more="background: hold")
    async with routed(policy) as sidecar:
        found = await asyncio.gather(*(_background(sidecar) for _ in range(4)))
        assert {reply.status for reply in found} == {200}
        assert {reply.engine for reply in found} == {"a", "b"}
        assert sum(sidecar.held.values()) == 4, "each lease is held after its answer"
        await sidecar.nothing_left()
        ends: list[Any] = [story.end for story in sidecar.recorder.stories]
        assert {(end.outcome.value, end.output_tokens) for end in ends} == {("completed", 20)}
    await a.stop()
    await b.stop()


async def test_background_responses_of_an_engine_that_restarts_end_as_lost(tmp_path: Path) -> None:
    a, b = await background_engine(), await background_engine()
    urls = static(*(f"http://127.0.0.1:{engine.port}" for engine in (a, b)))
    policy = write_policy(tmp_path / "policy.yaml", urls, more="background: hold")
    async with routed(policy) as sidecar:
        limits = sidecar.controller.background.limits
        sidecar.controller.background.limits = type(limits)(most_s=60, gone_s=0.5, every_s=(0.02, 0.05))
        await _background(sidecar, output=2000)
        await until(lambda: sidecar.controller.state()["background"] == 1)
        await a.stop()
        await a.start(Emulator(EmulatorConfig(engine=Vllm, response_store=True)).app)
        await sidecar.nothing_left()
        end: Any = sidecar.recorder.stories[0].end
        assert (end.outcome.value, end.error) in {("failed", "engine_unreachable"), ("failed", "response_not_found")}
    await a.stop()
    await b.stop()


async def _background(sidecar: Routed, output: int = 20) -> Any:
    body = {"model": "m", "input": "hello", "max_output_tokens": output, "background": True}
    async with sidecar.client.post(sidecar.url + "/v1/responses", json=body) as answer:
        headers = {name.lower(): value for name, value in answer.headers.items()}
        reply = type("Reply", (), {"status": answer.status, "engine": headers.get("x-admission-engine")})
        await answer.read()
        return reply
