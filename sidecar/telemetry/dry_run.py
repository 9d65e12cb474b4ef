"""The dry run's results: what enforcing would have done to requests, in figures, metrics and log lines.

The figures are added up by tier and by tenant since the policy in force was first observed. Waits are counted in
buckets, each a tenth wider than the one before: a quantile is right to 5%, whatever its size, and the figures of
several replicas can be added up. There are at most 231 buckets up to an hour, and only those with a wait in them are
kept. The longest wait is exact.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

import msgspec

from sidecar.events import Observed, Verdict
from sidecar.telemetry.logs.request_log import RequestLog
from sidecar.telemetry.metrics.requests import RequestMetrics, WaitHistograms, add

WAITS_FROM_US = 10_000
"""Shorter waits do not count as such: a store takes as long to answer."""
OTHER_TENANTS = "(others)"
"""Not the name of a tenant: those have no parentheses."""
_STEP = math.log(1.1)


class DryRunCounts(msgspec.Struct):
    """Counts of requests by the end that they would have had.

    `waits` counts by bucket those that would have been admitted after a wait; of them, `waited` would have waited for
    10 ms or more. `refused` and `unknown` are by code. Of all requests, however they would have ended, `starved` would
    have been overtaken for 10 ms or more, and `served_ahead` has the tokens that would have gone first while they
    waited, by tier.
    """

    requests: int = 0
    admitted: int = 0
    abandoned: int = 0
    refused: dict[str, int] = {}
    unknown: dict[str, int] = {}
    waits: dict[int, int] = {}
    waited: int = 0
    wait_max_us: int = 0
    starved: int = 0
    starvation_max_us: int = 0
    served_ahead: dict[str, int] = {}

    def note(self, observed: Observed) -> None:
        """Counts one request."""
        self.requests += 1
        self.starved += observed.starvation_us >= WAITS_FROM_US
        self.starvation_max_us = max(self.starvation_max_us, observed.starvation_us)
        for tier, tokens in observed.served_ahead.items():
            _add(self.served_ahead, tier, tokens)
        if observed.verdict is Verdict.ADMITTED:
            self.admitted += 1
            wait_us = observed.queue_wait_us
            if wait_us > 0:
                _add(self.waits, int(math.log(wait_us) / _STEP))
            self.waited += wait_us >= WAITS_FROM_US
            self.wait_max_us = max(self.wait_max_us, wait_us)
        elif observed.verdict is Verdict.ABANDONED:
            self.abandoned += 1
        else:
            by_code = self.refused if observed.verdict is Verdict.REFUSED else self.unknown
            _add(by_code, str(observed.code))

    def add(self, other: DryRunCounts) -> None:
        """Counts all that another has counted."""
        for name in ("requests", "admitted", "abandoned", "waited", "starved"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("refused", "unknown", "waits", "served_ahead"):
            for key, number in getattr(other, name).items():
                _add(getattr(self, name), key, number)
        self.wait_max_us = max(self.wait_max_us, other.wait_max_us)
        self.starvation_max_us = max(self.starvation_max_us, other.starvation_max_us)

    def wait_us(self, share: float) -> int:
        """The wait that this share of the admitted would not have exceeded, right to 5%; 0 where none waited."""
        left = math.ceil(share * self.admitted) - (self.admitted - sum(self.waits.values()))
        for bucket in sorted(self.waits):
            if left <= 0:
                break
            left -= self.waits[bucket]
            if left <= 0:
                return min(self.wait_max_us, round(math.exp((bucket + 0.5) * _STEP)))
        return 0


class DryRunReport(msgspec.Struct, frozen=True):
    """All counts of a process at one moment, by name; an empty name where it is not known. `since_s` is since 1970."""

    generation: str
    since_s: float
    by_tier: dict[str, DryRunCounts]
    by_tenant: dict[str, DryRunCounts]


class DryRunStats:
    """The counts of one process. They begin again with every policy; use it from one event loop.

    `generation` is that of the policy in force, and `now_s` the calendar's clock. A request that was observed under
    another policy is left out.
    """

    def __init__(self, generation: Callable[[], str], now_s: Callable[[], float]) -> None:
        self._generation = generation
        self._now_s = now_s
        self._report: DryRunReport | None = None

    def note(self, observed: Observed) -> None:
        """Counts one request, under its tier and its tenant; the name is empty where it is not known."""
        if observed.generation != self._generation():
            return
        if self._report is None or observed.generation != self._report.generation:
            self._report = DryRunReport(observed.generation, self._now_s(), {}, {})
        self._report.by_tier.setdefault(observed.tier or "", DryRunCounts()).note(observed)
        self._report.by_tenant.setdefault(observed.tenant or "", DryRunCounts()).note(observed)

    def read(self, most_tenants: int) -> DryRunReport | None:
        """The counts now: the largest tenants by requests, others under `OTHER_TENANTS`. None where there are none."""
        report = self._report
        if report is None or len(report.by_tenant) <= most_tenants:
            return report
        ranked = sorted(report.by_tenant.items(), key=lambda pair: (-pair[1].requests, pair[0]))
        shown = dict(ranked[:most_tenants])
        shown[OTHER_TENANTS] = added_up(counts for _, counts in ranked[most_tenants:])
        return msgspec.structs.replace(report, by_tenant=shown)


def added_up(all_counts: Iterable[DryRunCounts]) -> DryRunCounts:
    """The sum of all."""
    total = DryRunCounts()
    for counts in all_counts:
        total.add(counts)
    return total


def _add(counted: dict[str, int] | dict[int, int], key: str | int, number: int = 1) -> None:
    counted[key] = counted.get(key, 0) + number  # type: ignore[index, arg-type]  # of the one kind or the other


class DryRunLog:
    """A line for every request that enforcing would have refused, bounded as real refusals are."""

    def __init__(self, log: RequestLog) -> None:
        self._log = log

    def note(self, observed: Observed) -> None:
        """Writes the line, or leaves it out."""
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


class DryRunMetrics:
    """Metrics with names of their own, so that the others report real ends only. One for each `RequestMetrics`."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self._counted = metrics.counters.observed
        instruments = metrics.instruments
        self._waits = WaitHistograms(metrics.pool, instruments.observed_queue_wait, instruments.observed_starvation)

    def note(self, observed: Observed) -> None:
        """Counts one request, and notes how long it would have waited."""
        tier, decision = observed.tier or "", observed.verdict.value
        add(self._counted, (tier, decision, observed.code or ""))
        if observed.verdict is Verdict.ADMITTED or observed.queue_wait_us:
            self._waits.record(tier, decision, observed, None)
