"""The requests of one run: the same for every way to serve them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

TIERS = ("interactive", "default", "bulk")
"""From the most important one."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The requests of one tier: what part of all they are, their prompt's tokens, and their output's, from and to."""

    share: float
    prompt: tuple[int, int]
    output: tuple[int, int]


KINDS = {
    "interactive": Kind(0.2, (64, 256), (32, 128)),
    "default": Kind(0.3, (128, 512), (64, 256)),
    "bulk": Kind(0.5, (256, 768), (128, 256)),
}
LONGEST = max(kind.prompt[1] + kind.output[1] for kind in KINDS.values())


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: its tier, the tokens of its prompt, and how many it generates."""

    tier: str
    prompt: tuple[int, ...]
    output_tokens: int


def planned(requests: int, seed: int, vocabulary: int, part: float = 1.0) -> Sequence[PlannedRequest]:
    """So many requests in a random order. `part` makes all lengths shorter, for a model on a processor."""
    luck = random.Random(seed)
    tiers = [tier for tier in TIERS for _ in range(round(KINDS[tier].share * requests))]
    tiers = (tiers + [TIERS[-1]] * requests)[:requests]
    luck.shuffle(tiers)
    found = []
    for tier in tiers:
        kind = KINDS[tier]
        prompt, output = (max(1, round(luck.randint(*length) * part)) for length in (kind.prompt, kind.output))
        found.append(PlannedRequest(tier, tuple(luck.randrange(vocabulary) for _ in range(prompt)), output))
    return found
