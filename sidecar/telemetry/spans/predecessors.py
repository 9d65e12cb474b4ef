"""Who was ahead of a request that waited, from the journal: where the links of its spans lead to."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import islice

from sidecar.events import Admitted, Refused
from sidecar.telemetry.journal import Journal, Record
from sidecar.telemetry.spans.links import Predecessor, Predecessors, WhoWasAhead

MOST_LOOKED_AT = 1024
"""Admissions that are looked at for those in turn: this runs on a request's path, and 1024 take about 0.1 ms."""


def predecessors_in(journal: Journal) -> WhoWasAhead:
    """Asks the journal; requests without a recorded trace are passed over."""
    return partial(_predecessors, journal)


def _predecessors(journal: Journal, tier: str, event: Admitted | Refused, most: int) -> Predecessors:
    # Twice as many, as some may have no trace: where all overtakers are sampled out, so, most likely, is this one.
    overtook = journal.overtook(event, most=2 * most)
    stood_in_line_us = event.at_us - event.queue_wait_us
    looked_at = journal.ahead_of(event, MOST_LOOKED_AT)
    in_turn = (record for record in looked_at if record.arrived_us <= stood_in_line_us)
    return Predecessors(_recorded(in_turn, None, most), _recorded(overtook, tier, most))


def _recorded(records: Iterable[Record], overtaken: str | None, most: int) -> list[Predecessor]:
    """Those with a trace that is kept; the rule is the one by which they overtook that tier."""
    found = (_predecessor(record, overtaken) for record in records)
    return [*islice((predecessor for predecessor in found if predecessor is not None), most)]


def _predecessor(record: Record, overtaken: str | None) -> Predecessor | None:
    trace, classified, admitted = record.trace, record.classified, record.admitted
    if trace is None or not trace.is_sampled or classified is None or admitted is None:
        return None
    rule = None if overtaken is None else admitted.passed.get(overtaken)
    return Predecessor(trace.trace_id, trace.span_id, record.request_id, classified.tier, rule)
