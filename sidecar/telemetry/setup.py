"""Setup of the OpenTelemetry SDK where the environment asks for it; `sidecar serve` calls this once, at start.

So does a server that is configured by the environment alone. In another application we never do: its owner installs the
SDK, and we use that. The SDK is imported by the functions that need it, so that a process which asked for nothing does
not load it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Union
from weakref import WeakKeyDictionary

from opentelemetry import metrics, trace

from sidecar.extras import how_to_install
from sidecar.telemetry.providers import has_no_meter_provider

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter

    from sidecar.telemetry.metrics.prometheus import PrometheusReader

PROMETHEUS = "prometheus"
HTTP, GRPC = "http/protobuf", "grpc"

Exporter = TypeVar("Exporter")
Shutdown = Callable[[], None]
MetricsOut = Union["MetricExporter", "PrometheusReader"]
"""An exporter is sent the metrics at intervals; a reader collects them when it wants."""

FLUSHED_WITHIN_S = 5.0
"""Longest wait for what an exporter still holds at the end of a server that is not ours, which may be killed soon."""

logger = logging.getLogger(__name__)

_installed: WeakKeyDictionary[object, PrometheusReader | None] = WeakKeyDictionary()
"""The providers that were installed here, each with what reads it for a page."""


class TelemetryError(ValueError):
    """The environment asks for telemetry that cannot be had; the message says which variable and what to do."""


class MetricsUnavailable(Exception):
    """This process has no metrics to scrape. The message is a sentence with the reason and the remedy."""


class MetricsEndpoint:
    """The metrics of this process for `GET /metrics`, as soon as `configure_from_environment` was given this."""

    def __init__(self) -> None:
        self._source: PrometheusReader | None = None
        self._reason = "metrics are not set up yet; try again in a moment"

    def open(self, source: PrometheusReader) -> None:
        """From now on there are metrics."""
        self._source = source

    def close(self, reason: str) -> None:
        """There will be none, for a reason that is a sentence, unless the endpoint is opened."""
        self._reason = reason

    def text(self, accept: str | None) -> tuple[bytes, str]:
        """See `PrometheusReader.text`. Raises MetricsUnavailable. Takes milliseconds; not for a pool's event loop."""
        if self._source is None:
            raise MetricsUnavailable(self._reason)
        return self._source.text(accept)


@dataclass(frozen=True)
class Signal(Generic[Exporter]):
    """Traces or metrics: the variables that ask for them, and their parts of the SDK.

    Of `otlp_variables` the first that is set counts. `module` has the OTLP `exporter` in the
    package of each protocol, `console` are a module and a name. `install` makes the global provider, and returns the
    function that sends the rest and ends it; `is_free` says that the process has no provider yet.
    """

    name: str
    exporter: str
    console: tuple[str, str]
    module: str
    is_free: Callable[[], bool]
    install: Callable[[list[Exporter], Resource], Shutdown]

    @property
    def exporters(self) -> str:
        """The variable that lists the exporters."""
        return f"OTEL_{self.name.upper()}_EXPORTER"

    def otlp_variables(self, what: str) -> tuple[str, str]:
        """The variables that name an endpoint or a protocol: the signal's own, and that of both."""
        return f"OTEL_EXPORTER_OTLP_{self.name.upper()}_{what}", f"OTEL_EXPORTER_OTLP_{what}"


def _make(module: str, name: str) -> Any:
    return getattr(import_module(module), name)()


def _install_tracer_provider(exporters: list[SpanExporter], resource: Resource) -> Shutdown:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # Without the SDK's own exit handler: the caller shuts down, once, when the last request is done.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    _installed[provider] = None
    return provider.shutdown


def meter_provider_for(out: list[MetricsOut], resource: Resource) -> MeterProvider:
    """One of ours, not the global one yet."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader

    from sidecar.telemetry.metrics.views import views

    readers = [each if isinstance(each, MetricReader) else PeriodicExportingMetricReader(each) for each in out]
    return MeterProvider(readers, resource, shutdown_on_exit=False, views=views())


def _install_meter_provider(out: list[MetricsOut], resource: Resource) -> Shutdown:
    provider = meter_provider_for(out, resource)
    metrics.set_meter_provider(provider)
    _installed[provider] = next((each for each in out if not hasattr(each, "export")), None)
    return provider.shutdown


TRACES: Signal[SpanExporter] = Signal(
    name="traces",
    exporter="OTLPSpanExporter",
    console=("opentelemetry.sdk.trace.export", "ConsoleSpanExporter"),
    module="trace_exporter",
    is_free=lambda: isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider),
    install=_install_tracer_provider,
)
METRICS: Signal[MetricsOut] = Signal(
    name="metrics",
    exporter="OTLPMetricExporter",
    console=("opentelemetry.sdk.metrics.export", "ConsoleMetricExporter"),
    module="metric_exporter",
    is_free=has_no_meter_provider,
    install=_install_meter_provider,
)
_SIGNALS: tuple[Signal[Any], ...] = (TRACES, METRICS)


def configure_from_environment(
    service_name: str = "admission-sidecar", scrape: MetricsEndpoint | None = None
) -> Shutdown:
    """Install a global provider for each signal that an `OTEL_*` variable asks for; the SDK reads the others itself.

    `service_name` is the service's name where neither OTEL_SERVICE_NAME nor OTEL_RESOURCE_ATTRIBUTES says.
    `scrape` answers `GET /metrics`; it is None where the process has no such page; with one, metrics are there to be
    scraped unless OTEL_METRICS_EXPORTER lists others. Returns a function to call at shutdown, which sends the rest; it
    never raises, and does nothing where nothing was installed, as when the process has a provider already. Raises
    TelemetryError for what cannot be had; nothing is installed then.
    """
    return prepare_from_environment(service_name, scrape)()


def prepare_from_environment(
    service_name: str = "admission-sidecar", scrape: MetricsEndpoint | None = None
) -> Callable[[], Shutdown]:
    """Prepares in two steps: this raises for every mistake, and what it returns installs, where the process has no
    provider by then.
    """
    asked = [(signal, names) for signal in _SIGNALS if (names := _exporter_names(signal, os.environ, scrape))]
    made = [
        (signal, [_exporter(signal, name, has_page=scrape is not None) for name in names])
        for signal, names in asked
        if signal.is_free()
    ]

    def install() -> Shutdown:
        shutdowns: list[Shutdown] = []
        if free := [(signal, out) for signal, out in made if signal.is_free()]:
            resource = _resource(service_name)
            shutdowns = [signal.install(out, resource) for signal, out in free]
        if scrape is not None:
            _show_on(scrape)
        return partial(_end, shutdowns)

    return install


def _show_on(page: MetricsEndpoint) -> None:
    provider = metrics.get_meter_provider()
    reader = _installed[provider] if provider in _installed else None  # noqa: SIM401  # some have no weak references
    if reader is None:
        page.close(_why_not_scraped(os.environ))
    else:
        page.open(reader)


def flush_providers(*, are_ours: bool, within_s: float = FLUSHED_WITHIN_S) -> None:
    """Has the process's providers send what they still hold: those that were installed here, or the others.

    Returns after `within_s` at the latest, whatever their exporters do. It does not raise.
    """
    providers = [trace.get_tracer_provider(), metrics.get_meter_provider()]
    flushes = [
        partial(provider.force_flush, round(within_s * 1000))
        for provider in providers
        if hasattr(provider, "force_flush") and (provider in _installed) is are_ours
    ]
    _run_all(flushes, within_s)


def _exporter_names(signal: Signal[Any], environ: Mapping[str, str], endpoint: MetricsEndpoint | None) -> list[str]:
    """The exporters asked for: those of the signal's variable, or else `otlp` where an endpoint is named.

    OpenTelemetry's own default is `otlp` to localhost. Ours is nothing: a process that is not configured must not
    spend its time on a Collector that is not there. A page that is not scraped costs little.
    """
    if _is_disabled(environ):
        return []
    names = [name.strip().lower() for name in environ.get(signal.exporters, "").split(",") if name.strip()]
    if not names:
        names += [PROMETHEUS] if signal is METRICS and endpoint is not None else []
        names += ["otlp"] if any(environ.get(endpoint) for endpoint in signal.otlp_variables("ENDPOINT")) else []
    return [name for name in dict.fromkeys(names) if name != "none"]


def _is_disabled(environ: Mapping[str, str]) -> bool:
    return environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def _why_not_scraped(environ: Mapping[str, str]) -> str:
    """Stands where no reader takes its place."""
    if _is_disabled(environ):
        return "OTEL_SDK_DISABLED is true, so that this process has no metrics; unset it to have them here"
    if not METRICS.is_free() and metrics.get_meter_provider() not in _installed:
        return (
            "this process had set up OpenTelemetry's metrics before the sidecar was started: they are where that sends "
            "them, the sidecar's among them"
        )
    return f"{METRICS.exporters} is {environ.get(METRICS.exporters)}; with {PROMETHEUS} in it the metrics would be here"


def _exporter(signal: Signal[Any], name: str, *, has_page: bool) -> Any:
    if name == "otlp":
        return _otlp_exporter(signal)
    if name == "console":
        return _make(*signal.console)
    if name == PROMETHEUS and signal is METRICS:
        return _prometheus(has_page=has_page)
    known = f"{PROMETHEUS}, otlp" if signal is METRICS else "otlp"
    raise TelemetryError(f'{signal.exporters}: "{name}" is not supported; write {known}, console or none')


def _otlp_exporter(signal: Signal[Any]) -> Any:
    variable = next((name for name in signal.otlp_variables("PROTOCOL") if os.environ.get(name)), None)
    protocol = HTTP if variable is None else os.environ[variable].strip()
    if protocol not in (HTTP, GRPC):
        raise TelemetryError(
            f'{variable}: "{protocol}" is not supported; write {HTTP} (a Collector listens for it on port 4318) or '
            f"{GRPC} (on port 4317)"
        )
    try:
        package = {HTTP: "http", GRPC: "grpc"}[protocol]
        return _make(f"opentelemetry.exporter.otlp.proto.{package}.{signal.module}", signal.exporter)
    except ImportError as error:
        extra = "otlp-grpc" if protocol == GRPC else "otlp"
        raise TelemetryError(
            f"exporting {signal.name} over OTLP ({protocol}) needs a package that is not installed: "
            f"{how_to_install(extra)}"
        ) from error


def _prometheus(*, has_page: bool) -> PrometheusReader:
    if not has_page:
        raise TelemetryError(
            f'{METRICS.exporters}: "{PROMETHEUS}" is what the admin port serves at /metrics, and there is none; set '
            "SIDECAR_ADMIN_PORT, or write otlp, console or none"
        )
    from sidecar.telemetry.metrics.prometheus import PrometheusReader

    return PrometheusReader()


def _resource(service_name: str) -> Resource:
    # An attribute given to Resource.create wins over the environment, so ours is only given where that has none.
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource

    named = SERVICE_NAME in OTELResourceDetector().detect().attributes
    return Resource.create({} if named else {SERVICE_NAME: service_name})


def _end(shutdowns: list[Shutdown]) -> None:
    """All at the same time: each may wait as long as its exporter may for a Collector that is not there."""
    _run_all(shutdowns)


def _run_all(works: Sequence[Callable[[], object]], within_s: float | None = None) -> None:
    """Each in a thread of its own, which does not keep the process from ending."""
    threads = [Thread(target=_run_one, args=(work,), daemon=True) for work in works]
    ends_s = None if within_s is None else time.monotonic() + within_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(None if ends_s is None else max(0.0, ends_s - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        logger.warning("telemetry was not sent within %g s; what is left may be lost", within_s)


def _run_one(work: Callable[[], object]) -> None:
    try:
        work()
    except Exception:
        logger.exception("telemetry could not be ended in order; what it still held may be lost")
