"""Deferred work: a request with a deadline waits until then, rises as it comes near, and gains nothing else by it."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta, timezone
from types import ModuleType
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sidecar.admission.deadline import asked_deadline_us
from sidecar.admission.intake import SizedRequest
from sidecar.admission.turn import EndCause, Turn, TurnEnded, TurnUser, refusal_for
from sidecar.engines.watch import EngineHealth, EngineState
from sidecar.errors import AdmissionError, InvalidHeader
from sidecar.events import Risen
from sidecar.explain.builder import ExplanationBuilder
from sidecar.explain.steps import steps
from sidecar.leases.lease_request import LeaseRequest
from sidecar.policy.model import Policy
from sidecar.pools import Pool
from sidecar.pools.pool_figures import RECENT_US
from sidecar.telemetry.dispatch import EventDispatcher
from sidecar.telemetry.journal import Journal
from sidecar.telemetry.logs.request_log import AccessLog, RequestLog
from sidecar.telemetry.spans.tracer import RequestTracer
from tests.support.each import each
from tests.support.middleware import SMALL, App, Caller, Guarded, TestedMiddleware, answer, guarding, key, policy
from tests.support.virtual_time import run_virtually, virtual_now_us
from tests.telemetry.measuring import Measuring

pytestmark = pytest.mark.anyio
BATCH, NORMAL, HIGH, CRITICAL = 3, 2, 1, 0
TIERS = ("critical", "high", "normal", "batch")
KEYS = {"requests": "1", "max_wait": "24h", "deadline": ", max_wait: 10m, max_deadline: 24h"}
DEFERRED = policy(**KEYS)
HOUR_S = 3600


# -- the header


NOW = datetime(2027, 1, 31, 5, 59, tzinfo=timezone.utc).timestamp()


@each(
    ("value", "left_s"),
    [
        ("6h", 6 * HOUR_S),
        (" 1.5 m ", 90),
        ("0s", 0),
        ("2027-01-31T06:00:00Z", 60),
        ("2027-01-31T06:00:00.9999999z", 60),
        ("2027-01-31 06:00Z", 60),
        ("2027-01-31T07:30:00+01:30", 60),
        ("2027-01-30T23:00:00-07:00", 60),
        ("2027-01-31T05:58:00Z", -60),
        ("1970-01-01T00:00:00Z", -NOW),
        ("9999-12-31T23:59:59-23:59", 253402300799 + 86340 - NOW),
    ],
)
def test_a_deadline_is_a_moment_or_a_time_from_now(value: str, left_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)
    assert asked_deadline_us(value.encode(), 5) == 5 + round(left_s * 1e6)


@each(
    "value",
    [
        "",
        "soon",
        "6",
        "-6h",
        "87600h",  # ten years
        "2027-01-31T06:00:00",  # of which zone?
        "2027-01-31",
        "2027-02-30T06:00:00Z",
        "2027-01-31T24:00:01Z",
        "2027-01-31T06:00:60Z",
        "0000-01-31T06:00:00Z",
        "2027-01-31T06:00:00+25:00",
        "20270131T060000Z",
        "1801375140",
        "Sun, 31 Jan 2027 06:00:00 GMT",
        "٢٠٢٧-01-31T06:00:00Z",
        "9" * 10_000 + "h",
    ],
)
def test_anything_else_is_no_deadline_and_the_refusal_says_what_would_be_one(value: str) -> None:
    with pytest.raises(
        InvalidHeader, match=r"x-admission-deadline: .* is no deadline; send .*Z, or a duration such as 6h"
    ):
        asked_deadline_us(value.encode(), 0)


# -- a wait, in virtual time


class Story(TurnUser):
    """One request in the pool: when it rose and to which tier, and how it ended. Times are in seconds."""

    def __init__(self, pool: Pool, request: SizedRequest, of: Policy) -> None:
        self.turn = Turn(pool, of, request, request.ask(), self)
        self.began_s = virtual_now_us() / 1e6
        self.rises: list[tuple[float, int]] = []
        self.client_left = asyncio.get_running_loop().create_future()
        self.may_end = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    @property
    def now_s(self) -> float:
        return round(virtual_now_us() / 1e6 - self.began_s, 1)

    def rose(self, request: SizedRequest) -> None:
        assert request is self.turn.request
        assert request.classification.level == self.turn.lease.tier
        self.rises.append((self.now_s, request.classification.level))

    def disconnect(self) -> asyncio.Future[None]:
        return self.client_left

    async def _run(self) -> tuple[str, float]:
        """How its wait ended, and when. It holds its lease until it `may_end`."""
        try:
            async with self.turn:
                admitted_s = self.now_s
                await self.may_end.wait()
                return "admitted", admitted_s
        except TurnEnded as end:
            return end.cause.value, self.now_s
        except AdmissionError as error:
            return error.code, self.now_s


class World:
    """A pool of one request at a time. At its end every request ends, and nothing is left in the pool."""

    def __init__(self, of: Policy = DEFERRED) -> None:
        self.policy, self.pool = of, Pool(of, virtual_now_us)
        self._stories: list[Story] = []

    async def ask(
        self, tier: str, deadline_s: float | None = None, *, tenant: str | None = None, max_wait_s: float | None = None
    ) -> Story:
        """A request of a tier; it is in the pool when this returns."""
        deadline = None if deadline_s is None else timedelta(seconds=deadline_s)
        asked = LeaseRequest(tier, 10, tenant, 1, 0, max_wait_s, True, None, deadline)
        story = Story(self.pool, asked.sized(self.policy, virtual_now_us()), self.policy)
        self._stories.append(story)
        for _ in range(3):
            await asyncio.sleep(0)
        return story

    def queued(self) -> list[int]:
        """How many wait, by tier."""
        return [requests for _, requests in self.pool._requests.queues()]

    async def __aenter__(self) -> World:
        return self

    async def __aexit__(self, *_: object) -> None:
        for story in self._stories:
            story.may_end.set()
        await asyncio.gather(*(story.task for story in self._stories))
        state = self.pool.state()
        assert (state["leases"], state["waiting"]) == (0, 0)
        assert self.pool._requests.queues() == [(0, 0)] * 4
        await self.pool.close()


def virtually(main: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """A test whose time is virtual."""

    @functools.wraps(main)
    def run() -> None:
        run_virtually(main())  # type: ignore[arg-type]

    run.__signature__ = inspect.Signature()  # type: ignore[attr-defined]
    return run


@virtually
async def test_it_waits_beyond_max_wait_rises_while_half_of_what_remains_is_left_and_ends_at_its_deadline() -> None:
    async with World() as world:
        await world.ask("critical")
        plain, deferred = await world.ask("batch"), await world.ask("batch", 16 * HOUR_S)
        assert await plain.task == ("too long", 600)
        assert await deferred.task == ("deadline", 16 * HOUR_S)
        assert deferred.rises == [(8 * HOUR_S, NORMAL), (12 * HOUR_S, HIGH), (14 * HOUR_S, CRITICAL)]


@virtually
async def test_it_rises_no_higher_than_its_tenant_may_ask_for() -> None:
    async with World() as world:
        await world.ask("critical")
        acme, nightly = [await world.ask("batch", 8 * HOUR_S, tenant=tenant) for tenant in ("acme", "nightly")]
        assert await nightly.task == await acme.task == ("deadline", 8 * HOUR_S)
        assert nightly.rises == []
        assert acme.rises == [(4 * HOUR_S, NORMAL), (6 * HOUR_S, HIGH)]


@virtually
async def test_what_its_tenants_limits_moved_down_waits_until_its_deadline_and_does_not_rise() -> None:
    limited = "limits: {requests_per_minute: 1}\nover_limit: {downgrade: batch}\n"
    async with World(policy(**{**KEYS, "max_wait": "1m", "of_normal": ", max_deadline: 1h"}, acme=limited)) as world:
        await world.ask("critical")
        within, over = [await world.ask("normal", 1000, tenant="acme") for _ in range(2)]
        assert world.queued() == [0, 0, 1, 1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", lambda: time.monotonic() + 1e9)  # no wall clock counts any more
            assert await over.task == await within.task == ("deadline", 1000)
        assert (within.rises, over.rises) == ([(500, HIGH)], [])
        assert over.turn.request.classification.downgraded_from == NORMAL


@virtually
async def test_what_its_tenants_limits_moved_down_waits_no_longer_than_its_new_tier_lets_it() -> None:
    limited = "limits: {requests_per_minute: 1}\nover_limit: {downgrade: batch}\n"
    for queue, end in ((", max_deadline: 15m", ("deadline", 900)), ("", ("too long", 600))):
        of = policy(**{**KEYS, "deadline": f", max_wait: 10m{queue}", "of_normal": ", max_deadline: 48h"}, acme=limited)
        async with World(of) as world:
            await world.ask("critical")
            _, over = [await world.ask("normal", 1800, tenant="acme") for _ in range(2)]
            assert await over.task == end


@virtually
async def test_one_that_rose_goes_before_others_of_its_old_tier_and_is_charged_in_the_new_one() -> None:
    async with World() as world:
        holder = await world.ask("critical")
        await world.ask("batch")
        deferred = await world.ask("batch", 200)
        after = await world.ask("normal")
        await asyncio.sleep(101)
        assert deferred.rises == [(100, NORMAL)]
        assert world.queued() == [0, 0, 2, 1]
        for one in (holder, deferred, after):
            one.may_end.set()
            await one.task
        # By its own arrival, as if it had asked for the better tier at once.
        assert [one.turn.lease.grant.queue_wait_us for one in (deferred, after)] == [101_000_000] * 2  # type: ignore[union-attr]
        assert (deferred.turn.request.classification.level, deferred.turn.request.classification.risen_from) == (
            NORMAL,
            BATCH,
        )


@virtually
async def test_it_rises_as_soon_as_less_remains_than_its_tiers_requests_have_waited_lately() -> None:
    async with World() as world:
        holder = await world.ask("critical")
        await world.ask("batch")
        await asyncio.sleep(300)
        holder.may_end.set()
        await holder.task
        assert world.pool.longest_wait_us(BATCH) == 300_000_000
        hasty, calm = await world.ask("batch", 290), await world.ask("batch", 700)
        assert hasty.rises == [(0, NORMAL)]
        # Of 700 s half is 350 s, and then no more than 300 s have been measured.
        await asyncio.sleep(340)
        assert calm.rises == []
        await asyncio.sleep(20)
        assert calm.rises == [(350, NORMAL)]
        await asyncio.sleep(2 * RECENT_US / 1e6)
        assert world.pool.longest_wait_us(BATCH) == 0


@virtually
async def test_where_the_better_tier_has_no_place_it_keeps_its_own_and_looks_again() -> None:
    async with World(policy(**KEYS, of_normal=", max_requests: 1")) as world:
        await world.ask("critical")
        other = await world.ask("normal", tenant="acme")
        deferred = await world.ask("batch", 800, tenant="acme")
        await asyncio.sleep(500)
        assert deferred.rises == []
        assert world.queued() == [0, 0, 1, 1]
        other.client_left.set_result(None)
        assert (await other.task)[0] == "disconnected"
        await asyncio.sleep(150)
        assert [level for _, level in deferred.rises][:1] == [NORMAL]


@virtually
async def test_the_earlier_of_deadline_and_max_wait_ends_it_each_with_its_own_code() -> None:
    async with World() as world:
        await world.ask("critical")
        short, long = [await world.ask("batch", 3600, max_wait_s=most_s) for most_s in (900, 7200)]
        assert (await short.task, await long.task) == (("too long", 900), ("deadline", 3600))


@virtually
async def test_a_deadline_that_has_passed_is_refused_at_once_and_one_beyond_the_tiers_most_is_capped() -> None:
    async with World() as world:
        for left_s in (0, -1, -1e9):
            late = await world.ask("batch", left_s)
            assert await late.task == ("deadline", 0)
        holder, far = await world.ask("critical"), await world.ask("batch", 10 * 365 * 24 * HOUR_S)
        assert await far.task == ("deadline", 24 * HOUR_S)
        holder.may_end.set()
        await holder.task
        assert (await world.ask("batch", 0)).task.result() == ("deadline", 0)  # also where there would be room


@virtually
async def test_a_client_that_leaves_as_its_request_rises_leaves_nothing() -> None:
    async with World() as world:
        await world.ask("critical")
        for at_s in (99.999999, 100, 100.000001):
            deferred = await world.ask("batch", 200)
            asyncio.get_running_loop().call_later(at_s, deferred.client_left.set_result, None)
            assert (await deferred.task)[0] == "disconnected"
            assert world.queued() == [0, 0, 0, 0]


@virtually
async def test_a_place_that_comes_free_as_it_rises_is_given_once() -> None:
    async with World() as world:
        for at_s in (99.999999, 100, 100.000001):
            holder, deferred = await world.ask("critical"), await world.ask("batch", 200)
            asyncio.get_running_loop().call_later(at_s, holder.may_end.set)
            await holder.task
            deferred.may_end.set()
            assert (await deferred.task)[0] == "admitted"


@virtually
async def test_one_that_waits_again_still_has_its_deadline_and_is_not_charged_twice() -> None:
    async with World() as world:
        deferred = await world.ask("batch", 16 * HOUR_S)
        await asyncio.sleep(2 * HOUR_S)
        again = asyncio.ensure_future(deferred.turn.hand_back(others_answer=True))
        await world.ask("critical")  # has its room now
        (end,) = await asyncio.gather(again, return_exceptions=True)
        assert isinstance(end, TurnEnded)
        assert (end.cause.value, deferred.now_s) == ("deadline", 16 * HOUR_S)
        # Fourteen hours remained: half of them, and then half of the rest.
        assert deferred.rises == [(9 * HOUR_S, NORMAL), (12.5 * HOUR_S, HIGH), (14.25 * HOUR_S, CRITICAL)]
        assert deferred.turn.lease.ticket.has_returned


@virtually
async def test_a_refusal_says_whether_room_or_an_engine_was_missing() -> None:
    async with World() as world:
        watch, end = EngineHealth(), TurnEnded(EndCause.DEADLINE, None)
        for state, why in (
            (EngineState.UP, "no room came free for tier batch"),
            (EngineState.DOWN, "no engine answered"),
        ):
            watch.state = state
            refusal = refusal_for(watch, world.pool, world.policy, end, level=BATCH)  # type: ignore[arg-type]
            assert refusal.message == f"{why} before the deadline of the request; send it again with a later one"


# -- seen from outside, in virtual time


class Engine:
    """Answers after 150 seconds."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(150)
        await answer(send, b"{}")


@virtually
async def test_everything_that_listens_says_that_it_rose_and_no_figure_of_a_tiers_waits_counts_it() -> None:
    journal, measuring, exporter = Journal(now_us=virtual_now_us), Measuring(), InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    logger = logging.Logger("test")  # no other test's handlers
    lines = list[logging.LogRecord]()
    logger.handle = lines.append  # type: ignore[method-assign]
    tracer = RequestTracer(provider, starvation_limits_s=dict.fromkeys(TIERS, 1.0))
    listeners = [journal, measuring.requests(), RequestLog(logger, access=AccessLog.ALL)]
    pool = Pool(DEFERRED, virtual_now_us)
    sidecar = TestedMiddleware(
        Engine(), policy=DEFERRED, pool=pool,
        observer=EventDispatcher(tracer, listeners),
    )  # fmt: skip
    holder, other = Caller(sidecar, SMALL).begin(), Caller(sidecar, SMALL).begin()
    await asyncio.sleep(0)
    headers = [(b"authorization", b"Bearer sk-acme"), (b"x-priority", b"batch"), (b"x-request-id", b"it")]
    deferred = Caller(sidecar, SMALL, headers=[*headers, (b"x-admission-deadline", b"500s")])
    asked = deferred.begin()
    await asyncio.sleep(140)
    assert [wait is None for wait in pool.oldest()] == [True, True, False, True]
    await holder
    await asyncio.sleep(120)  # the second runs until 300
    assert [wait is None for wait in pool.oldest()] == [True] * 4
    await asyncio.gather(asked, other)
    await pool.close()

    answered = dict(deferred.sent[0]["headers"])
    assert [answered[b"x-admission-" + name] for name in (b"tier", b"risen-from", b"wait-ms")] == [
        b"normal", b"batch", b"300000",
    ]  # fmt: skip
    story = ExplanationBuilder(journal, lambda: TIERS, "lab", is_shared=False).explain("it")
    assert story is not None
    assert story.asked is not None
    assert (story.asked.tier, story.asked.risen_from) == ("normal", "batch")
    assert "it rose from batch, as its deadline came near" in " ".join(step.text for step in steps(story))
    (span,) = (
        span.attributes for span in exporter.get_finished_spans()
        if span.name == "admission" and span.attributes and "admission.risen_from" in span.attributes
    )  # fmt: skip
    assert (span["admission.tier"], span["admission.risen_from"]) == ("normal", "batch")
    assert "admission.starved_too_long" not in span
    (line,) = (line for line in lines if getattr(line, "risen_from", None) is not None)
    assert (line.tier, line.risen_from) == ("normal", "batch")  # type: ignore[attr-defined]
    assert measuring.values("admission.risen") == {("default", "normal"): 1}
    assert measuring.values("admission.admitted")["default", "normal"] == 3
    assert measuring.sums("admission.queue_wait")["admitted", "default", "normal"] == (2, 150.0)


# -- over HTTP


PRIORITY = ("x-priority: batch", key("acme"))
CHAT_ANSWER = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}],
}
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def deferred(deadline: str) -> dict[str, str]:
    return {"x-priority": "batch", "x-admission-deadline": deadline}


def openai_client(openai: ModuleType, guarded: Guarded) -> Any:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{guarded.port}/v1", api_key="sk-acme")


async def test_an_openai_client_waits_until_its_deadline_and_gets_a_504_that_it_does_not_repeat(
    openai: ModuleType,
) -> None:
    app = App(is_held=True)
    async with guarding(app, policy("keep_alive: 20ms\n", **KEYS)) as guarded, openai_client(openai, guarded) as client:
        holder = asyncio.ensure_future(guarded.ask())
        await guarded.until(leases=1)
        create = client.chat.completions.create
        with pytest.raises(openai.InternalServerError) as whole:
            await create(model="m", messages=MESSAGES, extra_headers=deferred("2s"))
        assert (whole.value.status_code, whole.value.code) == (504, "deadline")
        assert "no room came free for tier high before the deadline of the request" in whole.value.message
        stream = await create(model="m", messages=MESSAGES, extra_headers=deferred("300ms"), stream=True)
        with pytest.raises(openai.APIError) as streamed:
            _ = [event async for event in stream]
        assert streamed.value.code == "deadline"
        with pytest.raises(openai.InternalServerError) as late:
            await create(model="m", messages=MESSAGES, extra_headers=deferred("2026-01-31T06:00:00Z"))
        assert (late.value.status_code, late.value.code) == (504, "deadline")
        app.release()
        await holder
    stories = guarded.recorder.stories
    assert len(stories) == 4  # none was repeated
    assert [event.tier for event in stories[1].events if isinstance(event, Risen)] == ["normal", "high"]


async def test_an_openai_client_that_is_deferred_gets_its_answer_whole_or_streamed(openai: ModuleType) -> None:
    app = App(is_held=True, answer=json.dumps(CHAT_ANSWER).encode())
    async with guarding(app, policy("keep_alive: 20ms\n", **KEYS)) as guarded, openai_client(openai, guarded) as client:
        for streams in (False, True):
            holder = asyncio.ensure_future(guarded.ask())
            await guarded.until(leases=1)
            create, headers = client.chat.completions.with_raw_response.create, deferred("9999-12-31T23:59:59Z")
            asked = asyncio.ensure_future(create(model="m", messages=MESSAGES, extra_headers=headers, stream=streams))
            await guarded.until(waiting=1)
            app.release(2)
            answer = await asked
            await holder
            assert answer.headers["x-admission-tier"] == "batch"
            assert answer.headers["x-admission-ignored"] == "x-admission-deadline"  # that of the tier is earlier
            assert "x-admission-risen-from" not in answer.headers
            if streams:
                _ = [event async for event in answer.parse()]
            else:
                assert answer.parse().choices[0].message.content == "hello"


async def test_a_header_that_says_two_things_or_a_tier_that_takes_none_is_a_400() -> None:
    async with guarding(App(), DEFERRED) as guarded:
        twice = "x-admission-deadline: 6h\r\nx-admission-deadline: 7h"
        assert (await guarded.ask(None, *PRIORITY, twice)).is_error(400, "invalid_header", "given twice")
        none = await guarded.ask(None, "x-admission-deadline: 6h")
        assert none.is_error(400, "invalid_header", "tier normal takes no request with a deadline; ", "do: batch")
        assert (await guarded.ask(None, *PRIORITY, "x-admission-deadline: soon")).is_error(400, "invalid_header")
        assert (await guarded.ask(None, *PRIORITY, "x-admission-deadline: 6h")).status == 200
    async with guarding(App()) as guarded:
        none = await guarded.ask(None, *PRIORITY, "x-admission-deadline: 6h")
        assert none.is_error(400, "invalid_header", "those with `queue: {max_deadline: ...}` do: none here")
