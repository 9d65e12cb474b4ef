"""Whether every floor was kept, seen from outside: from the moments at which requests came, began and ended.

The floor of a tier is a part of its reserve: `fair` of it with `order: gain`, all of it with `order: level`. For the
baselines, which promise none, it is what `order: gain` promises. Two figures for each tier:

- `stall_s`: the longest time in which a request of the tier that is no larger than its floor waited, without any
  request of the tier that began. The scheduler promises that the head of a tier is admitted within 2 D, if it is no
  larger than the floor (clause b of its bound), where D is the longest time that a request runs.
- `share`: while a request of the tier waited, the tokens (prompt and answer) of its requests that ran, of those of all
  that ran, on average over that time.

A floor is kept where `stall_s` is at most 2 D, and `share` is at least the floor's part of the pool. A tier that had
requests waiting for less than a second in all has no share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sidecar.tools.simulate.load import Request

LEAST_WAIT_US = 1_000_000


class Floor(NamedTuple):
    """One tier's floor in one run. `share` is relative to the floor's part: 1 is the floor."""

    stall_s: float
    bound_s: float
    share: float | None

    @property
    def is_kept(self) -> bool:
        """See above."""
        return self.stall_s <= self.bound_s and (self.share is None or self.share >= 1)


def floors(offered: Sequence[Request], parts: Sequence[float], pool_tokens: int) -> list[Floor]:
    """Every tier's floor; `parts` are the floors' parts of the pool, by level."""
    ran_us = [one.end_us - one.started_us for one in offered if one.end_us is not None and one.started_us is not None]
    bound_s = 2 * max(ran_us, default=0) / 1e6
    return [
        Floor(_stall_us(offered, level, part * pool_tokens) / 1e6, bound_s, _share(offered, level, part))
        for level, part in enumerate(parts)
    ]


def _stall_us(offered: Sequence[Request], level: int, floor_tokens: float) -> int:
    """The longest of the times between two moments of a tier at which a request began or none waited."""
    moments: list[tuple[int, int, int]] = []
    for one in offered:
        if one.tier != level:
            continue
        is_small = one.prompt + one.output <= floor_tokens
        began_us = _left_us(one)
        moments.append((began_us, 0, -is_small))
        moments.append((one.at_us, 1, is_small))
    moments.sort()
    waiting = since_us = longest_us = 0
    for at_us, kind, change in moments:
        if waiting:
            longest_us = max(longest_us, at_us - since_us)
        if kind == 0 or not waiting:
            since_us = at_us
        waiting += change
    return longest_us


def _share(offered: Sequence[Request], level: int, part: float) -> float | None:
    changes: list[tuple[int, int, int, int]] = []  # when; requests that wait, its tier's and all tokens that run
    for one in offered:
        is_own = one.tier == level
        began_us = _left_us(one)
        if is_own:
            changes += [(one.at_us, 1, 0, 0), (began_us, -1, 0, 0)]
        if one.started_us is not None and one.end_us is not None:
            tokens = one.prompt + one.output
            changes += [(began_us, 0, tokens * is_own, tokens), (one.end_us, 0, -tokens * is_own, -tokens)]
    changes.sort(key=lambda change: change[0])
    waiting = own = whole = waited_us = 0
    own_us = whole_us = last_us = 0
    for at_us, of_waiting, of_own, of_whole in changes:
        if waiting > 0:
            waited_us += at_us - last_us
            own_us += own * (at_us - last_us)
            whole_us += whole * (at_us - last_us)
        waiting, own, whole, last_us = waiting + of_waiting, own + of_own, whole + of_whole, at_us
    if waited_us < LEAST_WAIT_US or not whole_us or not part:
        return None
    return own_us / whole_us / part


def _left_us(one: Request) -> int:
    """When it stopped waiting: it began, or its wait ended."""
    found = one.end_us if one.started_us is None else one.started_us
    assert found is not None, "every request has an end"
    return found
