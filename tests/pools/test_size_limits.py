"""The size limit of a tier in the words of its 400: the figure, what sets it, and what to do."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from sidecar.policy.compiler import load
from sidecar.policy.rules import PoolRules, Shares, pool_rules
from sidecar.policy.size_limits import SizeLimits
from tests.policy.files import pool
from tests.pools.harness import ask, policy_of

FIRST = Shares("high", reserve=Fraction(1, 5), lend=Fraction(1, 2))


def _rules(low: Shares) -> PoolRules:
    return pool_rules(tokens=100, requests=100, tiers=(FIRST, low))


REASONS = [
    (Shares("low", limit=Fraction(1, 2)), 50, "the tier's limit"),
    (Shares("low"), 90, "the pool less what more important tiers keep free"),
    (Shares("low", reserve=Fraction(1, 10)), 80, "the pool less what the other tiers reserve"),
    (Shares("low", reserve=Fraction(1, 10), limit=Fraction(4, 5)), 80, "the tier's limit"),
]


@pytest.mark.parametrize(("low", "allowed", "reason"), REASONS, ids=[f"{most}: {why}" for _, most, why in REASONS])
def test_the_refusal_names_the_size_limit_and_what_sets_it(low: Shares, allowed: int, reason: str) -> None:
    sizes = SizeLimits(policy_of(_rules(low)))
    assert sizes.too_large(ask(tier=1, tokens=allowed, requests=allowed)) is None
    assert str(sizes.too_large(ask(tier=1, tokens=allowed + 1))) == (
        f"this request would hold {allowed + 1} tokens (prompt and maximum output); "
        f"tier low allows {allowed}, {reason}; shorten the prompt or ask for less output"
    )
    assert str(sizes.too_large(ask(tier=1, requests=allowed + 1))) == (
        f"this request would start {allowed + 1} sequences; "
        f"tier low allows {allowed}, {reason}; ask for fewer (n or best_of)"
    )


def test_a_tier_that_may_hold_everything_says_so() -> None:
    assert "tier high allows 100, the whole pool;" in str(
        SizeLimits(policy_of(_rules(Shares("low")))).too_large(ask(tokens=101))
    )


def test_the_least_of_what_bounds_a_request_is_named() -> None:
    sizes = SizeLimits(policy_of(_rules(Shares("low", reserve=Fraction(1, 10))), max_request_tokens=30))
    assert "tier low allows 30, its max_request_tokens;" in str(sizes.too_large(ask(tier=1, tokens=31)))


def test_a_request_must_fit_one_engine(tmp_path: Path) -> None:
    text = """\
engine: vllm
tiers: {normal: {}, batch: {limit: 50%}}
engines:
  static:
    - {name: a, url: http://a, capacity: {tokens: 100, requests: 10}}
    - {name: b, url: http://b, capacity: {tokens: 40, requests: 12}}
"""
    sizes = SizeLimits(load(pool(tmp_path, text)))
    assert (sizes.limits(0), sizes.limits(1)) == ((100, 12), (70, 11))
    assert sizes.too_large(ask(tokens=100)) is None
    said = "tier normal allows 100, the largest engine; shorten the prompt or ask for less output"
    assert said in str(sizes.too_large(ask(tokens=101)))
    assert "allows 12, the largest engine; ask for fewer" in str(sizes.too_large(ask(requests=13)))
    assert "allows 70, the tier's limit;" in str(sizes.too_large(ask(tier=1, tokens=71)))
    # What waits already is not refused while its engine is away.
    assert sizes.outgrown(ask(tokens=101)) is None


def test_with_one_engine_the_engine_is_the_pool(tmp_path: Path) -> None:
    text = "engine: vllm\ntiers: {normal: {}}\nengines: {static: [{name: a, url: http://a, capacity: {tokens: 9}}]}\n"
    said = str(SizeLimits(load(pool(tmp_path, text))).too_large(ask(tokens=10)))
    assert "allows 9, the whole pool" in said


def test_a_reserve_that_is_more_than_the_others_leave() -> None:
    """Two of three requests are reserved by either tier, once each is rounded up."""
    rules = pool_rules(
        tokens=None,
        requests=3,
        tiers=(Shares("high", reserve=Fraction(1, 2)), Shares("low", reserve=Fraction(1, 2))),
    )
    said = str(SizeLimits(policy_of(rules)).too_large(ask(tier=1, requests=3)))
    assert "tier low allows 2, the tier's reserve; ask for fewer" in said


def test_a_request_that_waits_is_judged_by_what_the_pool_could_hold() -> None:
    sizes = SizeLimits(policy_of(_rules(Shares("low", reserve=Fraction(1, 10)))))
    assert sizes.outgrown(ask(tier=1, tokens=90)) is None
    assert "allows 90, the pool less what more important tiers keep free" in str(sizes.outgrown(ask(tier=1, tokens=91)))
