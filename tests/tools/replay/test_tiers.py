"""Which tier a request of a trace has: exact proportions, one tier a conversation, and what rows say themselves."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.policy.compiler import load, shipped_policies
from sidecar.tools.replay.plan import BadTier, assign, ladder
from sidecar.tools.replay.trace import TraceRow

names = st.sampled_from(["high", "normal", "batch"])
mixes = st.dictionaries(names, st.floats(0.1, 100), min_size=1)


def plain(count: int) -> list[TraceRow]:
    return [TraceRow(line=number + 1, at_s=0.0, input_tokens=1) for number in range(count)]


@given(st.integers(0, 200), mixes, st.integers())
def test_the_proportions_are_as_exact_as_whole_numbers_can_be(count: int, mix: Mapping[str, float], seed: int) -> None:
    rows = plain(count)
    found = Counter(assign(rows, ladder(None, mix, rows), mix, random.Random(seed)))
    assert sum(found.values()) == count
    for name, weight in mix.items():
        assert abs(found[name] - count * weight / sum(mix.values())) < 1


def test_the_same_seed_deals_the_same_and_another_one_another() -> None:
    rows = plain(50)
    tiers = ladder(None, None, rows)
    dealt = [assign(rows, tiers, None, random.Random(seed)) for seed in (1, 1, 2)]
    assert tiers == ("high", "normal", "batch")
    assert dealt[0] == dealt[1] != dealt[2]
    assert list(dealt[0]) != sorted(dealt[0]), "it is not shuffled"


def test_all_turns_of_a_conversation_have_the_tier_of_its_first() -> None:
    rows = [TraceRow(line=number + 1, at_s=0.0, input_tokens=1, session=f"s{number % 9}") for number in range(90)]
    found = assign(rows, ("high", "batch"), {"high": 1, "batch": 2}, random.Random(1))
    by_session = {row.session: tier for row, tier in zip(rows, found, strict=True)}
    assert [by_session[row.session] for row in rows] == list(found)
    assert Counter(by_session.values()) == {"high": 3, "batch": 6}


def test_what_a_row_says_goes_before_the_mix() -> None:
    rows = [
        TraceRow(line=1, input_tokens=1, priority="batch"),
        TraceRow(line=2, input_tokens=1, priority="high"),
        *plain(4)[2:],
    ]
    found = assign(rows, ("high", "batch"), {"high": 1}, random.Random(1))
    assert list(found) == ["batch", "high", "high", "high"]


def test_a_policy_s_ladder_is_the_ladder_and_numbers_are_mapped_to_it_as_at_the_sidecar() -> None:
    policy = load(shipped_policies())
    values = [1, 0.75, 0.5, 0.3, 0, 0.0]
    rows = [TraceRow(line=number, input_tokens=1, priority=value) for number, value in enumerate(values)]
    tiers = ladder(policy, None, rows)
    assert tiers == ("critical", "high", "normal", "low", "batch")
    expected = ["critical", "high", "normal", "low", "batch", "batch"]
    assert list(assign(rows, tiers, None, random.Random(1))) == expected


def test_without_a_policy_the_ladder_is_what_is_in_use_in_the_usual_order() -> None:
    named = [TraceRow(line=1, input_tokens=1, priority="batch"), TraceRow(line=2, input_tokens=1, priority="critical")]
    assert ladder(None, None, named) == ("critical", "batch")
    assert ladder(None, {"gold": 1, "low": 1, "tin": 1, "high": 1}, plain(1)) == ("high", "low", "gold", "tin")


@pytest.mark.parametrize("priority", ["gold", 2, -1, float("nan")])
def test_a_tier_that_is_none_is_said_with_its_line_and_what_would_be_right(priority: str | float) -> None:
    rows = [*plain(2), TraceRow(line=17, input_tokens=1, priority=priority)]
    with pytest.raises(BadTier, match=r"line 17: .* is no tier; write one of high, normal, batch, or a number"):
        assign(rows, ("high", "normal", "batch"), None, random.Random(1))


def test_a_mix_with_a_tier_that_the_policy_does_not_have_is_said_so() -> None:
    with pytest.raises(BadTier, match="--mix: 'gold' is no tier of the policy, which has critical, high"):
        ladder(load(shipped_policies()), {"gold": 1}, [])
