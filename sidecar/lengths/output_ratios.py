"""How the tokens of answers come: the bytes of text that one has, and how many an event of a stream has.

Both are learned from answers with usage, and estimate the tokens of answers without: streams whose usage no one asked
for, and those that broke off before it came. Each tenant and model has its own: no tenant's
answers change what another one is charged.
"""

from __future__ import annotations

from collections import OrderedDict

BYTES_PER_TOKEN = 4.0
"""Of text of which nothing is known: English has 4 to 5."""
LEARNING_RATE = 0.1
"""Weight of the newest answer, as for prompts (`sidecar.lengths.token_estimates`)."""
MOST_TOKENS_PER_EVENT = 64.0
_JOINED = 1.05
"""Events count as one token each unless their text has more tokens than this: the bytes of texts vary by as much."""
_SURELY_JOINED = 2.0
"""The same where nothing was learned."""
MOST_KEPT = 8192
"""Tenants and models. The one that was used least recently is forgotten."""
LONGEST_MODEL_NAME = 256
"""Characters. Model names come from clients, and memory must stay small."""


class OutputRatio:
    """The ratios of one tenant and model, None while nothing is known."""

    __slots__ = ("bytes_per_token", "tokens_per_event")

    def __init__(self) -> None:
        self.bytes_per_token: float | None = None
        self.tokens_per_event: float | None = None

    def tokens(self, events: int, text_bytes: int | None) -> int:
        """The tokens of so many events, whose text has so many bytes; None where it was not measured."""
        if text_bytes is None:
            return round(events * (self.tokens_per_event or 1))
        by_text = text_bytes / (self.bytes_per_token or BYTES_PER_TOKEN)
        is_joined = by_text > events * (_JOINED if self.bytes_per_token else _SURELY_JOINED)
        return round(by_text) if is_joined else events

    def learn(self, tokens: int, events: int, text_bytes: int | None) -> None:
        """Learns from an answer of so many tokens; one that did not stream has no events."""
        if text_bytes:
            self.bytes_per_token = _nearer(self.bytes_per_token, text_bytes / tokens)
        if events > 0:
            joined = min(MOST_TOKENS_PER_EVENT, max(1.0, tokens / events))
            self.tokens_per_event = _nearer(self.tokens_per_event, joined)


def _nearer(value: float | None, seen: float) -> float:
    return seen if value is None else value + LEARNING_RATE * (seen - value)


class OutputRatios:
    """The ratios of every tenant and model that was used lately."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str | None], OutputRatio] = OrderedDict()

    def of(self, tenant: str, model: str | None) -> OutputRatio:
        """The ratios of a tenant's answers by a model, to use and to teach."""
        key = tenant, model
        found = self._kept.get(key)
        if found is None:
            found = OutputRatio()
            if model is not None and len(model) > LONGEST_MODEL_NAME:
                return found
            if len(self._kept) >= MOST_KEPT:
                self._kept.popitem(last=False)
            self._kept[key] = found
        else:
            self._kept.move_to_end(key)
        return found
