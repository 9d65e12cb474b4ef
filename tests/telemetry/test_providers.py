"""Whether the process has an SDK: asked at every request, and so without the API's look into the environment."""

from __future__ import annotations

import os

import pytest
from opentelemetry import metrics, trace
from opentelemetry.metrics import _internal
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider

from sidecar.telemetry.providers import has_no_meter_provider, none_is_set


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


def test_a_provider_that_is_set_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert none_is_set()
    assert has_no_meter_provider()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", TracerProvider(shutdown_on_exit=False))
    assert not none_is_set()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(_internal, "_METER_PROVIDER", MeterProvider(shutdown_on_exit=False))
    assert not none_is_set()
    assert not has_no_meter_provider()


def test_a_name_that_the_api_no_longer_has_may_hide_an_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(trace, "_TRACER_PROVIDER")
    assert not none_is_set()


def test_the_api_looks_into_the_environment_at_every_call_and_we_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this fails because the API does not, `none_is_set` is no longer needed."""
    environment = CountingEnvironment(os.environ)
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(_internal, "environ", environment)
    trace.get_tracer_provider(), metrics.get_meter_provider()
    assert environment.asked == 2
    assert none_is_set()
    assert environment.asked == 2
