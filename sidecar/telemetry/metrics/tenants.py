"""Tenants in metrics: the largest few are named, the others are `other`; and the holdings of each tenant.

A metric with a label for every tenant would grow without bounds, so only so many have a series of their own. The first
to come have one; when there are more, the largest by what they ask for have it, looked at every few minutes. Counts go
to the tenant's own series while it is named, and to `other` while it is not, and stay there: every series only grows,
a tenant that is named for the first time starts at 0, one that is named again goes on where it was, and all series
together have counted everything once. The series of a tenant that is named no longer is shown, unchanged, until the
next look: a reader in between has read its last value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sidecar.figures import TOKENS, Counted, counted
from sidecar.telemetry.semconv import ADMISSION_TIER, OUTPUT_RATIO

OTHER = "other"
SHOWN = 20
SHOWN_VARIABLE = "SIDECAR_METRICS_TENANTS"
MOST_SHOWN = 500
LOOK_EVERY_US = 5 * 60 * 1_000_000
"""Above what any scraper or exporter waits between two readings."""
TIMES_LARGER = 2
"""So much larger than a named tenant another must be to take its place: two that are alike do not change places."""


@dataclass(slots=True, eq=False)
class TenantCounts:
    """One series of each tenant metric. Only grows. `answers` counts by tier and by the class of their length."""

    admitted: int = counted(
        "admission.tenant.admitted",
        "Requests that got their lease, of the largest tenants and of `other`.",
    )
    refused: int = counted("admission.tenant.refused", "Requests answered with an error.")
    tokens_used: int = counted("admission.tenant.tokens_used", "Tokens that settled requests used.", unit=TOKENS)
    answers: Counted = counted(
        "admission.output.answers",
        "Complete answers of a learned length, by their length in parts of what was expected: up to so much.",
        (ADMISSION_TIER, OUTPUT_RATIO),
        "{answer}",
    )


class TenantSeries:
    """One tenant. `counts` is where its requests are to be counted at this moment."""

    __slots__ = ("counts", "name", "own", "recent_tokens")

    def __init__(self, name: str, counts: TenantCounts) -> None:
        self.name = name
        self.counts = counts
        self.own = TenantCounts()
        self.recent_tokens = 0


class TenantLabels:
    """All tenants of one pool in this process, as many as its policy has; at most `shown` are named at a time.

    Counted in one thread; `series` and `name_for` may be called from any other. `known` are the tenants that had a
    request, by their names: their `counts` are those of this moment.
    """

    def __init__(self, shown: int = SHOWN) -> None:
        self._shown = shown
        self.known: dict[str, TenantSeries] = {}
        self._other = TenantCounts()
        # Replaced, never changed: an exporter's thread reads them.
        self._named: frozenset[str] = frozenset()
        self._unchanged: frozenset[str] = frozenset()
        self._look_at_us = 0

    def note_request(self, name: str, tokens: int, at_us: int) -> TenantSeries:
        """Notes a request of this tenant, for so many tokens, at so many microseconds of a monotonic clock."""
        if at_us >= self._look_at_us:
            self._look(at_us)
        tenant = self.known.get(name)
        if tenant is None:
            tenant = self._new(name)
        tenant.recent_tokens += tokens
        return tenant

    def series(self) -> Mapping[str, TenantCounts]:
        """Every series, by the tenant's name in metrics."""
        shown = {name: self.known[name].own for name in sorted(self._named | self._unchanged)}
        return shown if len(self.known) == len(self._named) else {**shown, OTHER: self._other}

    def name_for(self, tenant: str) -> str:
        """A tenant's name in metrics."""
        return tenant if tenant in self._named else OTHER

    def _new(self, name: str) -> TenantSeries:
        tenant = self.known[name] = TenantSeries(name, self._other)
        if len(self._named) < self._shown and name != OTHER:
            self._name(tenant)
        return tenant

    def _look(self, at_us: int) -> None:
        """Names the tenants that have become larger than some that are named."""
        self._look_at_us = at_us + LOOK_EVERY_US
        self._unchanged = frozenset()
        named = sorted((self.known[name] for name in self._named), key=_size)
        others = [tenant for name, tenant in self.known.items() if name not in self._named and name != OTHER]
        for smallest, largest in zip(named, sorted(others, key=_size, reverse=True), strict=False):
            if largest.recent_tokens <= TIMES_LARGER * smallest.recent_tokens:
                break
            self._unchanged |= {smallest.name}
            self._named -= {smallest.name}
            smallest.counts = self._other
            self._name(largest)
        for tenant in self.known.values():
            tenant.recent_tokens //= 2  # older requests count less and less

    def _name(self, tenant: TenantSeries) -> None:
        self._named |= {tenant.name}
        tenant.counts = tenant.own


def _size(tenant: TenantSeries) -> int:
    return tenant.recent_tokens


def shown_tenants(environment: Mapping[str, str]) -> int:
    """How many tenants the environment wants to be named in metrics. Raises ValueError for any other text."""
    written = environment.get(SHOWN_VARIABLE, "").strip()
    if not written:
        return SHOWN
    if not written.isdecimal() or int(written) > MOST_SHOWN:
        raise ValueError(f"{SHOWN_VARIABLE}: {written!r} is no number of tenants; write one from 0 to {MOST_SHOWN}")
    return int(written)


class TenantHolding(NamedTuple):
    """One tenant's held tokens and leases, and its requests that wait."""

    tokens_held: int = 0
    leases: int = 0
    waiting: int = 0


class TenantHoldings:
    """The holdings of one middleware's tenants; no larger than what is active. Changed in one thread, read in any."""

    def __init__(self) -> None:
        self._tenants: dict[str, tuple[int, int, int]] = {}  # replaced as a whole: a reader sees one moment of each

    def held(self) -> Mapping[str, TenantHolding]:
        """Every tenant that holds or waits for something."""
        return {tenant: TenantHolding(*holding) for tenant, holding in self._tenants.copy().items()}

    def add(self, tenant: str, tokens: int = 0, leases: int = 0, waiting: int = 0) -> None:
        """Adds to each; subtracts where the figure is negative."""
        held_tokens, held_leases, were_waiting = self._tenants.get(tenant, _NOTHING_HELD)
        leases += held_leases
        waiting += were_waiting
        if leases or waiting:
            self._tenants[tenant] = (held_tokens + tokens, leases, waiting)
        else:
            self._tenants.pop(tenant, None)


_NOTHING_HELD = (0, 0, 0)
