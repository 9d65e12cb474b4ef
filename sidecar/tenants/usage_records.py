"""Interface of the records of use in a store. It imports no client of a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

MOST_AT_ONCE = 128
"""Entries, charges, or accounts, of one call: so many take the store less than a millisecond."""


class UsageKey(NamedTuple):
    """Key by which use is counted. `day` is a date in UTC, such as 2026-11-24; `model` is empty where none was
    named.
    """

    day: str
    tenant: str
    tier: str
    model: str


class UsageFigures(NamedTuple):
    """Requests and tokens."""

    requests: int
    input_tokens: int
    output_tokens: int

    def plus(self, other: UsageFigures) -> UsageFigures:
        """The sum of both."""
        return UsageFigures(*(mine + its for mine, its in zip(self, other, strict=True)))


UsageCharge = tuple[str, str, int]
"""A day, an account (`policy.tenant.Account`), and the tokens that count in its budgets, weighted by their cost."""


class Sums(NamedTuple):
    """The tokens that count in the budgets of one account in a day and in the month of that day."""

    day: int
    month: int


class Recorded(NamedTuple):
    """The store's answer: its time in seconds since 1970, and the sums that were asked for."""

    time_s: float
    sums: Mapping[str, Sums]


class UsageRecords(Protocol):
    """The use of all replicas, in a store. Every coroutine but `close` raises StoreError."""

    async def add(
        self,
        part: int,
        entries: Sequence[tuple[UsageKey, UsageFigures]],
        charges: Sequence[UsageCharge],
        day: str,
        accounts: Sequence[str],
    ) -> Recorded:
        """Adds the n-th part of what this replica has counted, once, however often it is sent. Part 0 is none.

        Each list has `MOST_AT_ONCE` at most; the sums are those of the `accounts`, in `day` and its month.
        """

    async def use_on(self, day: str) -> Mapping[UsageKey, UsageFigures]:
        """All that was counted of a day."""

    async def close(self) -> None:
        """Closes the connection, in any state."""
