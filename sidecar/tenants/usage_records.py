"""Records of the tenants' use. It imports no client of a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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
