"""The virtual engine, the literal rules, and the product's own parts in virtual time, with 300 requests of a trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.reservations import literal, loads
from benchmarks.reservations.__main__ import MODES, Case, case, missed, recovery, table
from benchmarks.reservations.engine import BLOCK, Hardware, RooflineEngine
from benchmarks.reservations.runs import play
from benchmarks.reservations.traces import CODE, CONV, MOONCAKE, Asked, asked, max_tokens_of
from sidecar.lengths.overlap import peak
from sidecar.tools.step_model.job import Job

pytestmark = pytest.mark.long

FOLDER = Path(__file__).parent / "traces"
SMALL = Hardware(kv_tokens=20_000)


@pytest.fixture(scope="module")
def requests() -> list[Asked]:
    return asked(CONV.lengths(FOLDER), 0)


def test_max_tokens_is_the_power_of_two_that_cuts_almost_no_output() -> None:
    assert max_tokens_of(CONV.lengths(FOLDER)) == 1024
    assert max_tokens_of([(1, output) for output in range(1, 2001)] * 5) == 2048


def test_a_seed_turns_the_trace_and_keeps_its_order(requests: list[Asked]) -> None:
    turned = asked(CONV.lengths(FOLDER), 3)
    start = next(at for at in range(len(requests)) if requests[at:] + requests[:at] == turned)
    assert start > 0


@given(
    st.lists(st.tuples(st.integers(1, 150), st.integers(1, 80)), min_size=1, max_size=30),
    st.integers(20, 60),
    st.booleans(),
)
def test_the_engine_generates_every_token_once_and_frees_every_block(
    lengths: list[tuple[int, int]], blocks: int, prefills: bool
) -> None:
    engine = RooflineEngine(Hardware(kv_tokens=blocks * BLOCK), prefills=prefills)
    sequences = [Job(*one) for one in lengths]
    for sequence in sequences:
        engine.add(sequence)
    finished: list[Job] = []
    while len(finished) < len(sequences):
        step = engine.step()
        finished += step.finished
        assert engine.cache.held_tokens <= blocks * BLOCK
        assert 0 <= engine.used_tokens <= engine.cache.held_tokens + engine.running
        assert engine.steps < 100_000
    assert sorted(map(id, finished)) == sorted(map(id, sequences))
    assert [engine.length(sequence) for sequence in sequences] == [output for _, output in lengths]
    assert engine.generated == sum(output for _, output in lengths)
    assert engine.used_tokens == 0
    assert engine.preemptions == sum(sequence.preemptions for sequence in sequences)


def test_a_full_cache_preempts_the_newest_which_goes_on_where_it_was() -> None:
    engine = RooflineEngine(Hardware(kv_tokens=10 * BLOCK))
    older, newer = Job(4 * BLOCK, 60), Job(4 * BLOCK, 60)
    engine.add(older)
    engine.add(newer)
    while not engine.preemptions:
        engine.step()
    assert (older.preemptions, newer.preemptions) == (0, 1)
    assert newer.emitted == BLOCK + 1  # each filled its last free block, and only one of the next was left
    while engine.step().finished != [newer]:
        pass
    assert engine.generated == 120


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), max_size=12))
def test_the_products_peak_is_the_literal_one(pairs: list[tuple[int, int]]) -> None:
    assert peak(pairs) == literal.peak(pairs)


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
