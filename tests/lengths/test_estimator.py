"""Estimates of output lengths: the chain, who sizes whom, and what a client can do to it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.lengths import estimator as module
from sidecar.lengths import histogram as histogram_module
from sidecar.lengths.estimator import (
    ENDPOINTS_REMEMBERED,
    ENOUGH,
    KEYS_REMEMBERED,
    TENANTS_REMEMBERED,
    Estimate,
    EstimateSource,
    KnownLengths,
    LengthEstimator,
    LengthKey,
)
from sidecar.lengths.histogram import FEWEST_TENANTS, LONGEST, MOST_VOTERS, Survival
from tests.lengths import literal
from tests.lengths.literal import Sample

CHAT = LengthKey("/v1/chat/completions", "m", "plain")
TOOLS = CHAT._replace(bucket="tools")
OTHER = LengthKey("/v1/completions", "m", "plain")


def teach(
    estimator: LengthEstimator,
    tenant: str,
    *lengths: int,
    key: LengthKey = CHAT,
    times: int = ENOUGH,
    cut: bool = False,
) -> None:
    for _ in range(times):
        for length in lengths:
            estimator.learn(tenant, key, length, is_censored=cut)


def tokens(estimator: LengthEstimator, tenant: str, key: LengthKey = CHAT, generated: int = 0) -> int | None:
    found = estimator.estimate(tenant, key, 0.9, generated=generated)
    return None if found is None else found.tokens


# The chain


def test_nothing_is_known_before_the_first_samples() -> None:
    estimator = LengthEstimator()
    assert estimator.estimate("acme", CHAT, 0.9) is None
    teach(estimator, "acme", 100, times=ENOUGH - 1)
    assert estimator.estimate("acme", CHAT, 0.9) is None
    teach(estimator, "acme", 100, times=1)
    assert estimator.estimate("acme", CHAT, 0.9) == Estimate(111, EstimateSource.OWN, ENOUGH, 0.9)
    assert estimator.estimate("acme", TOOLS, 0.9) is None
    assert estimator.estimate("acme", OTHER, 0.9) is None


def test_with_three_tenants_a_newcomer_begins_at_their_median() -> None:
    estimator = LengthEstimator()
    for number, length in enumerate((50, 1000, 300), 1):
        assert estimator.estimate("new", CHAT, 0.9) is None
        teach(estimator, f"t{number}", length)
    assert estimator.estimate("new", CHAT, 0.9) == Estimate(304, EstimateSource.TENANTS, 3 * ENOUGH, 0.9)


def test_the_median_of_an_even_number_is_the_upper() -> None:
    estimator = LengthEstimator()
    for number, length in enumerate((160, 320, 640, 1280)):
        teach(estimator, f"t{number}", length)
    assert tokens(estimator, "new") == 640


def test_a_stream_that_outlives_all_it_is_known_by_holds_its_most() -> None:
    estimator = LengthEstimator()
    for number in range(FEWEST_TENANTS):
        teach(estimator, f"t{number}", 1600)
    teach(estimator, "acme", 100, 200)
    assert tokens(estimator, "acme", generated=112) == 207
    assert tokens(estimator, "acme", generated=208) is None, "its own samples say that it is unlike them all"


def test_a_tenant_whose_answers_are_all_cut_short_is_not_sized_by_others() -> None:
    estimator = LengthEstimator()
    for number in range(FEWEST_TENANTS):
        teach(estimator, f"t{number}", 100)
    assert tokens(estimator, "acme") == 112
    teach(estimator, "acme", 500, cut=True)
    assert tokens(estimator, "acme") is None


def test_a_tenant_whose_samples_do_not_say_votes_for_much() -> None:
    estimator = LengthEstimator()
    for number, length in enumerate((160, 320, 640)):
        teach(estimator, f"t{number}", length)
    assert tokens(estimator, "new", generated=160) == 640, "160 is beyond the first: 320, 640, unknown"
    assert tokens(estimator, "new", generated=320) is None


def test_a_median_is_asked_anew_for_every_bin() -> None:
    estimator = LengthEstimator()
    for tenant in ("a", "b", "c"):
        teach(estimator, tenant, *range(16, 1601, 16))
    for generated in range(0, 1590, 10):
        newcomer, own = tokens(estimator, "new", generated=generated), tokens(estimator, "a", generated=generated)
        assert newcomer is not None
        assert own is not None
        assert 0 <= newcomer - own < 16, "the median is that of upper edges"


KEYS = st.sampled_from([CHAT, TOOLS, OTHER])
EVENTS = st.lists(
    st.tuples(
        st.sampled_from("abcd"), KEYS, st.builds(Sample, st.integers(0, 400), st.sampled_from([False, False, True]))
    ),
    max_size=60,
)


def literal_estimate(
    events: list[tuple[str, LengthKey, Sample]], tenant: str, key: LengthKey, q: float, beyond: int, *, slack: float
) -> tuple[int, EstimateSource, int] | None:
    """The chain, from the list of all samples, where 3 samples are enough."""

    def known(one: str, where: LengthKey | str) -> list[Sample]:
        return literal.decayed(
            [sample for who, what, sample in events if who == one and where in (what, what.endpoint)]
        )

    def complete(samples: list[Sample]) -> int:
        return sum(not sample.is_censored for sample in samples)

    own = known(tenant, key)
    if complete(own) >= 3:
        found = literal.length(own, q, beyond, slack)
        return None if found is None else (found, EstimateSource.OWN, complete(own))
    if len(own) - complete(own) >= 3:
        return None
    for where in (key, key.endpoint):
        voters = [samples for one in "abcd" if complete(samples := known(one, where)) >= 3]
        if len(voters) >= FEWEST_TENANTS:
            votes = sorted(literal.quantile(samples, q, beyond, slack) or LONGEST + 1 for samples in voters)
            median = votes[len(votes) // 2]
            return None if median > LONGEST else (median, EstimateSource.TENANTS, sum(map(complete, voters)))
    return None


@pytest.fixture(scope="module")
def three_are_enough() -> Iterator[None]:
    with patch.object(module, "ENOUGH", 3):
        yield


@pytest.mark.usefixtures("three_are_enough")
@given(EVENTS, st.sampled_from("abcde"), KEYS, st.sampled_from([0.5, 0.9, 0.95]), st.integers(0, 400))
def test_estimates_are_those_of_the_definition(
    events: list[tuple[str, LengthKey, Sample]], tenant: str, key: LengthKey, q: float, beyond: int
) -> None:
    estimator = LengthEstimator()
    for who, what, sample in events:
        estimator.learn(who, what, sample.length, is_censored=sample.is_censored)
    found = estimator.estimate(tenant, key, q, generated=beyond)
    expected = [literal_estimate(events, tenant, key, q, beyond, slack=slack) for slack in (1e-7, 0.0, -1e-7)]
    assert (None if found is None else (found.tokens, found.source, found.samples)) in expected
    assert found is None or (found.tokens > beyond and found.quantile == q)


# One tenant cannot spoil another's estimate


@pytest.mark.parametrize("lengths", [(1,), (LONGEST,), (1, 100_000)], ids=["tiny", "huge", "both in turn"])
@pytest.mark.parametrize("cut", [False, True], ids=["complete", "cut short"])
def test_a_flood_of_one_tenant_moves_neither_another_nor_the_newcomers(lengths: tuple[int, ...], cut: bool) -> None:
    estimator = LengthEstimator()
    for number, length in enumerate((320, 320, 320, 480)):
        teach(estimator, f"t{number}", length)
    for _ in range(20):
        teach(estimator, "hostile", *lengths, cut=cut, times=200)
        assert [tokens(estimator, f"t{number}") for number in range(4)] == [319, 319, 319, 479]
        assert 320 <= (tokens(estimator, "new") or 0) <= 480
        assert 320 <= (tokens(estimator, "new", TOOLS) or 0) <= 480


def test_endless_models_and_buckets_evict_their_own_tenants_keys_alone() -> None:
    estimator = LengthEstimator()
    teach(estimator, "acme", 100)
    teach(estimator, "hostile", 100)
    for number in range(2000):
        estimator.learn("hostile", LengthKey(f"/{number}", f"m{number}", f"b{number}"), 10, is_censored=False)
    assert tokens(estimator, "acme") == 111
    assert tokens(estimator, "hostile") is None
    assert len(estimator._tenants["hostile"].keys) == KEYS_REMEMBERED
    assert len(estimator._tenants["hostile"].endpoints) == ENDPOINTS_REMEMBERED


def test_the_least_recently_learned_key_is_forgotten_and_asking_keeps_none() -> None:
    estimator = LengthEstimator()
    teach(estimator, "acme", 100, key=CHAT)
    teach(estimator, "acme", 100, key=TOOLS)
    for number in range(KEYS_REMEMBERED - 1):
        estimator.learn("acme", CHAT, 100, is_censored=False)
        assert tokens(estimator, "acme", TOOLS) == 111
        estimator.learn("acme", CHAT._replace(model=f"m{number}"), 100, is_censored=False)
    assert tokens(estimator, "acme", CHAT) == 111
    assert tokens(estimator, "acme", TOOLS) is None


def test_a_place_that_is_kept_while_its_key_is_forgotten_holds_nothing_and_learns_anew() -> None:
    estimator, place, other = LengthEstimator(), KnownLengths("acme", CHAT), KnownLengths("acme", CHAT)
    for _ in range(ENOUGH):
        estimator.learn_at(place, 100, False)
    assert (
        estimator.estimate_at(other, 0.9)
        == estimator.estimate_at(place, 0.9)
        == Estimate(111, EstimateSource.OWN, ENOUGH, 0.9)
    )
    for number in range(KEYS_REMEMBERED):
        estimator.learn("acme", CHAT._replace(model=f"m{number}"), 10, is_censored=False)
    assert estimator.estimate_at(place, 0.9) is estimator.estimate_at(other, 0.9) is None
    assert not place.learned._complete
    estimator.learn_at(place, 300, False)
    assert len(estimator._tenants["acme"].keys) == KEYS_REMEMBERED
    estimator.learn_at(other, 300, False)
    assert other.learned is place.learned is estimator._tenants["acme"].keys[CHAT]
    assert place.learned.samples == 2


def test_a_key_whose_endpoint_was_forgotten_keeps_its_samples_and_votes_on_the_endpoint_again() -> None:
    estimator, place = LengthEstimator(), KnownLengths("acme", CHAT)
    for _ in range(ENOUGH):
        estimator.learn_at(place, 100, False)
    for number in range(ENDPOINTS_REMEMBERED):
        estimator.learn("acme", CHAT._replace(endpoint=f"/{number}"), 10, is_censored=False)
    assert CHAT.endpoint not in estimator._tenants["acme"].endpoints
    assert CHAT.endpoint not in estimator._medians
    assert estimator.estimate_at(place, 0.9) == Estimate(111, EstimateSource.OWN, ENOUGH, 0.9)
    for _ in range(ENOUGH):
        estimator.learn_at(place, 100, False)
    assert place.learned.samples == 2 * ENOUGH
    assert estimator._tenants["acme"].endpoints[CHAT.endpoint].samples == ENOUGH
    assert len(estimator._medians[CHAT.endpoint]) == 1


@given(st.lists(st.sampled_from("mnopq"), max_size=40))
def test_the_keys_that_a_tenant_keeps_are_those_that_were_learned_latest(models: list[str]) -> None:
    estimator, places = (
        LengthEstimator(),
        {model: KnownLengths("acme", CHAT._replace(model=model)) for model in "mnopq"},
    )
    with patch.object(module, "KEYS_REMEMBERED", 3):
        for count, model in enumerate(models, 1):
            estimator.learn_at(places[model], 10, False)
            latest = [*dict.fromkeys(reversed(models[:count]))]
            assert {key.model for key in estimator._tenants["acme"].keys} == {*latest[:3]}


@given(st.lists(st.sampled_from("abcdefgh"), max_size=40))
def test_the_tenants_that_were_learned_from_latest_are_kept(tenants: list[str]) -> None:
    """Their order is not kept while there are few: half as many as are remembered are sure to be the latest."""
    estimator, places = LengthEstimator(), {tenant: KnownLengths(tenant, CHAT) for tenant in "abcdefgh"}
    with patch.object(module, "TENANTS_REMEMBERED", 6):
        for count, tenant in enumerate(tenants, 1):
            estimator.learn_at(places[tenant], 10, False)
            latest = [*dict.fromkeys(reversed(tenants[:count]))]
            assert {*latest[:3]} <= {*estimator._tenants}
            assert len(estimator._tenants) == min(6, len(latest))


def test_asking_takes_no_memory() -> None:
    estimator = LengthEstimator()
    teach(estimator, "acme", 100)
    for number in range(1000):
        assert tokens(estimator, f"t{number}", CHAT._replace(model=f"m{number}")) is None
    assert (len(estimator._tenants), len(estimator._medians)) == (1, 2)


def test_a_tenant_that_forgot_its_key_has_no_vote() -> None:
    estimator = LengthEstimator()
    for number in range(FEWEST_TENANTS):
        teach(estimator, f"t{number}", 320)
    assert tokens(estimator, "new") == 320
    for number in range(KEYS_REMEMBERED):
        estimator.learn("t0", OTHER._replace(model=f"m{number}"), 10, is_censored=False)
    assert CHAT not in estimator._tenants["t0"].keys
    assert len(estimator._medians[CHAT]) == FEWEST_TENANTS - 1


def test_only_so_many_tenants_are_remembered_and_those_forgotten_have_no_vote() -> None:
    estimator = LengthEstimator()
    for number in range(FEWEST_TENANTS):
        teach(estimator, f"t{number}", 320)
    for number in range(TENANTS_REMEMBERED):
        estimator.learn(f"n{number}", OTHER, 10, is_censored=False)
    assert len(estimator._tenants) == TENANTS_REMEMBERED
    assert not estimator._medians


@pytest.mark.parametrize(
    "key", [CHAT._replace(model="m" * 257), CHAT._replace(endpoint="/" * 257)], ids=["model", "endpoint"]
)
def test_a_name_that_nothing_has_is_not_learned(key: LengthKey) -> None:
    estimator = LengthEstimator()
    teach(estimator, "acme", 100, key=key)
    assert not estimator._tenants


@given(st.lists(st.tuples(st.integers(-5, 10**400), st.booleans(), st.none() | st.integers(-5, 10**400)), max_size=80))
def test_no_report_makes_the_estimate_fail(reports: list[tuple[int, bool, int | None]]) -> None:
    estimator = LengthEstimator()
    for length, is_censored, other in reports:
        estimator.learn("acme", CHAT, length, is_censored=is_censored, chunks=other)
    found = estimator.estimate("acme", CHAT, 0.95, generated=100)
    assert found is None or found.tokens > 100
    assert 1.0 <= estimator.tokens_per_chunk("acme", CHAT) <= 64.0


def test_only_so_many_tenants_vote() -> None:
    estimator = LengthEstimator()
    for number in range(MOST_VOTERS + 20):
        teach(estimator, f"t{number}", 320 if number < MOST_VOTERS else 640)
    assert estimator.estimate("new", CHAT, 0.9) == Estimate(320, EstimateSource.TENANTS, MOST_VOTERS * ENOUGH, 0.9)


# Tokens per chunk


def test_tokens_per_chunk_come_to_what_streams_show() -> None:
    estimator = LengthEstimator()
    assert estimator.tokens_per_chunk("acme", CHAT) == 1.0
    for _ in range(60):
        estimator.learn("acme", CHAT, 400, is_censored=False, chunks=100)
    assert estimator.tokens_per_chunk("acme", CHAT) == pytest.approx(4, abs=0.02)
    assert estimator.tokens_per_chunk("other", CHAT) == estimator.tokens_per_chunk("acme", TOOLS) == 1.0


# Cost


def test_tables_are_rebuilt_once_for_many_samples() -> None:
    built = 0

    class Counted(Survival):
        def __init__(self, complete: list[float], censored: list[float]) -> None:
            nonlocal built
            built += 1
            super().__init__(complete, censored)

    estimator = LengthEstimator()
    with patch.object(histogram_module, "Survival", Counted):
        for number in range(6400):
            estimator.learn("acme", CHAT, number % 500, is_censored=False)
            assert number < ENOUGH or estimator.estimate("acme", CHAT, 0.9)
    assert 6400 // 64 <= built <= 6400 // 64 + 200


def test_an_estimate_of_many_samples_costs_no_more_than_of_few() -> None:
    def cost_s(samples: int) -> float:
        estimator = LengthEstimator()
        for number in range(samples):
            estimator.learn("acme", CHAT, number * 7919 % 4000, is_censored=False)
        costs = []
        for _ in range(20):
            began = time.thread_time()
            for generated in range(0, 3000, 10):
                estimator.estimate("acme", CHAT, 0.9, generated=generated)
            costs.append(time.thread_time() - began)
        return min(costs)

    assert cost_s(50_000) < 3 * cost_s(ENOUGH)  # its tables have five times the edges


def test_what_a_tenant_takes_is_bounded() -> None:
    """The worst: every key's histogram is as wide as it gets, 14 KB."""
    estimator = LengthEstimator()
    for number in range(2 * KEYS_REMEMBERED):
        estimator.learn("hostile", CHAT._replace(model=f"m{number}"), LONGEST, is_censored=False)
    (known,) = estimator._tenants.values()
    sizes = [sys.getsizeof(learned._complete) for learned in known.keys.values()]
    assert 2 * sum(sizes) < 1_300_000


def test_what_was_learned_most_is_listed_with_its_quantile() -> None:
    estimator = LengthEstimator()
    for tenant, samples in (("few", 3), ("most", 60), ("more", 10)):
        for number in range(samples):
            estimator.learn(tenant, CHAT, 16 * (number + 1), is_censored=False, chunks=8 * (number + 1))
    estimator.learn("most", CHAT, 5000, is_censored=True)
    estimator.learn("cut short", CHAT, 5000, is_censored=True)
    first, second = estimator.most_learned(2, 0.9)
    assert (first.tenant, first.endpoint, first.model, first.bucket) == ("most", *CHAT)
    assert (first.samples, first.censored, first.quantile) == (60, 1, 0.9)
    assert first.estimate == estimator.estimate("most", CHAT, 0.9).tokens  # type: ignore[union-attr]
    assert first.median is not None
    assert 400 < first.median < 560 < first.estimate
    assert first.tokens_per_chunk == 2.0
    assert second.tenant == "more"
    last = estimator.most_learned(9, 0.9)[-1]
    assert (last.tenant, last.samples, last.median, last.estimate) == ("cut short", 0, None, None)
