"""The spans of a request that gave its room to a more important one, and began anew."""

import pytest
from opentelemetry.trace import StatusCode

from tests.telemetry.span_stories import (
    TWICE_PREEMPTED,
    Tracing,
    admitted,
    classified,
    in_vain,
    interval,
    ns,
    parent_id,
    preempted,
    received,
    span_id,
)


@pytest.fixture
def tracing():
    return Tracing()


def play(tracing, *events):
    """The spans by name, in order of their beginnings."""
    observation = tracing.observer.received(received())
    for event in events:
        observation.on_event(event)
    found = {}
    for span in sorted(tracing.exporter.get_finished_spans(), key=lambda span: span.start_time):
        found.setdefault(span.name, []).append(span)
    return found


def test_every_wait_and_every_attempt_is_a_bar_of_its_own(tracing):
    spans = play(tracing, *TWICE_PREEMPTED)

    (admission,) = spans["admission"]
    waits, attempts = spans["admission.queued"], spans["engine"]
    assert interval(admission) == (ns(0), ns(7_000_000))
    assert [*map(interval, waits)] == [
        (ns(50), ns(1_000_000)),
        (ns(3_000_000), ns(5_000_000)),
        (ns(5_500_000), ns(6_000_000)),
    ]
    assert [*map(interval, attempts)] == [
        (ns(1_000_000), ns(3_000_000)),
        (ns(5_000_000), ns(5_500_000)),
        (ns(6_000_000), ns(7_000_000)),
    ]
    assert {parent_id(span) for span in (*waits, *attempts)} == {span_id(admission)}
    assert len({span_id(span) for span in (*waits, *attempts)}) == 6
    obstacles = [wait.attributes["admission.obstacle"] for wait in waits]
    assert obstacles == ["no_room", "preempted", "preempted"]


def test_a_lost_attempt_says_so_and_is_no_error_of_the_engine(tracing):
    *lost, last = play(tracing, *TWICE_PREEMPTED)["engine"]

    for attempt, at_us in zip(lost, (3_000_000, 5_500_000), strict=True):
        assert [(event.name, event.timestamp) for event in attempt.events] == [("preempted", ns(at_us))]
        assert attempt.attributes["admission.preempted"] is True
        assert attempt.attributes["gen_ai.operation.name"] == "chat"
        assert attempt.attributes.keys().isdisjoint({"error.type", "gen_ai.usage.output_tokens"})
        assert attempt.status.status_code is StatusCode.UNSET
    assert [event.name for event in last.events] == ["first_byte"]
    assert last.attributes["gen_ai.response.time_to_first_chunk"] == 0.2
    assert "admission.preempted" not in last.attributes


def test_waits_are_reported_once_with_the_last_figures(tracing):
    spans = play(tracing, *TWICE_PREEMPTED)

    (admission,), (starved, again) = spans["admission"], spans["admission.starved"]
    assert [interval(starved), interval(again)] == [(ns(3_000_000), ns(5_000_000)), (ns(5_500_000), ns(6_000_000))]
    assert [parent_id(starved), parent_id(again)] == [span_id(wait) for wait in spans["admission.queued"][1:]]
    assert [bar.attributes["admission.served_ahead.high"] for bar in (starved, again)] == [900, 950]
    reported = admission.attributes
    assert reported["admission.preemptions"] == 2
    assert (reported["admission.queue_wait_s"], reported["admission.starvation_s"]) == (5.99995, 3.0)
    assert reported["gen_ai.latency.time_in_queue"] == 5.99995
    assert (reported["admission.decision"], reported["admission.outcome"]) == ("admitted", "completed")


def test_nothing_is_exported_before_the_request_has_ended(tracing):
    """Its spans leave together, so that who samples at the tail sees how it ended."""
    observation = tracing.observer.received(received())
    for event in TWICE_PREEMPTED[:-1]:
        observation.on_event(event)

    assert not tracing.exporter.get_finished_spans()


@pytest.mark.parametrize(
    ("code", "status", "is_error"),
    [("queue_timeout", 503, True), ("client_left", None, False), ("canceled", None, True)],
)
def test_one_that_is_not_admitted_again_ends_in_its_wait(tracing, code, status, is_error):
    first = admitted(100, 50, starvation_us=20, served_ahead={"high": 900})
    end = in_vain(9_000_100, code, status)
    spans = play(tracing, classified(), first, *preempted(4_000_000, 100), end)

    (admission,), (wait,), (attempt,) = spans["admission"], spans["admission.queued"], spans["engine"]
    assert interval(attempt) == (ns(100), ns(4_000_000))
    assert interval(wait) == (ns(4_000_000), ns(9_000_100))
    assert interval(spans["admission.starved"][0]) == (ns(4_000_000), ns(9_000_100))
    assert interval(admission) == (ns(0), ns(9_000_100))
    reported = admission.attributes
    assert (reported["admission.queue_wait_s"], reported["admission.starvation_s"]) == (9.00005, 9.00002)
    assert (reported["admission.decision"], reported["admission.reason"]) == ("admitted", code)
    assert reported["admission.tokens.used"] == 0
    assert attempt.status.status_code is StatusCode.UNSET
    assert admission.status.status_code is (StatusCode.ERROR if is_error else StatusCode.UNSET)
    assert reported.get("error.type") == (code if is_error else None)
    if is_error:
        assert admission.status.description.startswith(f"{code}: ")
        assert "waited again" in admission.status.description
