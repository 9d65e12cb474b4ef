"""Merged reports of all replicas: a tier's last minutes, its oldest waiting request, the tenants, the last refusals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from sidecar.cluster.document import OldestWaiter, RefusalView, ReplicaView, TenantView
from sidecar.cluster.report import MOST_REFUSALS, ReplicaReport, TierReport
from sidecar.telemetry.recent import BUCKET_S, BUCKETS, Bucket, Overtakings, add_overtakings

SHOWN_TENANTS = 10


@dataclass(frozen=True, slots=True)
class ReceivedReport:
    """A report that is `age_s` old. `ahead_s` is by how much its replica's calendar is ahead of ours."""

    report: ReplicaReport
    age_s: float
    ahead_s: float = 0.0


def heard(report: ReplicaReport, age_s: float, at_s: float) -> ReceivedReport:
    """A report of another replica, heard at `at_s`: how old it is, the store's clock says, not that replica's."""
    return ReceivedReport(report, age_s, report.at_s - (at_s - age_s))


def recent(tier: str, all_heard: Iterable[ReceivedReport], at_s: float) -> list[Bucket]:
    """The five minutes up to `at_s`, over all replicas, in our own calendar."""
    last = int(at_s) // BUCKET_S
    buckets = {number: Bucket(number * BUCKET_S) for number in range(last - BUCKETS + 1, last + 1)}
    for one in all_heard:
        shift = round(one.ahead_s / BUCKET_S)
        for bucket in (bucket for reported in _of(tier, one) for bucket in reported.recent):
            into = buckets.get(bucket.t_s // BUCKET_S - shift)
            if into is not None:
                _add(into, bucket)
    return list(buckets.values())


def overtaken_by(tier: str, all_heard: Iterable[ReceivedReport]) -> dict[str, Overtakings]:
    """The tiers that overtook a tier, over all replicas, most often first."""
    summed: dict[str, Overtakings] = {}
    for reported in (reported for one in all_heard for reported in _of(tier, one)):
        add_overtakings(summed, reported.overtaken_by)
    return dict(sorted(summed.items(), key=lambda pair: -pair[1].requests))


def oldest(tier: str, all_heard: Iterable[ReceivedReport]) -> OldestWaiter | None:
    """The one that has waited longest in any replica."""
    waiting = [reported.oldest for one in all_heard for reported in _of(tier, one) if reported.oldest is not None]
    return max(waiting, key=lambda waiter: waiter.wait_s, default=None)


def queued(tier: str, all_heard: Iterable[ReceivedReport]) -> tuple[int, int]:
    """The tokens and requests that a tier has waiting in all replicas."""
    reported = [reported for one in all_heard for reported in _of(tier, one)]
    return sum(one.queued_tokens for one in reported), sum(one.queued_requests for one in reported)


def tenants(all_heard: Iterable[ReceivedReport], most: int = SHOWN_TENANTS) -> list[TenantView]:
    """Those that hold most, then those of whom most waits."""
    summed: dict[str, tuple[int, int, int]] = {}
    for reported in (reported for one in all_heard for reported in one.report.tenants):
        tokens, leases, waiting = summed.get(reported.tenant, (0, 0, 0))
        summed[reported.tenant] = tokens + reported.tokens_held, leases + reported.leases, waiting + reported.waiting
    found = [TenantView(name, *figures) for name, figures in summed.items()]
    return sorted(found, key=lambda one: (-one.tokens_held, -one.waiting, one.tenant))[:most]


def refusals(all_heard: Iterable[ReceivedReport]) -> list[RefusalView]:
    """The newest first, in our own calendar."""
    found = [
        msgspec.structs.replace(refusal, at_s=refusal.at_s - one.ahead_s)
        for one in all_heard
        for refusal in one.report.refusals
    ]
    return sorted(found, key=lambda refusal: -refusal.at_s)[:MOST_REFUSALS]


def replicas(all_heard: Iterable[ReceivedReport]) -> list[ReplicaView]:
    """All replicas with a report, in the order of their names."""
    found = [
        ReplicaView(
            report.replica,
            report.host,
            report.leases,
            report.waiting,
            round(one.age_s, 1),
            report.generation,
            report.engine,
        )
        for one in all_heard
        for report in [one.report]
        if report.replica
    ]
    return sorted(found, key=lambda replica: (replica.host, replica.replica))


def _of(tier: str, one: ReceivedReport) -> Sequence[TierReport]:
    return [reported for reported in one.report.tiers if reported.tier == tier]


def _add(into: Bucket, more: Bucket) -> None:
    into.admitted += more.admitted
    into.refused += more.refused
    into.wait_sum_s += more.wait_sum_s
    into.starvation_sum_s += more.starvation_sum_s
    into.wait_max_s = max(into.wait_max_s, more.wait_max_s)
    into.starvation_max_s = max(into.starvation_max_s, more.starvation_max_s)
    into.ttft_max_s = max(into.ttft_max_s, more.ttft_max_s)
    into.preempted += more.preempted
    into.engine_lost_s += more.engine_lost_s
    into.offered += more.offered
    into.met += more.met
    into.gain_earned += more.gain_earned
    into.gain_attainable += more.gain_attainable
