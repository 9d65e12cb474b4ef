"""The process's providers of tracers and meters, asked at every request.

While there is no SDK, the API looks into the environment at each call. That costs as much as deciding on a request. So
its stand-in is kept, and used for as long as the API has no provider.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, TypeVar

from opentelemetry import metrics, trace
from opentelemetry.metrics import MeterProvider, _internal
from opentelemetry.trace import TracerProvider

Provider = TypeVar("Provider")

_UNKNOWN: Any = object()  # stands for a name that a later API does not have
_METER_PROVIDER = "_METER_PROVIDER"
TRACER_PROVIDER: Final = "_TRACER_PROVIDER"
TRACE: Final = vars(trace)
"""`TRACE.get(TRACER_PROVIDER)` is the process's provider where one was set; else `tracer_provider` says what stands in.
"""
_METRICS = vars(_internal)
_IS_NAMED = "OTEL_PYTHON_TRACER_PROVIDER" in os.environ or "OTEL_PYTHON_METER_PROVIDER" in os.environ


def _lookup(get: Callable[[], Provider], module: ModuleType, name: str) -> Callable[[], Provider]:
    """A quicker `get`. `module` has the provider under `name`, and None before one is set."""
    names = vars(module)
    stand_in: Provider | None = None

    def found() -> Provider:
        nonlocal stand_in
        provider: Provider | None = names.get(name, _UNKNOWN)
        if provider is _UNKNOWN:
            return get()
        if provider is not None:
            return provider
        if stand_in is None:
            stand_in = get()
        return stand_in

    return found


def kept_answer(ask: Callable[[], bool]) -> Callable[[], bool]:
    """`ask`, a question about the process's providers: its answer is kept for as long as they are the same ones.

    It is asked every time where the API has other names, and nothing is known.
    """
    answer = False
    tracers: object = _UNKNOWN
    meters: object = _UNKNOWN

    def answered() -> bool:
        nonlocal answer, tracers, meters
        try:
            if TRACE[TRACER_PROVIDER] is tracers and _METRICS[_METER_PROVIDER] is meters:
                return answer
            tracers, meters = TRACE[TRACER_PROVIDER], _METRICS[_METER_PROVIDER]
        except KeyError:
            return ask()
        answer = ask()
        return answer

    return answered


def none_is_set() -> bool:
    """Whether there surely is no SDK: the API has no provider, and the environment names none."""
    return (
        TRACE.get(TRACER_PROVIDER, _UNKNOWN) is None
        and _METRICS.get(_METER_PROVIDER, _UNKNOWN) is None
        and not _IS_NAMED
    )


tracer_provider: Callable[[], TracerProvider] = _lookup(trace.get_tracer_provider, trace, TRACER_PROVIDER)
meter_provider: Callable[[], MeterProvider] = _lookup(metrics.get_meter_provider, _internal, _METER_PROVIDER)
