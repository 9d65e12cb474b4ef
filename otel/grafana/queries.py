"""Our metrics in PromQL, as the dashboard asks for them: of one pool, over all of its replicas.

In a pool that replicas share, each of them reports the leases of the whole pool: those gauges are `max`. A replica's
own queue, counters and histograms are `sum`. Two pools are never added up: one is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from panels import PROMISED, Query

POOL = 'admission_pool="$pool"'
BY_TIER = "{{admission_tier}}"


def gauge(name: str, by: str = "admission_tier") -> str:
    """What every replica says alike: the largest of what they say."""
    return f"max by ({by}) ({name}{{{POOL}}})"


def largest(name: str) -> str:
    """The largest of all tiers."""
    return f"max ({name}{{{POOL}}})"


def total(name: str, by: str) -> str:
    """What every replica says of itself alone: all of them together."""
    return f"sum by ({by}) ({name}{{{POOL}}})"


def mean(name: str, by: str) -> str:
    """What every replica measures for itself: the mean of all."""
    return f"avg by ({by}) ({name}{{{POOL}}})"


def rate(name: str, by: str = "") -> str:
    """A counter of all replicas, a second."""
    return f"sum by ({by}) (rate({name}_total{{{POOL}}}[$__rate_interval]))"


def increase(name: str, by: str) -> str:
    """A counter of all replicas, over the time that the dashboard shows."""
    return f"sum by ({by}) (increase({name}_total{{{POOL}}}[$__range]))"


def quantiles(name: str, by: Sequence[str] = ("admission_tier",), legend: str = f"{BY_TIER} ") -> list[Query]:
    """The p50 and p99 of a histogram of all replicas; its exemplars with the latter."""
    labels = ", ".join([*by, "le"])
    buckets = f"sum by ({labels}) (rate({name}_bucket{{{POOL}}}[$__rate_interval]))"
    return [
        Query(f"histogram_quantile(0.5, {buckets})", f"{legend}p50"),
        Query(f"histogram_quantile(0.99, {buckets})", f"{legend}p99", exemplar=True),
    ]


def promised(name: str) -> Query:
    """What the policy promises a tier (`slo`)."""
    return Query(gauge(name), f"{BY_TIER} {PROMISED}")


def met(name: str) -> str:
    """Of a counter of requests by whether they met an objective: the share that did, by tier."""
    of_those = f'sum by (admission_tier) (rate({name}_total{{{POOL}, admission_slo="met"}}[$__rate_interval]))'
    return f"{of_those} / ({rate(name, 'admission_tier')} > 0)"


def share(name: str) -> str:
    """Tokens by tier, as a part of the pool's."""
    return f"{gauge(name)} / on () group_left () {largest('admission_capacity_tokens')}"
