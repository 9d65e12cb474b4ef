"""Learned times of prefills: how long an engine takes to the first byte of an answer, by what it has to compute.

An answer that is not streamed has no first byte before its end. Its un-prefilled tokens would block the engine for as
long as it generates, so the pool stops to count them when a prefill of that size should be over.
"""

from __future__ import annotations

from collections import OrderedDict

FIRST_S, TOKENS_PER_S = 0.2, 8000.0
"""The guess for an engine that has answered no stream yet: a small model on one GPU."""
LONGEST_S = 60.0
_FIXED_TOKENS = 256.0
"""An empty prompt takes a step, too: its time is that of so many tokens."""
_NEW_PART = 0.1
_MOST_ENGINES = 256


class PrefillTimes:
    """Moving averages by engine id. A prefill of other tokens than the average takes proportionally longer."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def learn(self, engine_id: str, tokens: int, took_s: float) -> None:
        """An engine had to compute so many tokens of a prompt, and sent the first byte after `took_s` seconds."""
        seen = self._seen.get(engine_id)
        if seen is None:
            self._seen[engine_id] = float(tokens), took_s
            if len(self._seen) > _MOST_ENGINES:
                self._seen.popitem(last=False)
            return
        mean_tokens, mean_s = seen
        self._seen[engine_id] = (
            mean_tokens + (tokens - mean_tokens) * _NEW_PART,
            mean_s + (took_s - mean_s) * _NEW_PART,
        )

    def expected_s(self, engine_id: str, tokens: int) -> float:
        """Seconds until the first byte, for so many tokens to compute."""
        seen = self._seen.get(engine_id)
        if seen is None:
            return min(LONGEST_S, FIRST_S + tokens / TOKENS_PER_S)
        mean_tokens, mean_s = seen
        return min(LONGEST_S, mean_s * (tokens + _FIXED_TOKENS) / (mean_tokens + _FIXED_TOKENS))
