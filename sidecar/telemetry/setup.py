"""Installs the OpenTelemetry SDK where the environment asks for it; `sidecar serve` calls this once, at start.

So does a server that is configured by the environment alone. In anybody else's app we never do: whoever owns the
process installs the SDK, and we follow.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

from sidecar.telemetry.scrape import Scrape
from sidecar.telemetry.signals import GRPC, HTTP, METRICS, TRACES, Exporter, Shutdown, Signal

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

    from sidecar.telemetry.metrics.prometheus import PrometheusReader

PROMETHEUS = "prometheus"

_SIGNALS: tuple[Signal[Any], ...] = (TRACES, METRICS)

logger = logging.getLogger(__name__)


class TelemetryError(ValueError):
    """The environment asks for telemetry that cannot be had; the message says which variable and what to do."""


def configure_from_environment(service_name: str = "admission-sidecar", scrape: Scrape | None = None) -> Shutdown:
    """Install a global provider for each signal that an `OTEL_*` variable asks for; the SDK reads the others itself.

    `service_name` is what the service is called where neither OTEL_SERVICE_NAME nor OTEL_RESOURCE_ATTRIBUTES says.
    `scrape` is what answers `GET /metrics`, None where the process has no such page; with one, metrics are there to be
    scraped unless OTEL_METRICS_EXPORTER lists others. Returns what to call at shutdown, to send what is still held; it
    never raises, and does nothing where nothing was installed, as when the process has a provider already. Raises
    TelemetryError for what cannot be had; nothing is installed then.
    """
    asked = [(signal, names) for signal in _SIGNALS if (names := _exporter_names(signal, os.environ, scrape))]
    if scrape is not None:
        scrape.refused(_why_not_scraped(os.environ))
    installs = [_prepared(signal, names, scrape) for signal, names in asked if signal.is_free()]
    if not installs:
        return _nothing
    resource = _resource(service_name)
    return partial(_end, [install(resource) for install in installs])


def _exporter_names(signal: Signal[Any], environ: Mapping[str, str], scrape: Scrape | None) -> list[str]:
    """The exporters asked for: those of the signal's variable, or else `otlp` where an endpoint is named.

    OpenTelemetry's own default is `otlp` to localhost. Ours is nothing: a process that nobody configured must not
    spend its time on a Collector that is not there. A page that nobody scrapes costs little.
    """
    if _is_disabled(environ):
        return []
    names = [name.strip().lower() for name in environ.get(signal.exporters, "").split(",") if name.strip()]
    if not names:
        names += [PROMETHEUS] if signal is METRICS and scrape is not None else []
        names += ["otlp"] if any(environ.get(endpoint) for endpoint in signal.endpoints) else []
    return [name for name in dict.fromkeys(names) if name != "none"]


def _is_disabled(environ: Mapping[str, str]) -> bool:
    return environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def _why_not_scraped(environ: Mapping[str, str]) -> str:
    """Stands where no reader takes its place."""
    if _is_disabled(environ):
        return "OTEL_SDK_DISABLED is true, so that this process has no metrics; unset it to have them here"
    if not METRICS.is_free():
        return (
            "this process had set up OpenTelemetry's metrics before the sidecar was started: they are where that sends "
            "them, the sidecar's among them"
        )
    return f"{METRICS.exporters} is {environ.get(METRICS.exporters)}; with {PROMETHEUS} in it the metrics would be here"


def _prepared(signal: Signal[Exporter], names: list[str], scrape: Scrape | None) -> Callable[[Resource], Shutdown]:
    """What installs the signal. All that can be wrong with the environment is wrong before."""
    return partial(signal.install, [_exporter(signal, name, scrape) for name in names])


def _exporter(signal: Signal[Any], name: str, scrape: Scrape | None) -> Any:
    if name == "otlp":
        return _otlp_exporter(signal)
    if name == "console":
        return signal.console()
    if name == PROMETHEUS and signal is METRICS:
        return _scraped(scrape)
    known = f"{PROMETHEUS}, otlp" if signal is METRICS else "otlp"
    raise TelemetryError(f'{signal.exporters}: "{name}" is not supported; write {known}, console or none')


def _otlp_exporter(signal: Signal[Exporter]) -> Exporter:
    variable = next((name for name in signal.protocols if os.environ.get(name)), None)
    protocol = HTTP if variable is None else os.environ[variable].strip()
    if protocol not in signal.otlp:
        raise TelemetryError(
            f'{variable}: "{protocol}" is not supported; write {HTTP} (a Collector listens for it on port 4318) or '
            f"{GRPC} (on port 4317)"
        )
    try:
        return signal.otlp[protocol]()
    except ImportError as error:
        extra = "otlp-grpc" if protocol == GRPC else "otlp"
        raise TelemetryError(
            f"exporting {signal.name} over OTLP ({protocol}) needs a package that is not installed: "
            f"pip install 'admission-sidecar[{extra}]'"
        ) from error


def _scraped(scrape: Scrape | None) -> PrometheusReader:
    if scrape is None:
        raise TelemetryError(
            f'{METRICS.exporters}: "{PROMETHEUS}" is what the admin port serves at /metrics, and there is none; set '
            "SIDECAR_ADMIN_PORT, or write otlp, console or none"
        )
    from sidecar.telemetry.metrics.prometheus import PrometheusReader

    reader = PrometheusReader()
    scrape.opened(reader)
    return reader


def _resource(service_name: str) -> Resource:
    # An attribute given to Resource.create wins over the environment, so ours is only given where that has none.
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource

    named = SERVICE_NAME in OTELResourceDetector().detect().attributes
    return Resource.create({} if named else {SERVICE_NAME: service_name})


def _end(shutdowns: list[Shutdown]) -> None:
    """All at the same time: each may wait as long as its exporter may for a Collector that is not there."""
    threads = [Thread(target=_end_one, args=(shutdown,)) for shutdown in shutdowns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _end_one(shutdown: Shutdown) -> None:
    try:
        shutdown()
    except Exception:
        logger.exception("telemetry could not be ended in order; what it still held may be lost")


def _nothing() -> None:
    """Shut down what was never started."""
