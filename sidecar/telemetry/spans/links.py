"""Span links where one request waits for many: from its waiting to the `admission` spans of those that went ahead.

A link leads from one trace into another. `admission.starved` links to the first that overtook it, `admission.queued` to
the first that were admitted before it in their turn. Only requests of this process are known, and only those whose
trace is recorded are linked to: a link to a trace that is not kept leads nowhere. Many backends show no links, so that
`admission.starved` also has the sums of those that overtook it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from opentelemetry.trace import Link, SpanContext, TraceFlags

from sidecar.events import Admitted, Refused
from sidecar.telemetry import semconv
from sidecar.telemetry.journal import Journal
from sidecar.telemetry.request_record import RequestRecord
from sidecar.telemetry.spans.open_span import Attributes

MOST_LINKS = 16
"""Links of one span. The first to overtake is the one to look at; each link costs some 5 microseconds and 100 bytes."""
MOST_LOOKED_AT = 1024
"""Admissions that are looked at for those in turn: this runs on a request's path, and 1024 take about 0.1 ms."""

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class WaitLinks(NamedTuple):
    """Links to those that were admitted in their turn while a request waited, and to those that overtook it.

    `overtaken_by` are the attributes with what overtook it: requests that came later and were admitted first.
    """

    in_turn: Sequence[Link]
    overtook: Sequence[Link]
    overtaken_by: Attributes


FindLinks = Callable[[str, Admitted | Refused, int], WaitLinks]
"""Given the tier of a request that waited, the event that ended its wait, and the id of its `admission` span.

Called on the request's path, once for each recorded request that waited and never for others.
"""


def links_from(journal: Journal) -> FindLinks:
    """Finds the links in the journal; requests without a recorded trace are passed over."""
    return partial(_find, journal)


def _find(journal: Journal, tier: str, event: Admitted | Refused, own_span_id: int) -> WaitLinks:
    overtook = journal.overtook(event, most=MOST_LOOKED_AT)
    queued_us = event.at_us - event.queue_wait_us
    looked_at = journal.ahead_of(event, MOST_LOOKED_AT)
    in_turn = (record for record in looked_at if record.arrived_us <= queued_us)
    links = _links(in_turn, None, own_span_id), _links(overtook, tier, own_span_id)
    return WaitLinks(*links, _overtaken_by(overtook, tier))


def _overtaken_by(overtook: Iterable[RequestRecord], overtaken: str) -> Attributes:
    """By tier, the tokens of those that overtook a request of the tier `overtaken`, and the rules by which they did."""
    tokens: dict[str, int] = {}
    rules: dict[str, dict[str, None]] = {}
    for record in overtook:
        if record.classified is not None and record.admitted is not None:
            tier, rule = record.classified.tier, record.admitted.passed.get(overtaken)
            tokens[tier] = tokens.get(tier, 0) + record.classified.tokens
            rules.setdefault(tier, {}).update({} if rule is None else {rule: None})
    found: Attributes = {semconv.ADMISSION_OVERTAKEN_BY_PREFIX + tier: sum_ for tier, sum_ in tokens.items()}
    for tier, named in rules.items():
        if named:
            found[f"{semconv.ADMISSION_OVERTAKEN_BY_PREFIX}{tier}.rules"] = ", ".join(named)
    return found


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
