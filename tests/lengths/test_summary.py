"""Summaries that replicas tell each other: what they keep, what they never repeat, and hostile ones."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.lengths.buckets import LengthKey
from sidecar.lengths.estimator import ENOUGH, REPLICAS_REMEMBERED, LengthEstimator, Source
from sidecar.lengths.histogram import LONGEST, LengthHistogram
from sidecar.lengths.summary import MILLION, MOST_ENTRIES, MOST_WEIGHT, VERSION, merged, read, summarize
from tests.support.examples import examples

CHAT = LengthKey("/v1/chat/completions", "m", "plain")
ROOM = 60_000


def learned(lengths: dict[str, int], times: int = ENOUGH, key: LengthKey = CHAT) -> LengthEstimator:
    estimator = LengthEstimator()
    for tenant, length in lengths.items():
        for _ in range(times):
            estimator.learn(tenant, key, length, is_censored=False)
    return estimator


def told(estimator: LengthEstimator, most_bytes: int = ROOM) -> Any:
    """The summary as it arrives."""
    return msgspec.json.decode(msgspec.json.encode(estimator.summary(most_bytes)))


def entry(points: object = (96, 500_000, 192, 0), samples: object = 100, weight: object = 100) -> list[object]:
    return ["acme", *CHAT, samples, weight, list(points) if isinstance(points, tuple) else points]


def heard(*entries: object) -> LengthEstimator:
    estimator = LengthEstimator()
    estimator.hear("r1", {"version": VERSION, "lengths": list(entries)})
    return estimator


def test_a_replica_that_learned_nothing_knows_what_another_told() -> None:
    other = LengthEstimator()
    other.hear("r1", told(learned({"acme": 300})))
    found = other.estimate("acme", CHAT, 0.9)
    assert found is not None
    assert (found.tokens, found.source, found.samples) == (304, Source.REPLICAS, ENOUGH)
    assert other.estimate("acme", CHAT, 0.9, generated=304) is None
    assert other.estimate("stranger", CHAT, 0.9) is None


def test_samples_of_both_are_counted_together_and_own_ones_alone_once_there_are_enough() -> None:
    own = learned({"acme": 100}, times=30)
    own.hear("r1", told(learned({"acme": 500}, times=30)))
    found = own.estimate("acme", CHAT, 0.9)
    assert found is not None
    assert (found.tokens, found.source, found.samples) == (512, Source.REPLICAS, 60)
    median = own.estimate("acme", CHAT, 0.4)
    assert median is not None
    assert median.tokens == 112
    for _ in range(20):
        own.learn("acme", CHAT, 100, is_censored=False)
    found = own.estimate("acme", CHAT, 0.9)
    assert found is not None
    assert (found.tokens, found.source) == (111, Source.OWN)


def test_a_forgotten_replica_counts_no_more() -> None:
    estimator = LengthEstimator()
    estimator.hear("r1", told(learned({"acme": 300})))
    estimator.forget("r1")
    estimator.forget("never heard")
    assert estimator.estimate("acme", CHAT, 0.9) is None
    assert not estimator._heard
    assert not estimator._medians


def test_a_new_summary_takes_the_place_of_the_last() -> None:
    estimator = LengthEstimator()
    for length in (300, 600):
        estimator.hear("r1", told(learned({"acme": length})))
    found = estimator.estimate("acme", CHAT, 0.9)
    assert found is not None
    assert (found.tokens, found.samples) == (608, ENOUGH)
    estimator.hear("r1", told(LengthEstimator()))
    assert estimator.estimate("acme", CHAT, 0.9) is None


def test_tenants_that_only_others_know_vote_for_a_newcomer() -> None:
    estimator = LengthEstimator()
    estimator.hear("r1", told(learned({"a": 160, "b": 320})))
    assert estimator.estimate("new", CHAT, 0.9) is None
    estimator.hear("r2", told(learned({"c": 640})))
    found = estimator.estimate("new", CHAT, 0.9)
    assert found is not None
    assert (found.tokens, found.source) == (320, Source.TENANTS)
    estimator.forget("r2")
    assert estimator.estimate("new", CHAT, 0.9) is None


def test_what_a_newcomer_begins_with_follows_what_others_tell() -> None:
    estimator = LengthEstimator()
    for length in (160, 640):
        for name in ("r1", "r2"):
            estimator.hear(name, told(learned({"a": length, "b": length, "c": length})))
        found = estimator.estimate("new", CHAT, 0.9)
        assert found is not None
        assert (found.tokens, found.samples) == (length, 6 * ENOUGH)


def test_own_samples_that_are_forgotten_count_no_more_beside_those_of_others() -> None:
    estimator = learned({"acme": 5000}, times=30)
    estimator.hear("r1", told(learned({"acme": 100})))
    found = estimator.estimate("acme", CHAT, 0.9)
    assert found is not None
    assert (found.tokens, found.samples) == (5024, 80)
    for number in range(100):
        estimator.learn("acme", CHAT._replace(model=f"m{number}"), 10, is_censored=False)
    found = estimator.estimate("acme", CHAT, 0.9)
    assert found is not None
    assert (found.tokens, found.samples) == (112, 50)
    for _ in range(40):
        estimator.learn("acme", CHAT, 1000, is_censored=False)
    found = estimator.estimate("acme", CHAT, 0.9)
    assert found is not None
    assert (found.tokens, found.samples) == (1008, 90)


def test_replicas_that_hear_each_other_in_turn_do_not_amplify() -> None:
    one, other, third = learned({"acme": 100}, times=30), learned({"acme": 500}, times=30), LengthEstimator()
    before = told(one), told(other)
    for _ in range(20):
        one.hear("other", told(other))
        other.hear("one", told(one))
        third.hear("one", told(one))
        third.hear("other", told(other))
    assert (told(one), told(other)) == before
    assert told(third)["lengths"] == []
    found = third.estimate("acme", CHAT, 0.9)
    assert found is not None
    assert found.samples == 60


@given(st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([False, False, True])), min_size=1, max_size=300))
def test_a_summary_says_no_less_than_the_samples_and_at_most_a_point_more(samples: list[tuple[int, bool]]) -> None:
    histogram = LengthHistogram()
    for length, is_censored in samples:
        histogram.add(length, is_censored=is_censored)
    exact, summary = histogram.survival(), summarize(histogram)
    read_back = merged(None, [summary])
    for q in (0.5, 0.75, 0.9, 0.95, 0.99):
        length, coarse = exact.quantile(q), read_back.quantile(q)
        nearest = min((point for point, longer in summary.points if longer <= (1 - q) * MILLION + 1e-3), default=None)
        if length is None:
            assert coarse is None
        elif coarse is None:
            assert nearest is None, "rounded up to a millionth, the share is larger than it may be"
        else:
            assert length <= coarse
            assert coarse == nearest


def test_a_summary_of_real_looking_lengths_is_nearly_exact_in_the_tail() -> None:
    rng, histogram = random.Random(5), LengthHistogram()
    for _ in range(10_000):
        histogram.add(round(rng.lognormvariate(5.3, 1)), is_censored=rng.random() < 0.1)
    read_back = merged(None, [summarize(histogram)])
    for q in (0.75, 0.9, 0.95, 0.99):
        exact = histogram.quantile(q)
        assert exact is not None
        assert exact <= (read_back.quantile(q) or 0) <= 1.03 * exact
    for q in (0.75, 0.9, 0.95):
        exact = histogram.quantile(q, 400)
        assert exact is not None
        assert 0.9 * exact <= (read_back.quantile(q, 400) or 0) <= 1.25 * exact


@pytest.mark.parametrize("most_bytes", [0, 10, 100, 1000, 10_000])
def test_a_summary_keeps_to_its_bytes(most_bytes: int) -> None:
    rng, estimator = random.Random(1), LengthEstimator()
    for tenant in range(40):
        for model in range(5):
            for _ in range(20):
                key = CHAT._replace(model=f'mö"del{model}')
                estimator.learn(f"tenant{tenant}", key, rng.randrange(4000), is_censored=False)
    document = estimator.summary(most_bytes)
    assert len(msgspec.json.encode(document)) <= max(most_bytes, len('{"version":1,"lengths":[]}'))
    if most_bytes == 10_000:
        assert len(document["lengths"]) > 30


def test_the_most_used_key_of_every_tenant_comes_before_any_tenants_second() -> None:
    estimator = learned({"small": 100}, times=5)
    for number in range(60):
        for _ in range(100):
            estimator.learn("hostile", CHAT._replace(model=f"m{number}"), 100, is_censored=False)
    estimator.learn("hostile", CHAT._replace(model="m7"), 100, is_censored=False)
    names = [(one[0], one[2]) for one in told(estimator, 1000)["lengths"]]
    assert names[:2] == [("hostile", "m7"), ("small", "m")]


def test_a_name_without_utf_8_is_told_to_no_one() -> None:
    estimator = learned({"acme": 100})
    for _ in range(100):
        estimator.learn("acme", CHAT._replace(model="\ud800"), 100, is_censored=False)
    assert [one[2] for one in told(estimator)["lengths"]] == ["m"]


# Hostile summaries


def deep(levels: int) -> object:
    nested: object = 1
    for _ in range(levels):
        nested = [nested]
    return nested


def shown(value: object) -> str:
    try:
        return str(value)[:40]
    except RecursionError:
        return "deep"


NUMBERS: list[object] = [math.nan, math.inf, -math.inf, -1, 0.5, 10**400, "1", None, True, [], {}]


NO_POINTS: list[object] = [
    *((96, bad, 192, 0) for bad in NUMBERS),
    *((bad, 500_000, 192, 0) for bad in NUMBERS if bad is not True),
    (True, 500_000, 192, 0),
    (192, 500_000, 96, 0),
    (96, 500_000, 96, 0),
    (96, 0, 192, 500_000),
    (96, MILLION + 1, 192, 0),
    (0, 500_000, 192, 0),
    (LONGEST + 1, 0),
    (96, 500_000, 192),
    (),
    tuple(number for point in range(33) for number in (point + 1, 0)),
    "96",
    None,
    {"96": 1},
    deep(5000),
]


def test_points_that_are_none_are_skipped_and_the_rest_is_heard() -> None:
    wrong = []
    for points in NO_POINTS:
        estimator = heard(entry(points), ["other", *CHAT, 100, 100, [304, 0]])
        found = estimator.estimate("other", CHAT, 0.9)
        if estimator.estimate("acme", CHAT, 0.9) is not None or found is None or found.tokens != 304:
            wrong.append(shown(points))
    assert wrong == []


def test_counts_that_are_none_are_skipped() -> None:
    for number in (*NUMBERS, 0, 10**10):
        assert heard(entry(samples=number)).estimate("acme", CHAT, 0.9) is None, shown(number)
        assert heard(entry(weight=number)).estimate("acme", CHAT, 0.9) is None, shown(number)
    assert heard(entry(weight=MOST_WEIGHT)).estimate("acme", CHAT, 0.9) is not None


NO_DOCUMENTS: list[object] = [
    None,
    1,
    "lengths",
    [],
    {},
    {"version": 2, "lengths": [entry()]},
    {"version": VERSION},
    {"version": VERSION, "lengths": {}},
    {"version": [], "lengths": "x"},
    deep(100_000),
]


def test_what_is_no_document_leaves_the_last_one_in_force() -> None:
    for document in NO_DOCUMENTS:
        estimator = heard(entry())
        estimator.hear("r1", document)
        assert estimator.estimate("acme", CHAT, 0.9) is not None, shown(document)


NO_ENTRIES: list[object] = [
    None,
    [],
    entry()[:-1],
    [*entry(), 1],
    [1, *entry()[1:]],
    [None, *entry()[1:]],
    ["a" * 300, *entry()[1:]],
    [["acme"], *entry()[1:]],
    ["acme", "/", "m" * 300, "plain", 100, 100, [96, 0]],
    ["acme", "/", "m", None, 100, 100, [96, 0]],
    ["acme", "/", {}, "plain", 100, 100, [96, 0]],
]


def test_entries_of_another_form_are_skipped() -> None:
    assert [shown(one) for one in NO_ENTRIES if heard(one)._heard] == []


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("acme"),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.sampled_from(["version", "lengths", "x"]), inner),
    max_leaves=30,
)
DAMAGED = st.tuples(st.integers(0, 6), ANYTHING).map(
    lambda change: [change[1] if index == change[0] else value for index, value in enumerate(entry())]
)


@settings(max_examples=examples(50))
@given(st.one_of(ANYTHING, st.lists(DAMAGED | ANYTHING, max_size=5).map(lambda ones: {"version": 1, "lengths": ones})))
def test_no_document_raises_and_what_is_heard_can_be_asked_and_forgotten(document: object) -> None:
    estimator = LengthEstimator()
    estimator.hear("r1", document)
    for tenant, key in list(estimator._heard):
        found = estimator.estimate(tenant, key, 0.95, generated=10)
        assert found is None or 10 < found.tokens <= LONGEST
    estimator.forget("r1")
    assert not estimator._heard
    assert not estimator._medians


def test_a_megabyte_of_keys_is_cut() -> None:
    document = {
        "version": VERSION,
        "lengths": [[f"t{number}", *CHAT, 100, 100, [96, 0]] for number in range(5 * MOST_ENTRIES)],
    }
    assert len(json.dumps(document)) > 1_000_000
    estimator = LengthEstimator()
    for name in range(3):
        estimator.hear(f"r{name}", document)
    assert len(estimator._heard) == MOST_ENTRIES


def test_one_key_many_times_counts_once() -> None:
    estimator = heard(*[entry()] * 100)
    found = estimator.estimate("acme", CHAT, 0.9)
    assert found is not None
    assert found.samples == 100
    estimator.forget("r1")
    assert not estimator._heard


def test_only_so_many_replicas_are_remembered_the_latest_heard() -> None:
    estimator = LengthEstimator()
    for number in range(3 * REPLICAS_REMEMBERED):
        estimator.hear(f"r{number}", {"version": VERSION, "lengths": [entry()]})
        estimator.hear("kept", {"version": VERSION, "lengths": [entry()]})
    assert len(estimator._replicas) == REPLICAS_REMEMBERED
    assert "kept" in estimator._replicas
    found = estimator.estimate("acme", CHAT, 0.9)
    assert found is not None
    assert found.samples == 100 * REPLICAS_REMEMBERED


def test_a_summary_cannot_outweigh_the_samples_of_the_replica_itself() -> None:
    """Once a replica has enough samples of its own, no other says anything about that tenant and key."""
    estimator = learned({"acme": 100})
    for number in range(10):
        estimator.hear(f"r{number}", {"version": VERSION, "lengths": [entry((16, 0), 10**9, MOST_WEIGHT)]})
    found = estimator.estimate("acme", CHAT, 0.9)
    assert found is not None
    assert (found.tokens, found.source) == (111, Source.OWN)


def test_reading_takes_the_form_that_writing_gives() -> None:
    estimator = learned({"acme": 100})
    entries = read(told(estimator))
    assert entries is not None
    ((tenant, key, summary),) = entries
    assert (tenant, key, summary.samples, summary.weight, summary.points) == ("acme", CHAT, 50, 50, ((112, 0),))
