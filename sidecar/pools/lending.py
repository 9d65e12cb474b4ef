"""Who holds what of whose reserve: figures for people, the scheduler does not know them.

A reserve that its tier does not use is lent to whoever comes. Tokens have no color, so who borrowed from whom is a
matter of accounting, and this is ours: what tiers hold above their own reserves comes first out of what nobody has
reserved. What is left is borrowed: split among the borrowers in proportion to what each holds above its reserve, and
among the lenders in proportion to what of its reserve each leaves idle and lends. Headroom is lent last: only more
important tiers may use it. Both sides add up to the same total exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Loan(NamedTuple):
    """One tier's tokens: what it holds out of others' reserves, and what of its own reserve others hold."""

    borrowed: int
    lent: int


def loans(held: Sequence[int], reserves: Sequence[int], headrooms: Sequence[int], capacity: int) -> Sequence[Loan]:
    """What each tier borrowed and lent, in the order given. `headrooms` are the parts of reserves that are not lent.

    The pool may hold more than its capacity, as when it has shrunk: what is beyond it came out of nobody's reserve.
    """
    above = [max(0, mine - reserve) for mine, reserve in zip(held, reserves, strict=True)]
    idle = [max(0, reserve - mine) for mine, reserve in zip(held, reserves, strict=True)]
    unreserved = max(0, capacity - sum(reserves))
    kept = [max(0, headroom - mine) for mine, headroom in zip(held, headrooms, strict=True)]
    lent = [whole - part for whole, part in zip(idle, kept, strict=True)]
    total = min(max(0, sum(above) - unreserved), sum(idle))
    of_lent = min(total, sum(lent))
    parts = [sum(pair) for pair in zip(_split(of_lent, lent), _split(total - of_lent, kept), strict=True)]
    return [Loan(*loan) for loan in zip(_split(total, above), parts, strict=True)]


def _split(total: int, weights: Sequence[int]) -> Sequence[int]:
    """Whole parts in proportion to the weights, none above its weight; the largest fractions are rounded up."""
    whole = sum(weights)
    if total == 0:
        return [0] * len(weights)
    parts = [total * weight // whole for weight in weights]
    by_fraction = sorted(range(len(weights)), key=lambda at: (-(total * weights[at] % whole), at))
    for at in by_fraction[: total - sum(parts)]:
        parts[at] += 1
    return parts
