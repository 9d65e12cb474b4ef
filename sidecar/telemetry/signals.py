"""Traces and metrics: the variables that each is asked for with, and its parts of the SDK.

The SDK is imported by the functions that need it, so that a process which asked for nothing does not load it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar, Union

from opentelemetry import metrics, trace

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter

    from sidecar.telemetry.metrics.prometheus import PrometheusReader

Exporter = TypeVar("Exporter")
Shutdown = Callable[[], None]

HTTP, GRPC = "http/protobuf", "grpc"


@dataclass(frozen=True)
class Signal(Generic[Exporter]):
    """One kind of telemetry. Of `endpoints` and `protocols` the first variable that is set counts."""

    name: str
    exporters: str
    endpoints: tuple[str, ...]
    protocols: tuple[str, ...]
    is_free: Callable[[], bool]
    """Whether the process has no provider yet."""
    otlp: Mapping[str, Callable[[], Exporter]]
    """By protocol. They raise ImportError without the package."""
    console: Callable[[], Exporter]
    install: Callable[[list[Exporter], Resource], Shutdown]
    """Make the global provider, and return what sends the rest and ends it."""


def _has_no_tracer_provider() -> bool:
    return isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def _http_spans() -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _grpc_spans() -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

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


def has_no_meter_provider() -> bool:
    """Whether the process has no SDK for metrics yet."""
    # The stand-in before one is set has no public name, as the tracers' has; it is the API's own and not the no-op.
    provider = metrics.get_meter_provider()
    is_the_apis = type(provider).__module__.startswith("opentelemetry.metrics")
    return is_the_apis and not isinstance(provider, metrics.NoOpMeterProvider)


def _http_metrics() -> MetricExporter:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter()


def _grpc_metrics() -> MetricExporter:
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter()


def _console_metrics() -> MetricExporter:
    from opentelemetry.sdk.metrics.export import ConsoleMetricExporter

    return ConsoleMetricExporter()


MetricsOut = Union["MetricExporter", "PrometheusReader"]
"""An exporter is sent the metrics every so often; a reader collects them when it likes."""


def meter_provider_for(out: list[MetricsOut], resource: Resource) -> MeterProvider:
    """One of ours, not the global one yet. Durations are added up by ourselves where all of `out` take that."""
    from opentelemetry.sdk.metrics import MeterProvider

    from sidecar.telemetry.metrics.summed import add_up_for
    from sidecar.telemetry.metrics.summed_readers import SummedExport, SumsReader, takes_sums
    from sidecar.telemetry.metrics.views import views, views_without_histograms

    # One that cannot take our sums has the SDK count for all: a duration is counted once, and in one way.
    are_summed = all(takes_sums(each) for each in out)
    readers = [each if isinstance(each, SumsReader) else SummedExport(each) for each in out]
    seen = views_without_histograms() if are_summed else views()
    provider = MeterProvider(readers, resource, shutdown_on_exit=False, views=seen)
    if are_summed:
        sums = add_up_for(provider)
        for reader in readers:
            reader.read(sums)
    return provider


def _install_meter_provider(out: list[MetricsOut], resource: Resource) -> Shutdown:
    provider = meter_provider_for(out, resource)
    metrics.set_meter_provider(provider)
    return provider.shutdown


TRACES: Signal[SpanExporter] = Signal(
    name="traces",
    exporters="OTEL_TRACES_EXPORTER",
    endpoints=("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
    protocols=("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"),
    is_free=_has_no_tracer_provider,
    otlp={HTTP: _http_spans, GRPC: _grpc_spans},
    console=_console_spans,
    install=_install_tracer_provider,
)
METRICS: Signal[MetricsOut] = Signal(
    name="metrics",
    exporters="OTEL_METRICS_EXPORTER",
    endpoints=("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
    protocols=("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"),
    is_free=has_no_meter_provider,
    otlp={HTTP: _http_metrics, GRPC: _grpc_metrics},
    console=_console_metrics,
    install=_install_meter_provider,
)
