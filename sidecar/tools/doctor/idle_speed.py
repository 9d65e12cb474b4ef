"""Speed of an engine that has nothing else to do, and the `slo` that it can be held to: twice its own times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from sidecar.durations import policy_duration
from sidecar.tools.doctor.recommendation import Recommendation
from sidecar.tools.loadgen import Seen
from sidecar.tools.step_model.model import EngineModel

PROMPT_TOKENS, PROMPT_BYTES = 1_000, 4_000
ANSWER_TOKENS = 16
TIMES = 2
"""Of the idle engine's own times: as slow as that its clients hardly notice, and it does more than twice as much."""
HOLD = "97%"
_SHORTEST_S = 20e-6
"""Tokens that follow each other faster came together: a server before the engine collects them."""


class IdleSpeed(NamedTuple):
    """Times to the first token of a prompt, and between two tokens after it, with nothing beside it."""

    ttft_s: float
    tpot_s: float
    prompt_tokens: int


def measured(alone: Sequence[Seen]) -> IdleSpeed | None:
    """The medians of answers that each were alone; None where they show no speed."""
    known = [(one, one.ttft_s, one.tpot_s) for one in alone]
    times = [(ttft_s, tpot_s) for _, ttft_s, tpot_s in known if ttft_s is not None and tpot_s is not None]
    if not times or statistics.median(tpot_s for _, tpot_s in times) < _SHORTEST_S:
        return None
    ttft_s, tpot_s = (statistics.median(column) for column in zip(*times, strict=True))
    prompts = [one.prompt_tokens for one in alone if one.prompt_tokens is not None]
    return IdleSpeed(ttft_s, tpot_s, round(statistics.median(prompts)) if prompts else PROMPT_TOKENS)


def predicted(model: EngineModel, outside_us: float = 0.0) -> IdleSpeed:
    """The speed of a model. `outside_us` is what a first token takes beside the engine's steps."""
    first_us = outside_us + model.idle_first_us(PROMPT_TOKENS)
    return IdleSpeed(first_us / 1e6, model.duration_us(1, 0) / 1e6, PROMPT_TOKENS)


def promise(speed: IdleSpeed) -> str:
    """The members of a tier's `slo`."""
    ttft, tpot = (policy_duration(_round_s(TIMES * own_s)) for own_s in (speed.ttft_s, speed.tpot_s))
    return f"ttft: {ttft}, tpot: {tpot}, hold: {HOLD}"


def recommended_slo(speed: IdleSpeed) -> Recommendation:
    """The `slo` of an interactive tier."""
    return Recommendation(
        f"slo: {{{promise(speed)}}}",
        f"twice what the idle engine takes: {speed.ttft_s * 1e3:.3g} ms to the first token of a prompt of "
        f"{speed.prompt_tokens:,} tokens, {speed.tpot_s * 1e3:.3g} ms for each token after it. In an interactive tier "
        f"it lets less important work fill the pool only so far that {HOLD} of the tier's requests meet both; a longer "
        "prompt needs a longer ttft",
    )


def _round_s(seconds: float) -> float:
    """Up to two digits that count, a millisecond or more."""
    unit: float = 10.0 ** max(-3, math.floor(math.log10(max(seconds, 1e-3))) - 1)
    return round(math.ceil(seconds / unit - 1e-9) * unit, 3)
