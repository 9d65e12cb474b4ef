"""Figures of the dry run: what enforcing would have done to requests.

The figures are added up by tier and by tenant over one period. A period begins when observing does, and again with
every change of the policy; it ends with the mode. Only requests that came in it are counted, so no two periods mix,
also where the same policy comes back. Waits are counted in buckets, each a tenth wider than the one before: a quantile
is right to 5%, whatever its size, and the figures of several replicas can be added up. There are at most 231 buckets up
to an hour, and only those with a wait in them are kept. The longest wait is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

import msgspec

from sidecar.events import Observed, ShadowHolds, Verdict

WAITS_FROM_US = 10_000
"""Shorter waits do not count as such: a store takes as long to answer."""
OTHER_TENANTS = "(others)"
"""Not the name of a tenant: those have no parentheses."""
_STEP = math.log(1.1)


class WaitQuantile(NamedTuple):
    """A wait; `is_least` says that it may grow, because of requests that still wait."""

    wait_us: int
    is_least: bool


class DryRunCounts(msgspec.Struct):
    """Counts of requests by the end that they would have had.

    `waits` counts by bucket those that would have been admitted after a wait; of them, `waited` would have waited for
    10 ms or more. `refused` and `unknown` are by code. Of all requests, however they would have ended, `starved` would
    have been overtaken for 10 ms or more, and `served_ahead` has the tokens that would have gone first while they
    waited, by tier. `clamped` asked for a better tier than they may have: how many for each. `waiting` would still be
    waiting, and are counted nowhere else; `waiting_waits` and `waiting_max_us` are their waits so far.
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
    clamped: dict[str, int] = {}
    waiting: int = 0
    waiting_waits: dict[int, int] = {}
    waiting_max_us: int = 0

    def note_waiting(self, waited_us: int) -> None:
        """Counts one request that still waits."""
        self.waiting += 1
        _add(self.waiting_waits, _bucket(max(1, waited_us)))
        self.waiting_max_us = max(self.waiting_max_us, waited_us)

    def note(self, observed: Observed) -> None:
        """Counts one request."""
        self.requests += 1
        self.starved += observed.starvation_us >= WAITS_FROM_US
        self.starvation_max_us = max(self.starvation_max_us, observed.starvation_us)
        for tier, tokens in observed.served_ahead.items():
            _add(self.served_ahead, tier, tokens)
        if observed.clamped_from is not None:
            _add(self.clamped, observed.clamped_from)
        if observed.verdict is Verdict.ADMITTED:
            self.admitted += 1
            wait_us = observed.queue_wait_us
            if wait_us > 0:
                _add(self.waits, _bucket(wait_us))
            self.waited += wait_us >= WAITS_FROM_US
            self.wait_max_us = max(self.wait_max_us, wait_us)
        elif observed.verdict is Verdict.ABANDONED:
            self.abandoned += 1
        else:
            by_code = self.refused if observed.verdict is Verdict.REFUSED else self.unknown
            _add(by_code, str(observed.code))

    def add(self, other: DryRunCounts) -> None:
        """Counts all that another has counted."""
        for name in self.__struct_fields__:
            own, more = getattr(self, name), getattr(other, name)
            if isinstance(own, dict):
                for key, number in more.items():
                    _add(own, key, number)
            else:
                setattr(self, name, max(own, more) if name.endswith("_max_us") else own + more)

    def wait_us(self, share: float) -> int:
        """The wait that this share of the admitted would not have exceeded, right to 5%; 0 where none waited."""
        return self.wait(share).wait_us

    def wait(self, share: float) -> WaitQuantile:
        """The quantile with requests that still wait, which count with their waits so far."""
        left = math.ceil(share * (self.admitted + self.waiting)) - (self.admitted - sum(self.waits.values()))
        longest_us, grows = max(self.wait_max_us, self.waiting_max_us), False
        for bucket in sorted({*self.waits, *self.waiting_waits}):
            if left <= 0:
                break
            grows = grows or bucket in self.waiting_waits
            left -= self.waits.get(bucket, 0) + self.waiting_waits.get(bucket, 0)
            if left <= 0:
                return WaitQuantile(min(longest_us, round(math.exp((bucket + 0.5) * _STEP))), grows)
        return WaitQuantile(0, is_least=False)


def _bucket(wait_us: int) -> int:
    return int(math.log(wait_us) / _STEP)


class DryRunReport(msgspec.Struct, frozen=True):
    """All counts of a process at one moment, by name; an empty name where it is not known. Times are since 1970.

    The period goes on where `until_s` is None. `holds` says by tier how the times of shadow requests were found.
    """

    generation: str
    since_s: float
    by_tier: dict[str, DryRunCounts]
    by_tenant: dict[str, DryRunCounts]
    until_s: float | None = None
    holds: dict[str, ShadowHolds] = {}


class StillWaiting(Protocol):
    """A shadow request that still waits."""

    @property
    def generation(self) -> str:
        """Of its policy."""

    @property
    def tier(self) -> str:
        """The tier's name."""

    @property
    def tenant(self) -> str:
        """The tenant's name."""

    @property
    def waited_us(self) -> int:
        """How long it has waited."""


class DryRunStats:
    """The counts of one process; use it from one event loop. `now_s` is the calendar's clock.

    `waiting` are the shadow requests that wait now, `holds` the counts of how they found their times, by tier.
    """

    def __init__(
        self,
        now_s: Callable[[], float],
        waiting: Callable[[], Iterable[StillWaiting]] = tuple,
        holds: Callable[[], Mapping[str, ShadowHolds]] = dict,
    ) -> None:
        self._now_s = now_s
        self._waiting = waiting
        self._holds = holds
        self._began_us = 0
        self._report: DryRunReport | None = None

    def begin(self, generation: str, now_us: int) -> None:
        """A period begins, under the policy of this generation; `now_us` is on the clock of `Observed.received_us`."""
        self._began_us = now_us
        self._report = DryRunReport(generation, self._now_s(), {}, {})

    def end(self) -> None:
        """The period ends, with those that still wait. Call it before the policy changes."""
        if self._report is not None and self._report.until_s is None:
            self._report = msgspec.structs.replace(self._with_waiting(self._report), until_s=self._now_s())

    def note(self, observed: Observed) -> None:
        """Counts one request, under its tier and its tenant; the name is empty where it is not known.

        A request of another policy or of an earlier period is left out.
        """
        report = self._report
        if (
            report is None
            or report.until_s is not None
            or observed.generation != report.generation
            or observed.received_us < self._began_us
        ):
            return
        for counted, name in ((report.by_tier, observed.tier), (report.by_tenant, observed.tenant)):
            counts = counted.get(name or "")
            if counts is None:
                counts = counted[name or ""] = DryRunCounts()
            counts.note(observed)

    def read(self, most_tenants: int) -> DryRunReport | None:
        """The counts now, or at the end of the last period. None where there was none.

        The largest tenants by requests have their own, the others are under `OTHER_TENANTS`.
        """
        report = self._report
        if report is not None and report.until_s is None:
            report = self._with_waiting(report)
        if report is None or len(report.by_tenant) <= most_tenants:
            return report
        ranked = sorted(report.by_tenant.items(), key=lambda pair: (-pair[1].requests, pair[0]))
        shown = dict(ranked[:most_tenants])
        shown[OTHER_TENANTS] = added_up(counts for _, counts in ranked[most_tenants:])
        return msgspec.structs.replace(report, by_tenant=shown)

    def _with_waiting(self, report: DryRunReport) -> DryRunReport:
        """A copy, with those that wait, and with how times were found."""
        by_tier = {name: added_up([counts]) for name, counts in report.by_tier.items()}
        by_tenant = {name: added_up([counts]) for name, counts in report.by_tenant.items()}
        for one in self._waiting():
            if one.generation == report.generation:
                by_tier.setdefault(one.tier, DryRunCounts()).note_waiting(one.waited_us)
                by_tenant.setdefault(one.tenant, DryRunCounts()).note_waiting(one.waited_us)
        holds = {name: msgspec.structs.replace(one) for name, one in self._holds().items()}
        return msgspec.structs.replace(report, by_tier=by_tier, by_tenant=by_tenant, holds=holds)


def added_up(all_counts: Iterable[DryRunCounts]) -> DryRunCounts:
    """The sum of all."""
    total = DryRunCounts()
    for counts in all_counts:
        total.add(counts)
    return total


def _add(counted: dict[str, int] | dict[int, int], key: str | int, number: int = 1) -> None:
    counted[key] = counted.get(key, 0) + number  # type: ignore[index, arg-type]  # of the one kind or the other
