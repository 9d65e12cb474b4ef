"""Who sends what, when: one fixed, seeded sequence of requests that every run replays.

An open loop: nobody waits for an answer before sending. Every tier's requests come as a Poisson process of their own;
critical, high and normal together fill the engine, and with low and batch it is asked for about a third more than it
can do. All tiers arrive alike, so that at equal priority they wait alike.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stream:
    """One kind of traffic. `header` is the tier that its client asks for, None where the key says it."""

    tier: str
    key: str
    per_second: float
    header: str | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `at_s` counts from the start of the run, sizes are in tokens."""

    at_s: float
    stream: Stream
    prompt_tokens: int
    output_tokens: int


STREAMS = (
    Stream("critical", "sk-demo-interactive", per_second=5, header="critical"),
    Stream("high", "sk-demo-interactive", per_second=36),
    Stream("normal", "sk-demo-standard", per_second=74),
    Stream("low", "sk-demo-standard", per_second=10, header="low"),
    Stream("batch", "sk-demo-research", per_second=24),
)
PROMPT_TOKENS = (40, 320)
OUTPUT_TOKENS = (16, 48)


def arrivals(duration_s: float, seed: int = 1) -> list[Arrival]:
    """All requests of one run, in order of their times."""
    rng = random.Random(seed)
    found: list[Arrival] = []
    for stream in STREAMS:
        times: list[float] = []
        at_s = rng.expovariate(stream.per_second)
        while at_s < duration_s:
            times.append(at_s)
            at_s += rng.expovariate(stream.per_second)
        found += [Arrival(at_s, stream, rng.randint(*PROMPT_TOKENS), rng.randint(*OUTPUT_TOKENS)) for at_s in times]
    return sorted(found, key=lambda arrival: arrival.at_s)
