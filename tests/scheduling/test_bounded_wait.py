"""The page's bounded wait: how long the front of a tier with a reserve waits until it enters an engine.

On one engine that bounds no prompts the bounds are promised: D while it is inside, 2 D for a small one, (k + 1) D for a
larger one of a tier that owes nothing, k tiers with a reserve; and how long a tier owes. On others they were measured
in the soak's floods, without the waits for those that are before it (`long_waits`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.scheduling.long_waits import Flood
from tests.scheduling.wrong_rules import PATCHES
from tests.support.each import each

PROMISED = {"inside": 1.0, "small": 2.0, "large": 1.0, "owes": 1.0}
MEASURED = {"inside": 2.0, "small": 3.0, "large": 5.0, "line": 2.0}


def worst(seeds: Iterable[int], engines: int, **options: Any) -> dict[str, float]:
    """Of floods that end, with nobody left; on one engine a larger one's wait is a part of (k + 1) D."""
    found: dict[str, float] = {}
    for seed in seeds:
        flood = Flood(seed, engines, **options).play()
        assert flood.left == 0, seed
        floors = 1 if engines else 1 + sum(tier.reserve > 0 for tier in flood.scheduler.rules.tiers)
        for what, waited in flood.worst.items():
            found[what] = max(found.get(what, 0), waited / (floors if what == "large" else 1))
    return found


def beyond(found: dict[str, float], bounds: dict[str, float]) -> dict[str, float]:
    return {what: found[what] for what, bound in bounds.items() if found[what] > bound}


@each("over", (False, True))
def test_on_one_engine_every_bound_holds_and_is_reached(over: bool) -> None:
    found = worst(range(40), 0, over=over)
    assert beyond(found, PROMISED) == {}
    assert found["inside"] > 0.6, "or the floods prove nothing"
    assert found["small"] > 1
    assert not over or (found["large"] > 0.6 and found["owes"] > 0.9)


@each("engines", (1, 2, 4, 8))
def test_on_engines_with_prompts_nobody_waits_longer_than_was_measured(engines: int) -> None:
    assert beyond(worst(range(6), engines), MEASURED) == {}


def test_by_gain_a_floor_is_as_good() -> None:
    assert beyond(worst((2, 3, 5), 0, by_gain=True), PROMISED) == {}
    assert beyond(worst((0, 2), 2, by_gain=True), MEASURED) == {}


@pytest.mark.soak
@each("by_gain", (False, True))
def test_no_flood_keeps_anyone_out_for_long(by_gain: bool) -> None:
    assert beyond(worst(range(100, 400), 0, by_gain=by_gain), PROMISED) == {}
    for engines in (1, 2, 4, 8):
        assert beyond(worst(range(100, 250), engines, by_gain=by_gain), MEASURED) == {}
    long = 10 if by_gain else 60  # by gain one flood of 60 takes more than ten minutes
    assert beyond(worst(range(3), 0, by_gain=by_gain, scale=long), PROMISED) == {}


@each(
    ("name", "engines", "broken"),
    (
        ("has no floors", 0, {"small", "large"}),
        ("small ones slip past", 0, {"large"}),
        ("first come, first served", 0, {"inside", "small", "large"}),
        ("turns by level", 0, {"large"}),
        ("first come, first served", 4, {"inside", "small", "large", "line"}),
        ("lets others into an engine that is closed", 8, {"large"}),
    ),
)
def test_a_wrong_rule_breaks_the_bound(
    name: str, engines: int, broken: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*PATCHES[name])
    bounds = MEASURED if engines else PROMISED
    found: set[str] = set()
    for seed in range(60):
        found |= set(beyond(worst([seed], engines), bounds))
        if broken <= found:
            return
    assert broken <= found
