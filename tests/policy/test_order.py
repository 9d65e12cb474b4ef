"""`order` and `fair`: what they become, and where they are refused."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from sidecar.policy.compiler import load
from sidecar.policy.model import Order
from sidecar.policy.warnings import warnings
from tests.policy.files import SMALL, mistakes, pool

TIERS = "{high: {reserve: 20%, lend: 50%, slo: {ttft: 1s, tpot: 50ms}}, normal: {}}"
GAIN = f"engine: vllm\ncapacity: {{tokens: 1000, requests: 10}}\norder: gain\nanonymous: normal\ntiers: {TIERS}\n"


def test_the_floor_is_a_part_of_the_reserve_and_the_headroom_is_of_all_of_it(tmp_path: Path) -> None:
    rules = load(pool(tmp_path, GAIN)).rules
    high = rules.tiers[0]
    assert rules.is_by_gain
    assert (high.reserve_tokens, high.reserve_requests, high.headroom_tokens) == (50, 1, 100)
    other = load(pool(tmp_path, f"{GAIN}fair: 100%\n"))
    assert other.rules.tiers[0].reserve_tokens == 200
    assert other.rules_of(2000, None).tiers[0].reserve_tokens == 400


def test_by_level_the_whole_reserve_is_the_floor(tmp_path: Path) -> None:
    policy = load(pool(tmp_path, GAIN.replace("order: gain", "order: level\nfair: 10%")))
    assert policy.order is Order.LEVEL
    assert policy.rules.tiers[0].reserve_tokens == 200
    assert policy.ordered_by(Order.GAIN).rules.tiers[0].reserve_tokens == 20
    assert policy.ordered_by(Order.GAIN).ordered_by(Order.LEVEL) == policy
    assert load(pool(tmp_path, SMALL)).fair == Fraction(1, 4)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("store: redis://a:6379/0\n", "a pool in a store orders by level only; remove `order: gain`, or `store`"),
        (
            "engines: {static: [{name: a, url: 'http://a:8000', capacity: {tokens: 10k, requests: 8}}]}\n",
            "a pool of several engines orders by level only; remove `order: gain`, or `engines`",
        ),
    ],
)
def test_what_it_does_not_go_with_is_said(tmp_path: Path, more: str, said: str) -> None:
    text = GAIN if "store" in more else GAIN.replace("capacity: {tokens: 1000, requests: 10}\n", "")
    assert mistakes(pool(tmp_path, text + more)) == [f"policy.yaml:{3 if 'store' in more else 2}: order: {said}"]


def test_another_word_is_refused(tmp_path: Path) -> None:
    (said,) = mistakes(pool(tmp_path, GAIN.replace("order: gain", "order: value")))
    assert "level" in said
    assert "gain" in said


def test_without_an_objective_it_is_warned_of(tmp_path: Path) -> None:
    def said(text: str) -> list[str]:
        return [warning.message for warning in warnings(load(pool(tmp_path, text))) if "`slo`" in warning.message]

    assert said(GAIN) == []
    (warning,) = said(GAIN.replace(", tpot: 50ms", ""))
    assert warning.startswith("no tier has an `slo` with `ttft` and `tpot`, so no request earns anything")
