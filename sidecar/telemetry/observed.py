"""Everybody who is told what enforcing would have done to a request: the tallies, the metrics, and the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from sidecar.events import Observed, Verdict
from sidecar.telemetry.logs.request_log import RequestLog

logger = logging.getLogger(__name__)

Record = TypeVar("Record")


class Listeners(Generic[Record]):
    """All that are told of one kind of record. Nothing raises: a listener's first failure is logged, others go on."""

    def __init__(self, listeners: Sequence[Callable[[Record], None]]) -> None:
        self._listeners = tuple(listeners)
        self._reported = False

    def __call__(self, record: Record) -> None:
        """Tells all of them."""
        for listener in self._listeners:
            try:
                listener(record)
            except Exception:  # noqa: PERF203  one that fails must not silence the others
                self._report()

    def _report(self) -> None:
        if not self._reported:
            self._reported = True
            logger.exception("telemetry failed; requests go on without, and further failures are not logged")


class ToldOfObserved(Listeners[Observed]):
    """The door's `ObservedObserver`."""


class ObservedLog:
    """Writes a line for every request that enforcing would have refused, so many a second as of real refusals."""

    def __init__(self, log: RequestLog) -> None:
        self._log = log

    def note(self, observed: Observed) -> None:
        """Writes it, or leaves it out."""
        if observed.verdict is not Verdict.REFUSED:
            return
        fields: dict[str, object] = {
            "event": "would_be_refused",
            "code": observed.code,
            "request_id": observed.request_id,
            "tier": observed.tier,
            "tenant": observed.tenant,
        }
        if observed.queue_wait_us:
            fields["queue_wait_s"] = observed.queue_wait_us / 1e6
            fields["starvation_s"] = observed.starvation_us / 1e6
        arguments = (observed.request_id, observed.code)
        self._log.write_bounded(logging.INFO, "request %s passed; enforcing would refuse it: %s", arguments, fields)
