"""Median over tenants of their quantiles: every tenant has one vote, however many requests it sends."""

from __future__ import annotations

from itertools import islice

from sidecar.lengths.histogram import BIN_TOKENS, LONGEST, LengthHistogram

FEWEST_TENANTS = 3
"""With fewer, one tenant's traffic would size the leases of another."""
MOST_VOTERS = 63
"""The first so many tenants vote: more would not make the median better, but slower."""
_FRESH = 64
"""Samples after which the medians are computed anew."""
_MOST_KEPT = 1024
_UNKNOWN = LONGEST + 1


class Median:
    """The upper median of the tenants' quantiles. A tenant whose samples do not say counts as one that says much.

    Fewer than half of the voters cannot move it out of the range of the others' quantiles, whatever they send.
    """

    def __init__(self) -> None:
        self._members: dict[str, LengthHistogram] = {}
        self._kept: dict[tuple[float, int], tuple[int | None, int]] = {}
        self._news = 0

    def __len__(self) -> int:
        return len(self._members)

    def put(self, tenant: str, evidence: LengthHistogram) -> None:
        """Gives a tenant its vote, or replaces what it votes by."""
        if self._members.get(tenant) is not evidence:
            self._members[tenant] = evidence
            self._kept.clear()

    def remove(self, tenant: str) -> None:
        """Takes a tenant's vote, if it has one."""
        if self._members.pop(tenant, None) is not None:
            self._kept.clear()

    def learned(self, samples: int = 1) -> None:
        """Notes that voters learned so many samples."""
        self._news = news = self._news + samples
        if news >= _FRESH:
            self._news = 0
            self._kept.clear()

    @property
    def is_full(self) -> bool:
        """Enough tenants vote."""
        return len(self._members) >= FEWEST_TENANTS

    def quantile(self, q: float, beyond: int = 0) -> tuple[int | None, int]:
        """The median of the voters' quantiles, None where they have none, and the number of samples.

        At most 64 samples old. `beyond` may be rounded down to its bin, because all edges are multiples of one.
        """
        asked = (q, beyond // BIN_TOKENS)
        found = self._kept.get(asked)
        if found is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            found = self._kept[asked] = self._vote(q, beyond)
        return found

    def _vote(self, q: float, beyond: int) -> tuple[int | None, int]:
        voters = list(islice(self._members.values(), MOST_VOTERS))
        votes = sorted(voter.quantile(q, beyond) or _UNKNOWN for voter in voters)
        median = votes[len(votes) // 2]
        return None if median == _UNKNOWN else median, sum(voter.samples for voter in voters)
