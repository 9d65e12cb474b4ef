"""The reports of all replicas added up: nothing is lost, nothing counted twice, whatever their clocks say."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.cluster import merge
from sidecar.cluster.document import OldestWaiter, RefusalView, TenantView
from sidecar.cluster.merge import ReceivedReport
from sidecar.cluster.report import MOST_REFUSALS, ReplicaReport, TierReport, Unreadable, pack, unpack
from sidecar.telemetry.recent import BUCKETS, Bucket, Overtakings

NOW_S = 1_700_000_003.0
START_S = 1_700_000_000 - 59 * 5


def report(replica: str = "one", *tiers: TierReport, at_s: float = NOW_S, **more: object) -> ReplicaReport:
    whole = {"tenants": [], "refusals": [], **more}
    return ReplicaReport(replica, f"host-{replica}", at_s, 3, 4, list(tiers), **whole)  # type: ignore[arg-type]


def tier(name: str = "batch", *buckets: Bucket, oldest: OldestWaiter | None = None, **by: Overtakings) -> TierReport:
    return TierReport(name, oldest, list(buckets), by)


def waiter(wait_s: float, replica: str = "one") -> OldestWaiter:
    return OldestWaiter(wait_s, wait_s / 2, {"high": 100}, replica)


def refusal(at_s: float, request_id: str = "id") -> RefusalView:
    return RefusalView(at_s, "batch", "acme", "queue_full", 503, "full", request_id, 0.0, "one")


def test_the_same_five_seconds_of_two_replicas_are_one_bucket() -> None:
    t_s = START_S + 50
    first = ReceivedReport(report("one", tier("batch", Bucket(t_s, 2, 1, 10.0, 6.0, 3.0, 2.0, 0.5, 2, 4.5))), 0.0)
    second = ReceivedReport(report("two", tier("batch", Bucket(t_s, 1, 0, 7.0, 7.0, 1.0, 1.0, 0.9, 1, 0.5))), 1.0)
    merged = merge.recent("batch", [first, second], NOW_S)
    assert [bucket.t_s for bucket in merged] == [START_S + 5 * number for number in range(BUCKETS)]
    assert merged[10] == Bucket(t_s, 3, 1, 17.0, 7.0, 4.0, 2.0, 0.9, 3, 5.0)
    assert all(bucket == Bucket(bucket.t_s) for bucket in merged if bucket.t_s != t_s)


@pytest.mark.parametrize("ahead_s", [-3600.0, -7.0, -1.0, 0.0, 2.0, 3600.0])
def test_a_replica_whose_clock_is_wrong_is_put_where_it_belongs(ahead_s: float) -> None:
    theirs_s = NOW_S - 1.0 + ahead_s  # when they wrote it a second ago, by their clock
    bucket = Bucket(int(theirs_s) // 5 * 5, 1)
    other = report("two", tier("batch", bucket), at_s=theirs_s, refusals=[refusal(theirs_s - 2.0)])
    one = merge.heard(other, 1.0, NOW_S)
    merged = merge.recent("batch", [one], NOW_S)
    assert sum(bucket.admitted for bucket in merged[-2:]) == 1
    assert [refused.at_s for refused in merge.refusals([one])] == [pytest.approx(NOW_S - 3.0)]


places = st.lists(st.tuples(st.integers(0, 59), st.integers(0, 9), st.floats(0, 100)), max_size=20)


@given(st.lists(places, max_size=4))
def test_sums_are_sums_and_maxima_maxima(reported: list[list[tuple[int, int, float]]]) -> None:
    every = [
        ReceivedReport(
            report(str(number), tier("batch", *(Bucket(START_S + 5 * at, n, 0, s, s) for at, n, s in of))), 0.0
        )
        for number, of in enumerate(reported)
    ]
    merged = merge.recent("batch", every, NOW_S)
    flat = [one for of in reported for one in of]
    assert len(merged) == BUCKETS
    assert sum(bucket.admitted for bucket in merged) == sum(count for _, count, _ in flat)
    assert max(bucket.wait_max_s for bucket in merged) == max((wait_s for *_, wait_s in flat), default=0.0)
    assert sum(bucket.wait_sum_s for bucket in merged) == pytest.approx(sum(wait_s for *_, wait_s in flat))


def test_merging_changes_no_report() -> None:
    own = report("one", tier("batch", Bucket(START_S, 1), high=Overtakings(1, 10, {"level": 1})))
    before = pack(own)
    for _ in range(2):
        merge.recent("batch", [ReceivedReport(own, 0.0), ReceivedReport(own, 0.0)], NOW_S)
        merge.overtaken_by("batch", [ReceivedReport(own, 0.0), ReceivedReport(own, 0.0)])
    assert pack(own) == before


def test_overtakings_add_up_by_tier_and_by_rule_the_most_first() -> None:
    one = tier("batch", normal=Overtakings(1, 5, {"reserve": 1}), high=Overtakings(2, 20, {"level": 2}))
    two = tier("batch", high=Overtakings(3, 30, {"level": 1, "reserve": 2}))
    merged = merge.overtaken_by(
        "batch", [ReceivedReport(report("one", one), 0.0), ReceivedReport(report("two", two), 0.0)]
    )
    assert list(merged) == ["high", "normal"]
    assert merged["high"] == Overtakings(5, 50, {"level": 3, "reserve": 2})


def test_the_oldest_is_that_of_any_replica() -> None:
    every = [
        ReceivedReport(report("one", tier("batch", oldest=waiter(5, "one"))), 0.0),
        ReceivedReport(report("two", tier("batch", oldest=waiter(9, "two"))), 0.0),
        ReceivedReport(report("three", tier("batch")), 0.0),
    ]
    assert merge.oldest("batch", every) == waiter(9, "two")
    assert merge.oldest("high", every) is None


def test_a_tenant_is_one_wherever_it_runs_and_those_that_hold_most_come_first() -> None:
    one = report(
        "one", tenants=[TenantView("acme", 10, 1, 0), TenantView("idle", 0, 0, 7), TenantView("big", 15, 1, 0)]
    )
    two = report("two", tenants=[TenantView("acme", 20, 2, 3)])
    merged = merge.tenants([ReceivedReport(one, 0.0), ReceivedReport(two, 0.0)])
    assert merged == [TenantView("acme", 30, 3, 3), TenantView("big", 15, 1, 0), TenantView("idle", 0, 0, 7)]
    many = report("one", tenants=[TenantView(f"tenant-{n}", n, 1, 0) for n in range(30)])
    assert len(merge.tenants([ReceivedReport(many, 0.0)])) == merge.SHOWN_TENANTS


def test_the_newest_refusals_come_first_and_are_bounded() -> None:
    every = [
        ReceivedReport(report(name, refusals=[refusal(NOW_S - n, f"{name}{n}") for n in range(20)]), 0.0)
        for name in "ab"
    ]
    merged = merge.refusals(every)
    assert len(merged) == MOST_REFUSALS
    assert [one.request_id for one in merged[:4]] == ["a0", "b0", "a1", "b1"]


def test_a_report_survives_the_way_and_what_is_none_is_said_so() -> None:
    reported = report("one", tier("batch", Bucket(START_S, 1), oldest=waiter(3)), refusals=[refusal(1.0)])
    assert unpack(pack(reported)) == reported
    another = zlib.compress(msgspec.msgpack.encode({"replica": 7}))
    bomb = zlib.compress(bytes(64 * 2**20))
    for packed in (b"", b"nonsense", another, bomb, pack(reported)[:-9]):
        with pytest.raises(Unreadable):
            unpack(packed)


def test_the_largest_report_fits_many_times_into_what_the_store_takes() -> None:
    full = [
        Bucket(START_S + 5 * n, n * 7919, n, n * 1.234567, n * 0.7654321, n * 0.3, n * 0.21, n * 0.1) for n in range(60)
    ]
    names = [f"a-tier-with-a-long-name-{n}" for n in range(12)]
    by = {name: Overtakings(12345, 6789012, {"level": 5, "reserve": 6, "limit": 7}) for name in names}
    tiers = [TierReport(name, waiter(1234.5678), full, by) for name in names]
    tenants = [TenantView(f"tenant-{n}-{'x' * 60}", n * 987, n, n) for n in range(20)]
    refusals = [msgspec.structs.replace(refusal(NOW_S + n, "i" * 128), message=f"{n} {'m' * 400}") for n in range(20)]
    assert len(pack(report("one", *tiers, tenants=tenants, refusals=refusals))) < 24_000
