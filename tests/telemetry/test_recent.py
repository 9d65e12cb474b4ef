"""The last five minutes of a process: what is counted where, and that it neither grows nor forgets too early."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from sidecar.events import (
    Admitted,
    Classified,
    FirstByte,
    Obstacle,
    Outcome,
    Preempted,
    Queued,
    Received,
    Refused,
    Settled,
)
from sidecar.telemetry.recent import BUCKET_S, BUCKETS, MOST_TIERS, Bucket, Recent, TierRecent
from tests.telemetry.span_stories import begin

NOW_S = 1_700_000_003
"""Three seconds into a bucket; the process's own clock is far from it."""
OFFSET_S = 1_699_999_000


def us(at_s: float) -> int:
    return round((at_s - OFFSET_S) * 1e6)


class Request:
    """One request reported to `recent`, as the sidecar would, in calendar seconds."""

    def __init__(self, recent: Recent, at_s: float, tier: str = "batch", *, tokens: int = 100, stream: bool = True):
        self.tell = begin(recent, Received(us(at_s), round(at_s * 1e9), "POST", "/", (), "id"), None)
        self.tell(Classified(us(at_s), tier, "acme", "key", None, "chat", None, None, stream, tokens, 1))

    def admitted(
        self, at_s: float, wait_s: float = 0.0, starved_s: float = 0.0, passed: Mapping[str, str] = {}
    ) -> None:
        self.tell(Queued(us(at_s - wait_s), Obstacle.NO_ROOM, "no room"))
        self.tell(Admitted(us(at_s), round(wait_s * 1e6), round(starved_s * 1e6), None, {}, 0, passed))

    def preempted(self, at_s: float, admitted_s: float) -> None:
        self.tell(Preempted(us(at_s), us(admitted_s), 1))
        self.tell(Queued(us(at_s), Obstacle.PREEMPTED, "its room went"))

    def settled(self, at_s: float, outcome: Outcome = Outcome.COMPLETED, status: int | None = 200) -> None:
        self.tell(Settled(us(at_s), outcome, status, 0, None, None, None))

    def refused(self, at_s: float, wait_s: float, status: int | None = 503) -> None:
        self.tell(Refused(us(at_s), "queue_timeout", "no", status, round(wait_s * 1e6)))


def filled(read: TierRecent) -> list[Bucket]:
    return [bucket for bucket in read.buckets if bucket != Bucket(bucket.t_s)]


def test_there_are_sixty_buckets_of_five_seconds_that_end_with_the_current_one() -> None:
    buckets = Recent().read("batch", NOW_S).buckets
    assert len(buckets) == BUCKETS == 60
    assert [after.t_s - before.t_s for before, after in itertools.pairwise(buckets)] == [BUCKET_S] * 59
    assert buckets[-1].t_s <= NOW_S < buckets[-1].t_s + BUCKET_S


def test_what_is_admitted_counts_in_the_bucket_of_its_admission() -> None:
    recent = Recent()
    Request(recent, NOW_S - 20).admitted(NOW_S - 10, wait_s=10, starved_s=4)
    Request(recent, NOW_S - 12).admitted(NOW_S - 10, wait_s=2)
    Request(recent, NOW_S).admitted(NOW_S)
    first, second = filled(recent.read("batch", NOW_S))
    assert first == Bucket(1_699_999_990, 2, 0, 12.0, 10.0, 4.0, 4.0)
    assert second == Bucket(1_700_000_000, 1)


def test_refusals_count_and_so_does_how_long_they_had_waited() -> None:
    recent = Recent()
    Request(recent, NOW_S - 5).refused(NOW_S, wait_s=5)
    Request(recent, NOW_S - 4).refused(NOW_S, wait_s=4, status=None)  # it hung up: no one refused it
    assert filled(recent.read("batch", NOW_S)) == [Bucket(1_700_000_000, 0, 1, 9.0, 5.0)]


def test_one_that_was_preempted_counts_once_with_its_whole_wait() -> None:
    recent = Recent()
    request = Request(recent, NOW_S - 20)
    request.admitted(NOW_S - 18, wait_s=2, starved_s=1)
    request.preempted(NOW_S - 13, admitted_s=NOW_S - 18)
    request.admitted(NOW_S, wait_s=20, starved_s=19)
    request.settled(NOW_S)
    first, second, third = filled(recent.read("batch", NOW_S))
    assert first == Bucket(1_699_999_985, 1, 0, 2.0, 2.0, 1.0, 1.0)
    assert second == Bucket(1_699_999_990, preempted=1, engine_lost_s=5.0)
    assert third == Bucket(1_700_000_000, 0, 0, 18.0, 20.0, 18.0, 19.0)


def test_one_that_is_not_admitted_again_is_refused_or_has_left() -> None:
    recent = Recent()
    for outcome, status in ((Outcome.FAILED, 503), (Outcome.CLIENT_LEFT, None)):
        request = Request(recent, NOW_S - 8)
        request.admitted(NOW_S - 8)
        request.preempted(NOW_S - 4, admitted_s=NOW_S - 8)
        request.settled(NOW_S, outcome, status)
    *_, last = filled(recent.read("batch", NOW_S))
    assert last == Bucket(1_700_000_000, 0, 1, 16.0, 8.0)


def test_a_request_that_no_one_could_classify_belongs_to_no_tier() -> None:
    recent = Recent()
    tell = begin(recent, Received(us(NOW_S), NOW_S * 10**9, "POST", "/", (), "id"), None)
    tell(Refused(us(NOW_S), "invalid_api_key", "no", 401))
    assert filled(recent.read("batch", NOW_S)) == filled(recent.read("", NOW_S)) == []


def test_who_waits_shows_before_the_wait_has_ended() -> None:
    recent = Recent()
    recent.waits("batch", NOW_S, 60.0, 50.0)
    recent.waits("batch", NOW_S + 1, 61.0, 51.0)
    (bucket,) = filled(recent.read("batch", NOW_S + 1))
    assert (bucket.wait_max_s, bucket.starvation_max_s, bucket.wait_sum_s) == (61.0, 51.0, 0.0)


def test_the_first_byte_of_a_stream_counts_from_the_arrival() -> None:
    recent = Recent()
    for stream, took_s in ((True, 2.5), (True, 1.0), (False, 9.0)):
        Request(recent, NOW_S - took_s, stream=stream).tell(FirstByte(us(NOW_S), 200))
    Request(recent, NOW_S - 8).tell(FirstByte(us(NOW_S), 500))  # an error's body is no token
    assert [bucket.ttft_max_s for bucket in filled(recent.read("batch", NOW_S))] == [2.5]


def test_an_overtaking_counts_with_the_tier_that_was_overtaken() -> None:
    recent = Recent()
    for rule in ("level", "level", "reserve"):
        Request(recent, NOW_S, "high", tokens=50).admitted(NOW_S, passed={"batch": rule, "normal": "level"})
    by = recent.read("batch", NOW_S).overtaken_by
    assert {name: (one.requests, one.tokens, one.rules) for name, one in by.items()} == {
        "high": (3, 150, {"level": 2, "reserve": 1})
    }
    assert recent.read("high", NOW_S).overtaken_by == {}


def test_after_five_minutes_it_is_forgotten_also_where_nothing_came_since() -> None:
    recent = Recent()
    Request(recent, NOW_S, "high").admitted(NOW_S, passed={"batch": "level"})
    kept, gone = NOW_S + (BUCKETS - 1) * BUCKET_S, NOW_S + BUCKETS * BUCKET_S
    assert filled(recent.read("high", kept))
    assert recent.read("batch", kept).overtaken_by
    assert not filled(recent.read("high", gone))
    assert not recent.read("batch", gone).overtaken_by
    Request(recent, gone, "high").admitted(gone)  # in the very place of the one that is over
    assert [bucket.admitted for bucket in filled(recent.read("high", gone))] == [1]


@given(st.lists(st.tuples(st.floats(0, 900), st.floats(0, 100)), max_size=40))
def test_within_five_minutes_nothing_is_lost_and_nothing_counted_twice(reported: list[tuple[float, float]]) -> None:
    recent, reported = Recent(), sorted(reported)
    for after_s, wait_s in reported:
        Request(recent, NOW_S + after_s - wait_s).admitted(NOW_S + after_s, wait_s)
    end_s = NOW_S + (reported[-1][0] if reported else 0)
    first_s = (int(end_s) // BUCKET_S - BUCKETS + 1) * BUCKET_S
    waits = [wait_s for after_s, wait_s in reported if NOW_S + after_s >= first_s]
    buckets = recent.read("batch", end_s).buckets
    assert sum(bucket.admitted for bucket in buckets) == len(waits)
    assert abs(sum(bucket.wait_sum_s for bucket in buckets) - sum(waits)) < 1e-4
    assert abs(max(bucket.wait_max_s for bucket in buckets) - max(waits, default=0.0)) < 1e-5


def test_names_of_tiers_are_bounded() -> None:
    recent = Recent()
    for number in range(3 * MOST_TIERS):
        Request(recent, NOW_S, f"tier-{number}").admitted(NOW_S)
    assert len(recent._tiers) <= MOST_TIERS + 1
