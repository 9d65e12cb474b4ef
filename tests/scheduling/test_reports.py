"""What is said of a ticket that enters: whom of other tiers it passed, and by which rule; and what it found there."""

from __future__ import annotations

from typing import Any

from sidecar.scheduling.amounts import UNBOUNDED
from sidecar.scheduling.reports import Found, Rule
from tests.scheduling.player import SchedulerPlayer
from tests.support.each import each

Step = dict[str, Any]
GAIN = {"weight": 1, "tokens": 10, "cost": 1, "start_by": 100, "slack": 1}
FULL = {"do": "submit", "id": "full", "tier": "b", "tokens": 10}
END = {"do": "settle", "id": "full"}


def ask(name: str, tier: str, tokens: int, **words: Any) -> Step:
    return {"do": "submit", "id": name, "tier": tier, "tokens": tokens, **words}


def entered(tiers: list[Step], steps: list[Step], **words: Any) -> dict[str, dict[str, Rule]]:
    """Of each ticket that enters, in order, a second apart: the tiers that it passed."""
    tiers = [{"name": name, **tier} for name, tier in zip("abc", tiers, strict=False)]
    player, found = SchedulerPlayer({"tiers": tiers, "capacity": {"tokens": 10}, **words}), {}
    for second, step in enumerate(steps):
        player.do(step, second * 1_000_000)
        player.dispatch(second * 1_000_000)
        for grant in player.grants:
            found[grant.ticket.id] = {player.names[level]: rule for level, rule in grant.passed.items()}
    return found


@each(
    ("rule", "first", "words", "earlier", "later"),
    [
        (Rule.FIRST, {"always_first": True, "limit": 0.5}, {}, 8, 5),
        (Rule.RESERVE, {"reserve": 0.5}, {}, 8, 5),
        (Rule.TURN, {"reserve": 0.3}, {}, 8, 5),
        (Rule.LEVEL, {}, {}, 8, 5),
        (Rule.GAIN, {}, {"order": "gain"}, 8, 5),
    ],
)
def test_it_passes_a_tier_that_had_come_before_by(
    rule: Rule, first: Step, words: Step, earlier: int, later: int
) -> None:
    waits, passes = ask("waits", "b", earlier), ask("passes", "a", later, gain=GAIN)
    assert entered([first, {}], [FULL, waits, passes, END], **words)["passes"] == {"b": rule}


def test_it_passes_nobody_that_came_later_nor_its_own_tier() -> None:
    found = entered([{}, {}], [FULL, ask("older", "a", 3), ask("later", "b", 3), ask("own", "a", 3), END])
    assert found == {"full": {}, "older": {}, "own": {"b": Rule.LEVEL}, "later": {}}


def test_it_passes_one_beyond_its_limit_and_one_that_does_not_hold_its_place() -> None:
    at_limit = [ask("holds", "a", 5), ask("waits", "a", 5), ask("passes", "b", 5)]
    assert entered([{"limit": 0.5}, {}], at_limit)["passes"] == {"a": Rule.LIMIT}
    passed_over = [ask("top", "a", 5), ask("giant", "b", 6), ask("passes", "c", 5)]
    assert entered([{}, {}, {}], passed_over)["passes"] == {"b": Rule.PASSED_OVER}


ENGINES = [{"id": "e#1", "tokens": 9, "requests": 1, "prefill": 5}, {"id": "f#1", "tokens": 9, "prefill": 5}]
RUNS = ask("runs", "b", 2, prompt=2, hits=[("e#1", 2)])
LINED = ask("lined", "a", 3, prompt=3, hits=[("e#1", 3)])


def test_it_passes_one_that_waits_for_its_engine() -> None:
    steps = [RUNS, LINED, ask("passes", "b", 2, prompt=2)]
    assert entered([{}, {}], steps, engines=ENGINES) == {"runs": {}, "passes": {"a": Rule.CLAIM}}


def test_it_found_an_engine_as_it_was_before_it_entered_and_after_what_it_stood_in_line() -> None:
    player = SchedulerPlayer({"tiers": [{"name": "a"}, {"name": "b"}], "engines": ENGINES})
    found = []
    other = ask("other", "b", 4, prompt=4, hits=[("f#1", 4)])
    more = ask("more", "b", 4, prompt=1, hits=[("f#1", 4)])
    for second, step in enumerate([RUNS, LINED, other, more, {"do": "settle", "id": "runs"}]):
        player.do(step, second * 1_000_000)
        player.dispatch(second * 1_000_000)
        found += [(grant.ticket.id, grant.engine, grant.sent, grant.found) for grant in player.grants]
    assert found == [
        ("runs", "e#1", 1, Found(9, 1, 0, 0, 0, 0)),
        ("other", "f#1", 1, Found(9, UNBOUNDED, 0, 0, 0, 0)),
        ("more", "f#1", 1, Found(9, UNBOUNDED, 4, 1, 1, 0)),
        ("lined", "e#1", 1, Found(9, 1, 0, 0, 0, 3_000_000)),
    ]
