"""Who borrowed what of whom: exact, and no more than there is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.policy.rules import UNLIMITED, Shares, pool_rules
from sidecar.pools.stats import Loan, TierUsage, loans, pool_state

TIERS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), min_size=1, max_size=6)


def split(tiers: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [held for held, _ in tiers], [reserve for _, reserve in tiers]


@given(tiers=TIERS, capacity=st.integers(0, 200))
def test_what_is_borrowed_is_what_is_lent_and_no_tier_does_both(tiers: list[tuple[int, int]], capacity: int) -> None:
    held, reserves = split(tiers)
    found = loans(held, reserves, [0] * len(held), capacity)

    assert sum(loan.borrowed for loan in found) == sum(loan.lent for loan in found)
    for loan, mine, reserve in zip(found, held, reserves, strict=True):
        assert 0 <= loan.borrowed <= max(0, mine - reserve)
        assert 0 <= loan.lent <= max(0, reserve - mine)
        assert 0 in loan


@given(tiers=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=6))
def test_headroom_is_lent_last(tiers: list[tuple[int, int, int]]) -> None:
    held, reserves = [mine for mine, _, _ in tiers], [reserve for _, reserve, _ in tiers]
    headrooms = [min(reserve, headroom) for _, reserve, headroom in tiers]
    capacity = sum(reserves)
    lent = [loan.lent for loan in loans(held, reserves, headrooms, capacity)]

    of_headroom = [
        one - max(0, reserve - max(mine, headroom))
        for one, mine, reserve, headroom in zip(lent, held, reserves, headrooms, strict=True)
    ]
    if sum(lent) <= sum(
        max(0, reserve - max(mine, kept)) for mine, reserve, kept in zip(held, reserves, headrooms, strict=True)
    ):
        assert max(of_headroom) <= 0
    assert sum(lent) == sum(loan.lent for loan in loans(held, reserves, [0] * len(held), capacity))
    assert all(one <= max(0, reserve - mine) for one, mine, reserve in zip(lent, held, reserves, strict=True))


def test_a_tier_that_lends_nothing_is_not_said_to_lend() -> None:
    assert loans([0, 0, 60], [10, 40, 0], [10, 0, 0], 100) == [Loan(0, 0), Loan(0, 10), Loan(10, 0)]


@given(tiers=TIERS, free=st.integers(0, 50))
def test_the_total_is_what_does_not_fit_into_what_no_one_reserved(tiers: list[tuple[int, int]], free: int) -> None:
    held, reserves = split(tiers)
    capacity = max(sum(held) + free, sum(reserves))  # as the rules have it: nothing is held beyond the pool
    above = sum(max(0, mine - reserve) for mine, reserve in zip(held, reserves, strict=True))

    total = sum(loan.borrowed for loan in loans(held, reserves, [0] * len(held), capacity))

    assert total == max(0, above - (capacity - sum(reserves)))


@given(tiers=TIERS, capacity=st.integers(0, 200))
def test_parts_are_in_proportion_to_a_token(tiers: list[tuple[int, int]], capacity: int) -> None:
    held, reserves = split(tiers)
    found = loans(held, reserves, [0] * len(held), capacity)
    above = [max(0, mine - reserve) for mine, reserve in zip(held, reserves, strict=True)]
    idle = [max(0, reserve - mine) for mine, reserve in zip(held, reserves, strict=True)]
    for parts, weights in (([loan.borrowed for loan in found], above), ([loan.lent for loan in found], idle)):
        for part, weight in zip(parts, weights, strict=True):
            assert abs(part * sum(weights) - sum(parts) * weight) < max(1, sum(weights))


def test_a_pool_without_bounds_lends_nothing() -> None:
    assert loans([5, 7], [UNLIMITED, UNLIMITED], [0, 0], UNLIMITED) == [Loan(0, 0), Loan(0, 0)]


def test_the_pools_state_says_who_borrows_and_who_lends() -> None:
    rules = pool_rules(tokens=100, requests=None, tiers=(Shares("high", reserve=0.4), Shares("batch")))  # type: ignore[arg-type]
    figures = [TierUsage(10, 1, 0, 0), TierUsage(90, 3, 0, 0)]

    tiers = pool_state(rules, figures, (), leases=4, waiting=0)["tiers"]

    assert [(tier["tier"], tier["borrowed"], tier["lent"]) for tier in tiers] == [("high", 0, 30), ("batch", 30, 0)]  # type: ignore[attr-defined]
