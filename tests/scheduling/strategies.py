"""Random pools small enough that everything collides: few tokens, short promotions, equal times."""

from __future__ import annotations

import random
from fractions import Fraction

from hypothesis import strategies as st
from oracle import Policy

from sidecar.policy.rules import Shares

WEIGHTS = {"a": 1, "b": 2, "c": 4, "d": 3}
FRACTIONS = [Fraction(0), Fraction(1, 4), Fraction(1, 3), Fraction(1, 2), Fraction(9, 10), Fraction(1)]


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    count = draw(st.integers(1, 5))
    cuts = draw(st.lists(st.integers(0, 100), min_size=count, max_size=count))
    whole = max(100, sum(cuts))
    always_first = draw(st.booleans())
    limits = [draw(st.sampled_from([Fraction(1), Fraction(1), Fraction(1, 2), Fraction(4, 5)])) for _ in cuts]
    if always_first:
        limits[0] = Fraction(1, 2)
    return Policy(
        capacity=draw(
            st.sampled_from([(40, None), (40, 4), (100, 7), (13, 3), (None, 4)]),
        ),
        tiers=tuple(
            Shares(
                f"t{level}",
                reserve=Fraction(cut, whole),
                lend=draw(st.sampled_from(FRACTIONS)),
                limit=limits[level],
                always_first=always_first and level == 0,
                preemptible=draw(st.sampled_from([True, True, False])),
                preempt_after_us=draw(st.sampled_from([0, 0, 5, None])),
            )
            for level, cut in enumerate(cuts)
        ),
        promote_after_us=draw(st.sampled_from([None, 1, 7, 20])),
        ceiling=draw(st.integers(0, count - 1)),
        max_preemptions=draw(st.sampled_from([1, 2, 0])),
    )


@st.composite
def preempting_policies(draw: st.DrawFn) -> Policy:
    """Pools in which much is preempted: no limits, and little that ages."""
    count = draw(st.integers(2, 4))
    reserves = st.sampled_from([Fraction(0), Fraction(1, 10), Fraction(1, 4)])
    return Policy(
        capacity=draw(st.sampled_from([(40, None), (40, 5), (100, 7)])),
        tiers=tuple(
            Shares(
                f"t{level}",
                draw(reserves),
                draw(st.sampled_from([Fraction(1), Fraction(1, 2)])),
                preemptible=level > 0 and draw(st.sampled_from([True, True, False])),
                preempt_after_us=draw(st.sampled_from([0, 0, 5])),
            )
            for level in range(count)
        ),
        promote_after_us=draw(st.sampled_from([None, None, 10])),
        ceiling=draw(st.integers(0, 1)),
        max_preemptions=draw(st.sampled_from([2, 1])),
    )


def random_policy(luck: random.Random) -> Policy:
    """The same kind of pool from a plain seed, for runs of operations that no shrinking needs."""
    count = luck.randint(2, 5)
    cuts = [luck.choice([0, 10, 20, 40]) for _ in range(count)]
    whole = max(100, sum(cuts))
    return Policy(
        capacity=luck.choice([(40, None), (40, 5), (100, 7)]),
        tiers=tuple(
            Shares(f"t{n}", Fraction(cut, whole), luck.choice(FRACTIONS), luck.choice([Fraction(1), Fraction(3, 5)]))
            for n, cut in enumerate(cuts)
        ),
        promote_after_us=luck.choice([None, 5, 20]),
        ceiling=luck.randrange(count),
    )


def preempting_policy(luck: random.Random) -> Policy:
    """The same kind of pool as `preempting_policies`, from a plain seed."""
    count = luck.randint(2, 4)
    return Policy(
        capacity=luck.choice([(40, None), (40, 5), (100, 7)]),
        tiers=tuple(
            Shares(
                f"t{level}",
                Fraction(luck.choice([0, 10, 25]), 100),
                luck.choice([Fraction(1), Fraction(1, 2)]),
                preemptible=level > 0 and luck.random() < 0.9,
                preempt_after_us=luck.choice([0, 5]),
            )
            for level in range(count)
        ),
        promote_after_us=luck.choice([None, None, 10]),
        ceiling=luck.randint(0, 1),
        max_preemptions=luck.choice([0, 1, 1, 2]),
    )
