"""What enforcing would have done, added up: nothing lost, quantiles as right as they say, and one policy at a time."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest

from sidecar.admission.dry_run.shadow import WaitingShadow
from sidecar.events import Observed, Verdict
from sidecar.telemetry.dry_run import OTHER_TENANTS, WAITS_FROM_US, DryRunCounts, DryRunReport, DryRunStats, added_up


def observed(wait_us: int = 0, verdict: Verdict = Verdict.ADMITTED, code: str | None = None, **more: Any) -> Observed:
    plain = {"at_us": 1, "request_id": "r", "generation": "g1", "tier": "batch", "tenant": "acme"}
    return Observed(verdict=verdict, code=code, queue_wait_us=wait_us, **{**plain, **more})


def tally_of(waits_us: list[int]) -> DryRunCounts:
    tally = DryRunCounts()
    for wait_us in waits_us:
        tally.note(observed(wait_us))
    return tally


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("none_of", [0, 700])
def test_a_quantile_is_right_to_5_percent(share: float, none_of: int) -> None:
    luck = random.Random(3)
    waits_us = sorted([0] * none_of + [round(math.exp(luck.uniform(0, 22))) for _ in range(1000)])
    exact = waits_us[math.ceil(share * len(waits_us)) - 1]
    assert tally_of(waits_us).wait_us(share) == pytest.approx(exact, rel=0.0501, abs=1)


def test_no_request_waited() -> None:
    assert DryRunCounts().wait_us(0.99) == 0
    assert tally_of([0, 0]).wait_us(1.0) == 0


def test_the_longest_is_exact_and_no_quantile_is_longer() -> None:
    tally = tally_of([1_000_003, 1_000_001])
    assert tally.wait_max_us == 1_000_003 >= tally.wait_us(1.0)


def test_what_a_store_takes_to_answer_is_no_wait() -> None:
    assert tally_of([WAITS_FROM_US - 1, WAITS_FROM_US]).waited == 1


def test_every_request_is_counted_once_by_what_became_of_it() -> None:
    tally = DryRunCounts()
    tally.note(observed())
    tally.note(observed(9_000_000, Verdict.REFUSED, "queue_timeout", starvation_us=40_000, served_ahead={"high": 7}))
    tally.note(observed(0, Verdict.REFUSED, "queue_full"))
    tally.note(observed(5_000_000, Verdict.ABANDONED, "client_left", served_ahead={"high": 3}))
    tally.note(observed(0, Verdict.UNKNOWN, "stopped"))
    assert (tally.requests, tally.admitted, tally.abandoned) == (5, 1, 1)
    assert (tally.refused, tally.unknown) == ({"queue_timeout": 1, "queue_full": 1}, {"stopped": 1})
    # Who was not admitted has no wait among theirs, but may have starved.
    assert (tally.waited, tally.wait_max_us, tally.waits) == (0, 0, {})
    assert (tally.starved, tally.starvation_max_us, tally.served_ahead) == (1, 40_000, {"high": 10})


def test_tallies_of_replicas_add_up_to_the_tally_of_all() -> None:
    luck = random.Random(5)
    reported = [
        observed(
            luck.randrange(10**7), luck.choice([*Verdict]), luck.choice("abc"), starvation_us=luck.randrange(10**6)
        )
        for _ in range(300)
    ]
    parts, whole = [DryRunCounts(), DryRunCounts(), DryRunCounts()], DryRunCounts()
    for number, one in enumerate(reported):
        parts[number % 3].note(one)
        whole.note(one)
    assert added_up(parts) == whole
    assert [sum(part.refused.values()) for part in parts] != [0, 0, 0]


def test_tallies_share_nothing() -> None:
    first, second = DryRunCounts(), DryRunCounts()
    first.note(observed(20_000, Verdict.REFUSED, "queue_full", served_ahead={"high": 1}))
    assert second == DryRunCounts()


class Process:
    """Tallies by a clock that a test can change; a period has begun."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.tallies = DryRunStats(lambda: self.now_s)
        self.tallies.begin("g1", 0)

    def read(self, most_tenants: int = 20) -> DryRunReport:
        standing = self.tallies.read(most_tenants)
        assert standing is not None
        return standing


def test_they_stand_by_tier_and_by_tenant() -> None:
    assert DryRunStats(lambda: 1.0).read(20) is None
    process = Process()
    process.tallies.note(observed())
    process.now_s = 200.0
    process.tallies.note(observed(tier=None, tenant=None, verdict=Verdict.REFUSED, code="invalid_api_key"))
    process.tallies.note(observed(tier="high"))
    standing = process.read()
    assert (standing.generation, standing.since_s) == ("g1", 100.0)
    assert {name: tally.requests for name, tally in standing.by_tier.items()} == {"batch": 1, "": 1, "high": 1}
    assert {name: tally.requests for name, tally in standing.by_tenant.items()} == {"acme": 2, "": 1}


def test_another_policy_begins_anew_and_what_the_last_one_still_tells_is_left_out() -> None:
    process = Process()
    process.tallies.note(observed())
    process.now_s = 300.0
    process.tallies.end()
    process.tallies.begin("g2", 10)
    process.tallies.note(observed(received_us=11))  # its shadow had waited since before
    assert (process.read().generation, process.read().by_tier) == ("g2", {})
    process.tallies.note(observed(generation="g2", tier="high", received_us=11))
    process.tallies.note(observed())
    standing = process.read()
    assert (standing.generation, standing.since_s, list(standing.by_tier)) == ("g2", 300.0, ["high"])
    assert standing.by_tier["high"].requests == 1


def test_the_same_policy_that_comes_back_begins_anew_too() -> None:
    process = Process()
    for _ in range(121):
        process.tallies.note(observed())
    process.now_s = 200.0
    process.tallies.end()
    process.tallies.note(observed())  # after the end
    ended = process.read()
    assert (ended.since_s, ended.until_s, ended.by_tier["batch"].requests) == (100.0, 200.0, 121)
    process.now_s = 300.0
    process.tallies.begin("g1", 5_000)
    process.tallies.note(observed(received_us=4_999))  # it came in the period before
    process.tallies.note(observed(received_us=5_000))
    standing = process.read()
    assert (standing.since_s, standing.until_s, standing.by_tier["batch"].requests) == (300.0, None, 1)


def test_those_that_wait_are_counted_when_they_are_read_and_stay_where_the_period_ends() -> None:
    waiting = [WaitingShadow("g1", "batch", "acme", 17_000_000), WaitingShadow("other", "batch", "acme", 1)]
    tallies = DryRunStats(lambda: 1.0, lambda: waiting)
    tallies.begin("g1", 0)
    tallies.note(observed(50_000))
    for _ in range(2):  # reading counts nothing twice
        read = tallies.read(20)
        assert read is not None
        batch = read.by_tier["batch"]
        assert (batch.requests, batch.waiting, batch.waiting_max_us) == (1, 1, 17_000_000)
        assert read.by_tenant["acme"].waiting == 1
    tallies.end()
    waiting.clear()
    ended = tallies.read(20)
    assert ended is not None
    assert ended.by_tier["batch"].waiting == 1


def test_of_many_tenants_the_largest_are_named_and_nothing_is_lost() -> None:
    process = Process()
    for number in range(30):
        for _ in range(number + 1):
            process.tallies.note(observed(tenant=f"t{number}"))
    standing = process.read(5)
    assert list(standing.by_tenant) == ["t29", "t28", "t27", "t26", "t25", OTHER_TENANTS]
    assert sum(tally.requests for tally in standing.by_tenant.values()) == 30 * 31 // 2
    assert len(process.read(30).by_tenant) == 30


def test_what_travels_to_other_replicas_is_the_same_there() -> None:
    process = Process()
    process.tallies.note(observed(123_456, served_ahead={"high": 3}))
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(process.read()), type=DryRunReport)
    assert travelled == process.read()
