"""`order` and `fair`: what they become, and where they are refused."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from sidecar.policy.choices import Order
from sidecar.policy.compiler import load
from sidecar.policy.warnings import warnings
from tests.policy.files import SMALL, mistakes, pool
from tests.support.in_process import output

TIERS = "{high: {reserve: 20%, lend: 50%, slo: {ttft: 1s, tpot: 50ms}}, normal: {}}"
GAIN = f"engine: vllm\ncapacity: {{tokens: 1000, requests: 10}}\norder: gain\nanonymous: normal\ntiers: {TIERS}\n"


def test_the_floor_is_a_part_of_the_reserve_and_at_least_the_headroom_of_all_of_it(tmp_path: Path) -> None:
    rules = load(pool(tmp_path, GAIN)).rules
    high = rules.tiers[0]
    assert rules.is_by_gain
    assert (high.reserve[:2], high.headroom[0]) == ((100, 1), 100)
    other = load(pool(tmp_path, f"{GAIN}fair: 100%\n"))
    assert other.rules.tiers[0].reserve[0] == 200
    assert other.rules_for(2000, None).tiers[0].reserve[0] == 400


def test_by_level_the_whole_reserve_is_the_floor(tmp_path: Path) -> None:
    policy = load(pool(tmp_path, GAIN.replace("order: gain", "order: level\nfair: 60%")))
    assert policy.order is Order.LEVEL
    assert policy.rules.tiers[0].reserve[0] == 200
    assert policy.ordered_by(Order.GAIN).rules.tiers[0].reserve[0] == 120
    assert policy.ordered_by(Order.GAIN).ordered_by(Order.LEVEL) == policy
    assert load(pool(tmp_path, SMALL)).fair == Fraction(1, 4)


def test_with_several_engines_the_floor_is_counted_in_prompts_too(tmp_path: Path) -> None:
    text = GAIN.replace("capacity: {tokens: 1000, requests: 10}\n", "")
    engines = "engines: {static: [{name: a, url: 'http://a:8000', capacity: {tokens: 10k, requests: 8}}]}\n"
    rules = load(pool(tmp_path, text + engines)).rules_for(1000, 10, 400)
    high = rules.tiers[0]
    assert high.reserve == (100, 1, 40)
    assert (high.headroom[0], high.headroom[2]) == (100, 40)


def test_it_goes_with_a_store_and_with_engines_there(tmp_path: Path) -> None:
    assert load(pool(tmp_path, f"{GAIN}store: redis://a:6379/0\n")).order is Order.GAIN
    text = GAIN.replace("capacity: {tokens: 1000, requests: 10}\n", "")
    text += "engines: {static: [{name: a, url: 'http://a:8000', capacity: {tokens: 10k, requests: 8}}]}\n"
    assert load(pool(tmp_path, f"{text}store: redis://a:6379/0\n")).order is Order.GAIN


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


def test_check_shows_the_floor_and_not_the_reserve(tmp_path: Path) -> None:
    folder = pool(tmp_path, GAIN)
    said = output("check", folder)
    assert "in tokens  floor  kept idle" in said
    assert "floor: what a tier always gets back in fair order, 25% of its reserve (fair)" in said
