"""Span links where one request waits for many: from its waiting to the `admission` spans of those that went ahead.

A link leads from one trace into another. `admission.starved` links to the first that overtook it, `admission.queued` to
the first that were admitted before it in their turn. Only requests of this process are known, and only those whose
trace is recorded are linked to: a link to a trace that is not kept leads nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice

from opentelemetry.trace import Link, SpanContext, TraceFlags

from sidecar.events import Admitted, Refused
from sidecar.telemetry import semconv
from sidecar.telemetry.journal import Journal
from sidecar.telemetry.request_record import RequestRecord

MOST_LINKS = 16
"""Links of one span. The first to overtake is the one to look at; each link costs some 5 microseconds and 100 bytes."""
MOST_LOOKED_AT = 1024
"""Admissions that are looked at for those in turn: this runs on a request's path, and 1024 take about 0.1 ms."""

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)

WaitLinks = tuple[Sequence[Link], Sequence[Link]]
"""To those that were admitted in their turn while a request waited, and to those that came later and overtook it."""
FindLinks = Callable[[str, Admitted | Refused, int], WaitLinks]
"""Given the tier of a request that waited, the event that ended its wait, and the id of its `admission` span.

Called on the request's path, once for each recorded request that waited and never for others.
"""


def links_from(journal: Journal) -> FindLinks:
    """Finds the links in the journal; requests without a recorded trace are passed over."""
    return partial(_find, journal)


def _find(journal: Journal, tier: str, event: Admitted | Refused, own_span_id: int) -> WaitLinks:
    # Twice as many, as some may have no trace: where all overtakers are sampled out, so, most likely, is this one.
    overtook = journal.overtook(event, most=2 * MOST_LINKS)
    queued_us = event.at_us - event.queue_wait_us
    looked_at = journal.ahead_of(event, MOST_LOOKED_AT)
    in_turn = (record for record in looked_at if record.arrived_us <= queued_us)
    return _links(in_turn, None, own_span_id), _links(overtook, tier, own_span_id)


def _links(records: Iterable[RequestRecord], overtaken: str | None, own_span_id: int) -> list[Link]:
    """To those with a recorded trace. The rule is the one by which they overtook that tier."""
    found = (_link(record, overtaken, own_span_id) for record in records)
    return [*islice((link for link in found if link is not None), MOST_LINKS)]


def _link(record: RequestRecord, overtaken: str | None, own_span_id: int) -> Link | None:
    trace, classified, admitted = record.trace, record.classified, record.admitted
    if trace is None or not trace.is_sampled or classified is None or admitted is None:
        return None
    if trace.span_id == own_span_id:  # its own earlier admission, which was taken back
        return None
    attributes = {semconv.ADMISSION_TIER: classified.tier, semconv.ADMISSION_REQUEST_ID: record.request_id}
    rule = None if overtaken is None else admitted.passed.get(overtaken)
    if rule is not None:
        attributes[semconv.ADMISSION_RULE] = rule
    return Link(SpanContext(trace.trace_id, trace.span_id, False, _SAMPLED), attributes)
