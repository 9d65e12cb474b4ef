"""A sidecar that no one looks at logs what went wrong, and reports to every listener as soon as there is one."""

from __future__ import annotations

import logging
from typing import Any, get_args

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.trace import NoOpTracerProvider, Tracer
from starlette.types import Receive, Scope, Send

from sidecar.events import Event
from sidecar.telemetry.dispatch import EventDispatcher, Listener
from sidecar.telemetry.logs.request_log import REQUESTS, RequestLog
from sidecar.telemetry.request_record import RequestRecord
from sidecar.telemetry.spans.tracer import RequestTracer
from tests.support.middleware import SMALL, Caller, Guarded, monitor, policy
from tests.telemetry.span_stories import (
    TRACEPARENT,
    Tracing,
    admitted,
    classified,
    received,
    settled,
)

HEALTHY = [classified(), admitted(), settled(1000)]


@pytest.fixture(autouse=True)
def _no_meter_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier test in this process may have set one, which lasts as long as the process."""
    monkeypatch.setattr("opentelemetry.metrics._internal._METER_PROVIDER", None)


class Ear:
    def __init__(self) -> None:
        self.heard: list[Event] = []
        self.handlers = dict.fromkeys(get_args(Event), self.hear)

    def hear(self, _: RequestRecord, event: Event) -> None:
        self.heard.append(event)


def quiet(spans: RequestTracer | None = None, *listeners: Listener) -> EventDispatcher:
    log = RequestLog()
    return EventDispatcher(spans or RequestTracer(NoOpTracerProvider()), [*listeners, log], failure_log=log)


def play(observer: EventDispatcher, *events: Event) -> None:
    observation = observer.received(received([TRACEPARENT]))
    assert observation is not None
    for event in events:
        observation.on_event(event)


def test_a_request_that_goes_well_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, REQUESTS)
    ear = Ear()
    play(quiet(None, ear), *HEALTHY)
    lines = [line for line in caplog.records if line.name.startswith("sidecar")]  # not what an earlier test left behind
    assert (lines, ear.heard) == ([], [])


def test_with_tracing_everybody_hears(caplog: pytest.LogCaptureFixture) -> None:
    tracing, ear = Tracing(), Ear()
    play(quiet(tracing.tracer, ear), *HEALTHY)
    assert ear.heard == HEALTHY
    assert {span.name for span in tracing.exporter.get_finished_spans()} == {"admission", "engine"}


def test_metrics_that_are_set_up_later_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ear = Ear()
    observer = quiet(None, ear)
    play(observer, *HEALTHY)
    provider = MeterProvider(shutdown_on_exit=False)
    monkeypatch.setattr("opentelemetry.metrics._internal._METER_PROVIDER", provider)
    play(observer, *HEALTHY)
    assert ear.heard == HEALTHY


@pytest.mark.anyio
async def test_a_failure_of_a_real_request_has_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, REQUESTS)
    guarded = Guarded(failing, policy())
    monitor(guarded.sidecar, quiet())
    with pytest.raises(RuntimeError, match="broken"):
        await Caller(guarded.sidecar, SMALL).run()
    (line,) = [line for line in caplog.records if line.name == REQUESTS]
    found = vars(line)
    assert found["event"] == "failed"
    assert found["tenant"]
    assert found["tier"] in {tier.name for tier in guarded.sidecar.policy.tiers}
    assert 0 <= found["duration_s"] < 5


async def failing(_scope: Scope, _receive: Receive, _send: Send) -> None:
    raise RuntimeError("broken")


def test_an_sdk_that_fails_at_first_records_the_requests_after_that(monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = Tracing()
    get_tracer, failures = sdk.provider.get_tracer, [RuntimeError("not yet")]

    def failing_once(*arguments: Any) -> Tracer:
        if failures:
            raise failures.pop()
        return get_tracer(*arguments)

    monkeypatch.setattr(sdk.provider, "get_tracer", failing_once)
    observer = quiet(sdk.tracer)
    play(observer, *HEALTHY)
    assert not sdk.exporter.get_finished_spans()
    play(observer, *HEALTHY)
    assert {span.name for span in sdk.exporter.get_finished_spans()} == {"admission", "engine"}
