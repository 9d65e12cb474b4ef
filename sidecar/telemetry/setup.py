"""Installs the OpenTelemetry SDK where the environment asks for it; `sidecar serve` calls this once, at start.

Mounted into somebody else's server we never do: whoever owns the process installs the SDK, and our spans follow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from opentelemetry import trace

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTERS = "OTEL_TRACES_EXPORTER"


class TelemetryError(Exception):
    """The environment asks for tracing that cannot be had; the message says which variable and what to do."""


def configure_from_environment(service_name: str = "admission-sidecar") -> Callable[[], None]:
    """Install a global TracerProvider if an `OTEL_*` variable asks for one; the SDK reads the others itself.

    `service_name` is what the service is called where neither OTEL_SERVICE_NAME nor OTEL_RESOURCE_ATTRIBUTES says.
    Returns what to call at shutdown, to send the spans that are still held; it does nothing where nothing was
    installed, as when the process has a provider already. Raises TelemetryError for what cannot be had.
    """
    names = _exporter_names(os.environ)
    if not names or not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return _nothing
    exporters = [_exporter(name) for name in names]

    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # Without the SDK's own exit handler: the caller shuts down, once, when the last request is done.
    provider = TracerProvider(resource=_resource(service_name), shutdown_on_exit=False)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return provider.shutdown


def _exporter_names(environ: Mapping[str, str]) -> list[str]:
    """The exporters asked for: OTEL_TRACES_EXPORTER's, or else `otlp` where an endpoint is named.

    OpenTelemetry's own default is `otlp` to localhost. Ours is nothing: a process that nobody configured must not
    spend its time on a Collector that is not there.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    names = [name.strip().lower() for name in environ.get(_EXPORTERS, "").split(",") if name.strip()]
    if not names and any(environ.get(endpoint) for endpoint in _ENDPOINTS):
        return ["otlp"]
    return [name for name in dict.fromkeys(names) if name != "none"]


def _exporter(name: str) -> SpanExporter:
    if name == "otlp":
        return _otlp_exporter()
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    raise TelemetryError(f'{_EXPORTERS}: "{name}" is not supported; write otlp, console or none')


def _otlp_exporter() -> SpanExporter:
    variable = next((name for name in _PROTOCOLS if os.environ.get(name)), None)
    if variable is not None and os.environ[variable].strip() != "http/protobuf":
        raise TelemetryError(
            f'{variable}: "{os.environ[variable]}" is not supported; write http/protobuf (a Collector listens for it '
            "on port 4318)"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise TelemetryError(
            "exporting traces over OTLP needs a package that is not installed: pip install 'admission-sidecar[otlp]'"
        ) from error
    return OTLPSpanExporter()


def _resource(service_name: str) -> Resource:
    # An attribute given to Resource.create wins over the environment, so ours is only given where that has none.
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource

    named = SERVICE_NAME in OTELResourceDetector().detect().attributes
    return Resource.create({} if named else {SERVICE_NAME: service_name})


def _nothing() -> None:
    """Shut down what was never started."""
