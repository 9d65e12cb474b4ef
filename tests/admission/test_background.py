"""Background responses: refused by default, and with `background: hold` never without a lease while they run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.routing import Mount

from sidecar.admission.background import FollowLimits
from sidecar.engines import Vllm
from sidecar.events import Outcome, Settled, Verdict
from sidecar.proxy.proxy import ReverseProxy
from sidecar.tools.emulator import Emulator, EmulatorConfig, StepModel
from tests.support import middleware
from tests.support.dry_run import DryRun
from tests.support.engine import Connection, raw_engine
from tests.support.middleware import Answer, App, Caller, Guarded, guarding, key, policy
from tests.support.serving import serving
from tests.support.waiting import until
from tests.support.wire import connected, exchange, get, post

pytestmark = pytest.mark.anyio

RESPONSES = "/v1/responses"
HOLD = "background: hold\n"
SPELLINGS = [True, 1, 1.0, "true", "TRUE", "t", "Yes", "y", "on", "1"]
FALSE = [False, 0, 0.0, -0.0, None, "false", "F", "no", "n", "off", "0"]
NEITHER = [2, -1, 0.5, "", " true ", "1.0", "maybe", [], {}, "tru\u00e9", 1e30]
FAST = FollowLimits(most_s=60, gone_s=0.3, every_s=(0.005, 0.02))


def asks(**members: Any) -> dict[str, Any]:
    return {"model": "m", "input": "hello engine", "max_output_tokens": 20, "background": True, **members}


def emulator(**settings: Any) -> Emulator:
    steps = StepModel(max_sequences=64, step_us=settings.pop("step_s", 0.01) * 1e6)
    return Emulator(EmulatorConfig(engine=Vllm, response_store=True, steps=steps, **settings))


@dataclass
class Stand:
    """A middleware before an engine that runs responses in the background."""

    guarded: Guarded
    emulator: Emulator

    def settled(self, index: int = 0) -> Settled:
        found: Settled = self.guarded.recorder.stories[index].one(Settled)
        return found

    async def until_running(self, sequences: int) -> None:
        engine = self.emulator.engine
        await until(lambda: engine.running + engine.waiting == sequences)


@asynccontextmanager
async def standing(where: str, more: str = HOLD, **settings: Any) -> AsyncIterator[Stand]:
    """`where`: over a network, in the same process, or there below a mount."""
    engine = emulator(**settings)
    async with serving(engine.app) as served:
        apps: dict[str, Any] = {
            "proxied": ReverseProxy(served.url),
            "mounted": engine.app,
            "below": Starlette(routes=[Mount("/", engine.app)]),
        }
        async with guarding(apps[where], policy(more, engine="vllm")) as guarded:
            guarded.sidecar.background.limits = FAST
            guarded.patience_s = 20.0
            yield Stand(guarded, engine)
            await until(lambda: not len(guarded.sidecar.background))
        if where == "proxied":
            await apps[where].close()


STREAM = {"stream": True}
EVERYWHERE = pytest.mark.parametrize("where", ["proxied", "mounted", "below"])


# Refused


@pytest.mark.parametrize("value", SPELLINGS)
async def test_it_is_refused_by_default_however_it_is_written(value: Any) -> None:
    app = App()
    async with guarding(app, policy()) as guarded:
        answer = await guarded.ask(asks(background=value), path=RESPONSES)
        assert answer.is_error(400, "background_not_allowed", "background: hold", "stream: true")
        assert answer.headers["x-should-retry"] == "false"
    assert app.seen == []


@pytest.mark.parametrize("raw", [b'"background":false,"background":true', rb'"backgr\u006fund":true'])
async def test_the_last_of_two_counts_and_an_escaped_name_is_the_name(raw: bytes) -> None:
    async with guarding(App(), policy()) as guarded:
        answer = await guarded.ask(b'{"input":"a",%s}' % raw, path=RESPONSES)
    assert answer.is_error(400, "background_not_allowed")


async def test_what_says_no_passes() -> None:
    async with guarding(App(), policy()) as guarded:
        for value in FALSE:
            assert (await guarded.ask(asks(background=value), path=RESPONSES)).status == 200, value


@pytest.mark.parametrize("more", ["", HOLD])
async def test_what_is_no_boolean_is_a_mistake(more: str) -> None:
    async with guarding(App(), policy(more)) as guarded:
        for value in NEITHER:
            answer = await guarded.ask(asks(background=value), path=RESPONSES)
            assert answer.is_error(400, "invalid_body", "background: expected true or false"), value


def test_the_spellings_are_pydantics() -> None:
    flag = TypeAdapter(bool | None)
    assert all(flag.validate_python(value) is True for value in SPELLINGS)
    assert not any(flag.validate_python(value) for value in FALSE)
    for value in NEITHER:
        with pytest.raises(ValidationError):
            flag.validate_python(value)


async def test_other_apis_do_not_know_it() -> None:
    async with guarding(App(), policy()) as guarded:
        assert (await guarded.ask({"messages": [{"role": "user", "content": "a"}], "background": True})).status == 200


async def test_a_client_does_not_choose_the_id_that_is_followed() -> None:
    async with guarding(App(), policy(HOLD)) as guarded:
        answer = await guarded.ask(asks(request_id="resp_../../health"), path=RESPONSES)
    assert answer.is_error(400, "invalid_body", "request_id", "leave it out")


# Held


@EVERYWHERE
async def test_the_lease_is_held_until_the_response_has_ended(where: str) -> None:
    async with standing(where) as stand:
        guarded = stand.guarded
        answer = await guarded.ask(asks(max_output_tokens=100), path=RESPONSES)
        assert (answer.status, answer.json["status"]) == (200, "queued")
        await stand.until_running(1)
        assert guarded.leases == 1, "it was answered, and runs"
        await guarded.until(leases=0, stories=1)
        assert stand.emulator.engine.running == 0
        settled = stand.settled()
        assert (settled.outcome, settled.error, settled.status) == (Outcome.COMPLETED, None, 200)
        assert (settled.input_tokens, settled.output_tokens, settled.tokens_used) == (3, 100, 103)


@EVERYWHERE
async def test_the_engine_never_runs_more_than_the_pool_holds(where: str) -> None:
    async with standing(where, HOLD) as stand:
        most, pool = 0, 4  # the policy's requests
        asked = [asyncio.create_task(stand.guarded.ask(asks(), path=RESPONSES)) for _ in range(24)]
        while not all(task.done() for task in asked) or stand.guarded.leases:
            engine = stand.emulator.engine
            most = max(most, engine.running + engine.waiting)
            await asyncio.sleep(0.001)
        assert [task.result().status for task in asked] == [200] * 24
        assert 1 <= most <= pool
        assert stand.emulator.engine.finished == 24


@EVERYWHERE
async def test_a_client_that_leaves_does_not_take_the_lease_along(where: str) -> None:
    async with standing(where) as stand:
        body = json.dumps(asks(stream=True, max_output_tokens=100)).encode()
        async with connected(stand.guarded.port) as (reader, writer):
            writer.write(post(RESPONSES, body))
            await asyncio.wait_for(reader.readuntil(b"response.created"), 60)
        await stand.until_running(1)
        await asyncio.sleep(0.1)
        assert (stand.guarded.leases, stand.emulator.engine.running) == (1, 1)
        await stand.guarded.until(leases=0, stories=1)
        assert (stand.emulator.engine.finished, stand.emulator.engine.aborted) == (1, 0)
        settled = stand.settled()
        assert (settled.outcome, settled.output_tokens) == (Outcome.COMPLETED, 100)


@EVERYWHERE
async def test_a_stream_that_is_read_to_its_end_is_settled_with_it(where: str) -> None:
    async with standing(where) as stand:
        answer = await stand.guarded.ask(asks(stream=True), path=RESPONSES)
        assert b"response.completed" in answer.body
        await stand.guarded.until(leases=0, stories=1)
        assert stand.settled().tokens_used == 23


@EVERYWHERE
async def test_one_that_is_canceled_gives_its_lease_back(where: str) -> None:
    async with standing(where) as stand:
        answer = await stand.guarded.ask(asks(max_output_tokens=5000), path=RESPONSES)
        await stand.until_running(1)
        canceled = await stand.guarded.ask({}, path=f"{RESPONSES}/{answer.json['id']}/cancel")
        assert canceled.json["status"] == "cancelled"
        await stand.guarded.until(leases=0, stories=1)
        assert stand.settled().outcome is Outcome.CLIENT_LEFT


@pytest.mark.parametrize(("where", "more"), [("proxied", {}), ("mounted", {}), ("below", {}), ("proxied", STREAM)])
async def test_one_that_takes_too_long_is_canceled_at_the_engine(where: str, more: dict[str, bool]) -> None:
    async with standing(where) as stand:
        stand.guarded.sidecar.background.limits = FollowLimits(most_s=0.3, every_s=(0.01, 0.02))
        stand.guarded.sidecar.watchdog.interval_s = 0.05
        await stand.guarded.ask(asks(max_output_tokens=50_000, **more), path=RESPONSES)
        await stand.guarded.until(leases=0, stories=1)
        assert stand.emulator.engine.running == 0
        assert stand.settled().error == "background_timeout"


@EVERYWHERE
async def test_what_the_engine_refuses_is_settled_at_once(where: str) -> None:
    async with standing(where, context_tokens=50) as stand:
        answer = await stand.guarded.ask(asks(max_output_tokens=5000), path=RESPONSES)
        assert answer.status == 400
        assert stand.guarded.leases == 0
        assert len(stand.guarded.sidecar.background) == 0


async def test_an_answer_that_is_complete_needs_no_following() -> None:
    """TensorRT-LLM ignores the field."""
    complete = b'{"id":"resp_1","status":"completed","usage":{"input_tokens":3,"output_tokens":5}}'
    async with guarding(App(answer=complete), policy(HOLD)) as guarded:
        assert (await guarded.ask(asks(), path=RESPONSES)).status == 200
        assert guarded.leases == 0
        assert guarded.recorder.stories[0].one(Settled).tokens_used == 8


async def test_it_is_never_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine would compute it to its end all the same, and once more when its request is sent again."""
    tiers = middleware.POOL.replace("normal: {{", "normal: {{preempt_after: 10ms, ")
    monkeypatch.setattr(middleware, "POOL", tiers.replace("batch: {{", "batch: {{preemptible: true, ", 1))
    engine = emulator()
    async with guarding(engine.app, policy(HOLD, engine="vllm", requests="1")) as guarded:
        guarded.sidecar.background.limits = FAST
        await guarded.ask(asks(max_output_tokens=100), key("nightly"), path=RESPONSES)
        more_important = await guarded.ask({"prompt": "a", "max_tokens": 1}, path="/v1/completions")
        assert more_important.status == 200
        await guarded.until(leases=0, stories=2)
        assert engine.engine.finished == 2
        assert "Preempted" not in guarded.recorder.stories[0].kinds


QUEUED = b'{"id":"resp_1","status":"queued","usage":null}'


@asynccontextmanager
async def told(says: Callable[[bool], Awaitable[tuple[int, bytes]]], more: str = HOLD) -> AsyncIterator[Any]:
    """An engine that answers as the test says, when it gets a response and when it is asked for it; and a proxy."""

    async def script(connection: Connection) -> None:
        while True:
            status, text = await says((await connection.request()).head.startswith(b"GET"))
            await connection.send(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%s" % (status, len(text), text))

    async with raw_engine(script) as engine:
        proxy = ReverseProxy(engine.url)
        async with guarding(proxy, policy(more)) as guarded:
            guarded.sidecar.background.limits = FAST
            yield engine, guarded
        await proxy.close()


async def test_a_client_that_leaves_before_the_answer_does_not_hide_the_id() -> None:
    is_told, has_ended = asyncio.Event(), asyncio.Event()

    async def says(is_asked: bool) -> tuple[int, bytes]:
        if not is_asked:
            await is_told.wait()
        ended = b'{"id":"resp_1","status":"completed","usage":{"input_tokens":3,"output_tokens":5}}'
        return 200, ended if has_ended.is_set() else QUEUED

    async with told(says) as (engine, guarded):
        async with connected(guarded.port) as (_, writer):
            writer.write(post(RESPONSES, json.dumps(asks()).encode()))
            await until(lambda: len(engine.requests) == 1)
        await asyncio.sleep(0.1)
        is_told.set()
        await until(lambda: len(engine.requests) >= 4)
        assert guarded.leases == 1
        has_ended.set()
        await guarded.until(leases=0, stories=1)
        assert guarded.recorder.stories[0].one(Settled).tokens_used == 8


# The engine is away, or knows nothing of it


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (404, b"{}", "response_not_found"),
        (500, b"{}", "engine_unreachable"),
        (401, b"{}", "engine_unreachable"),
        (200, b'{"status":"failed"}', "response_failed"),
    ],
)
async def test_whatever_the_engine_says_of_it_the_lease_ends(status: int, body: bytes, error: str) -> None:
    async def says(is_asked: bool) -> tuple[int, bytes]:
        return (status, body) if is_asked else (200, QUEUED)

    async with told(says) as (_, guarded):
        await guarded.ask(asks(), path=RESPONSES)
        await guarded.until(leases=0, stories=1)
        assert guarded.recorder.stories[0].one(Settled).error == error


async def test_the_key_that_reached_the_engine_asks_for_the_response() -> None:
    async def says(is_asked: bool) -> tuple[int, bytes]:
        return 200, b'{"status":"completed"}' if is_asked else QUEUED

    async with told(says, HOLD + "forward_key: true\n") as (engine, guarded):
        await guarded.ask(asks(), "authorization: Bearer sk-acme", "accept-encoding: gzip", path=RESPONSES)
        await guarded.until(leases=0, stories=1)
    made, asked = engine.requests
    assert asked.head.startswith(b"GET /v1/responses/resp_1 HTTP/1.1")
    assert asked.all(b"authorization") == [b"Bearer sk-acme"]
    assert asked.body == b""
    assert made.all(b"accept-encoding") == [b"identity"], "the id is read from the answer"


# The end of the server


async def test_draining_waits_for_what_runs_in_the_background() -> None:
    async with standing("proxied") as stand:
        await stand.guarded.ask(asks(max_output_tokens=100), path=RESPONSES)
        stand.guarded.sidecar.drain()
        assert stand.guarded.sidecar.under_way == 1
        await asyncio.wait_for(stand.guarded.sidecar.drained(), 60)
        assert (stand.guarded.leases, stand.emulator.engine.finished) == (0, 1)


async def test_closing_gives_back_the_lease_and_says_what_runs_on(caplog: pytest.LogCaptureFixture) -> None:
    async with standing("proxied") as stand:
        await stand.guarded.ask(asks(max_output_tokens=50_000), path=RESPONSES)
        await stand.guarded.sidecar.background.close()
        assert stand.guarded.leases == 0
        assert stand.settled().error == "canceled"
        assert stand.emulator.engine.running == 1, "a restart does not destroy what its clients wait for"
    assert "1 background responses run on at the engine without a lease" in caplog.text


async def test_a_server_that_cancels_its_task_does_not_end_the_following() -> None:
    engine = emulator()
    guarded = Guarded(engine.app, policy(HOLD, engine="vllm"))
    guarded.sidecar.background.limits = FAST
    caller = Caller(guarded.sidecar, json.dumps(asks(stream=True, max_output_tokens=100)).encode(), path=RESPONSES)
    task = caller.begin()
    await until(lambda: any(b"response.created" in message.get("body", b"") for message in caller.sent))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert guarded.leases == 1
    await guarded.until(leases=0, stories=1)
    assert engine.engine.finished == 1
    assert guarded.recorder.stories[0].one(Settled).tokens_used == 103
    await engine.engine.stop()


# Observing


async def test_observing_it_passes_and_enforcing_would_refuse_it() -> None:
    engine = emulator()
    observed = DryRun(engine.app, policy(engine="vllm"))
    async with serving(observed.sidecar) as observed.served:
        answer = await observed.ask(asks(), path=RESPONSES)
        assert answer.json["status"] == "queued"
        page = Answer.parsed(await exchange(observed.port, get(f"{RESPONSES}/{answer.json['id']}")))
        assert page.json["id"] == answer.json["id"]
        await until(lambda: engine.engine.finished == 1)
    assert observed.verdicts() == [(Verdict.REFUSED, "background_not_allowed")]
