"""Metrics of requests, from events: plain numbers that are added up, and a histogram where a distribution is wanted.

What an SDK does for one measurement costs as much as all of the adding: so the sums are told when somebody reads them,
and only where the SDK is the host's are durations given to it one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider, NoOpMeterProvider

from sidecar.events import (
    Admitted,
    Classified,
    Event,
    FirstByte,
    Outcome,
    Preempted,
    Queued,
    Received,
    Refused,
    Settled,
)
from sidecar.telemetry import semconv
from sidecar.telemetry.holdings import Holding, Holdings
from sidecar.telemetry.metrics.counters import OVER, UNDER, Counted
from sidecar.telemetry.metrics.exemplars import context_of
from sidecar.telemetry.metrics.histograms import Labeled
from sidecar.telemetry.metrics.instruments import Held, Instruments, instruments_of
from sidecar.telemetry.preemption import end_of_wait, engine_time_us
from sidecar.telemetry.telemetry import Tell, Trace
from sidecar.telemetry.tenants import SHOWN, Tenant

logger = logging.getLogger(__name__)

GAVE_UP = frozenset(("client_left", "canceled"))
"""The codes of `Refused` that are nobody's refusal."""


class Waits(NamedTuple):
    """The histograms of one tier's waits that ended one way."""

    queue_wait: Labeled
    starvation: Labeled


class RequestMetrics:
    """Listens to every request to one pool. One for each door; two doors to one pool add to the same counters.

    `tiers` are those that are told of from the start, before any request; `tenants_shown` tenants at most are named.
    `meter_provider` None means the global one; an SDK that is installed later is found.
    """

    def __init__(
        self,
        pool: str,
        *,
        tiers: Sequence[str] = (),
        tenants_shown: int = SHOWN,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        self.pool = pool
        self.holdings = Holdings()
        self._held = Held(pool, self.holdings)
        self.instruments = _instruments(meter_provider)
        self.instruments.watch_tenants(self._held)
        self.counters = self.instruments.counters(pool, tenants_shown)
        for tier in tiers:
            self.counters.know(tier)
        self._waits: dict[tuple[str, str], Waits] = {}
        self._first_tokens: dict[str, Labeled] = {}

    def begin(self, received: Received, trace: Trace | None) -> Tell:
        """See `Listener.begin`."""
        return _Request(self, received, trace).tell

    def held(self) -> Mapping[str, Holding]:
        """What the tenants hold and wait for at this door. In any thread."""
        return self.holdings.held()

    def waits(self, tier: str, decision: str) -> Waits:
        """Where the waits of a tier are noted that ended so; made once."""
        waits = self._waits.get((tier, decision))
        if waits is None:
            labels = {**self._labels(tier), semconv.ADMISSION_DECISION: decision}
            instruments = self.instruments
            waits = Waits(instruments.queue_wait.labeled(labels), instruments.starvation.labeled(labels))
            self._waits[tier, decision] = waits
        return waits

    def first_token(self, tier: str) -> Labeled:
        """Where a tier's times to first token are noted; made once."""
        labeled = self._first_tokens.get(tier)
        if labeled is None:
            labeled = self._first_tokens[tier] = self.instruments.time_to_first_token.labeled(self._labels(tier))
        return labeled

    def _labels(self, tier: str) -> dict[str, str]:
        return {semconv.POOL: self.pool, semconv.ADMISSION_TIER: tier}


class _Request:
    """One request. Until it is classified it has no tier; `_tier` is that tier's name as a counter has it.

    `_admitted_last` is None until it is admitted. How one waited that may be preempted is told when it can change no
    more: with its first byte, or its end.
    """

    __slots__ = (
        "_admitted_last", "_context", "_is_holding", "_is_preemptible", "_is_wait_told", "_is_waiting", "_metrics",
        "_received", "_streams", "_tenant", "_tier", "_tokens", "_trace",
    )  # fmt: skip

    def __init__(self, metrics: RequestMetrics, received: Received, trace: Trace | None) -> None:
        self._metrics = metrics
        self._received = received
        self._trace = trace if trace is not None and trace.is_sampled else None
        self._context: Context | None = None
        self._tenant: Tenant | None = None
        self._tier = ("",)
        self._admitted_last: Admitted | None = None
        self._is_waiting = self._is_holding = self._is_wait_told = False

    def tell(self, event: Event) -> None:
        kind = type(event)  # quicker than isinstance: records have no subclasses
        if kind is Classified:
            self._classified(event)  # type: ignore[arg-type]
        elif kind is Admitted:
            self._admitted(event)  # type: ignore[arg-type]
        elif kind is FirstByte:
            self._answered(event)  # type: ignore[arg-type]
        elif kind is Settled:
            self._settled(event)  # type: ignore[arg-type]
        elif kind is Queued:
            self._queued()
        elif kind is Refused:
            self._refused(event)  # type: ignore[arg-type]
        elif kind is Preempted:
            self._preempted(event)  # type: ignore[arg-type]

    def _classified(self, event: Classified) -> None:
        counters = self._metrics.counters
        self._tier = (event.tier,)
        self._tokens, self._streams, self._is_preemptible = event.tokens, event.stream, event.preemptible
        self._tenant = counters.tenants.asks(event.tenant, event.tokens, event.at_us)
        if event.clamped_from is not None:
            _add(counters.clamped, (event.clamped_from, event.tier))
        if event.downgraded_from is not None:
            _add(counters.downgraded, (event.downgraded_from, event.tier))

    def _queued(self) -> None:
        if self._tenant is not None:
            self._is_waiting = True
            self._metrics.holdings.waits(self._tenant.name)

    def _admitted(self, event: Admitted) -> None:
        self._waits_no_more()
        metrics, tier, tenant = self._metrics, self._tier, self._tenant
        if tenant is None:
            return
        counters = metrics.counters
        if self._admitted_last is None:
            _add(counters.admitted, tier)
            _add(counters.tokens_estimated, tier, self._tokens)
            tenant.counts.admitted += 1
        self._admitted_last = event
        self._is_holding = True
        metrics.holdings.holds(tenant.name, self._tokens)
        for overtaken, rule in event.passed.items():
            _add(counters.overtaken, (overtaken, tier[0], rule))
            _add(counters.overtaken_tokens, (overtaken, tier[0], rule), self._tokens)
        if not self._is_preemptible:
            self._waited_once("admitted", event)

    def _preempted(self, event: Preempted) -> None:
        counters = self._metrics.counters
        _add(counters.preemptions, self._tier)
        _add(counters.preempted_engine_us, self._tier, engine_time_us(event))
        self._holds_no_more()

    def _answered(self, event: FirstByte) -> None:
        if self._admitted_last is not None:
            self._waited_once("admitted", self._admitted_last)
        if self._tenant is not None and self._streams and event.status < 400:
            since_s = (event.at_us - self._received.at_us) / 1e6
            self._metrics.first_token(self._tier[0]).record(since_s, self._where())

    def _settled(self, event: Settled) -> None:
        metrics, tier, tenant = self._metrics, self._tier, self._tenant
        if tenant is None:
            return
        counters = metrics.counters
        _add(counters.settled, (tier[0], event.outcome.value))
        _add(counters.tokens_used, tier, event.tokens_used)
        tenant.counts.tokens_used += event.tokens_used
        self._ends_waiting(event)
        self._holds_no_more()
        is_counted = event.input_tokens is not None and event.output_tokens is not None
        if is_counted and event.outcome is Outcome.COMPLETED:
            error = self._tokens - event.tokens_used
            _add(counters.estimate_errors, (tier[0], UNDER if error < 0 else OVER), abs(error))

    def _refused(self, event: Refused) -> None:
        self._waits_no_more()
        gave_up = event.code in GAVE_UP
        counters = self._metrics.counters
        _add(counters.abandoned if gave_up else counters.refused, (self._tier[0], event.code))
        if self._tenant is not None and not gave_up:
            self._tenant.counts.refused += 1
        if event.queue_wait_us > 0:
            self._waited(event.code if gave_up else "refused", event.queue_wait_us, event.starvation_us)

    def _ends_waiting(self, event: Settled) -> None:
        """Tells how it waited, where nothing has told that before."""
        if self._admitted_last is None:
            return
        if not self._is_holding:  # preempted, and not admitted again
            self._waits_no_more()
            end = end_of_wait(self._admitted_last, event)
            self._waited_once(end.code if end.code in GAVE_UP else "refused", end)
        else:
            self._waited_once("admitted", self._admitted_last)

    def _holds_no_more(self) -> None:
        if self._is_holding and self._tenant is not None:
            self._is_holding = False
            self._metrics.holdings.gives_back(self._tenant.name, self._tokens)

    def _waited_once(self, decision: str, end: Admitted | Refused) -> None:
        if not self._is_wait_told:
            self._is_wait_told = True
            self._waited(decision, end.queue_wait_us, end.starvation_us)

    def _waits_no_more(self) -> None:
        if self._is_waiting and self._tenant is not None:
            self._is_waiting = False
            self._metrics.holdings.waits_no_more(self._tenant.name)

    def _waited(self, decision: str, queue_wait_us: int, starvation_us: int) -> None:
        waits = self._metrics.waits(self._tier[0], decision)
        waits.queue_wait.record(queue_wait_us / 1e6, self._where())
        if starvation_us > 0:
            waits.starvation.record(starvation_us / 1e6, self._where())

    def _where(self) -> Context | None:
        if self._context is None and self._trace is not None:
            self._context = context_of(self._trace, self._received.request_id)
        return self._context


def _add(counted: Counted, labels: tuple[str, ...], number: int = 1) -> None:
    counted[labels] = counted.get(labels, 0) + number


def _instruments(meter_provider: MeterProvider | None) -> Instruments:
    try:
        return instruments_of(meter_provider)
    except Exception:
        logger.exception("the metrics of requests failed; requests go on without")
        return instruments_of(_NOTHING)


_NOTHING = NoOpMeterProvider()
