"""Summaries of what a replica learned, small enough for its report, and what others make of them.

A replica's document has only what it saw itself, never what it heard: replicas that hear each other in turn count no
request twice. `SummaryMerge` makes one of all.

A document is `{"version": 1, "lengths": [[tenant, endpoint, model, bucket, samples, weight, points], ...]}`. The
points are one list: a length, the millionths of the answers that are longer, the next length, and so on. All numbers
are whole. A reader takes nothing for granted: it skips entries that are not of this form.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from math import ceil
from typing import Any, NamedTuple

from sidecar.lengths.buckets import LengthKey
from sidecar.lengths.histogram import EDGES, LONGEST, LengthHistogram, Survival, bin_of

VERSION = 1
MILLION = 1_000_000
LEVELS = tuple(
    round(MILLION * share)
    for share in (
        0.9,
        0.8,
        0.7,
        0.6,
        0.5,
        0.4,
        0.3,
        0.25,
        0.2,
        0.15,
        0.1,
        0.075,
        0.05,
        0.03,
        0.02,
        0.01,
        0.005,
        0.001,
        0.0,
    )
)
"""The shares of longer answers at which a point is taken, in millionths: denser where quantiles are asked for."""
_NOISE = 1e-6
"""Shares are rounded up, so that no summary says less than its samples; but not for the rounding of a float."""
MOST_POINTS = 32
MOST_SAMPLES = 10**9
"""A replica that has learned more says so many."""
MOST_WEIGHT = 3000
"""The decayed weight of endless samples with a half-life of 2,000 is 2,886: no honest replica says more."""
MOST_ENTRIES = 4096
LONGEST_NAME = 256
"""Characters of a tenant, an endpoint or a model; nothing is learned for a longer one."""


class Summary(NamedTuple):
    """The lengths of one tenant and key on one replica. `points` are (length, millionths of the answers longer)."""

    samples: int
    weight: int
    points: tuple[tuple[int, int], ...]

    def add_to(self, complete: list[float], censored: list[float]) -> None:
        """Adds weights by bin: answers between two points count as the longer, those after the last are censored."""
        left, unit = MILLION, self.weight / MILLION
        last = 0
        for length, longer in self.points:
            last = bin_of(length)
            complete[last] += (left - longer) * unit
            left = longer
        censored[last] += left * unit


def summarize(histogram: LengthHistogram) -> Summary:
    """The summary of a histogram."""
    return Summary(
        min(histogram.samples, MOST_SAMPLES), max(1, round(histogram.weight)), _points_of(histogram.survival())
    )


def _points_of(survival: Survival) -> tuple[tuple[int, int], ...]:
    points: list[tuple[int, int]] = []
    level = 0
    for edge, share in zip(survival.edges, survival.beyond, strict=True):
        longer = ceil(share * MILLION - _NOISE)
        if level < len(LEVELS) and longer <= LEVELS[level]:
            points.append((edge, longer))
            while level < len(LEVELS) and longer <= LEVELS[level]:
                level += 1
    if survival.edges and points[-1:] != [(survival.edges[-1], longer)]:
        points.append((survival.edges[-1], longer))
    return tuple(points)


def merged(own: LengthHistogram | None, heard: Iterable[Summary]) -> Survival:
    """The distribution of this replica's samples and the others' together."""
    complete, censored = [0.0] * len(EDGES), [0.0] * len(EDGES)
    if own is not None:
        for index, (ended, cut) in enumerate(zip(*own.weights(), strict=True)):
            complete[index], censored[index] = ended, cut
    for summary in heard:
        summary.add_to(complete, censored)
    return Survival(complete, censored)


def write(entries: Iterable[tuple[str, LengthKey, LengthHistogram]], most_bytes: int) -> dict[str, Any]:
    """The document of the first entries that fit into so many bytes of JSON."""
    return document(
        ((tenant, key, summarize(histogram)) for tenant, key, histogram in entries if histogram.samples), most_bytes
    )


def document(entries: Iterable[tuple[str, LengthKey, Summary]], most_bytes: int) -> dict[str, Any]:
    """The document of the first summaries that fit into so many bytes of JSON."""
    lengths: list[list[Any]] = []
    whole = {"version": VERSION, "lengths": lengths}
    left = most_bytes - len(json.dumps(whole, separators=(",", ":")))
    for tenant, key, (samples, weight, points) in entries:
        entry = [tenant, *key, samples, weight, [number for point in points for number in point]]
        size = _size(entry)
        if size is None:
            continue
        left -= size
        if left < 0:
            break
        lengths.append(entry)
    return whole


def _size(entry: list[Any]) -> int | None:
    """The bytes of an entry and its comma; None where a name has no UTF-8."""
    try:
        return len(json.dumps(entry, separators=(",", ":"), ensure_ascii=False).encode()) + 1
    except UnicodeEncodeError:
        return None


def read(told: object) -> Iterator[tuple[str, LengthKey, Summary]] | None:
    """The entries of another replica's document that are as they must be; None where it is no document at all."""
    if not isinstance(told, dict) or told.get("version") != VERSION:
        return None
    lengths = told.get("lengths")
    if not isinstance(lengths, list):
        return None
    found = (_entry(one) for one in lengths[:MOST_ENTRIES])
    return (one for one in found if one is not None)


def _entry(one: object) -> tuple[str, LengthKey, Summary] | None:
    if not isinstance(one, list) or len(one) != 7:
        return None
    tenant, endpoint, model, bucket, samples, weight, numbers = one
    if not (_is_name(tenant) and _is_name(endpoint) and _is_name(bucket) and (model is None or _is_name(model))):
        return None
    points = _points(numbers)
    if points is None or not _is_whole(samples, 1, MOST_SAMPLES) or not _is_whole(weight, 1, MOST_WEIGHT):
        return None
    return tenant, LengthKey(endpoint, model, bucket), Summary(samples, weight, points)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_NAME


def _is_whole(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _points(numbers: object) -> tuple[tuple[int, int], ...] | None:
    """The points, where lengths rise and the shares of longer answers fall."""
    if not isinstance(numbers, list) or not 2 <= len(numbers) <= 2 * MOST_POINTS or len(numbers) % 2:
        return None
    before, left = 0, MILLION
    for length, longer in zip(numbers[::2], numbers[1::2], strict=True):
        if not _is_whole(length, before + 1, LONGEST) or not _is_whole(longer, 0, left):
            return None
        before, left = length, longer
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


class SummaryMerge:
    """The documents of many replicas in one of the same form, in which each sample still counts once.

    Its weights are bounded as those of one replica. So it stands for all replicas, and is not added to any of them.
    """

    def __init__(self) -> None:
        self._by_place: dict[tuple[str, LengthKey], list[Summary]] = {}

    def add(self, told: object) -> None:
        """Adds a replica's document, whatever it is: entries that have not the form are skipped."""
        for tenant, key, one in read(told) or ():
            self._by_place.setdefault((tenant, key), []).append(one)

    def summaries(self) -> Iterator[tuple[str, LengthKey, Summary]]:
        """One of each tenant and key. Every tenant's key with most samples comes first, then its second."""
        by_tenant: dict[str, list[tuple[int, LengthKey]]] = {}
        for (tenant, key), told in self._by_place.items():
            by_tenant.setdefault(tenant, []).append((sum(one.samples for one in told), key))
        ranked = [
            (rank, -samples, tenant, key)
            for tenant, keys in by_tenant.items()
            for rank, (samples, key) in enumerate(sorted(keys, key=lambda one: one[0], reverse=True))
        ]
        ranked.sort(key=lambda entry: entry[:2])
        return ((tenant, key, self._merged(tenant, key)) for _, _, tenant, key in ranked)

    def _merged(self, tenant: str, key: LengthKey) -> Summary:
        told = self._by_place[tenant, key]
        samples, weight = sum(one.samples for one in told), sum(one.weight for one in told)
        return Summary(min(samples, MOST_SAMPLES), min(weight, MOST_WEIGHT), _points_of(merged(None, told)))
