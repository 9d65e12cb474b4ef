"""What is left of a tenant's limits: told to its clients in every answer, and by the error that refuses a request."""

from __future__ import annotations

from typing import NamedTuple


class Remaining(NamedTuple):
    """One limit: what a minute allows, what may come at once now, and in how many microseconds all of it may again."""

    per_minute: int
    left: int
    reset_us: int


class Allowance(NamedTuple):
    """A tenant's limits as they stand, None for one that it does not have.

    `is_downgraded` says that the request was over them and is in at a lower tier instead: it counts in none of them.
    """

    requests: Remaining | None = None
    tokens: Remaining | None = None
    is_downgraded: bool = False
