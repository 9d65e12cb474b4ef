"""One replica over a ledger decides as the literal reference, whatever it shows of what waits."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_replica import OneReplica

sys.path.insert(0, str(Path(__file__).parent.parent / "scheduling"))

import reference
from golden_programs import read
from record_golden import STEPS, Author, random_header

BEAT_US = 1_000_000


def first_difference(program: dict[str, Any], most_bids: int) -> str | None:
    """The first step whose answer is not the reference's. Both decide every second between two steps, too."""
    judge, one = reference.new(program), OneReplica(program, most_bids)
    judge.divide = lambda tokens, weight: tokens / weight
    last = 0
    for number, step in enumerate(program["steps"], 1):
        at = round(step["at"] * 1e6)
        for now in [*range(last + BEAT_US, at, BEAT_US), at]:
            if now == at and not _play(judge, one, step, now):
                continue
            expected, found = (judge.dispatch(now), judge.preempt(now)), one.pump(now)
            if (found[0], sorted(found[1])) != (expected[0], sorted(expected[1])):
                return f"{program['name']}, step {number} {step} at {now}: {found}, not {expected}"
        last = at
    return None


def _play(judge: reference.Reference, one: OneReplica, step: dict[str, Any], now: int) -> bool:
    """One step of both; False where a replica has none: it cancels what stands in line, and charges with growth."""
    what, found = step["do"], judge.find(step.get("id", ""), "line", "running")
    if what == "charge" or (found is not None and found.state == "line" and what in ("settle", "resize")):
        return False
    growth = step["tokens"] - found.tokens if what == "resize" and found is not None else 0
    judge.do(step, now)
    if growth > 0 and found is not None:
        tier = judge.tiers[found.tier]["name"]
        charge = {"do": "charge", "tier": tier, "tenant": found.tenant, "weight": found.weight, "tokens": growth}
        judge.do(charge, now)
    one.do(step, now)
    return True


def test_it_gives_the_answers_of_golden_programs() -> None:
    assert [found for program in read()[::15] if (found := first_difference(program, 32))] == []


@pytest.mark.long
def test_it_gives_the_answers_of_all_golden_programs() -> None:
    assert [found for program in read() if (found := first_difference(program, 32))] == []


@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_it_answers_random_programs_as_the_reference(seed: int, several: bool, by_gain: bool) -> None:
    luck = random.Random(seed)
    header = random_header(luck, f"seed {seed}", several=several, by_gain=by_gain)
    assert first_difference(Author(luck, header).write(STEPS), 32) is None
