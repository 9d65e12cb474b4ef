"""The process's providers of tracers and meters, asked at every request.

While there is no SDK, the API looks into the environment at each call. That costs as much as deciding on a request. So
its stand-in is kept, and used for as long as the API has no provider.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Generic, TypeVar

from opentelemetry import metrics, trace
from opentelemetry.metrics import MeterProvider, _internal
from opentelemetry.trace import TracerProvider

Provider = TypeVar("Provider")


class _Lookup(Generic[Provider]):
    """The provider that `get` returns. `module` has it under `name`, and None before one is set."""

    def __init__(self, get: Callable[[], Provider], module: ModuleType, name: str) -> None:
        self._get = get
        self._module = module
        self._name = name
        self._stand_in: Provider | None = None

    def __call__(self) -> Provider:
        if getattr(self._module, self._name, self) is not None:
            return self._get()
        if self._stand_in is None:
            self._stand_in = self._get()
        return self._stand_in


def none_is_set() -> bool:
    """Whether there surely is no SDK: the API has no provider, and the environment names none."""
    return (
        _TRACE.get(_TRACER_PROVIDER, _UNKNOWN) is None
        and _METRICS.get(_METER_PROVIDER, _UNKNOWN) is None
        and not _IS_NAMED
    )


_UNKNOWN = object()  # stands for a name that a later API does not have
_TRACER_PROVIDER, _METER_PROVIDER = "_TRACER_PROVIDER", "_METER_PROVIDER"
_TRACE, _METRICS = vars(trace), vars(_internal)
_IS_NAMED = "OTEL_PYTHON_TRACER_PROVIDER" in os.environ or "OTEL_PYTHON_METER_PROVIDER" in os.environ

tracer_provider: Callable[[], TracerProvider] = _Lookup(trace.get_tracer_provider, trace, _TRACER_PROVIDER)
meter_provider: Callable[[], MeterProvider] = _Lookup(metrics.get_meter_provider, _internal, _METER_PROVIDER)
