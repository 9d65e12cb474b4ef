"""The report of a whole pool: what every replica shows of many others is what it would show of all their reports."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sidecar.cluster import merge
from sidecar.cluster import overview as module
from sidecar.cluster.document import OldestWaiter, RefusalView, TenantView
from sidecar.cluster.dry_run import observed_report
from sidecar.cluster.learned_lengths import LengthExchange
from sidecar.cluster.lease_sizes import lease_size_rows
from sidecar.cluster.overview import FORGET_AFTER_S, PoolOverview
from sidecar.cluster.pool_report import PoolMerge, PoolReport, ReplicaRow, heard
from sidecar.cluster.report import EngineReport, ReplicaReport, TierReport, pack, unpack, unpack_as
from sidecar.lengths.buckets import LengthKey
from sidecar.lengths.estimator import LengthEstimator, Source
from sidecar.lengths.lease_size import EngineSizesDocument
from sidecar.policy.model import Mode
from sidecar.pools import PeerReport, PeerReports
from sidecar.pools.base import MOST_REPORT_BYTES
from sidecar.telemetry.dry_run import DryRunCounts, DryRunReport
from sidecar.telemetry.recent import Bucket, Overtakings
from tests.cluster.test_overview import policy_of, sources_of
from tests.support.shared_pools import begun_store, shared_pool

pytestmark = pytest.mark.anyio
NOW_S = 1_700_000_003.0
KEY = LengthKey("/v1/chat/completions", "m", "plain")


def report(number: int, **more: Any) -> ReplicaReport:
    """A report whose figures are different for each number, and whose calendar is ahead by as many seconds."""
    at_s = NOW_S + number
    waits = [Bucket(int(at_s) // 5 * 5, admitted=number, wait_sum_s=1.0, wait_max_s=float(number))]
    overtakings = {"high": Overtakings(number, 10, {"level": number})}
    plain: dict[str, Any] = {
        "tiers": [
            TierReport("batch", OldestWaiter(float(number), 0.0, {}, f"r{number}"), waits, overtakings, 10, number)
        ],
        "tenants": [TenantView(f"tenant-{number % 3}", 100, 1, number)],
        "refusals": [
            RefusalView(at_s - number / 100, "batch", None, "queue_full", 503, "", f"q{number}", 0.0, f"r{number}")
        ],
        "generation": f"g{number % 2}",
        "observed": DryRunReport("g", at_s - 60, {"batch": DryRunCounts(requests=number)}, {}),
        "mode": "enforce",
        "engines": [EngineReport("a", "a#1", "ready", number, 10, 0.5)],
        "lease_sizes": [EngineSizesDocument(None, 0.95, 1.0, "", False, number, 10, 10, 5)],
    }
    return ReplicaReport(f"r{number}", "host", at_s, number, 1, **{**plain, **more})


async def merged(reports: Sequence[ReplicaReport], ages_s: float = 1.0) -> bytes:
    told = {one.replica: PeerReport(ages_s, pack(one)) for one in reports}
    return await PoolMerge(reports[0])(told)


async def test_the_figures_of_all_are_those_of_their_reports_and_ours_count_once() -> None:
    reports = [report(number) for number in range(20)]
    each = PeerReports({one.replica: PeerReport(1.0, pack(one)) for one in reports})
    text = PeerReports({}, PeerReport(0.0, await merged(reports)))
    one_by_one, at_once = heard(each, "r7", NOW_S), heard(text, "r7", NOW_S)
    assert (one_by_one.has_own, at_once.has_own) == (False, True)
    policy = policy_of()
    shown = []
    for told in (one_by_one, at_once):
        own = merge.heard(told.own(reports[7]), 1.0, NOW_S)
        every = [own, *told.still_there(NOW_S, FORGET_AFTER_S)]
        shown.append(
            (
                merge.recent("batch", every, NOW_S),
                merge.oldest("batch", every),
                merge.overtaken_by("batch", every),
                merge.queued("batch", every),
                merge.tenants(every),
                [refusal.request_id for refusal in merge.refusals(every)],
                merge.replicas(every),
                lease_size_rows(one.report.lease_sizes for one in every),
                sorted((one.report.replica, one.report.engines) for one in every if one.report.engines is not None),
            )
        )
        period = observed_report(policy, every, NOW_S)
        shown[-1] += (period.total.requests, period.replicas, period.since_s)  # type: ignore[assignment]
    assert shown[0] == shown[1]
    assert sum(bucket.admitted for bucket in shown[0][0]) == sum(range(20))
    assert shown[0][3] == (20 * 10, sum(range(20)))


async def test_a_replica_that_is_not_yet_in_it_adds_its_own_figures() -> None:
    told = heard(PeerReports({}, PeerReport(2.0, await merged([report(n) for n in range(10)]))), "new", NOW_S)
    assert not told.has_own
    own = report(50)
    assert told.own(own) is own
    assert len(told.still_there(NOW_S, FORGET_AFTER_S)) == 11  # the sums and ten rows
    rows = [one for one in told.received if one.report.replica]
    assert {one.age_s for one in rows} == {3.0}
    assert told.still_there(NOW_S + 7.5, FORGET_AFTER_S)[0].report.replica == ""
    assert len(told.still_there(NOW_S + 7.5, FORGET_AFTER_S)) == 1
    assert told.still_there(NOW_S + 8.5, FORGET_AFTER_S) == []


async def test_a_dry_run_by_another_policy_than_the_others_keeps_its_own_figures() -> None:
    told = heard(PeerReports({}, PeerReport(0.0, await merged([report(n) for n in range(10)]))), "r7", NOW_S)
    ours = DryRunReport("newer", NOW_S, {"batch": DryRunCounts(requests=3)}, {})
    assert told.own(report(7)).observed == DryRunReport("g", NOW_S + 7 - 60, {}, {})
    assert told.own(report(7, observed=ours)).observed == ours


def noise(chance: random.Random, length: int) -> str:
    return "".join(chr(chance.randrange(0x4E00, 0x9FFF)) for _ in range(length))


async def test_it_fits_whatever_is_in_the_reports() -> None:
    chance = random.Random(1)
    engines = [EngineReport(noise(chance, 40), noise(chance, 40), "ready", 1) for _ in range(50)]
    long = [TenantView(noise(chance, 3000), 1, 1, 1) for _ in range(20)]
    for more in ({"engines": engines}, {"tenants": long}, {"generation": noise(chance, 400)}):
        reports = [report(0), *(report(number, **more) for number in range(1, 128))]
        text = await merged(reports)
        assert len(text) <= MOST_REPORT_BYTES
        assert unpack_as(PoolReport, text).whole.replica == ""
    plain = unpack_as(PoolReport, await merged([report(number) for number in range(128)]))
    assert len(plain.rows) == 128  # the control: nothing was left out
    assert plain.whole.tiers


@pytest.mark.parametrize("at_s", [float("nan"), float("inf")])
async def test_reports_that_lie_are_left_out_and_the_others_are_merged(at_s: float) -> None:
    lies = {
        "no-report": PeerReport(0.0, b"x"),
        "no-tiers": PeerReport(0.0, pack(report(1, tiers=[]))),
        "lengths": PeerReport(0.0, pack(report(2, lengths={"version": 1, "lengths": [[None] * 7, 5]}))),
    }
    broken = msgspec.structs.replace(report(3), at_s=at_s)
    too_long = msgspec.structs.replace(report(4), host="x" * 20_000)
    lies |= {"no-calendar": PeerReport(0.0, pack(broken)), "no-host": PeerReport(0.0, pack(too_long))}
    told = unpack_as(PoolReport, await PoolMerge(report(0))(lies))
    assert told.unreadable == ["no-calendar", "no-host", "no-report"]
    assert [row.report.replica for row in told.rows] == ["r1", "r2"]


async def test_a_merged_text_that_lies_is_said_and_shows_nothing() -> None:
    whole = msgspec.structs.replace(report(0), replica="")
    for text in (b"x", pack(report(0)), pack(PoolReport(msgspec.structs.replace(whole, at_s=float("nan")), []))):
        told = heard(PeerReports({}, PeerReport(0.0, text)), "r7", NOW_S)
        assert told.received == ()
        assert told.unreadable
    rows = [ReplicaRow(report(number), -1e9) for number in (7, 8)]
    named = pack(PoolReport(report(5), rows))  # the sums have a name, and a row is younger than now
    told = heard(PeerReports({}, PeerReport(1.0, named)), "r7", NOW_S)
    assert [(one.report.replica, one.age_s) for one in told.received] == [("", 1.0), ("r8", 1.0)]


# -- lengths


def taught(length: int, samples: int, tenant: str = "acme") -> LengthEstimator:
    estimator = LengthEstimator()
    for _ in range(samples):
        estimator.learn(tenant, KEY, length, is_censored=False)
    return estimator


def told_of(estimator: LengthEstimator, number: int) -> ReplicaReport:
    return unpack(LengthExchange(estimator).packed(report(number)))


async def test_learned_lengths_of_all_size_a_request_and_each_sample_counts_once() -> None:
    learning = [taught(40, 3) for _ in range(30)]
    text = await merged([told_of(one, number) for number, one in enumerate(learning)])
    told = heard(PeerReports({}, PeerReport(0.0, text)), "r7", NOW_S)
    for estimator, has_own in ((learning[7], told.has_own), (LengthEstimator(), False)):
        exchange = LengthExchange(estimator)
        exchange.hear((one.report for one in told.received), has_own=has_own)
        found = estimator.estimate("acme", KEY, 0.95)
        assert found is not None
        assert (found.source, found.samples, found.tokens) == (Source.REPLICAS, 90, 48)
        exchange.hear([report(3)])  # a small pool again, in which no one has learned anything
        assert estimator.estimate("acme", KEY, 0.95) is None


async def test_merged_lengths_have_the_quantiles_of_all_samples() -> None:
    chance = random.Random(3)
    learning = [LengthEstimator() for _ in range(20)]
    every = LengthEstimator()
    for number in range(1_900):
        length = int(chance.lognormvariate(5, 1)) + 1
        for estimator in (learning[number % 20], every):
            estimator.learn("acme", KEY, length, is_censored=False)
    text = await merged([told_of(one, number) for number, one in enumerate(learning)])
    reader = LengthEstimator()
    told = heard(PeerReports({}, PeerReport(0.0, text)), "new", NOW_S)
    LengthExchange(reader).hear(one.report for one in told.received)
    for share in (0.5, 0.9, 0.95):
        found, exact = reader.estimate("acme", KEY, share), every.estimate("acme", KEY, share)
        assert found is not None
        assert exact is not None
        assert exact.tokens <= found.tokens <= 1.5 * exact.tokens  # two summaries, each rounded up


async def test_lengths_of_many_tenants_leave_room_for_the_rest() -> None:
    reports = []
    for number in range(60):
        estimator = LengthEstimator()
        for tenant in range(60):
            for length in range(20):
                estimator.learn(f"tenant-{number}-{tenant}", KEY, 10 * length + tenant, is_censored=False)
        reports.append(told_of(estimator, number))
    text = await merged(reports)
    told = unpack_as(PoolReport, text)
    assert len(text) <= MOST_REPORT_BYTES
    assert len(told.rows) == 60
    assert len(told.whole.lengths["lengths"]) > 100


# -- on real pools


async def test_each_of_twenty_replicas_shows_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARE_EVERY_S", 0.05)
    policy = policy_of()
    with begun_store(tmp_path) as server:
        pools = [shared_pool(policy, server) for _ in range(20)]
        await asyncio.gather(*(pool.open() for pool in pools))
        lives = [PoolOverview(sources_of(pool, policy)) for pool in pools]
        await asyncio.gather(*(live.open() for live in lives))

        def shown() -> Mapping[int, list[str]]:
            return {number: [one.replica for one in live.overview().replicas] for number, live in enumerate(lives)}

        names = sorted(pool.name for pool in pools)
        for _ in range(100):
            await asyncio.sleep(0.1)
            if all(seen == names for seen in shown().values()):
                break
        assert set(map(tuple, shown().values())) == {tuple(names)}
        assert not any(live.overview().notices for live in lives)
        assert policy.mode is Mode.ENFORCE
        await asyncio.gather(*(live.close() for live in lives))
        await asyncio.gather(*(pool.close() for pool in pools))
