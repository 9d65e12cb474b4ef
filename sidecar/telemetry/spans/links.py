"""Span links where one request waits on many: from its waiting to the `admission` spans of those that went ahead.

A link leads from one trace into another. `admission.starved` links to the first that overtook it, `admission.queued` to
the first that were admitted ahead of it in their turn. Only requests of this process are known, and only those whose
trace is recorded are linked to: a link to a trace that nobody keeps leads nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from opentelemetry.trace import Link, SpanContext, TraceFlags

from sidecar.events import Admitted, Refused
from sidecar.telemetry import semconv

MOST_LINKS = 16
"""Links of one span. Who overtook first is who to look at; each link costs some 5 microseconds and 100 bytes."""

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class Predecessor(NamedTuple):
    """A request that was admitted while another waited: its recorded `admission` span, and why it went first.

    `rule` is the name of the scheduler's rule by which it overtook; None where it came first, or is of the same tier.
    """

    trace_id: int
    span_id: int
    request_id: str
    tier: str
    rule: str | None


class Predecessors(NamedTuple):
    """Those admitted while a request waited, in order: `in_turn` had come before it, `overtook` came later."""

    in_turn: Sequence[Predecessor]
    overtook: Sequence[Predecessor]


WhoWasAhead = Callable[[str, Admitted | Refused, int], Predecessors]
"""Given the tier of a request that waited, the event that ended its waiting, and how many of each kind are wanted.

Called on the request's path, once for each recorded request that waited and never for others.
"""


def links_to(predecessors: Iterable[Predecessor]) -> Sequence[Link]:
    """A link to each."""
    return [_link_to(predecessor) for predecessor in predecessors]


def _link_to(predecessor: Predecessor) -> Link:
    attributes = {
        semconv.ADMISSION_TIER: predecessor.tier,
        semconv.ADMISSION_REQUEST_ID: predecessor.request_id,
    }
    if predecessor.rule is not None:
        attributes[semconv.ADMISSION_RULE] = predecessor.rule
    return Link(SpanContext(predecessor.trace_id, predecessor.span_id, False, _SAMPLED), attributes)
