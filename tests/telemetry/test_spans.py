import itertools
import re

import msgspec
import pytest
from opentelemetry.trace import SpanKind, StatusCode

from sidecar import errors
from sidecar.events import Expectation, Outcome
from tests.telemetry.span_stories import (
    EXPECTED,
    Tracing,
    admitted,
    classified,
    first_byte,
    interval,
    ns,
    parent_id,
    queued,
    received,
    refused,
    settled,
    span_id,
)


def every_error():
    """Everything that the sidecar can answer."""
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "code")]


@pytest.fixture
def tracing():
    return Tracing()


def test_a_request_admitted_at_once_is_two_spans(tracing):
    spans = tracing.play(classified(), admitted(60), first_byte(20_060), settled(90_000))

    assert set(spans) == {"admission", "engine"}
    admission, engine = spans["admission"], spans["engine"]
    assert (admission.kind, engine.kind) == (SpanKind.SERVER, SpanKind.CLIENT)
    assert parent_id(admission) is None
    assert parent_id(engine) == span_id(admission)
    assert interval(admission) == (ns(0), ns(90_000))
    assert interval(engine) == (ns(60), ns(90_000))
    assert [(event.name, event.timestamp, dict(event.attributes)) for event in engine.events] == [
        ("first_byte", ns(20_060), {})
    ]
    assert not admission.events
    assert admission.status.status_code is engine.status.status_code is StatusCode.UNSET


def test_the_attributes_of_a_request_admitted_at_once(tracing):
    by_key = msgspec.structs.replace(classified(), key="ci")
    spans = tracing.play(by_key, admitted(60), first_byte(20_060), settled(90_000))

    assert dict(spans["admission"].attributes) == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "admission.request_id": "request-1",
        "admission.tier": "batch",
        "admission.tenant": "acme",
        "admission.key": "ci",
        "admission.source": "header",
        "admission.decision": "admitted",
        "admission.outcome": "completed",
        "admission.queue_wait_s": 0.0,
        "admission.starvation_s": 0.0,
        "admission.tokens.reserved": 800,
        "admission.tokens.used": 712,
        "admission.level": 3,
        "admission.engine_priority": 10,
    }
    assert dict(spans["engine"].attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "llama-3.1-8b",
        "gen_ai.request.max_tokens": 256,
        "gen_ai.request.stream": True,
        "gen_ai.response.time_to_first_chunk": 0.02,
        "gen_ai.usage.input_tokens": 512,
        "gen_ai.usage.output_tokens": 200,
    }


def test_what_it_was_expected_to_use_and_how_its_lease_moved(tracing):
    expected = msgspec.structs.replace(classified(), expected=EXPECTED)
    grown = msgspec.structs.replace(settled(90_000), held_tokens=900, growths=2)
    written = dict(tracing.play(expected, admitted(60), first_byte(20_060), grown)["admission"].attributes)
    assert {name: written[name] for name in sorted(written) if re.search("output|most|held|overlap|growths", name)} == {
        "admission.growths": 2,
        "admission.output.expected": 100,
        "admission.output.quantile": 0.95,
        "admission.output.source": "own",
        "admission.overlap": 0.83,
        "admission.tokens.held": 900,
        "admission.tokens.most": 1000,
    }


def test_where_nothing_was_known_and_nothing_moved_only_that_is_written(tracing):
    unknown = Expectation(100, 1, "maximum", 0, 0.0, overlap=1.0, most_tokens=800)
    still = msgspec.structs.replace(settled(90_000), held_tokens=800)
    events = msgspec.structs.replace(classified(), expected=unknown), admitted(60), first_byte(20_060), still
    with_learning = dict(tracing.play(*events)["admission"].attributes)
    assert with_learning.pop("admission.output.source") == "maximum"
    assert not [name for name in with_learning if re.search("output|most|held|overlap|growths", name)]


def test_the_operation_is_named_as_the_conventions_name_it(tracing):
    spans = tracing.play(classified(api="completions", stream=False), admitted(), first_byte(900), settled(1000))

    assert spans["engine"].attributes["gen_ai.operation.name"] == "text_completion"
    assert "gen_ai.response.time_to_first_chunk" not in spans["engine"].attributes


def test_a_request_that_waited_has_a_queued_span(tracing):
    spans = tracing.play(classified(), queued(), admitted(2_100_000, wait_us=2_099_950), settled(3_000_000))

    assert set(spans) == {"admission", "admission.queued", "engine"}
    waited = spans["admission.queued"]
    assert waited.kind is SpanKind.INTERNAL
    assert parent_id(waited) == span_id(spans["admission"])
    assert interval(waited) == (ns(50), ns(2_100_000))
    assert dict(waited.attributes) == {
        "admission.tier": "batch",
        "admission.obstacle": "no_room",
        "admission.explanation": "the pool has no room",
    }
    assert spans["admission"].attributes["admission.queue_wait_s"] == 2.09995
    assert spans["admission"].attributes["gen_ai.latency.time_in_queue"] == 2.09995
    assert spans["admission"].attributes["admission.starvation_s"] == 0.0


def test_starvation_is_a_bar_of_its_own_from_the_first_overtaking_to_admission(tracing):
    starved = admitted(2_100_000, 2_099_950, starvation_us=1_400_000, served_ahead={"high": 900, "normal": 50})
    spans = tracing.play(classified(), queued(), starved, settled(3_000_000))

    assert set(spans) == {"admission", "admission.queued", "admission.starved", "engine"}
    bar = spans["admission.starved"]
    assert bar.kind is SpanKind.INTERNAL
    assert parent_id(bar) == span_id(spans["admission.queued"])
    assert interval(bar) == (ns(700_000), ns(2_100_000))
    served_ahead = {"admission.served_ahead.high": 900, "admission.served_ahead.normal": 50}
    assert dict(bar.attributes) == {"admission.tier": "batch", **served_ahead}
    assert spans["admission"].attributes["admission.starvation_s"] == 1.4
    assert served_ahead.items() <= spans["admission"].attributes.items()


def test_overtaken_in_the_microsecond_of_its_admission_is_not_starved(tracing):
    spans = tracing.play(classified(), queued(), admitted(100, 50, served_ahead={"high": 900}), settled(1000))

    assert "admission.starved" not in spans
    assert spans["admission"].attributes["admission.served_ahead.high"] == 900


def test_an_answer_that_is_the_clients_doing_has_its_reason_and_is_no_error(tracing):
    admission = tracing.play(refused("invalid_api_key", 401))["admission"]

    assert admission.status.status_code is StatusCode.UNSET
    assert dict(admission.attributes) == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 401,
        "admission.request_id": "request-1",
        "admission.decision": "refused",
        "admission.reason": "invalid_api_key",
        "admission.queue_wait_s": 0.0,
        "admission.starvation_s": 0.0,
    }


def test_every_refusal_is_a_span_with_its_status_and_its_reason():
    wrong = []
    for error, waited_us in itertools.product(every_error(), (0, 900_000)):
        waiting = [queued()] if waited_us else []
        end = refused(error.code, error.status, after_us=waited_us + 50, queue_wait_us=waited_us)
        admission = Tracing().play(classified(), *waiting, end)["admission"]
        is_servers = error.status >= 500
        found = admission.status.status_code, admission.status.description, dict(admission.attributes)
        expected = {
            "http.response.status_code": error.status,
            "admission.reason": error.code,
            "admission.decision": "refused",
            "gen_ai.request.model": "llama-3.1-8b",
            "error.type": error.code if is_servers else None,
        }
        status = StatusCode.ERROR if is_servers else StatusCode.UNSET
        if found[:2] != (status, f"because of {error.code}" if is_servers else None):
            wrong.append((error.__name__, waited_us, found))
        wrong += [(error.__name__, waited_us, name) for name, value in expected.items() if found[2].get(name) != value]

    assert wrong == []


def test_a_request_that_starved_until_its_time_was_over_shows_both_bars():
    tracing = Tracing(starvation_limits_s={"batch": 0.3})
    timeout = refused(
        "queue_timeout",
        503,
        after_us=1_000_000,
        queue_wait_us=999_950,
        starvation_us=400_000,
        overtaken_at_us=5_600_000,
        served_ahead={"high": 7},
    )
    spans = tracing.play(classified(), queued(), timeout)

    assert set(spans) == {"admission", "admission.queued", "admission.starved"}
    assert interval(spans["admission"]) == (ns(0), ns(1_000_000))
    assert interval(spans["admission.queued"]) == (ns(50), ns(1_000_000))
    assert interval(spans["admission.starved"]) == (ns(600_000), ns(1_000_000))
    assert spans["admission"].status.status_code is StatusCode.ERROR
    assert spans["admission"].attributes["error.type"] == "queue_timeout"
    assert spans["admission"].attributes["admission.queue_wait_s"] == 0.99995
    assert spans["admission"].attributes["admission.starvation_s"] == 0.4
    assert spans["admission"].attributes["admission.starved_too_long"] is True
    assert spans["admission"].attributes["admission.served_ahead.high"] == 7


@pytest.mark.parametrize(("code", "is_error"), [("client_left", False), ("canceled", True)])
def test_a_wait_that_ends_without_an_answer_is_an_error_where_the_server_gave_up(tracing, code, is_error):
    spans = tracing.play(classified(), queued(), refused(code, None, after_us=500, queue_wait_us=450))

    assert set(spans) == {"admission", "admission.queued"}
    admission = spans["admission"]
    assert interval(spans["admission.queued"]) == (ns(50), ns(500))
    assert interval(admission) == (ns(0), ns(500))
    assert admission.status.status_code is (StatusCode.ERROR if is_error else StatusCode.UNSET)
    assert admission.attributes["admission.decision"] == admission.attributes["admission.reason"] == code
    assert admission.attributes.get("error.type") == (code if is_error else None)
    assert "http.response.status_code" not in admission.attributes


def test_a_client_that_left_while_it_was_served_is_no_error(tracing):
    spans = tracing.play(classified(), admitted(), first_byte(900), settled(1000, Outcome.CLIENT_LEFT))

    for span in spans.values():
        assert span.status.status_code is StatusCode.UNSET
        assert "error.type" not in span.attributes
    assert spans["admission"].attributes["admission.decision"] == "admitted"
    assert spans["admission"].attributes["admission.outcome"] == "client_left"


def test_an_engine_that_failed_marks_both_spans(tracing):
    spans = tracing.play(classified(), admitted(), settled(1000, Outcome.FAILED, 502, "engine_unreachable"))

    for span in (spans["admission"], spans["engine"]):
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == "the engine could not be reached, or broke off before it answered"
        assert span.attributes["error.type"] == "engine_unreachable"
        assert span.end_time == ns(1000)
    assert spans["admission"].attributes["http.response.status_code"] == 502


@pytest.mark.parametrize(
    ("status", "is_sidecars", "is_engines"), [(500, True, True), (400, False, True), (200, False, False)]
)
def test_what_the_engine_refuses_is_an_error_of_the_call_and_what_it_fails_at_of_the_sidecar_too(
    tracing, status, is_sidecars, is_engines
):
    spans = tracing.play(classified(), admitted(), settled(1000, status=status))

    for span, is_error in ((spans["admission"], is_sidecars), (spans["engine"], is_engines)):
        assert span.status.status_code is (StatusCode.ERROR if is_error else StatusCode.UNSET)
        assert span.attributes.get("error.type") == (str(status) if is_error else None)


def test_whom_a_request_overtook_is_reported_with_the_rule(tracing):
    spans = tracing.play(classified(), admitted(passed={"batch": "reserve", "low": "level"}), settled(1000))

    assert spans["admission"].attributes["admission.passed.batch"] == "reserve"
    assert spans["admission"].attributes["admission.passed.low"] == "level"


def test_the_engine_has_its_name_where_it_is_known():
    spans = Tracing(provider_name="vllm").play(classified(), admitted(), settled(1000))

    assert spans["engine"].attributes["gen_ai.provider.name"] == "vllm"
    assert "gen_ai.provider.name" not in spans["admission"].attributes


@pytest.mark.parametrize(("limit_s", "is_marked"), [(1.3, True), (1.4, False), (None, False)])
def test_a_request_that_starved_longer_than_its_tier_promises_is_marked(limit_s, is_marked):
    limits_s = {"high": 0.1} if limit_s is None else {"high": 0.1, "batch": limit_s}
    tracing = Tracing(starvation_limits_s=limits_s)
    starved = admitted(2_100_000, 2_099_950, starvation_us=1_400_000, served_ahead={"high": 900})

    spans = tracing.play(classified(), queued(), starved, settled(3_000_000))

    assert spans["admission"].attributes.get("admission.starved_too_long") == (True if is_marked else None)


def test_other_limits_hold_for_requests_from_then_on():
    tracing = Tracing(starvation_limits_s={"batch": 1.0})
    before = tracing.observer.received(received())
    tracing.tracer.change({"batch": 2.0}, None)
    starved = admitted(2_100_000, 2_099_950, starvation_us=1_400_000, served_ahead={"high": 900})

    for observation in (before, tracing.observer.received(received())):
        for event in (classified(), queued(), starved, settled(3_000_000)):
            observation.on_event(event)

    marks = [
        span.attributes.get("admission.starved_too_long")
        for span in tracing.exporter.get_finished_spans()
        if span.name == "admission"
    ]
    assert marks == [True, None]


def test_all_spans_of_a_request_leave_together_when_it_ends(tracing):
    starved = admitted(2_100_000, 2_099_950, starvation_us=1_400_000, served_ahead={"high": 900})

    assert tracing.play(classified(), queued(), starved, first_byte(2_200_000)) == {}


def test_a_clamped_ask_is_reported_and_an_unreported_engine_priority_is_not(tracing):
    spans = tracing.play(classified(clamped_from="critical"), admitted(engine_priority=None), settled(1000))

    assert spans["admission"].attributes["admission.clamped_from"] == "critical"
    assert "admission.engine_priority" not in spans["admission"].attributes
