"""A request that engines did not serve before its first byte: its spans, its record, and its explanation."""

from __future__ import annotations

import pytest
from opentelemetry.trace import StatusCode

from sidecar.cli.explain_request import text
from sidecar.events import Admitted, Event, FirstByte, Obstacle, Placed, Preempted, Queued, Replayed, ReplayReason
from sidecar.explain.builder import ExplanationBuilder
from sidecar.telemetry.dispatch import EventDispatcher
from sidecar.telemetry.journal import Journal
from sidecar.telemetry.spans.tracer import RequestTracer
from tests.telemetry.span_stories import ARRIVAL_US, Tracing, classified, ns, received, settled

PLACED = Placed(20_000, 4, 3_000, 3, 500, prompt=700, hits=(("b#2", 600), ("c#1", 200)), claimed_us=1_500_000)


def at_engine(after_us: int, engine: str, wait_us: int = 0, placed: Placed | None = None) -> Admitted:
    return Admitted(ARRIVAL_US + after_us, wait_us, 0, None, {}, 3, engine=engine, placed=placed)


def left(after_us: int, engine: str, reason: ReplayReason, times: int) -> list[Event]:
    at_us = ARRIVAL_US + after_us
    return [
        Replayed(at_us, engine, reason),
        Preempted(at_us, at_us - 1000, times, is_unreached=True),
        Queued(at_us, Obstacle.ENGINE, "no engine"),
    ]


STORY: list[Event] = [
    classified(),
    at_engine(60, "a#1"),
    *left(1_000_000, "a#1", ReplayReason.CRASHED, 1),
    at_engine(1_500_000, "c#1", wait_us=1_499_960),
    *left(2_000_000, "c#1", ReplayReason.FULL, 2),
    at_engine(3_500_000, "b#2", wait_us=3_499_960, placed=PLACED),
    FirstByte(ARRIVAL_US + 4_000_000, 200),
    settled(5_000_000),
]


@pytest.fixture
def spans():
    tracing = Tracing()
    observation = tracing.observer.received(received())
    for event in STORY:
        observation.on_event(event)
    found = {}
    for span in sorted(tracing.exporter.get_finished_spans(), key=lambda span: span.start_time):
        found.setdefault(span.name, []).append(span)
    return found


def test_the_admission_has_its_last_engine_and_why(spans):
    (admission,) = spans["admission"]
    assert admission.attributes["admission.engine"] == "b"
    assert admission.attributes["admission.engine.predicted_hit"] == 600
    assert admission.attributes["admission.engine.claimed_s"] == 1.5
    assert admission.attributes["admission.replays"] == 2
    assert admission.status.status_code is StatusCode.UNSET


def test_each_attempt_is_a_span_with_its_engine_and_the_replay_is_its_event(spans):
    crashed, full, served = spans["engine"]
    assert [span.attributes["admission.engine"] for span in spans["engine"]] == ["a", "c", "b"]
    assert [(event.name, event.timestamp) for event in crashed.events] == [("replayed", ns(1_000_000))]
    assert crashed.attributes["admission.replay.reason"] == crashed.attributes["error.type"] == "crashed"
    assert crashed.status.description == "the engine crashed before it answered"
    assert full.attributes["admission.replay.reason"] == "full"
    assert (full.status.status_code, "error.type" in full.attributes) == (StatusCode.UNSET, False)
    assert [event.name for event in full.events] == ["replayed"]
    assert [event.name for event in served.events] == ["first_byte"]


def test_a_request_of_a_pool_of_one_has_none_of_this():
    tracing = Tracing()
    observation = tracing.observer.received(received())
    for event in (classified(), Admitted(ARRIVAL_US + 60, 0, 0, None, {}, 3), settled(5_000_000)):
        observation.on_event(event)
    names = {name for span in tracing.exporter.get_finished_spans() for name in span.attributes}
    assert not {name for name in names if "engine" in name and name != "admission.engine_priority"}


def test_the_explanation_says_why_this_engine_and_what_the_others_did():
    journal = Journal(now_us=lambda: ARRIVAL_US + 6_000_000)
    observation = EventDispatcher(RequestTracer(), [journal]).received(received())
    assert observation is not None
    for event in STORY:
        observation.on_event(event)
    story = ExplanationBuilder(journal, lambda: ["batch"], "default", is_shared=False).explain("request-1")
    assert story is not None
    assert story.conclusion == (
        "admitted at once; engine a crashed before it answered; waited again for 0.50 s; engine c said that it was "
        "full; waited again for 1.50 s"
    )
    lines = {line.split("  ")[0]: line for line in text(story).splitlines()}
    assert lines["engine"].split(maxsplit=1)[1] == (
        "b; it held 3,000 of 20,000 tokens, 500 of them not prefilled, and 3 of 4 requests; it was predicted to have "
        "600 of the prompt's 700 tokens (others: c 200); for 1.50 s the request stood in line for an engine"
    )
    again = [line for line in text(story).splitlines() if line.startswith("waited again")]
    assert [line.rpartition(": ")[2] for line in again] == [
        "engine a crashed before it answered",
        "engine c said that it was full",
    ]
    assert [attempt.engine for attempt in story.preempted] == ["a", "c"]
