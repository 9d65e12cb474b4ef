"""Traces and metrics: the variables that each is asked for with, and its parts of the SDK.

The SDK is imported by the functions that need it, so that a process which asked for nothing does not load it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from opentelemetry import metrics, trace

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter

Exporter = TypeVar("Exporter")
Shutdown = Callable[[], None]


@dataclass(frozen=True)
class Signal(Generic[Exporter]):
    """One kind of telemetry. Of `endpoints` and `protocols` the first variable that is set counts."""

    name: str
    exporters: str
    endpoints: tuple[str, ...]
    protocols: tuple[str, ...]
    is_free: Callable[[], bool]
    """Whether the process has no provider yet."""
    otlp: Callable[[], Exporter]
    """Raises ImportError without the package."""
    console: Callable[[], Exporter]
    install: Callable[[list[Exporter], Resource], Shutdown]
    """Make the global provider, and return what sends the rest and ends it."""


def _has_no_tracer_provider() -> bool:
    return isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def _otlp_spans() -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _console_spans() -> SpanExporter:
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter

    return ConsoleSpanExporter()


def _install_tracer_provider(exporters: list[SpanExporter], resource: Resource) -> Shutdown:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # Without the SDK's own exit handler: the caller shuts down, once, when the last request is done.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return provider.shutdown


def _has_no_meter_provider() -> bool:
    # The stand-in before one is set has no public name, as the tracers' has; it is the API's own and not the no-op.
    provider = metrics.get_meter_provider()
    is_the_apis = type(provider).__module__.startswith("opentelemetry.metrics")
    return is_the_apis and not isinstance(provider, metrics.NoOpMeterProvider)


def _otlp_metrics() -> MetricExporter:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter()


def _console_metrics() -> MetricExporter:
    from opentelemetry.sdk.metrics.export import ConsoleMetricExporter

    return ConsoleMetricExporter()


def _install_meter_provider(exporters: list[MetricExporter], resource: Resource) -> Shutdown:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    readers = [PeriodicExportingMetricReader(exporter) for exporter in exporters]
    provider = MeterProvider(readers, resource, shutdown_on_exit=False)
    metrics.set_meter_provider(provider)
    return provider.shutdown


TRACES = Signal(
    name="traces",
    exporters="OTEL_TRACES_EXPORTER",
    endpoints=("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
    protocols=("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"),
    is_free=_has_no_tracer_provider,
    otlp=_otlp_spans,
    console=_console_spans,
    install=_install_tracer_provider,
)
METRICS = Signal(
    name="metrics",
    exporters="OTEL_METRICS_EXPORTER",
    endpoints=("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
    protocols=("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"),
    is_free=_has_no_meter_provider,
    otlp=_otlp_metrics,
    console=_console_metrics,
    install=_install_meter_provider,
)
