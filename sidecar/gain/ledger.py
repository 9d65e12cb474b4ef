"""Ledger of service gain: by tier, what was earned and could be earned, and the outcomes of all offered requests."""

from __future__ import annotations

from collections import Counter

import msgspec

from sidecar.gain.token_deadlines import Earned, SloOutcome

_NEW_PART = 1 / 64
"""Of the newest answer in the mean length."""
_MOST_TIERS = 64
"""More than any policy has: a changed policy may bring new names."""


class TierGainDocument(msgspec.Struct, frozen=True):
    """The gain of one tier since the process began, in weighted tokens. `outcomes` counts offered requests."""

    tier: str
    earned: int
    attainable: int
    outcomes: dict[str, int]


class TierGain:
    """The gain of one tier. `mean_tokens` is the mean length of its latest answers, None before the first."""

    def __init__(self) -> None:
        self.earned = self.attainable = 0
        self.outcomes: Counter[SloOutcome] = Counter()
        self.mean_tokens: float | None = None

    def add(self, gain: Earned) -> None:
        """One request has ended."""
        self.earned += gain.earned
        self.attainable += gain.attainable
        self.outcomes[gain.outcome] += 1

    def answered(self, tokens: int) -> None:
        """A complete answer had so many tokens: requests without one are counted by the mean."""
        mean = self.mean_tokens
        self.mean_tokens = float(tokens) if mean is None else mean + (tokens - mean) * _NEW_PART


class GainLedger:
    """The tiers of one pool, by name, in one process."""

    def __init__(self) -> None:
        self._tiers: dict[str, TierGain] = {}

    def tier(self, name: str) -> TierGain:
        """The gain of a tier. One that is new begins at nothing."""
        found = self._tiers.get(name)
        if found is None:
            if len(self._tiers) >= _MOST_TIERS:
                del self._tiers[next(iter(self._tiers))]
            found = self._tiers[name] = TierGain()
        return found

    def documents(self) -> list[TierGainDocument]:
        """Every tier that has an objective, or had one."""
        return [
            TierGainDocument(name, one.earned, one.attainable, {of.value: one.outcomes[of] for of in SloOutcome})
            for name, one in self._tiers.items()
        ]
