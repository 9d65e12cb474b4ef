"""A door that nobody looks at: no page, no SDK for traces or metrics. Its requests cost next to nothing to tell of.

Only what went wrong is logged, from the events that were kept until it was known.
"""

from __future__ import annotations

from opentelemetry import metrics

from sidecar.events import Event, Headers, Observation, Received, Refused, Settled
from sidecar.telemetry.logs.request_log import RequestLog
from sidecar.telemetry.signals import has_no_meter_provider
from sidecar.telemetry.telemetry import Telemetry, clients_trace


class Quiet:
    """Tells `telemetry` of a request where the process has an SDK by now, else the log alone, and only of failures."""

    def __init__(self, telemetry: Telemetry, log: RequestLog) -> None:
        self._telemetry = telemetry
        self._log = log
        self._provider: object = None
        self._is_measured = False

    def listens(self) -> bool:
        """The log always does."""
        return True

    def received(self, event: Received) -> Observation | None:
        """Begins a request."""
        if self._has_sdk():
            return self._telemetry.received(event)
        return _Kept(self._telemetry, self._log, event)

    def flush(self) -> None:
        """See `Telemetry.flush`."""
        self._telemetry.flush()

    def _has_sdk(self) -> bool:
        provider = metrics.get_meter_provider()
        if provider is not self._provider:
            self._provider, self._is_measured = provider, not has_no_meter_provider()
        return self._is_measured or self._telemetry.is_traced()


class _Kept:
    """One request's events, until its end says whether anybody should hear of them."""

    __slots__ = ("_events", "_log", "_received", "_telemetry")

    def __init__(self, telemetry: Telemetry, log: RequestLog, received: Received) -> None:
        self._telemetry = telemetry
        self._log = log
        self._received = received
        self._events: list[Event] = []

    def headers(self) -> Headers:
        """Nothing goes on to the engine but what the client sent."""
        return ()

    def on_event(self, event: Event) -> None:
        """Keeps it, or logs what has been kept."""
        self._events.append(event)
        if isinstance(event, Refused) or (isinstance(event, Settled) and self._log.has_a_line_for(event)):
            self._tell()

    def _tell(self) -> None:
        try:
            tell = self._log.begin(self._received, clients_trace(self._received.headers))
            for event in self._events:
                tell(event)
        except Exception:
            self._telemetry.report()
