"""Figures as people read them, and the sentence that says who starves and why."""

from __future__ import annotations

import msgspec
import pytest

from sidecar.cluster.document import EngineStatus, OldestWaiter, ReplicaView, TenantView, TierGuard
from sidecar.cluster.phrases import (
    as_guarded,
    count,
    crowd,
    engine_headline,
    headline,
    sentence_for,
    starving,
    waits_at_its_limit,
)
from sidecar.durations import short_duration
from sidecar.policy.choices import Mode
from sidecar.telemetry.recent import Bucket, Overtakings
from tests.cluster.views import starved, tier

DURATIONS = [
    (0, "0 ms"),
    (0.0304, "30 ms"),
    (0.9994, "999 ms"),
    (0.9999, "1.0 s"),
    (9.94, "9.9 s"),
    (9.96, "10 s"),
    (59.4, "59 s"),
    (59.6, "1 m 00 s"),
    (192, "3 m 12 s"),
    (3599.4, "59 m 59 s"),
    (3599.6, "1 h 00 m"),
    (7265, "2 h 01 m"),
]


def test_a_duration_has_the_figures_that_matter() -> None:
    assert [(seconds, short_duration(seconds)) for seconds, _ in DURATIONS] == DURATIONS


COUNTS = [
    (0, "0"),
    (9_999, "9,999"),
    (10_000, "10k"),
    (12_345, "12.3k"),
    (400_000, "400k"),
    (1_000_000, "1M"),
    (2_560_000, "2.6M"),
    (10**10, "10G"),
]


def test_a_count_is_short() -> None:
    assert [(number, count(number)) for number, _ in COUNTS] == COUNTS


def test_the_headline_says_who_starves_who_overtook_it_and_why() -> None:
    assert headline([tier("high"), starved()]) == (
        "batch starves: its oldest request has waited 3 m 12 s and starved 2 m 40 s. "
        "high overtook it 41 times in 5 minutes, because high is more important."
    )


def test_of_several_replicas_the_last_minutes_are_said_to_be_this_ones() -> None:
    assert headline([starved()], is_alone=False) == (
        "batch starves: its oldest request has waited 3 m 12 s and starved 2 m 40 s. "
        "high overtook requests of this replica 41 times in 5 minutes, because high is more important."
    )


def test_it_is_the_one_that_starves_most_not_the_one_that_waits_longest() -> None:
    waits = starved("low", wait_s=500, starved_s=1)
    assert headline([waits, starved("batch", wait_s=60, starved_s=40)]).startswith("batch starves")


@pytest.mark.parametrize(
    ("rule", "because"),
    [
        ("always_first", "because high always goes first"),
        ("reserve", "because high held less than its reserve"),
        ("limit", "because batch was at its limit"),
        ("guarded", "because the SLO of a more important tier left no room to batch"),
        ("another", "because of the rule another"),
    ],
)
def test_every_rule_has_its_reason(rule: str, because: str) -> None:
    by = {"low": Overtakings(1, 1, {"level": 1}), "high": Overtakings(2, 9, {rule: 2})}
    batch = tier("batch", oldest=OldestWaiter(9, 9, {}, "one"), overtaken_by=by)
    assert headline([batch]).endswith(f"high overtook it twice in 5 minutes, {because}.")


def test_who_waits_without_having_been_overtaken_does_not_starve() -> None:
    waits = tier("normal", oldest=OldestWaiter(4.2, 0.0, {}, "one"))
    assert headline([tier("high"), waits]) == "No request starves. normal waits longest: 4.2 s."


def test_who_waits_at_its_own_limit_does_not_starve() -> None:
    by_limit = {"high": Overtakings(41, 81_000, {"limit": 40, "level": 1})}
    waits = msgspec.structs.replace(starved(), overtaken_by=by_limit, is_at_limit=waits_at_its_limit(by_limit))
    assert starving([waits]) is None
    assert headline([tier("high"), waits]) == ("No request starves. batch waits longest: 3 m 12 s, at its own limit.")
    gone = msgspec.structs.replace(waits, oldest=None, is_at_limit=False, recent=[Bucket(0, starvation_max_s=12.0)])
    assert headline([tier("high"), gone]) == "No request waits."


def test_a_guarded_tier_says_what_it_meets_and_what_it_leaves() -> None:
    guard = TierGuard(0.3501, 0.25, 0.31, {"met": 2000, "missed": 50}, is_in_vain=False)
    leaves = "others may fill the pool to 35%, and 31% of it is held"
    assert as_guarded(guard, 0.97, 1173, 31) == f"97.4% met of 1,204 (97% promised), {leaves}"
    assert as_guarded(guard, 0.995, 0, 0) == f"none ended lately (99.5% promised), {leaves}"
    vain = msgspec.structs.replace(guard, is_in_vain=True)
    assert as_guarded(vain, 0.97, 1, 1) == f"50.0% met of 2 (97% promised), {leaves}; they are not why it misses"


def test_when_no_one_waits_it_still_says_who_starved_before() -> None:
    assert headline([tier("high")]) == headline([]) == "No request waits."
    before = tier(
        "batch", recent=[Bucket(0, starvation_max_s=12.0)], overtaken_by={"high": Overtakings(1, 1, {"level": 1})}
    )
    assert headline([tier("high"), before]) == (
        "No request waits. In the last 5 minutes batch starved for up to 12 s. "
        "high overtook it once in 5 minutes, because high is more important."
    )
    assert headline([tier("high"), before], is_alone=False) == (
        "No request waits. In the last 5 minutes batch of this replica starved for up to 12 s. "
        "high overtook requests of this replica once in 5 minutes, because high is more important."
    )


@pytest.mark.parametrize(
    ("waiting", "said"),
    [
        ({"loud": 89, "quiet": 0}, " 89 of the 89 waiting requests are from tenant loud."),
        ({"loud": 3000, "quiet": 100, "other": 0}, " 3,000 of the 3,100 waiting requests are from tenant loud."),
        ({"loud": 61, "quiet": 35}, ""),
        ({"loud": 19, "quiet": 0}, ""),
        ({"alone": 500}, ""),
        ({}, ""),
    ],
)
def test_a_tenant_that_floods_the_queue_is_named(waiting: dict[str, int], said: str) -> None:
    assert crowd([TenantView(tenant, 1, 1, number) for tenant, number in waiting.items()]) == said


# -- without an engine


def replica(name: str, engine: EngineStatus | None) -> ReplicaView:
    return ReplicaView(name, f"host-{name}", 0, 0, 0.0, "abc", engine)


REFUSED = EngineStatus("down", "connection refused by http://e:8000", 12.0)
OTHER = EngineStatus("mismatch", "http://e:8000 is vLLM, but the policy says engine: sglang", 12.0)
UP = EngineStatus("up", "", 100.0)


@pytest.mark.parametrize(
    ("engines", "waiting", "mode", "said"),
    [
        ([UP, UP], 3, Mode.ENFORCE, None),
        ([None], 3, Mode.ENFORCE, None),
        (
            [REFUSED],
            38,
            Mode.ENFORCE,
            "The engine does not answer: connection refused by http://e:8000, for 12 s. 38 requests wait.",
        ),
        (
            [REFUSED, REFUSED],
            1,
            Mode.ENFORCE,
            "The engine does not answer: connection refused by http://e:8000, for 12 s. 1 request waits.",
        ),
        (
            [UP, REFUSED, UP],
            0,
            Mode.ENFORCE,
            "1 of 3 replicas cannot use the engine (host-1 1): connection refused by http://e:8000, for 12 s. "
            "No request waits.",
        ),
        (
            [UP, *[REFUSED] * 5],
            2,
            Mode.ENFORCE,
            "5 of 6 replicas cannot use the engine (host-1 1, host-2 2, host-3 3 and 2 more): connection refused by "
            "http://e:8000, for 12 s. 2 requests wait.",
        ),
        (
            [OTHER],
            2,
            Mode.OBSERVE,
            "Another engine than the policy's answers, for 12 s: http://e:8000 is vLLM, but the policy says engine: "
            "sglang. No request is held (mode: observe).",
        ),
    ],
)
def test_the_first_sentence_is_about_an_engine_that_cannot_be_used(
    engines: list[EngineStatus | None], waiting: int, mode: Mode, said: str | None
) -> None:
    views = [replica(str(number), engine) for number, engine in enumerate(engines)]
    assert engine_headline(views, waiting, mode) == said


def test_observing_the_sentence_goes_on_in_lower_case() -> None:
    assert sentence_for(Mode.OBSERVE, "No request waits.").endswith("If they were: no request waits.")
    assert sentence_for(Mode.ENFORCE, "No request waits.") == "No request waits."
