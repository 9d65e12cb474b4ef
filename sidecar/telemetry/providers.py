"""The process's providers of tracers and meters: whether there are any, asked at every request."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.metrics import _internal

_UNKNOWN: Any = object()  # stands for a name that a later API does not have
_TRACE, _METRICS = vars(trace), vars(_internal)
_NAMES_TRACERS = "OTEL_PYTHON_TRACER_PROVIDER" in os.environ
_NAMES_METERS = "OTEL_PYTHON_METER_PROVIDER" in os.environ


def none_is_set() -> bool:
    """True if there surely is no SDK: the API has no provider, and the environment names none."""
    return no_tracers_are_set() and _METRICS.get("_METER_PROVIDER", _UNKNOWN) is None and not _NAMES_METERS


def no_tracers_are_set() -> bool:
    """True if there surely is no SDK for traces.

    The API has no such question, and looks into the environment whenever it is asked for a provider: without an SDK
    that would cost a request as much as deciding on it. So the API's private names are read, here and above.
    """
    return _TRACE.get("_TRACER_PROVIDER", _UNKNOWN) is None and not _NAMES_TRACERS


def has_no_meter_provider() -> bool:
    """True if the process has no SDK for metrics yet."""
    # The stand-in before one is set has no public name, as the tracers' has; it is the API's own and not the no-op.
    provider = metrics.get_meter_provider()
    is_the_apis = type(provider).__module__.startswith("opentelemetry.metrics")
    return is_the_apis and not isinstance(provider, metrics.NoOpMeterProvider)


# -- A failure of telemetry: logged once, and never raised, as all of it runs on the path of requests.


class FirstFailure:
    """Logs the exception being handled, the first time only: a defect must not write a line a request."""

    def __init__(self, logger: logging.Logger, consequence: str) -> None:
        self._logger = logger
        self._message = f"{consequence} without, and further failures are not logged"
        self._is_logged = False

    def __call__(self) -> None:
        """An exception is being handled."""
        if not self._is_logged:
            self._is_logged = True
            with suppress(Exception):  # a handler of the log may have raised the first one
                self._logger.exception(self._message)
