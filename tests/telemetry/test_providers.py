"""The process's providers are those of the API, without its look into the environment at every call."""

from __future__ import annotations

import os

import pytest
from opentelemetry import metrics, trace
from opentelemetry.metrics import _internal
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider

from sidecar.telemetry.sdk_bypass import providers


@pytest.fixture(autouse=True)
def _no_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier test in this process may have set a provider, which lasts as long as the process."""
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(_internal, "_METER_PROVIDER", None)


class CountingEnvironment(dict[str, str]):
    asked = 0

    def __contains__(self, name: object) -> bool:
        self.asked += 1
        return super().__contains__(name)


def test_without_an_sdk_they_are_the_apis_stand_ins() -> None:
    for _ in range(2):
        assert providers.tracer_provider() is trace.get_tracer_provider()
        assert providers.meter_provider() is metrics.get_meter_provider()
        assert providers.none_is_set()


def test_an_sdk_that_is_set_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    providers.tracer_provider(), providers.meter_provider()
    tracer_provider, meter_provider = TracerProvider(shutdown_on_exit=False), MeterProvider(shutdown_on_exit=False)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", tracer_provider)
    assert not providers.none_is_set()
    assert providers.tracer_provider() is tracer_provider
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(_internal, "_METER_PROVIDER", meter_provider)
    assert not providers.none_is_set()
    assert providers.meter_provider() is meter_provider


def test_an_answer_is_kept_until_there_is_another_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, True, False, True, False])
    answer = providers.kept_answer(lambda: next(answers))
    assert [answer() for _ in range(3)] == [False, False, False]
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", TracerProvider(shutdown_on_exit=False))
    assert [answer() for _ in range(2)] == [True, True]
    monkeypatch.setattr(_internal, "_METER_PROVIDER", MeterProvider(shutdown_on_exit=False))
    assert [answer() for _ in range(2)] == [False, False]
    monkeypatch.delattr(trace, "_TRACER_PROVIDER")  # as a later API may be: then anything may have happened
    assert [answer() for _ in range(2)] == [True, False]


def test_a_name_that_the_api_no_longer_has_may_hide_an_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(trace, "_TRACER_PROVIDER")
    assert not providers.none_is_set()


def test_the_api_looks_into_the_environment_at_every_call_and_we_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this fails because the API does not, `providers` is no longer needed."""
    providers.tracer_provider(), providers.meter_provider()
    environment = CountingEnvironment(os.environ)
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(_internal, "environ", environment)
    trace.get_tracer_provider(), metrics.get_meter_provider()
    assert environment.asked == 2
    providers.tracer_provider(), providers.meter_provider()
    assert providers.none_is_set()
    assert environment.asked == 2
