"""The process's providers of tracers and meters, asked at every request.

While there is no SDK, the API looks into the environment at each call. That costs as much as deciding on a request. So
its stand-in is kept, and used for as long as the API has no provider.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, Generic, TypeVar

from opentelemetry import metrics, trace
from opentelemetry.metrics import MeterProvider, _internal
from opentelemetry.trace import TracerProvider

Provider = TypeVar("Provider")

_UNKNOWN: Any = object()  # stands for a name that a later API does not have
_TRACER_PROVIDER, _METER_PROVIDER = "_TRACER_PROVIDER", "_METER_PROVIDER"
_TRACE, _METRICS = vars(trace), vars(_internal)
_IS_NAMED = "OTEL_PYTHON_TRACER_PROVIDER" in os.environ or "OTEL_PYTHON_METER_PROVIDER" in os.environ


class _Lookup(Generic[Provider]):
    """The provider that `get` returns. `module` has it under `name`, and None before one is set."""

    def __init__(self, get: Callable[[], Provider], module: ModuleType, name: str) -> None:
        self._get = get
        self._names = vars(module)
        self._name = name
        self._stand_in: Provider | None = None

    def __call__(self) -> Provider:
        found: Provider | None = self._names.get(self._name, _UNKNOWN)
        if found is _UNKNOWN:
            return self._get()
        if found is not None:
            return found
        if self._stand_in is None:
            self._stand_in = self._get()
        return self._stand_in


class ProvidersWatch:
    """Notices that the process has other providers than at the last look."""

    __slots__ = ("_meters", "_tracers")

    def __init__(self) -> None:
        self._tracers: object = _UNKNOWN
        self._meters: object = _UNKNOWN

    def have_changed(self) -> bool:
        """Whether one of them is another; also where that is not known, because the API has other names."""
        tracers, meters = _TRACE.get(_TRACER_PROVIDER, _UNKNOWN), _METRICS.get(_METER_PROVIDER, _UNKNOWN)
        if tracers is self._tracers and meters is self._meters:
            return tracers is _UNKNOWN or meters is _UNKNOWN
        self._tracers, self._meters = tracers, meters
        return True


def none_is_set() -> bool:
    """Whether there surely is no SDK: the API has no provider, and the environment names none."""
    return (
        _TRACE.get(_TRACER_PROVIDER, _UNKNOWN) is None
        and _METRICS.get(_METER_PROVIDER, _UNKNOWN) is None
        and not _IS_NAMED
    )


tracer_provider: Callable[[], TracerProvider] = _Lookup(trace.get_tracer_provider, trace, _TRACER_PROVIDER)
meter_provider: Callable[[], MeterProvider] = _Lookup(metrics.get_meter_provider, _internal, _METER_PROVIDER)
