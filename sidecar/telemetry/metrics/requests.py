"""Metrics of requests: plain numbers that are added up, and a histogram where a distribution is wanted.

One measurement through an SDK costs as much as all of the adding. So the sums are read when a reader collects them,
and only where the SDK is the host's are durations given to it one by one.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TypeVar

from opentelemetry.metrics import MeterProvider, NoOpMeterProvider

from sidecar.events import (
    Admitted,
    Classified,
    Expectation,
    FirstByte,
    Observed,
    Outcome,
    Preempted,
    Queued,
    Refused,
    ServiceGain,
    Settled,
    UnguardedRequest,
)
from sidecar.telemetry import semconv
from sidecar.telemetry.metrics.histograms import DurationHistogram, LabeledHistogram
from sidecar.telemetry.metrics.instruments import OVER, UNDER, Instruments, instruments_of
from sidecar.telemetry.metrics.tenants import SHOWN, TenantHolding, TenantHoldings
from sidecar.telemetry.request_record import EventHandlers, RequestRecord, engine_time_us

logger = logging.getLogger(__name__)

Labels = TypeVar("Labels", bound=tuple[str, ...])

GAVE_UP = frozenset(("client_left", "canceled"))
"""The codes of `Refused` that are not the middleware's refusal."""
PASSED, REFUSED, FAILED = "passed", "refused", "failed"
RATIOS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 4.0)
RATIO_NAMES = (*(f"{ratio:g}" for ratio in RATIOS), "more")
"""Classes of an answer's length in parts of the expected one, each up to so much. A counter of each costs no call of a
host's SDK, which a histogram would."""
MAXIMUM = "maximum"
"""`Expectation.source` where nothing was known: the difference to that is no error of an estimate."""


class WaitHistograms:
    """The histograms of the waits at one pool, by tier and by how the wait ended."""

    def __init__(self, pool: str, queue_wait: DurationHistogram, starvation: DurationHistogram) -> None:
        self._pool = pool
        self._histograms = queue_wait, starvation
        self._labeled: dict[tuple[str, str], tuple[LabeledHistogram, LabeledHistogram]] = {}

    def record(
        self, tier: str, decision: str, end: Admitted | Refused | Observed, record: RequestRecord | None
    ) -> None:
        """Notes a wait, and its starvation where it starved; the request's record is the exemplar."""
        labeled = self._labeled.get((tier, decision))
        if labeled is None:
            labels = {semconv.POOL: self._pool, semconv.ADMISSION_TIER: tier, semconv.ADMISSION_DECISION: decision}
            queue_wait, starvation = self._histograms
            labeled = self._labeled[tier, decision] = queue_wait.labeled(labels), starvation.labeled(labels)
        labeled[0].record(end.queue_wait_us / 1e6, record)
        if end.starvation_us > 0:
            labeled[1].record(end.starvation_us / 1e6, record)


# Looked up once: an enumeration's attribute costs as much as a call.
_COMPLETED, _, _FAILED = Outcome


class RequestMetrics:
    """A listener. One for each middleware; two middlewares on one pool add to the same counters.

    `tiers` are reported from the start, before any request, and of the `measured` ones the service gain;
    `tenants_shown` tenants at most are named. `meter_provider` None means the global one; an SDK that is installed
    later is found.
    """

    def __init__(
        self,
        pool: str,
        *,
        tiers: Sequence[str] = (),
        measured: Sequence[str] = (),
        tenants_shown: int = SHOWN,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        self.pool = pool
        self.holdings = TenantHoldings()
        self.instruments = _instruments(meter_provider)
        self.instruments.watch_tenants(pool, self.holdings)
        self.counters = self.instruments.counters(pool, tenants_shown)
        for tier in tiers:
            self.counters.know(tier)
        for tier in measured:
            self.counters.know_objective(tier)
        self._waits = WaitHistograms(pool, self.instruments.queue_wait, self.instruments.starvation)
        self._first_tokens: dict[str, LabeledHistogram] = {}
        self.handlers: EventHandlers = {
            Classified: self._classified,
            Queued: self._queued,
            Admitted: self._admitted,
            Preempted: self._preempted,
            FirstByte: self._first_byte,
            Settled: self._settled,
            Refused: self._refused,
        }

    def held(self) -> Mapping[str, TenantHolding]:
        """The holdings of each tenant at this middleware. In any thread."""
        return self.holdings.held()

    def note_unguarded(self, request: UnguardedRequest) -> None:
        """Counts a request on a path that the policy does not guard. In `mode: observe` it has the refusal's code."""
        add(self.counters.unguarded, (request.route, REFUSED if request.is_refused else PASSED, request.code or ""))

    def _classified(self, _: RequestRecord, event: Classified) -> None:
        counters = self.counters
        counters.tenants.note_request(event.tenant, event.tokens, event.at_us)
        if event.clamped_from is not None:
            add(counters.clamped, (event.clamped_from, event.tier))
        if event.downgraded_from is not None:
            add(counters.downgraded, (event.downgraded_from, event.tier))

    def _queued(self, record: RequestRecord, _: Queued) -> None:
        if record.classified is not None:
            self.holdings.add(record.classified.tenant, waiting=1)

    def _admitted(self, record: RequestRecord, event: Admitted) -> None:
        classified = record.classified
        if classified is None:
            return
        self._end_queued(record)
        counters, tier, tokens = self.counters, classified.tier, classified.tokens
        if not record.lost:
            add(counters.admitted, (tier,))
            add(counters.tokens_estimated, (tier,), tokens)
            counters.tenants.counts(classified.tenant).admitted += 1
        self.holdings.add(classified.tenant, tokens, 1)
        for overtaken, rule in event.passed.items():
            add(counters.overtaken, (overtaken, tier, rule))
            add(counters.overtaken_tokens, (overtaken, tier, rule), tokens)
        # Preempted all the same where another policy came. A wait for the engine is one more wait.
        if not classified.preemptible and (not record.lost or record.lost[-1].preempted.is_unreached):
            self._record_wait(record, "admitted", event)

    def _preempted(self, record: RequestRecord, event: Preempted) -> None:
        classified = record.classified
        tier = "" if classified is None else classified.tier
        if not event.is_unreached:
            add(self.counters.preemptions, (tier,))
            add(self.counters.preempted_engine_us, (tier,), engine_time_us(event))
        if classified is not None and record.lost and record.lost[-1].preempted is event:
            self.holdings.add(classified.tenant, -classified.tokens, -1)

    def _first_byte(self, record: RequestRecord, event: FirstByte) -> None:
        classified = record.classified
        if classified is None:
            return
        if classified.preemptible and record.admitted is not None:  # from now on it cannot be preempted
            self._record_wait(record, "admitted", record.admitted)
        if classified.stream and event.status < 400:
            histogram = self._first_tokens.get(classified.tier)
            if histogram is None:
                labels = {semconv.POOL: self.pool, semconv.ADMISSION_TIER: classified.tier}
                histogram = self.instruments.time_to_first_token.labeled(labels)
                self._first_tokens[classified.tier] = histogram
            histogram.record((event.at_us - record.at_us) / 1e6, record)

    def _settled(self, record: RequestRecord, event: Settled) -> None:
        classified = record.classified
        if classified is None:
            return
        counters, tier, used = self.counters, classified.tier, event.tokens_used
        add(counters.settled, (tier, event.outcome._value_))
        if event.outcome is _FAILED:
            add(counters.failed, (tier, event.error or FAILED))
        add(counters.tokens_used, (tier,), used)
        counters.tenants.counts(classified.tenant).tokens_used += used
        is_wait_recorded = not classified.preemptible or record.first_byte is not None
        if record.admitted is not None:
            self.holdings.add(classified.tenant, -classified.tokens, -1)
            if not is_wait_recorded:
                self._record_wait(record, "admitted", record.admitted)
        elif record.refused is not None:  # preempted, and not admitted again
            self._end_queued(record)
            if not is_wait_recorded:
                code = record.refused.code
                self._record_wait(record, code if code in GAVE_UP else "refused", record.refused)
        is_counted = event.input_tokens is not None and event.output_tokens is not None
        if is_counted and event.outcome is _COMPLETED:
            error = classified.tokens - used
            add(counters.estimate_errors, (tier, UNDER if error < 0 else OVER), abs(error))
        if classified.expected is not None:
            self._note_size(classified, classified.expected, event)
        if event.gain is not None:
            self._note_gain(tier, event.gain)

    def _note_gain(self, tier: str, gain: ServiceGain) -> None:
        counters = self.counters
        add(counters.gain_earned, (tier,), gain.earned)
        add(counters.gain_attainable, (tier,), gain.attainable)
        add(counters.slo_requests, (tier, gain.slo))

    def _note_size(self, classified: Classified, expected: Expectation, event: Settled) -> None:
        """Counts how often the lease grew, and compares the length of a complete answer with what was expected."""
        tier, output = classified.tier, event.output_tokens
        if event.growths:
            add(self.counters.growths, (tier,), event.growths)
        is_complete = event.outcome is _COMPLETED and (event.status or 0) < 400
        if output is not None and is_complete and expected.source != MAXIMUM:
            ratio = RATIO_NAMES[bisect_left(RATIOS, output / (expected.output_tokens * expected.sequences))]
            add(self.counters.tenants.counts(classified.tenant).answers, (tier, ratio))

    def _refused(self, record: RequestRecord, event: Refused) -> None:
        self._end_queued(record)
        classified, gave_up, counters = record.classified, event.code in GAVE_UP, self.counters
        tier = "" if classified is None else classified.tier
        add(counters.abandoned if gave_up else counters.refused, (tier, event.code))
        if classified is not None and not gave_up:
            counters.tenants.counts(classified.tenant).refused += 1
        if event.gain is not None:
            self._note_gain(tier, event.gain)
        if event.queue_wait_us > 0:
            self._record_wait(record, event.code if gave_up else "refused", event)

    def _end_queued(self, record: RequestRecord) -> None:
        if record.queued is not None and record.classified is not None:
            self.holdings.add(record.classified.tenant, waiting=-1)

    def _record_wait(self, record: RequestRecord, decision: str, end: Admitted | Refused) -> None:
        tier = "" if record.classified is None else record.classified.tier
        self._waits.record(tier, decision, end, record)


def add(counted: dict[Labels, int], labels: Labels, number: int = 1) -> None:
    """Adds to the count of these labels."""
    counted[labels] = counted.get(labels, 0) + number


def _instruments(meter_provider: MeterProvider | None) -> Instruments:
    try:
        return instruments_of(meter_provider)
    except Exception:
        logger.exception("the metrics of requests failed; requests go on without")
        return instruments_of(_NO_METRICS)


_NO_METRICS = NoOpMeterProvider()
