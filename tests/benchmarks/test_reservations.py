"""The virtual engine, the literal rules, and the product's own parts in virtual time, with 300 requests of a trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.reservations import literal, loads
from benchmarks.reservations.__main__ import MODES, Case, case, missed, recovery, table
from benchmarks.reservations.engine import Hardware
from benchmarks.reservations.runs import play
from benchmarks.reservations.traces import CODE, CONV, MOONCAKE, Asked, asked
from sidecar.lengths.trust import peak_tokens

pytestmark = pytest.mark.long

FOLDER = Path(__file__).parent / "traces"
SMALL = Hardware(kv_tokens=20_000)


@pytest.fixture(scope="module")
def requests() -> list[Asked]:
    return asked(CONV.lengths(FOLDER), 0)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), max_size=12))
def test_the_products_peak_is_the_literal_one(pairs: list[tuple[int, int]]) -> None:
    assert peak_tokens((used, remaining, 1) for used, remaining in pairs) == literal.peak(pairs)


@pytest.mark.parametrize(("learn", "q"), [("off", None), ("cautious", 0.95), ("full", 0.9)])
def test_the_product_uses_as_much_of_the_cache_as_the_literal_rules(
    requests: list[Asked], learn: str, q: float | None
) -> None:
    product = play(requests, learn, SMALL).used
    expected = literal.used_share(requests[:150], q, SMALL, has_overlap=learn == "full")
    assert product == pytest.approx(expected, abs=0.06)


def test_each_mode_uses_more_than_the_one_before_and_a_run_repeats_exactly(requests: list[Asked]) -> None:
    runs = {learn: play(requests * 3, learn, SMALL) for learn in MODES}
    assert runs["off"].used < runs["cautious"].used < runs["full"].used
    assert runs["off"].end.preemptions == 0
    assert play(requests * 3, "full", SMALL) == runs["full"]


def test_two_replicas_share_a_pool_and_both_learn(requests: list[Asked]) -> None:
    one, two = (play(requests * 3, "cautious", SMALL, replicas=count) for count in (1, 2))
    assert two.used == pytest.approx(one.used, abs=0.08)


def test_where_lengths_jump_the_engine_preempts_and_the_pool_recovers(requests: list[Asked]) -> None:
    found = recovery("full", play(loads.jump(requests * 3), "full", SMALL))
    assert found.used_before > 0.5
    assert found.used_after > 0.5
    assert found.last_s is None or found.preemptions > 0


def test_a_missed_target_is_said(requests: list[Asked]) -> None:
    good = Case("", "", 0.99, 0.99, 0.99, 0.0, 0.0, 1.0, 1.0)
    cases = [
        replace(good, load=trace.name, learn=learn, tokens_per_s=1.0 if learn == "off" else 1.5)
        for trace in (CONV, CODE, MOONCAKE)
        for learn in MODES
    ]
    assert missed(cases) == []
    assert CONV.name in table(cases)
    worse = [*cases[:2], replace(cases[2], used=0.87, preempted_per_1000=2.5, tokens_per_s=1.39), *cases[3:]]
    assert len(missed(worse)) == 3
    real = [case(CONV.name, learn, [play(requests, learn, SMALL)]) for learn in MODES[:1]]
    assert missed(real) == []
