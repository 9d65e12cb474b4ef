"""How large a burst has to be so that requests really wait, and no larger.

It takes more requests than the engine runs at once. Where the engine says how many those are, the first burst is of the
right size; where not, bursts grow until enough of them waited, or the bound is reached.
"""

from __future__ import annotations

from sidecar.doctor.burst import Burst
from sidecar.load import Seen

WAITING = 36
"""Requests that should wait: twelve of each level, half more than `judging.FEWEST`."""
FIRST = 40
"""Where nobody says how many run at once. It is enough for an engine that runs four."""
GROWTH = 4
MOST_REQUESTS = 400
"""In one burst, unless the user allows more: some ten thousand tokens."""
GOAL_S = 2.0
"""For one burst, about: long enough to watch gauges, short enough for a server with work to do."""
FEWEST_TOKENS, MOST_TOKENS = 3, 64
LONGEST_ANSWER = 6
"""Measured in the shortest: a burst's longest has twice its tokens, and a control may be three times as long again."""
_SLOWER_TOGETHER = 2.0  # a token of many sequences at once, against a token of one alone: a guess that only sizes
_MEAN_LENGTH = 1.5  # answers have one to two times the plan's tokens
_PROMPT_TOKENS = 64  # more than the prompt has, with a chat template around it


def first_size(max_running: int | None, most: int) -> int:
    """The size of the first burst. `max_running` is None where the engine does not say it."""
    return min(most, FIRST if max_running is None else max_running + WAITING)


def next_size(burst: Burst, most: int) -> int | None:
    """A larger size after a burst in which too few waited; None where the bound is reached."""
    size, waited = burst.plan.requests, burst.judgment.waited
    if size >= most:
        return None
    wanted = burst.at_once + WAITING if waited else size * GROWTH
    return min(most, max(wanted, size * 3 // 2))


def tokens(requests: int, at_once: int | None, alone: Seen, context_tokens: int | None) -> int:
    """The shortest answer's length, so that the burst takes about its goal. `alone` is a request that had no company.

    `at_once` is None where nobody knows how many run at once yet.
    """
    waves = max(1.0, requests / (at_once or requests / GROWTH))
    per_token_s = (alone.tpot_s or 0.02) * _SLOWER_TOGETHER * _MEAN_LENGTH
    wanted = int(GOAL_S / waves / max(per_token_s, 1e-4))
    room = MOST_TOKENS if context_tokens is None else (context_tokens - _PROMPT_TOKENS) // LONGEST_ANSWER
    return max(1, min(max(wanted, FEWEST_TOKENS), MOST_TOKENS, room))
