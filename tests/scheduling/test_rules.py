"""The core gives every answer of the literal reference: of its scenarios, and of random programs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.scheduling.time_alone import next_change
from tests.scheduling import reference
from tests.scheduling.player import SchedulerPlayer, first_difference, rules_of
from tests.scheduling.programs import programs, random_program, scenarios


def test_it_gives_the_answers_of_every_scenario() -> None:
    assert [found for scenario in scenarios() if (found := first_difference(scenario))] == []


@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_it_answers_random_programs_as_the_reference(seed: int, several: bool, by_gain: bool) -> None:
    assert first_difference(random_program(seed, several=several, by_gain=by_gain)) is None


def test_a_ticket_ages_by_the_figure_that_counts_now() -> None:
    def scenario(promote_after_s: int | None) -> dict[str, Any]:
        aging = None if promote_after_s is None else {"promote_after_s": promote_after_s, "ceiling": "a"}
        return {"tiers": [{"name": name} for name in "abc"], "capacity": {"tokens": 10}, "aging": aging}

    player, second = SchedulerPlayer(scenario(None)), 1_000_000
    steps = (("held", "a", 0), ("old", "c", 0), ("young", "b", 120))
    for name, tier, at in steps:
        player.do({"do": "submit", "id": name, "tier": tier, "tokens": 10}, at * second)
        player.dispatch(at * second)
    player.scheduler.change_rules(rules_of(scenario(100)))
    assert next_change(player.scheduler, 120 * second) == 200 * second
    player.do({"do": "settle", "id": "held"}, 150 * second)
    assert player.dispatch(150 * second) == [("old", "pool#1")]


def enters_for(pool: reference.Reference, chosen: list[str], now: int) -> bool:
    """Whether the one enters for which these were chosen, if they let go at once."""
    waiting = [r for r, _ in pool.in_order() if pool.tiers[r.tier]["preempt_after"] is not None]
    served = next(r for r in waiting if now - r.arrived >= pool.tiers[r.tier]["preempt_after"])
    for ticket in chosen:
        pool.do({"do": "requeue", "id": ticket}, now)
    pool.dispatch(now)
    return served.state == "running"


@pytest.mark.long
def test_nobody_gives_room_in_vain() -> None:
    found = []
    for seed in range(200):
        program = random_program(seed, several=True, by_gain=seed % 2 == 0)
        pool = reference.new(program)
        for step in program["steps"]:
            now = round(step["at"] * 1e6)
            pool.do(step, now)
            pool.dispatch(now)
            is_first = not any(r.chosen for r in pool.running())
            if (chosen := pool.preempt(now)) and is_first:
                found.append(enters_for(copy.deepcopy(pool), chosen, now))
    assert len(found) > 10
    assert all(found)


def test_the_programs_reach_each_word() -> None:
    steps = [step for program in programs(range(40)) for step in program["steps"]]
    assert {step["do"] for step in steps} == {
        *("submit", "cancel", "settle", "prefilled", "keep", "requeue", "hand_back", "resize", "charge", "cap"),
        *("engines", "wait", "guard"),
    }
    assert sum(bool(step["chosen"]) for step in steps) > 3
