"""Report of a whole pool: in a pool of many replicas one of them makes it of all reports, and the others read only it.

Figures are added up, lists keep their first entries, and every replica keeps a row without them. So it is as large for
a hundred replicas as for nine, but for their rows.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from sidecar.cluster import merge
from sidecar.cluster.doubts import added_up_holds
from sidecar.cluster.dry_run import by_name
from sidecar.cluster.engine_speeds import engine_speed_rows
from sidecar.cluster.lease_sizes import lease_size_rows
from sidecar.cluster.merge import ReceivedReport
from sidecar.cluster.report import (
    MOST_TENANTS,
    ReplicaReport,
    TierReport,
    Unreadable,
    has_any,
    packed_if_it_fits,
    unpack,
    unpack_as,
)
from sidecar.engines.speed import EngineSpeedDocument
from sidecar.lengths.buckets import LengthKey
from sidecar.lengths.lease_size import EngineSizesDocument
from sidecar.lengths.summary import Summary, SummaryMerge, document
from sidecar.pools import PeerReport, PeerReports
from sidecar.telemetry.dry_run import DryRunReport

MOST_LENGTHS = 512
"""Tenants and kinds of requests. Most of them fit, which is four times as many as a replica tells of itself."""
MOST_LENGTHS_BYTES = 64 * 1024
"""Of JSON."""
_LEAST_LENGTHS_BYTES = 4 * 1024
_MOST_ROW_BYTES = 2 * 1024
"""Without engines, as msgpack. No honest row has a quarter of it; a longer one would cost the others theirs."""
_MOST_UNREADABLE = 8


class ReplicaRow(msgspec.Struct, frozen=True):
    """One replica without its figures, as it was `age_s` before the report was made."""

    report: ReplicaReport
    age_s: float


class PoolReport(msgspec.Struct, frozen=True):
    """All replicas. `whole` has the figures of all; its `replica` is empty, and its times are those of its calendar.

    `unreadable` names replicas whose reports could not be read.
    """

    whole: ReplicaReport
    rows: list[ReplicaRow]
    unreadable: list[str] = []


@dataclass(frozen=True, slots=True)
class Heard:
    """The other replicas as they were heard `at_s`, and the names of those whose reports could not be read.

    Where `has_own` is true, a report without a name has the figures of all, this replica's too, up to some seconds ago.
    """

    received: Sequence[ReceivedReport] = ()
    unreadable: Sequence[str] = ()
    at_s: float = 0.0
    has_own: bool = False

    def still_there(self, at_s: float, forget_after_s: float) -> list[ReceivedReport]:
        """Those that are still heard of at `at_s`, with their ages then."""
        more_s = max(0.0, at_s - self.at_s)
        aged = (ReceivedReport(one.report, one.age_s + more_s, one.ahead_s) for one in self.received)
        return [one for one in aged if one.age_s <= forget_after_s]

    def own(self, report: ReplicaReport) -> ReplicaReport:
        """This replica's report beside the others': without the figures that are in theirs."""
        if not self.has_own:
            return report
        row, whole = without_figures(report), self.received[0].report
        ours, theirs = report.observed, whole.observed
        is_of_another_policy = ours is not None and (theirs is None or theirs.generation != ours.generation)
        return msgspec.structs.replace(row, observed=ours) if is_of_another_policy else row


def heard(peers: PeerReports, but: str, at_s: float) -> Heard:
    """What the other replicas have left, read `at_s`; `but` is this replica."""
    if peers.merged is not None:
        return _heard_of_all(peers.merged, but, at_s)
    found, unreadable = [], []
    for name, peer in peers.each.items():
        if name != but:
            try:
                found.append(merge.heard(unpack(peer.report), peer.age_s, at_s))
            except Unreadable:
                unreadable.append(name)
    return Heard(found, unreadable, at_s)


def _heard_of_all(merged: PeerReport, but: str, at_s: float) -> Heard:
    try:
        told = unpack_as(PoolReport, merged.report)
        if not math.isfinite(told.whole.at_s):
            raise Unreadable("its time is not a number")
    except Unreadable:
        return Heard((), ("that merges the reports of all",), at_s)
    rows = [
        ReceivedReport(row.report, max(0.0, row.age_s) + merged.age_s)
        for row in told.rows
        if row.report.replica not in ("", but)
    ]
    has_own = any(row.report.replica == but for row in told.rows)
    whole = msgspec.structs.replace(told.whole, replica="", generation="", engines=None)
    return Heard([merge.heard(whole, merged.age_s, at_s), *rows], told.unreadable[:_MOST_UNREADABLE], at_s, has_own)


class PoolMerge:
    """The merged text of all replicas' reports, as `Pool.share` asks for it; `own` is the report of this replica.

    It runs in the event loop, and gives way after each report and each tier: some milliseconds at most.
    """

    def __init__(self, own: ReplicaReport) -> None:
        self._own = own

    async def __call__(self, reports: Mapping[str, PeerReport]) -> bytes:
        """See `Merge`."""
        received, unreadable, lengths = [], [], SummaryMerge()
        for name, peer in reports.items():
            try:
                one = merge.heard(_bounded(unpack(peer.report)), peer.age_s, self._own.at_s)
            except Unreadable:
                unreadable.append(name)
                continue
            received.append(one)
            lengths.add(one.report.lengths)
            await asyncio.sleep(0)
        whole = await self._whole(received)
        rows = [ReplicaRow(without_figures(one.report), round(one.age_s, 3)) for one in received]
        made = PoolReport(whole, rows, sorted(unreadable)[:_MOST_UNREADABLE])
        summaries = []
        for entry in islice(lengths.summaries(), MOST_LENGTHS):
            summaries.append(entry)
            await asyncio.sleep(0)
        for smaller in _smaller(made, summaries):
            if packed := packed_if_it_fits(smaller):
                return packed
            await asyncio.sleep(0)
        raise AssertionError("a report without figures and rows fits")

    async def _whole(self, received: Sequence[ReceivedReport]) -> ReplicaReport:
        own = self._own
        alike = [one for one in received if one.report.mode in ("", own.mode)]
        tiers = []
        for tier in own.tiers:
            recent = [bucket for bucket in merge.recent(tier.tier, alike, own.at_s) if has_any(bucket)]
            oldest, overtaken_by = merge.oldest(tier.tier, alike), merge.overtaken_by(tier.tier, alike)
            queued = merge.queued(tier.tier, alike)
            tiers.append(TierReport(tier.tier, oldest, recent, overtaken_by, *queued))
            await asyncio.sleep(0)
        return ReplicaReport(
            "",
            "",
            own.at_s,
            sum(one.report.leases for one in received),
            sum(one.report.waiting for one in received),
            tiers,
            merge.tenants(received, MOST_TENANTS),
            merge.refusals(received),
            observed=_observed(received),
            mode=own.mode,
            lease_sizes=_lease_sizes(received),
            engine_speeds=_engine_speeds(received),
        )


def without_figures(report: ReplicaReport) -> ReplicaReport:
    """A replica's row: what it is, holds and lists, and which dry run its figures belong to."""
    period = report.observed
    return msgspec.structs.replace(
        report,
        tiers=[],
        tenants=[],
        refusals=[],
        observed=period and DryRunReport(period.generation, period.since_s, {}, {}, period.until_s),
        lease_sizes=[],
        lengths=None,
        engine_speeds=[],
    )


def _bounded(report: ReplicaReport) -> ReplicaReport:
    row = msgspec.structs.replace(without_figures(report), engines=None)
    if len(msgspec.msgpack.encode(row)) > _MOST_ROW_BYTES:
        raise Unreadable("its row is too long")
    return report


def _smaller(made: PoolReport, summaries: Sequence[tuple[str, LengthKey, Summary]]) -> Iterator[PoolReport]:
    """The report in ever fewer bytes: lengths go first, then the rows' engines, then rows, then the figures."""
    most_bytes = MOST_LENGTHS_BYTES
    while most_bytes >= _LEAST_LENGTHS_BYTES:
        told = msgspec.structs.replace(made.whole, lengths=document(summaries, most_bytes))
        yield msgspec.structs.replace(made, whole=told)
        most_bytes //= 2
    rows = [ReplicaRow(msgspec.structs.replace(row.report, engines=None), row.age_s) for row in made.rows]
    while rows:
        yield PoolReport(made.whole, rows, made.unreadable)
        rows = rows[: len(rows) // 2]
    yield PoolReport(msgspec.structs.replace(without_figures(made.whole), observed=None), [])


def _observed(received: Iterable[ReceivedReport]) -> DryRunReport | None:
    """The dry runs by the policy that most replicas observe by, or observed by last, in one."""
    by_generation: dict[str, list[tuple[DryRunReport, float]]] = {}
    for one in received:
        if one.report.observed is not None:
            by_generation.setdefault(one.report.observed.generation, []).append((one.report.observed, one.ahead_s))
    if not by_generation:
        return None
    generation, periods = max(by_generation.items(), key=lambda item: len(item[1]))
    ends_s = [None if period.until_s is None else period.until_s - ahead_s for period, ahead_s in periods]
    tenants = by_name(period.by_tenant for period, _ in periods)
    most = sorted(tenants, key=lambda name: (-tenants[name].requests, name))[:MOST_TENANTS]
    tiers = dict.fromkeys(tier for period, _ in periods for tier in period.holds)
    return DryRunReport(
        generation,
        min(period.since_s - ahead_s for period, ahead_s in periods),
        by_name(period.by_tier for period, _ in periods),
        {name: tenants[name] for name in most},
        None if None in ends_s else max(end_s for end_s in ends_s if end_s is not None),
        {tier: added_up_holds(period.holds[tier] for period, _ in periods if tier in period.holds) for tier in tiers},
    )


def _lease_sizes(received: Iterable[ReceivedReport]) -> list[EngineSizesDocument]:
    rows = lease_size_rows(one.report.lease_sizes for one in received)
    return [EngineSizesDocument(**msgspec.structs.asdict(row)) for row in rows]


def _engine_speeds(received: Sequence[ReceivedReport]) -> list[EngineSpeedDocument]:
    """One of each engine, with the samples of all replicas."""
    by_engine: dict[str | None, list[EngineSpeedDocument]] = {}
    for speed in (speed for one in received for speed in one.report.engine_speeds):
        by_engine.setdefault(speed.engine, []).append(speed)
    return [
        EngineSpeedDocument(
            row.engine,
            row.prefill_ns,
            row.output_ns,
            row.token_us,
            max(speed.first_us for speed in by_engine[row.engine]),
            row.is_known,
            sum(speed.first_samples for speed in by_engine[row.engine]),
            sum(speed.token_samples for speed in by_engine[row.engine]),
            row.first_error,
            row.token_error,
        )
        for row in engine_speed_rows(one.report.engine_speeds for one in received)
    ]
