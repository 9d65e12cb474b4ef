"""The counts that counters report, by their labels."""

from __future__ import annotations

from collections import defaultdict

Counted = defaultdict[tuple[str, ...], int]
"""A count for every combination of the labels' values.

Read in any thread. It only grows, by `+= number`: two event loops may add to one count, so what is added is computed
before, and no call comes between reading and writing.
"""


def nothing_counted() -> Counted:
    """All counts are 0, and none is reported."""
    return defaultdict(int)
