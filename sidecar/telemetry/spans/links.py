"""Information of a wait's spans on other requests: who went ahead, in words and figures, and links to their `admission`
spans.

A link leads from one trace into another. `admission.starved` links to the first that overtook it, `admission.queued` to
the first that were admitted before it in their turn. Only requests of this process are known, and only those whose
trace is recorded are linked to: a link to a trace that is not kept leads nowhere. Many backends show no links, so that
`admission.starved` also has a sentence, and the sums of those that overtook it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, Tracer

from sidecar.tasks import running_loop
from sidecar.telemetry import semconv
from sidecar.telemetry.ahead import AheadGroup, new_groups, reasons, unseen, why_it_waited, without_own_runs
from sidecar.telemetry.journal import MOST_LOOKED_AT, Journal
from sidecar.telemetry.request_record import RequestRecord

# -- An open span of OpenTelemetry's API.

Attributes = dict[str, str | int | float | bool | None]
"""Those that are None are not known, or say nothing: they are not written."""
(SPAN_KEY,) = trace.set_span_in_context(trace.INVALID_SPAN, Context())
"""In a context: its span. A context that is made with it is one mapping, where the API makes three."""
Moment = tuple[str, int]
"""A span event: its name, and its time in Unix nanoseconds."""


@dataclass(slots=True)
class OpenSpan:
    """A span that has begun, and the context that it was started in. Times are Unix nanoseconds."""

    tracer: Tracer
    span: Span
    parent: Context

    def child(
        self, name: str, kind: SpanKind, start_ns: int, attributes: Attributes, links: Sequence[Link] = ()
    ) -> OpenSpan:
        """Begins a span below it."""
        below = Context({**self.parent, SPAN_KEY: self.span})
        span = self.tracer.start_span(name, below, kind, _known(attributes), links, start_time=start_ns)
        return OpenSpan(self.tracer, span, below)

    def end(self, at_ns: int, attributes: Attributes, events: Sequence[Moment] = (), error: str | None = None) -> None:
        """Ends it. `error` is the description of its status, None where it is none."""
        for name, moment_ns in events:
            self.span.add_event(name, timestamp=moment_ns)
        if attributes:
            self.span.set_attributes(_known(attributes))
        if error is not None:
            self.span.set_status(StatusCode.ERROR, error)
        self.span.end(at_ns)

    def link(self, links: Sequence[Link]) -> None:
        """Adds links to those that it began with."""
        for link in links:
            self.span.add_link(link.context, link.attributes)


def _known(attributes: Attributes) -> dict[str, str | int | float | bool]:
    return {name: value for name, value in attributes.items() if value is not None}


MOST_LINKS = 16
"""Links of one span. The first to overtake is the one to look at; each link costs some 5 microseconds and 100 bytes."""


class WaitLinks(NamedTuple):
    """Links to those that were admitted in their turn while a request waited, and to those that overtook it.

    `overtaken_by` are the attributes that say what overtook it: requests that came later and were admitted first.
    """

    in_turn: Sequence[Link]
    overtook: Sequence[Link]
    overtaken_by: Attributes


class WaitSoFar(NamedTuple):
    """How a wait has gone until `at_us`, on the clock of the events."""

    at_us: int
    attributes: Attributes


FindLinks = Callable[[RequestRecord], WaitLinks]
"""Given a request whose wait is over.

Called on the request's path, once for each recorded request that waited and never for others.
"""
Place = Callable[[RequestRecord], int | None]
"""How many requests are before one that waits; None where that is not known."""


@dataclass(frozen=True, slots=True)
class WaitFinder:
    """Finds what is known of a wait in the journal. `tiers` are the policy's names, most important first.

    `is_shared` says that other replicas admit out of the same pool.
    """

    journal: Journal
    tiers: Sequence[str] = ()
    is_shared: bool = False
    place: Place = lambda _: None

    def ended(self, waiter: RequestRecord) -> WaitLinks:
        """Of a wait that is over. It is `FindLinks`; requests without a recorded trace are passed over."""
        looked_at = self.journal.find_ahead(waiter, MOST_LOOKED_AT)
        in_turn = _links((each for each in looked_at if each.arrived_us <= waiter.arrived_us), None)
        if waiter.waited is None or waiter.waited.overtaken_at_us is None:
            return WaitLinks(in_turn, (), {})
        overtook = without_own_runs(self.journal.overtook(waiter, most=MOST_LOOKED_AT), waiter)
        groups = new_groups(overtook, waiter, self.tiers)
        not_known = unseen(waiter.waited, looked_at, self.journal, is_shared=self.is_shared)
        are_all = self.journal.looks_at_all(waiter)
        why = why_it_waited(None, groups, not_known, is_starved=True, are_all=are_all)
        written = {semconv.ADMISSION_EXPLANATION: why, **_overtaken_by(overtook, groups, waiter)}
        return WaitLinks(in_turn, _links(overtook, waiter.tier), written)

    def so_far(self, record: RequestRecord) -> WaitSoFar:
        """Of a wait that goes on."""
        at_us, queued = self.journal.now_us(), record.queued
        seen = self.journal.find_ahead(record, MOST_LOOKED_AT)
        ahead = without_own_runs(seen, record)
        overtook = [each for each in ahead if each.arrived_us > record.arrived_us]
        overtaken_us = next((each.admitted.at_us for each in overtook if each.admitted is not None), at_us)
        groups = new_groups(ahead, record, self.tiers)
        obstacle = None if queued is None else queued.explanation
        are_all = len(seen) < MOST_LOOKED_AT
        written: Attributes = {
            semconv.ADMISSION_QUEUE_WAIT_S: (at_us - record.arrived_us) / 1e6,
            semconv.ADMISSION_STARVATION_S: (at_us - overtaken_us) / 1e6,
            semconv.ADMISSION_EXPLANATION: why_it_waited(
                obstacle, groups, (), is_starved=bool(overtook), are_all=are_all
            ),
            **_overtaken_by(overtook, [group for group in groups if group.came_later], record),
        }
        place = self.place(record)
        if place is not None:
            written[semconv.ADMISSION_REQUESTS_BEFORE] = place
        return WaitSoFar(at_us, written)


def _overtaken_by(overtook: Sequence[RequestRecord], groups: Sequence[AheadGroup], waiter: RequestRecord) -> Attributes:
    """By tier: the requests that overtook, their tokens and tenants, and why they did, in words and by rule."""
    tenants: dict[str, set[str]] = {}
    rules: dict[str, dict[str, None]] = {}
    overtaken = waiter.tier or ""
    for tier, tenant, rule in dict.fromkeys(
        (record.classified.tier, record.classified.tenant, record.admitted.passed.get(overtaken))
        for record in overtook
        if record.classified is not None and record.admitted is not None
    ):
        tenants.setdefault(tier, set()).add(tenant)
        rules.setdefault(tier, {}).update({} if rule is None else {rule: None})
    found: Attributes = {}
    for tier, of_tier in tenants.items():
        alike = [group for group in groups if group.tier == tier]
        tokens = sum(group.tokens for group in alike)
        found[semconv.ADMISSION_OVERTAKEN_BY_PREFIX + tier] = tokens
        found[semconv.ADMISSION_AHEAD_TOKENS_PREFIX + tier] = tokens
        found[semconv.ADMISSION_AHEAD_REQUESTS_PREFIX + tier] = sum(group.requests for group in alike)
        found[semconv.ADMISSION_AHEAD_TENANTS_PREFIX + tier] = len(of_tier)
        found[semconv.ADMISSION_AHEAD_BECAUSE_PREFIX + tier] = reasons(alike)
        if rules[tier]:
            found[semconv.ADMISSION_AHEAD_RULES_PREFIX + tier] = ", ".join(rules[tier])
    return found


def _links(records: Iterable[RequestRecord], overtaken: str | None) -> list[Link]:
    """To those with a recorded trace. The rule is the one by which they overtook that tier."""
    found = (_link(record, overtaken) for record in records)
    return [*islice((link for link in found if link is not None), MOST_LINKS)]


def _link(record: RequestRecord, overtaken: str | None) -> Link | None:
    trace, classified, admitted = record.trace, record.classified, record.admitted
    if trace is None or not trace.trace_flags.sampled or classified is None or admitted is None:
        return None
    attributes = {semconv.ADMISSION_TIER: classified.tier, semconv.ADMISSION_REQUEST_ID: record.request_id}
    rule = None if overtaken is None else admitted.passed.get(overtaken)
    if rule is not None:
        attributes[semconv.ADMISSION_RULE] = rule
    return Link(trace, attributes)


# -- Waits that last: each is reported in its trace now and then, so that a process that is killed leaves a last word.
#
# One timer serves all requests that wait and whose trace is recorded. Those come first that were not reported for
# the longest time, and at most `MOST_AT_ONCE` in `PAUSE_S`: where more wait, each is reported less often.

MOST_AT_ONCE = 4
PAUSE_S = 0.05
"""80 in a second: a report takes 1 ms where a thousand requests went ahead, and the SDK keeps 2,048 spans for 5 s."""


SoFar = Callable[[RequestRecord], WaitSoFar]
"""Finds how a request has waited up to now."""


class WaitingSpans(Protocol):
    """The spans of a request that waits."""

    def report_wait(self, so_far: SoFar) -> None:
        """Exports how the wait has gone. Must not raise."""


class LongWaits:
    """All recorded requests that wait. `every_s` is how often each is reported, 0 for never: a change may come.

    `so_far` finds what is to be reported. Use it from one event loop at a time.
    """

    def __init__(self, every_s: float, so_far: SoFar) -> None:
        self._every_s = every_s
        self._so_far = so_far
        self._due: OrderedDict[WaitingSpans, float] = OrderedDict()  # the first due is first
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def change_interval(self, every_s: float) -> None:
        """Follows another policy, for the requests that wait now, too."""
        if every_s == self._every_s:
            return
        self._every_s = every_s
        waiting = list(self._due)
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for spans in waiting:
            self.add(spans)

    def add(self, spans: WaitingSpans) -> None:
        """The request waits from now on."""
        loop = running_loop()
        if loop is None:  # there is no later
            return
        if self._loop is not loop:  # what waited in a loop that has ended, waits no more
            self._due.clear()
            self._timer, self._loop = None, loop
        self._due[spans] = loop.time() + self._every_s
        if self._every_s and self._timer is None:
            self._timer = loop.call_later(self._every_s, self._report_due, loop)

    def discard(self, spans: WaitingSpans) -> None:
        """Its wait is over."""
        self._due.pop(spans, None)

    def _report_due(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not loop:
            return
        self._timer = None
        now_s = loop.time()
        for _ in range(min(MOST_AT_ONCE, len(self._due))):
            spans, due_s = next(iter(self._due.items()))
            if due_s > now_s:
                break
            self._due[spans] = now_s + self._every_s
            self._due.move_to_end(spans)
            spans.report_wait(self._so_far)
        if self._due:
            due_s = next(iter(self._due.values()))
            self._timer = loop.call_later(max(due_s - now_s, PAUSE_S), self._report_due, loop)
