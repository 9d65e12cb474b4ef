"""Amounts: tokens, requests, and prompt tokens without a first byte. All whole numbers."""

from __future__ import annotations

from typing import TypeAlias

from sidecar.policy import rules

Amount: TypeAlias = rules.Amount

UNBOUNDED = rules.UNLIMITED
"""A dimension without a bound."""

NOTHING: Amount = (0, 0, 0)


def plus(a: Amount, b: Amount) -> Amount:
    """The sum."""
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def minus(a: Amount, b: Amount) -> Amount:
    """The difference."""
    return a[0] - b[0], a[1] - b[1], a[2] - b[2]


def larger(a: Amount, b: Amount) -> Amount:
    """The larger of both in each dimension."""
    return max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2])


def smaller(a: Amount, b: Amount) -> Amount:
    """The smaller of both in each dimension."""
    return min(a[0], b[0]), min(a[1], b[1]), min(a[2], b[2])


def within(a: Amount, most: Amount) -> bool:
    """`<=` in all dimensions: "fits"."""
    return a[0] <= most[0] and a[1] <= most[1] and a[2] <= most[2]


def below(a: Amount, most: Amount) -> bool:
    """`<` in all dimensions."""
    return a[0] < most[0] and a[1] < most[1] and a[2] < most[2]
