"""Deadlines of an answer's tokens: what a request earned of what it could, and whether it met its tier's objective.

Token i of an answer, from 1, is due `ttft + (i - 1) * tpot` after the request arrived. One that is forwarded before
that earns its tier's weight. The sum over the tokens is the token-level deadline-aware gain of ProServe (arXiv
2512.12928). What could be earned is the weight of all its tokens.

The outcome of a request is the objective that it missed first: its first token was not in time (`ttft`), or the mean
time of the later ones was above `tpot`, as `vllm bench serve --goodput` computes it. A request that got no complete
answer is `refused`, or `abandoned` where its client left. It counts in what could be earned by the length that was
expected of it, or by what was forwarded if that is more: else a policy would look better for refusing requests.

An answer that does not stream shows no times of tokens. It earns all where it comes before its last token is due, and
else nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import msgspec


class SloOutcome(str, Enum):
    """The end of a request, by its tier's objective."""

    MET = "met"
    TTFT = "ttft"
    TPOT = "tpot"
    REFUSED = "refused"
    ABANDONED = "abandoned"


class Objective(NamedTuple):
    """The times that a tier promises, in microseconds, and the worth of a token in time."""

    ttft_us: int
    tpot_us: int
    weight: int

    def loosened(self, ttft_us: int, tpot_us: int) -> Objective:
        """Objective for a client that is content with longer times. A shorter one changes nothing."""
        return Objective(max(self.ttft_us, ttft_us), max(self.tpot_us, tpot_us), self.weight)


class Earned(msgspec.Struct, frozen=True, gc=False):
    """The gain of one request, in weighted tokens, and its outcome."""

    earned: int
    attainable: int
    outcome: SloOutcome


class TokenDeadlines:
    """The tokens of one answer as they pass. `read` costs the same however many tokens come at once.

    Tokens are counted in events of the stream, each of which has `tokens_per_event`, of one of the `sequences`. The
    number of tokens that the answer really had is given at its end. Call `end` once, before one of the gains is asked.
    """

    __slots__ = (
        "_due_us", "_first_due_us", "_late", "_objective", "_seen", "_sequences", "_skipped", "first_us", "last_us",
        "step_us",
    )  # fmt: skip

    def __init__(
        self, objective: Objective, arrived_us: int, *, tokens_per_event: float = 1.0, sequences: int = 1
    ) -> None:
        self._objective = objective
        self._first_due_us = self._due_us = arrived_us + objective.ttft_us
        self.step_us = max(1, round(objective.tpot_us * tokens_per_event / sequences))
        self._sequences = sequences
        self._seen = self._skipped = self._late = 0
        self.first_us: int | None = None
        self.last_us = 0

    def read(self, now_us: int, events: int) -> None:
        """Reports how many events have come by now."""
        new = events - self._seen
        if new <= 0:
            return
        if self.first_us is None:
            self.first_us = now_us
        over_us = now_us - self._due_us
        if over_us >= 0:
            late = over_us // self.step_us + 1
            self._late += min(new, late)
        self._seen = events
        self._due_us += new * self.step_us
        self.last_us = now_us

    @property
    def base_us(self) -> int:
        """The event after n others is due `n * step_us` after this."""
        return self._due_us - self._seen * self.step_us

    def in_time(self, now_us: int, events: int) -> None:
        """Reports how many events have come by now, where all new ones are in time: the same as `read` for each of
        them.
        """
        self._due_us += (events - self._seen) * self.step_us
        self._seen, self.last_us = events, now_us

    def skip(self, events: int) -> None:
        """Reports how many events have come, where the new ones have no token."""
        self._skipped += events - self._seen
        self._seen = events

    def end(self, without_token: int) -> None:
        """The last so many events had no token: they were sent when the answer was complete."""
        without_token = min(without_token, self._seen - self._skipped)
        self._due_us -= without_token * self.step_us
        over_us = self.last_us - self._due_us
        if over_us >= 0:
            self._late -= min(self._late, without_token, over_us // self.step_us + 1)
        self._skipped += without_token

    @property
    def events(self) -> int:
        """The events that had tokens."""
        return self._seen - self._skipped

    def streamed(self, tokens: int) -> Earned:
        """The gain of a complete answer that streamed, with so many tokens in all its sequences."""
        weight = self._objective.weight
        return Earned(weight * self._in_time(tokens), weight * tokens, self._outcome(tokens))

    def whole(self, tokens: int, admitted_us: int, now_us: int) -> Earned:
        """The gain of a complete answer that did not stream."""
        weight, later = self._objective.weight, max(0, tokens // self._sequences - 1)
        if now_us < self._first_due_us + later * self._objective.tpot_us:
            return Earned(weight * tokens, weight * tokens, SloOutcome.MET)
        is_first_late = admitted_us >= self._first_due_us
        return Earned(0, weight * tokens, SloOutcome.TTFT if is_first_late else SloOutcome.TPOT)

    def broken_off(self, tokens: int, expected: int, *, is_abandoned: bool) -> Earned:
        """The gain of a request that got so many tokens of an answer, perhaps none, and not its end."""
        weight = self._objective.weight
        outcome = SloOutcome.ABANDONED if is_abandoned else SloOutcome.REFUSED
        return Earned(weight * self._in_time(tokens), weight * max(tokens, expected), outcome)

    def _in_time(self, tokens: int) -> int:
        events = self.events
        return tokens - min(tokens, -(-self._late * tokens // events)) if events else 0

    def _outcome(self, tokens: int) -> SloOutcome:
        if self.first_us is None:  # an answer without a token
            return SloOutcome.MET
        if self.first_us >= self._first_due_us:
            return SloOutcome.TTFT
        return SloOutcome.TPOT if self.is_slow(self.last_us, tokens // self._sequences - 1) else SloOutcome.MET

    def is_slow(self, until_us: int, later: float) -> bool:
        """True if so many tokens of a sequence, after its first, took longer until a moment than the objective says."""
        first_us = self.first_us
        return later > 0 and first_us is not None and until_us - first_us > later * self._objective.tpot_us


# -- headers by which a client loosens its tier's objective

TTFT_HEADERS = (b"x-llm-d-slo-ttft-ms", b"x-slo-ttft-ms")
TPOT_HEADERS = (b"x-llm-d-slo-tpot-ms", b"x-slo-tpot-ms")
SLO_HEADERS = (*TTFT_HEADERS, *TPOT_HEADERS)
_MILLISECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,6})?").fullmatch
"""At most eleven days. A longer one is no objective, and its sums would be no whole numbers that JSON has."""


def asked_slo(headers: Mapping[bytes, bytes], objective: Objective) -> tuple[Objective, list[str]]:
    """The tier's objective as the client loosens it, and the names of the headers that do not count."""
    ignored: list[str] = []
    ttft_us = _asked_us(headers, TTFT_HEADERS, objective.ttft_us, ignored)
    tpot_us = _asked_us(headers, TPOT_HEADERS, objective.tpot_us, ignored)
    return objective.loosened(ttft_us, tpot_us), ignored


def _asked_us(headers: Mapping[bytes, bytes], names: tuple[bytes, ...], promised_us: int, ignored: list[str]) -> int:
    found = 0
    for name in names:
        raw = headers.get(name)
        if raw is None:
            continue
        asked_us = _us(raw)
        if asked_us is None or asked_us < promised_us or found:
            ignored.append(name.decode("ascii"))
        else:
            found = asked_us
    return found


def _us(raw: bytes) -> int | None:
    raw = raw.strip()
    return round(float(raw) * 1000) if _MILLISECONDS(raw) else None


# -- Ledger of service gain: by tier, what was earned and could be earned, and the outcomes of all offered requests.

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
