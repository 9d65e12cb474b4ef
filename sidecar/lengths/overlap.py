"""Overlap of the requests of one engine: they end at different times, so together they need less than their sum.

The peak is that of the specification: sort what runs by the tokens that are still to come, r, descending; u is what
each uses. While the k-th is just about to end, the first k use u_1 + ... + u_k + k * r_k. The largest of these sums is
the peak. It is exact where all generate at the same rate. The peak of two engines together, or of two replicas, is not
larger than the sum of their peaks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from operator import itemgetter

_REMAINING = itemgetter(1)
WHOLE = 2**16
"""The ratio of an engine whose requests all need their most at once."""
STALE_SHARE = 16
"""The ratio is computed anew when a 16th of the requests or of their tokens changed. Until then no more than this share
of the tokens is counted by a ratio that it did not contribute to."""


def peak_tokens(running: Iterable[tuple[int, int, int]]) -> int:
    """Peak from (used, remaining, sequences): each of the sequences has `remaining` tokens to come."""
    used_so_far = sequences_so_far = most = 0
    for used, remaining, sequences in sorted(running, key=_REMAINING, reverse=True):
        used_so_far += used
        sequences_so_far += sequences
        most = max(most, used_so_far + sequences_so_far * remaining)
    return most


class Overlap:
    """The overlap of one engine, as one process sees it: its running requests, and the ratio of peak to plain sum."""

    def __init__(self) -> None:
        self._running: dict[Hashable, tuple[int, int, int]] = {}
        self._sum = 0
        self._ratio = WHOLE
        self._changes = 0
        self._moved = 0

    def put(self, lease: Hashable, used: int, remaining: int, sequences: int = 1) -> None:
        """States what a lease uses now, and the tokens to come of each of its sequences; the lease may be new."""
        before = self._running.get(lease, (0, 0, 1))
        self._running[lease] = now = (used, remaining, sequences)
        self._note(before, now)

    def remove(self, lease: Hashable) -> None:
        """Forgets a lease that has ended; one that is not known is ignored."""
        before = self._running.pop(lease, None)
        if before is not None:
            self._note(before, (0, 0, 1))

    def _note(self, before: tuple[int, int, int], now: tuple[int, int, int]) -> None:
        change = now[0] + now[1] * now[2] - before[0] - before[1] * before[2]
        self._sum += change
        self._changes += 1
        self._moved += abs(change)

    @property
    def ratio(self) -> int:
        """The peak in 65,536ths of the plain sum, rounded up: 1 to 65,536. At most a 16th of the requests old."""
        if self._changes * STALE_SHARE > len(self._running) or self._moved * STALE_SHARE > self._sum:
            self._recompute()
        return self._ratio

    def _recompute(self) -> None:
        total = self._sum
        self._ratio = (
            WHOLE if total <= 0 else max(1, min(WHOLE, -(-peak_tokens(self._running.values()) * WHOLE // total)))
        )
        self._changes = self._moved = 0

    def counted(self, tokens: int) -> int:
        """The tokens that a need of `tokens` is counted as: its share of the peak, rounded up, at least 1."""
        return max(1, -(-tokens * self.ratio // WHOLE))
