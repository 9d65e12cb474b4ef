"""The peak against its definition, and the overlap that one engine is counted with."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sidecar.lengths.trust import STALE_SHARE, WHOLE, Overlap, peak_tokens
from tests.lengths import literal
from tests.support.examples import examples

PAIRS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), max_size=12)


def peak(pairs: list[tuple[int, int]]) -> int:
    """Peak of leases of one sequence each."""
    return peak_tokens((used, remaining, 1) for used, remaining in pairs)


@given(PAIRS)
def test_the_peak_is_that_of_generating_token_by_token(pairs: list[tuple[int, int]]) -> None:
    assert peak(pairs) == literal.peak(pairs)


@given(PAIRS, PAIRS)
def test_the_peak_of_two_parts_is_not_above_the_sum_of_their_peaks(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    """Replicas need not tell each other their overlap: counted apart, they count no less."""
    assert max(peak(one), peak(other)) <= peak(one + other) <= peak(one) + peak(other)


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200), st.integers(1, 5)), max_size=8))
def test_several_sequences_of_a_lease_are_as_many_that_run_apart(running: list[tuple[int, int, int]]) -> None:
    apart = [(used if number == 0 else 0, remaining) for used, remaining, count in running for number in range(count)]
    assert peak_tokens(running) == peak(apart)


def test_what_ends_at_once_overlaps_not_at_all() -> None:
    overlap = Overlap()
    assert overlap.ratio == WHOLE
    for number in range(100):
        overlap.put(number, 1000, 500)
    assert overlap.ratio == WHOLE
    assert overlap.counted(1500) == 1500


def test_ends_spread_evenly_need_half_of_what_is_to_come() -> None:
    """Sum 100 * 1000 + 5050 * 10 to come; at its peak half of the requests have ended."""
    pairs = [(0, 10 * number) for number in range(1, 101)]
    overlap = Overlap()
    for number, (used, remaining) in enumerate(pairs):
        overlap.put(number, used, remaining)
    assert 0.5 <= overlap.ratio / WHOLE < 0.51


class Engine(RuleBasedStateMachine):
    """Leases come, grow, shrink and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.overlap = Overlap()
        self.running: dict[int, tuple[int, int, int]] = {}

    @rule(
        lease=st.integers(0, 20),
        used=st.one_of(st.integers(0, 100), st.integers(0, 2**40)),
        remaining=st.one_of(st.integers(0, 100), st.integers(0, 2**40)),
        sequences=st.integers(1, 4),
    )
    def put(self, lease: int, used: int, remaining: int, sequences: int) -> None:
        self.running[lease] = (used, remaining, sequences)
        self.overlap.put(lease, used, remaining, sequences)

    @rule(lease=st.integers(0, 20))
    def remove(self, lease: int) -> None:
        self.running.pop(lease, None)
        self.overlap.remove(lease)

    @invariant()
    def counted_is_no_less_than_the_peak(self) -> None:
        """With so few leases, every change counts at once."""
        total = sum(used + remaining * sequences for used, remaining, sequences in self.running.values())
        ratio = self.overlap.ratio
        assert 1 <= ratio <= WHOLE
        if total < STALE_SHARE:
            return
        needed = peak_tokens(self.running.values())
        assert total * ratio // WHOLE >= needed - total // STALE_SHARE
        if len(self.running) < STALE_SHARE and self.running:
            assert ratio == max(1, min(WHOLE, -(-needed * WHOLE // total)))

    @invariant()
    def counting_rounds_up_and_never_to_nothing(self) -> None:
        for tokens in (0, 1, 2, 1000, 2**40):
            counted = self.overlap.counted(tokens)
            assert 1 <= counted <= max(1, tokens)
            assert counted * WHOLE >= tokens * self.overlap.ratio or tokens == 0


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=examples(50))


def test_with_many_leases_the_counted_tokens_stay_near_the_peak() -> None:
    """Between two computations a 16th may be new: what is counted falls short by no more than that share, ever."""
    rng, overlap, running, worst = random.Random(3), Overlap(), {}, 1.0
    for step in range(5000):
        lease = step if rng.random() < 0.3 or not running else rng.choice(list(running))
        if lease in running and rng.random() < 0.3:
            del running[lease]
            overlap.remove(lease)
        else:
            running[lease] = (rng.randrange(2000), rng.randrange(2000), 1)
            overlap.put(lease, *running[lease])
        if len(running) > 100:
            del running[first := next(iter(running))]
            overlap.remove(first)
        counted = sum(overlap.counted(used + remaining) for used, remaining, _ in running.values())
        worst = min(worst, counted / max(1, peak_tokens(running.values())))
    assert worst > 1 - 1 / STALE_SHARE


def test_the_ratio_is_not_computed_at_every_change() -> None:
    overlap, computed = Overlap(), 0
    for number in range(1600):
        overlap.put(number, 100, number)
    assert overlap.ratio
    recompute = overlap._recompute

    def counting() -> None:
        nonlocal computed
        computed += 1
        recompute()

    overlap._recompute = counting  # type: ignore[method-assign]
    for number in range(1600):
        overlap.put(number, 164, max(0, number - 64))
        assert overlap.ratio
    assert 10 <= computed <= 16
