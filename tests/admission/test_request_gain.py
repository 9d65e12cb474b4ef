"""Service gain of whole requests, on a clock that the app moves."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from sidecar.admission.intake import RequestIntake, SizedRequest
from sidecar.admission.usage import UsageReader
from sidecar.events import Outcome, ServiceGain
from sidecar.gain.token_deadlines import Objective, asked_slo
from sidecar.pools import Pool
from tests.support.middleware import (
    CHAT,
    App,
    Caller,
    Guarded,
    Recorder,
    TestedMiddleware,
    answer,
    chat,
    chunk,
    guarding,
    key,
    policy,
    start,
    whole_body,
)

pytestmark = pytest.mark.anyio

SLO = "30s}, slo: {ttft: 1s, tpot: 100ms}, gain: {weight: 4"
"""Of tier normal; 10 tokens are due 1.0, 1.1, ... 1.9 s after the arrival."""
EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM = json.dumps(chat(stream=True)).encode()
WHOLE = json.dumps(chat()).encode()
OBJECTIVE = Objective(1_000_000, 100_000, 4)


class Clocked(Guarded):
    """A controller on a clock that stands still until it is moved."""

    def __init__(self, app: Any, max_wait: str = SLO, **settings: str) -> None:
        self.now_us = 1_000_000
        with_policy = policy(max_wait=max_wait, **settings)
        self.recorder, self.served = Recorder(), None
        self.pool = Pool(with_policy, clock=lambda: self.now_us)
        self.sidecar = TestedMiddleware(
            app,
            policy=with_policy,
            pool=self.pool,
            observer=self.recorder,
        )

    def gain(self) -> ServiceGain | None:
        """The gain that the only request's end reports."""
        (story,) = self.recorder.stories
        return story.end.gain

    def counted(self) -> tuple[int, int, dict[str, int]]:
        """What the state says of the tier: earned, attainable, and the outcomes that there were."""
        (tier,) = self.sidecar.state()["gain"]["tiers"]  # type: ignore[index]
        return tier["earned"], tier["attainable"], {name: count for name, count in tier["outcomes"].items() if count}


def streaming(clocked: Callable[[], Clocked], *gaps_s: float, events: bytes = EVENT, usage: int | None = None) -> Any:
    """An app that sends an event after each gap, and then the engine's count."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await whole_body(receive)
        await start(send, content_type=b"text/event-stream")
        for gap_s in gaps_s:
            clocked().now_us += round(gap_s * 1e6)
            await chunk(send, events)
        if usage is not None:
            await chunk(send, b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":%d}}\n\n' % usage)
        await chunk(send, DONE, more=False)

    return app


async def streamed(*gaps_s: float, body: bytes = STREAM, **more: Any) -> Clocked:
    guarded: Clocked = Clocked(streaming(lambda: guarded, *gaps_s, **more))
    await Caller(guarded.sidecar, body).run()
    assert guarded.leases == 0
    return guarded


@pytest.mark.parametrize(
    ("first_s", "gap_s", "earned", "outcome"),
    [(0.9, 0.09, 40, "met"), (1.05, 0.01, 36, "ttft"), (0.5, 0.2, 20, "tpot")],  # its sixth comes when due, at 1.5 s
)
async def test_each_token_in_time_earns_its_part(first_s: float, gap_s: float, earned: int, outcome: str) -> None:
    guarded = await streamed(first_s, *[gap_s] * 9, usage=10)
    assert guarded.gain() == ServiceGain(earned, 40, outcome)
    assert guarded.counted() == (earned, 40, {outcome: 1})


async def test_events_of_several_tokens_are_counted_as_the_engine_says() -> None:
    """An engine that sends eight tokens at once is learned as such, and is not late for that."""
    guarded: Clocked = Clocked(streaming(lambda: guarded, 0.5, *[0.75] * 3, usage=32))
    for _ in range(40):
        await Caller(guarded.sidecar, STREAM).run()
    assert guarded.recorder.stories[-1].end.gain == ServiceGain(128, 128, "met")
    speed = guarded.sidecar.gain.speeds.engine(None)
    assert speed.tokens_per_event == pytest.approx(8, rel=0.1)


async def test_an_answer_that_does_not_stream_is_due_as_a_whole() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await whole_body(receive)
        guarded.now_us += took_us
        await answer(send, b'{"usage":{"prompt_tokens":9,"completion_tokens":10}}')

    for took_us, gain in (  # noqa: B007  # the app reads it
        (1_800_000, ServiceGain(40, 40, "met")),
        (1_900_000, ServiceGain(0, 40, "tpot")),
    ):
        guarded = Clocked(app)
        await Caller(guarded.sidecar, WHOLE).run()
        assert guarded.gain() == gain


async def test_an_answer_that_says_nothing_of_its_length_counts_by_what_was_expected() -> None:
    guarded = Clocked(App())
    await Caller(guarded.sidecar, WHOLE).run()
    assert guarded.gain() == ServiceGain(40, 40, "met")


async def test_no_count_makes_an_answer_longer_than_it_can_be() -> None:
    """What looks like usage may be a tool of the client's, which the answer repeats."""
    guarded = await streamed(0.5, *[0.01] * 9, usage=2**40)
    gain = guarded.gain()
    assert gain is not None
    assert gain.attainable <= 4 * 64 * 11
    tier = guarded.sidecar.gain.ledger.tier("normal")
    assert tier.mean_tokens is not None
    assert tier.mean_tokens <= 64 * 11


async def test_an_error_of_the_engine_is_a_refusal_and_a_mistake_of_the_client_is_none() -> None:
    for status, gain in (
        (400, None),
        (422, None),
        (429, ServiceGain(0, 40, "refused")),
        (500, ServiceGain(0, 40, "refused")),
    ):

        async def app(scope: Any, receive: Any, send: Any, status: int = status) -> None:
            await whole_body(receive)
            await answer(send, b'{"error":{}}', status)

        guarded = Clocked(app)
        await Caller(guarded.sidecar, STREAM).run()
        assert guarded.gain() == gain, status


async def test_a_request_that_is_refused_counts_by_what_its_tier_answers() -> None:
    guarded: Clocked = Clocked(streaming(lambda: guarded, 0.1, usage=6), max_wait="0s" + SLO[3:], requests="1")
    await Caller(guarded.sidecar, STREAM).run()
    assert guarded.counted() == (24, 24, {"met": 1})
    lease = await guarded.pool.enter(guarded_ask())
    await Caller(guarded.sidecar, STREAM).run()
    assert guarded.recorder.stories[-1].end.gain == ServiceGain(0, 24, "refused")
    lease.settle(0)


def guarded_ask() -> Any:
    from sidecar.pools import Ask

    return Ask(2, "acme", 1, 10, 1)


async def test_a_client_that_leaves_while_it_waits_has_abandoned_it() -> None:
    guarded = Clocked(App(), requests="1")
    lease = await guarded.pool.enter(guarded_ask())
    caller = Caller(guarded.sidecar, STREAM)
    running = caller.begin()
    await guarded.until(waiting=1)
    caller.leave()
    await running
    assert guarded.gain() == ServiceGain(0, 40, "abandoned")
    lease.settle(0)


async def test_a_client_that_leaves_in_the_middle_has_earned_what_came_in_time() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await whole_body(receive)
        await start(send, content_type=b"text/event-stream")
        for _ in range(3):
            guarded.now_us += 10_000
            await chunk(send, EVENT)
        caller.leave()
        assert (await receive())["type"] == "http.disconnect"

    guarded = Clocked(app)
    caller = Caller(guarded.sidecar, STREAM)
    await caller.run()
    assert guarded.gain() == ServiceGain(12, 40, "abandoned")


async def test_a_policy_without_an_objective_follows_nothing() -> None:
    guarded: Clocked = Clocked(streaming(lambda: guarded, 0.1), max_wait="30s}, slo: {ttft: 1s")
    await Caller(guarded.sidecar, STREAM).run()
    assert guarded.gain() is None
    assert "gain" not in guarded.sidecar.state()
    assert not guarded.sidecar.gain.speeds.engines


async def test_the_events_before_the_first_token_are_not_the_first_token() -> None:
    """The responses API begins with events at once."""
    created = b'event: response.created\ndata: {"type":"response.created"}\n\n'
    delta = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"x"}\n\n'

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await whole_body(receive)
        await start(send, content_type=b"text/event-stream")
        await chunk(send, created)
        guarded.now_us += 1_100_000
        await chunk(send, delta)
        await chunk(send, b"", more=False)

    guarded = Clocked(app)
    body = json.dumps({"model": "m", "input": "hi", "max_output_tokens": 5, "stream": True}).encode()
    await Caller(guarded.sidecar, body, path="/v1/responses").run()
    gain = guarded.gain()
    assert gain is not None
    assert gain.slo == "ttft"


async def test_the_engines_speed_is_learned_from_what_passes() -> None:
    guarded: Clocked = Clocked(streaming(lambda: guarded, 0.2, *[0.02] * 80, usage=81))
    body = json.dumps(chat(stream=True, max_tokens=100)).encode()
    for _ in range(40):
        await Caller(guarded.sidecar, body).run()
    (engine,) = guarded.sidecar.state()["gain"]["engines"]  # type: ignore[index]
    assert engine["is_known"]
    assert engine["token_us"] == pytest.approx(20_000, rel=0.1)
    assert engine["first_error"] < 0.2
    assert (engine["first_samples"], engine["token_samples"]) == (40, 40)


async def test_a_client_that_reads_slowly_does_not_make_the_engine_look_slow() -> None:
    """Its backpressure begins when the buffers of its connection are full: only tokens before that are looked at."""
    guarded: Clocked = Clocked(streaming(lambda: guarded, 0.2, *[0.02] * 70, *[5.0] * 20, usage=91))
    body = json.dumps(chat(stream=True, max_tokens=100)).encode()
    for _ in range(40):
        await Caller(guarded.sidecar, body).run()
    assert guarded.sidecar.gain.speeds.engine(None).coefficients.token_us == pytest.approx(20_000, rel=0.1)


async def test_the_dry_run_measures_what_clients_really_get() -> None:
    guarded: Clocked = Clocked(streaming(lambda: guarded, 0.5, *[0.2] * 9, usage=10), grace="2s\nmode: observe")
    await Caller(guarded.sidecar, STREAM).run()
    assert guarded.gain() == ServiceGain(20, 40, "tpot")
    speed = guarded.sidecar.gain.speeds.engine(None)
    assert (speed.running, speed.unprefilled) == (0, 0)


# -- headers


@pytest.mark.parametrize(
    ("headers", "objective", "ignored"),
    [
        ({b"x-slo-ttft-ms": b"2500"}, Objective(2_500_000, 100_000, 4), []),
        ({b"x-llm-d-slo-tpot-ms": b" 250.5 "}, Objective(1_000_000, 250_500, 4), []),
        ({b"x-slo-ttft-ms": b"999"}, OBJECTIVE, ["x-slo-ttft-ms"]),
        (
            {b"x-slo-ttft-ms": b"5000", b"x-llm-d-slo-ttft-ms": b"2000"},
            Objective(2_000_000, 100_000, 4),
            ["x-slo-ttft-ms"],
        ),
        *(
            ({b"x-slo-tpot-ms": value}, OBJECTIVE, ["x-slo-tpot-ms"])
            for value in (
                b"",
                b"-1",
                b"1e9",
                b"nan",
                b"inf",
                b"2s",
                b"1_000",
                b"9" * 10,
                b"\xb2",
                b"0x10",
                b"1.",
                b"5000,1",
            )
        ),
    ],
)
def test_a_header_loosens_its_tiers_objective_and_never_tightens_it(
    headers: dict[bytes, bytes], objective: Objective, ignored: list[str]
) -> None:
    assert asked_slo(headers, OBJECTIVE) == (objective, ignored)


async def test_a_header_that_does_not_count_is_reported_and_one_that_does_is_used() -> None:
    guarded: Clocked = Clocked(streaming(lambda: guarded, 1.5, *[0.01] * 9, usage=10))
    headers = [(b"x-llm-d-slo-ttft-ms", b"2000"), (b"x-slo-tpot-ms", b"1")]
    caller = Caller(guarded.sidecar, STREAM, headers=headers)
    await caller.run()
    assert guarded.gain() == ServiceGain(40, 40, "met")
    assert dict(caller.sent[0]["headers"])[b"x-admission-ignored"] == b"x-slo-tpot-ms"


async def test_a_header_with_two_values_is_refused() -> None:
    async with guarding(App(), policy(max_wait=SLO)) as guarded:
        answered = await guarded.ask(None, key("acme"), "x-slo-ttft-ms: 5000", "x-slo-ttft-ms: 9000")
        assert answered.is_error(400, "invalid_header", "x-slo-ttft-ms")


# -- attempts


async def test_whatever_becomes_of_its_attempts_a_request_leaves_no_engine_behind() -> None:
    """Preempted before its first byte, replayed at another engine, and refused at last."""
    seen = []

    class Noting(App):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                seen.append(dict(speed.__dict__))
            await super().__call__(scope, receive, send)

    guarded = Clocked(Noting())
    speed = guarded.sidecar.gain.speeds.engine(None)
    await Caller(guarded.sidecar, STREAM).run()
    assert seen[0]["running"] == 1
    gain = guarded.sidecar.gain
    request = await sized(guarded)
    followed = gain.follow(request, guarded.sidecar.snapshot, 0)
    assert followed is not None
    followed.sent("a#1", UsageReader()).feed(EVENT)
    followed.first_byte(200)
    followed.taken_back()
    followed.sent("b#1", UsageReader())
    assert gain.speeds.engine("b").running == 1
    assert followed.refused(503, is_abandoned=False) == ServiceGain(0, 40, "refused")
    for engine in gain.speeds.engines.values():
        assert (engine.running, engine.generating.now, engine.unprefilled) == (0, 0, 0)


async def test_a_second_attempt_is_measured_from_the_first_arrival() -> None:
    guarded = Clocked(App())
    request = await sized(guarded)
    followed = guarded.sidecar.gain.follow(request, guarded.sidecar.snapshot, guarded.now_us)
    assert followed is not None
    followed.sent(None, UsageReader()).feed(EVENT)
    followed.taken_back()
    guarded.now_us += 1_500_000
    followed.sent(None, UsageReader()).feed(EVENT)
    gain = followed.settled(Outcome.COMPLETED, 200, is_failure=False)
    assert gain is not None
    assert (gain.earned, gain.slo) == (0, "ttft")


async def sized(guarded: Clocked) -> SizedRequest:
    snapshot = guarded.sidecar.snapshot
    intake = RequestIntake(snapshot, snapshot.endpoints[CHAT], {}, guarded.now_us)
    intake.check_head([], {})
    request = intake.feed({"type": "http.request", "body": STREAM}, guarded.now_us)
    assert request is not None
    return request
