"""PLACEHOLDER until the controller comes: plain AIMD."""

from __future__ import annotations

from typing import NamedTuple


class Seen(NamedTuple):
    met: float
    missed: float
    held: float
    floors: float
    waits: bool


class GuardState(NamedTuple):
    share: float = 0.1
    met: float = 0
    missed: float = 0


def decide(state: GuardState, seen: Seen, hold: float) -> GuardState:
    met, missed = state.met + seen.met, state.missed + seen.missed
    if met + missed < 10:
        return GuardState(min(1.0, state.share + 0.005 * seen.waits), met, missed)
    if missed > (1 - hold) * (met + missed) and seen.held > seen.floors:
        return GuardState(max(0.01, 0.7 * min(state.share, seen.held)))
    return GuardState(min(1.0, state.share + 0.005 * seen.waits))
