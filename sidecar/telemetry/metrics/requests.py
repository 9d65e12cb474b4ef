"""Metrics of requests: plain numbers that are added up, and a histogram where a distribution is wanted.

One measurement through an SDK costs as much as all of the adding. So the sums are read when a reader collects them,
and only durations are given to it one by one.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence

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
    Risen,
    ServiceGain,
    Settled,
    UnguardedRequest,
    Verdict,
)
from sidecar.telemetry import semconv
from sidecar.telemetry.metrics.histograms import DurationHistogram
from sidecar.telemetry.metrics.instruments import OVER, UNDER, Instruments, instruments_for
from sidecar.telemetry.metrics.tenants import SHOWN, TenantCounts, TenantHolding, TenantHoldings
from sidecar.telemetry.request_record import ABANDONED, EventHandlers, RequestRecord, engine_time_us

logger = logging.getLogger(__name__)

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
        self._queue_wait, self._starvation = queue_wait, starvation

    def record(
        self, tier: str, decision: str, end: Admitted | Refused | Observed, request: RequestRecord | None = None
    ) -> None:
        """Notes a wait, and its starvation where it starved; the request's record is the exemplar.

        That of a deferred request says nothing of its tier, and is in no histogram.
        """
        if request is not None and request.classified is not None and request.classified.is_deferred:
            return
        labels = {semconv.POOL: self._pool, semconv.ADMISSION_TIER: tier, semconv.ADMISSION_DECISION: decision}
        self._queue_wait.record(end.queue_wait_us / 1e6, labels, request)
        if end.starvation_us > 0:
            self._starvation.record(end.starvation_us / 1e6, labels, request)


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
        of = self.instruments
        self._waits = WaitHistograms(pool, of.queue_wait, of.starvation)
        self._observed_waits = WaitHistograms(pool, of.observed_queue_wait, of.observed_starvation)
        self.handlers: EventHandlers = {
            Classified: self._classified,
            Queued: self._queued,
            Risen: self._risen,
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
        self.counters.unguarded[request.route, REFUSED if request.is_refused else PASSED, request.code or ""] += 1

    def note_observed(self, observed: Observed) -> None:
        """Counts a request of the dry run, in metrics of its own: the others report real ends only."""
        tier, decision = observed.tier or "", observed.verdict.value
        self.counters.observed[tier, decision, observed.code or ""] += 1
        if observed.verdict is Verdict.ADMITTED or observed.queue_wait_us:
            self._observed_waits.record(tier, decision, observed)

    def _classified(self, _: RequestRecord, event: Classified) -> None:
        counters = self.counters
        counters.tenants.note_request(event.tenant, event.tokens, event.at_us)
        if event.clamped_from is not None:
            counters.clamped[event.clamped_from, event.tier] += 1
        if event.downgraded_from is not None:
            counters.downgraded[event.downgraded_from, event.tier] += 1

    def _queued(self, record: RequestRecord, _: Queued) -> None:
        if record.classified is not None:
            self.holdings.add(record.classified.tenant, waiting=1)

    def _risen(self, _: RequestRecord, event: Risen) -> None:
        self.counters.risen[event.tier,] += 1

    def _admitted(self, record: RequestRecord, event: Admitted) -> None:
        classified = record.classified
        if classified is None:
            return
        if record.queued is not None:
            self._end_queued(record)
        counters, tier, tokens, lost = self.counters, classified.tier, classified.tokens, record.lost
        if not lost:
            counters.admitted[tier,] += 1
            counters.tokens_estimated[tier,] += tokens
            counters.tenants.known[classified.tenant].counts.admitted += 1
        self.holdings.add(classified.tenant, tokens, 1)
        if event.passed:
            self._note_overtaken(event.passed, tier, tokens)
        # Preempted all the same where another policy came. A wait for the engine is one more wait.
        if not classified.preemptible and (not lost or lost[-1].preempted.is_unreached):
            self._waits.record(tier, "admitted", event, record)

    def _note_overtaken(self, passed: Mapping[str, str], tier: str, tokens: int) -> None:
        for overtaken, rule in passed.items():
            self.counters.overtaken[overtaken, tier, rule] += 1
            self.counters.overtaken_tokens[overtaken, tier, rule] += tokens

    def _preempted(self, record: RequestRecord, event: Preempted) -> None:
        classified = record.classified
        tier = "" if classified is None else classified.tier
        if not event.is_unreached:
            lost_us = engine_time_us(event)
            self.counters.preemptions[tier,] += 1
            self.counters.preempted_engine_us[tier,] += lost_us
        if classified is not None and record.lost and record.lost[-1].preempted is event:
            self.holdings.add(classified.tenant, -classified.tokens, -1)

    def _first_byte(self, record: RequestRecord, event: FirstByte) -> None:
        classified = record.classified
        if classified is None:
            return
        if classified.preemptible and record.admitted is not None:  # from now on it cannot be preempted
            self._record_wait(record, "admitted", record.admitted)
        if classified.stream and event.status < 400:
            labels = {semconv.POOL: self.pool, semconv.ADMISSION_TIER: classified.tier}
            self.instruments.time_to_first_token.record((event.at_us - record.at_us) / 1e6, labels, record)

    def _settled(self, record: RequestRecord, event: Settled) -> None:
        classified = record.classified
        if classified is None:
            return
        counters, tier, used, outcome = self.counters, classified.tier, event.tokens_used, event.outcome
        tenant = counters.tenants.known[classified.tenant].counts
        tenant.tokens_used += used
        counters.settled[tier, outcome._value_] += 1
        counters.tokens_used[tier,] += used
        if outcome is Outcome.FAILED:
            counters.failed[tier, event.error or FAILED] += 1
        if outcome is Outcome.COMPLETED and event.output_tokens is not None:
            if event.input_tokens is not None:
                over = classified.tokens - used
                direction, error = (UNDER, -over) if over < 0 else (OVER, over)
                counters.estimate_errors[tier, direction] += error
            if classified.expected is not None and (event.status or 0) < 400:
                _note_length(classified.expected, event.output_tokens, tier, tenant)
        if record.admitted is not None:
            self.holdings.add(classified.tenant, -classified.tokens, -1)
        elif record.refused is not None:  # preempted, and not admitted again
            self._end_queued(record)
        if classified.preemptible and record.first_byte is None:
            self._note_preemptible_wait(record)
        if event.growths and classified.expected is not None:
            counters.growths[tier,] += event.growths
        if event.gain is not None:
            self._note_gain(tier, event.gain)

    def _note_preemptible_wait(self, record: RequestRecord) -> None:
        """Of a request that could be preempted to its end: the wait that was its last."""
        if record.admitted is not None:
            self._record_wait(record, "admitted", record.admitted)
        elif record.refused is not None:
            code = record.refused.code
            self._record_wait(record, code if code in ABANDONED else "refused", record.refused)

    def _note_gain(self, tier: str, gain: ServiceGain) -> None:
        counters = self.counters
        counters.gain_earned[tier,] += gain.earned
        counters.gain_attainable[tier,] += gain.attainable
        counters.slo_requests[tier, gain.slo] += 1

    def _refused(self, record: RequestRecord, event: Refused) -> None:
        self._end_queued(record)
        gave_up, counters, tier, tenant = event.code in ABANDONED, self.counters, record.tier or "", record.tenant
        counted = counters.abandoned if gave_up else counters.refused
        counted[tier, event.code] += 1
        if tenant is not None and not gave_up:
            counters.tenants.note_request(tenant, 0, event.at_us).counts.refused += 1
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


def _note_length(expected: Expectation, output: int, tier: str, tenant: TenantCounts) -> None:
    """Compares the length of a complete answer with what was expected."""
    if expected.source != MAXIMUM:
        labels = tier, RATIO_NAMES[bisect_left(RATIOS, output / (expected.output_tokens * expected.sequences))]
        tenant.answers[labels] += 1


def _instruments(meter_provider: MeterProvider | None) -> Instruments:
    try:
        return instruments_for(meter_provider)
    except Exception:
        logger.exception("the metrics of requests failed; requests go on without")
        return instruments_for(_NO_METRICS)


_NO_METRICS = NoOpMeterProvider()
