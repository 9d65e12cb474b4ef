"""What enforcing would have done: in metrics of its own, in the log, on the span, and never as what happened."""

from __future__ import annotations

import json
import logging
from typing import Any

import msgspec
import pytest

from sidecar.events import Admitted, Classified, Observed, Verdict
from sidecar.telemetry.dispatch import Fanout
from sidecar.telemetry.logs.formats import JsonFormatter
from sidecar.telemetry.logs.request_log import LINES_PER_S, RequestLog
from tests.telemetry.measuring import Measuring
from tests.telemetry.span_stories import Tracing, begin, received, settled

CLASSIFIED = Classified(1, "batch", "acme", "key", None, "chat", "m", 5, False, 10, 1)


def observed(verdict: Verdict, code: str | None = None, **more: Any) -> Observed:
    return Observed(5_000_001, "request-1", "g1", verdict, code, **{"tier": "batch", "tenant": "acme", **more})


WAITED = observed(Verdict.ADMITTED, queue_wait_us=2_500_000, starvation_us=500_000)
TIMED_OUT = observed(Verdict.REFUSED, "queue_timeout", queue_wait_us=3_000_000)
NO_KEY = observed(Verdict.REFUSED, "invalid_api_key", tier=None, tenant=None)


def test_metrics_of_what_would_have_been_have_names_of_their_own() -> None:
    measuring = Measuring()
    requests = measuring.requests()
    tell = begin(requests, received(), None)
    for event in (CLASSIFIED, Admitted(2, 0, 0, None, {}, 1), WAITED):
        tell(event)
    for one in (observed(Verdict.ADMITTED), WAITED, TIMED_OUT, TIMED_OUT, NO_KEY):
        requests.note_observed(one)
    # Labels in the order of their names: decision, pool, reason, tier.
    assert measuring.values("admission.observed") == {
        ("admitted", "default", "", "batch"): 2,
        ("refused", "default", "queue_timeout", "batch"): 2,
        ("refused", "default", "invalid_api_key", ""): 1,
    }
    assert measuring.sums("admission.observed.queue_wait") == {
        ("admitted", "default", "batch"): (2, 2.5),
        ("refused", "default", "batch"): (2, 6.0),
    }
    assert measuring.sums("admission.observed.starvation") == {("admitted", "default", "batch"): (1, 0.5)}
    # What really happened: it was let through, and did not wait.
    assert measuring.sums("admission.queue_wait") == {("admitted", "default", "batch"): (1, 0.0)}
    assert measuring.values("admission.refused") == {}


def test_a_line_for_each_that_would_have_been_refused_and_none_for_the_others(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sidecar.requests")
    log = RequestLog()
    for one in (WAITED, TIMED_OUT, observed(Verdict.UNKNOWN, "stopped"), NO_KEY):
        log.note_observed(one)
    lines = [(record.event, record.code, record.message) for record in caplog.records]  # type: ignore[attr-defined]
    assert lines == [
        ("would_be_refused", "queue_timeout", "request request-1 passed; enforcing would refuse it: queue_timeout"),
        ("would_be_refused", "invalid_api_key", "request request-1 passed; enforcing would refuse it: invalid_api_key"),
    ]
    assert (caplog.records[0].queue_wait_s, caplog.records[0].tier) == (3.0, "batch")  # type: ignore[attr-defined]


def test_the_line_names_the_path_and_the_address_of_the_client(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sidecar.requests")
    RequestLog().note_observed(msgspec.structs.replace(NO_KEY, path="/v1/completions", client="10.0.0.7"))
    line = json.loads(JsonFormatter().format(caplog.records[0]))
    assert (line["route"], line["client"]) == ("/v1/completions", "10.0.0.7")


def test_a_flood_of_them_is_cut_short_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sidecar.requests")
    request_log = RequestLog()
    for _ in range(LINES_PER_S + 30):
        request_log.note_observed(TIMED_OUT)
    request_log.flush()
    *lines, last = caplog.records
    assert len(lines) == LINES_PER_S
    assert (last.event, last.left_out) == ("left_out", 30)  # type: ignore[attr-defined]


def test_the_span_says_it_where_it_is_known_in_time() -> None:
    admitted = Admitted(5_000_001, 0, 0, None, {}, 1)
    attributes = Tracing().play(CLASSIFIED, admitted, TIMED_OUT, settled(1_000_000))["admission"].attributes or {}
    assert attributes["admission.observed.decision"] == "refused"
    assert attributes["admission.observed.reason"] == "queue_timeout"
    assert attributes["admission.observed.queue_wait_s"] == 3.0
    assert attributes["admission.observed.starvation_s"] == 0.0
    assert (attributes["admission.decision"], attributes["admission.queue_wait_s"]) == ("admitted", 0.0)


def test_a_listener_that_fails_silences_no_other_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Observed] = []

    def broken(_: Observed) -> None:
        raise RuntimeError("no")

    reported = Fanout([broken, heard.append])
    reported(WAITED)
    reported(NO_KEY)
    assert heard == [WAITED, NO_KEY]
    assert len(caplog.records) == 1
