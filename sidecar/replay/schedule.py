"""When a trace's requests are sent and how long they are, after the jitter, the speed, the caps and the cuts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from sidecar.replay.row import BLOCK_TOKENS, Row

QUANTIZED_FROM_S = 1.0
"""Timestamps that share few moments, this far apart, are rounded: the Mooncake traces are, to 3 s."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """What is changed about every request: times are divided by `speed`, lengths multiplied by `scale`, then capped.

    Rows after `duration_s` of the replay are left out.
    """

    speed: float = 1.0
    scale: float = 1.0
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    duration_s: float | None = None

    @property
    def block_tokens(self) -> int:
        """How long a shared block is after scaling, so that as much of each prompt is shared as before."""
        return max(1, round(BLOCK_TOKENS * self.scale))

    def of(self, row: Row) -> Row:
        """The row, faster and shorter. It keeps at least one token of each kind."""
        return replace(
            row,
            at_s=None if row.at_s is None else row.at_s / self.speed,
            delay_s=row.delay_s / self.speed,
            input_tokens=_sized(row.input_tokens, self.scale, self.max_input_tokens),
            output_tokens=_sized(row.output_tokens, self.scale, self.max_output_tokens),
        )


def schedule(rows: Sequence[Row], sizing: Sizing, jitter_s: float, rng: random.Random) -> Sequence[Row]:
    """The rows to play, in the order of the file: times count from the first.

    `jitter_s` spreads times that were rounded down: each is moved later by less than that, by chance.
    """
    moved = [row if row.at_s is None else row.at(row.at_s + rng.uniform(0.0, jitter_s)) for row in rows]
    start_s = min((row.at_s for row in moved if row.at_s is not None), default=0.0)
    sized = [sizing.of(row if row.at_s is None else row.at(row.at_s - start_s)) for row in moved]
    return sized if sizing.duration_s is None else _before(sizing.duration_s, sized)


def _before(duration_s: float, rows: Sequence[Row]) -> Sequence[Row]:
    """Rows that are sent by then. A conversation whose first turn comes later is left out as a whole."""
    late = {row.session for row in _first_turns(rows) if row.at_s is not None and row.at_s >= duration_s} - {None}
    return [row for row in rows if row.session not in late and (row.at_s is None or row.at_s < duration_s)]


def _first_turns(rows: Sequence[Row]) -> Sequence[Row]:
    first: dict[str | None, Row] = {}
    for row in rows:
        first.setdefault(row.session, row)
    return list(first.values())


def rounding_s(rows: Sequence[Row]) -> float:
    """How far apart the moments of a trace are that was rounded, 0 for one that was not."""
    moments = sorted({row.at_s for row in rows if row.at_s is not None})
    timed = sum(row.at_s is not None for row in rows)
    if len(moments) < 3 or timed < 2 * len(moments):
        return 0.0
    gap_s = median(later - earlier for earlier, later in pairwise(moments))
    return gap_s if gap_s >= QUANTIZED_FROM_S else 0.0


def _sized(tokens: int | None, scale: float, most: int | None) -> int | None:
    if tokens is None:
        return None
    scaled = max(1, round(tokens * scale))
    return scaled if most is None else min(scaled, most)
