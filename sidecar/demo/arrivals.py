"""Who sends what, when: one fixed, seeded sequence of requests that every run replays.

An open loop: nobody waits for an answer before sending. Interactive and internal traffic comes as a Poisson process and
alone keeps the engine full; a second and a half in (sooner in a short run), a research job adds its batch. Together
they ask for about a third more than the engine can do.
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
    burst: int = 0


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
    Stream("batch", "sk-demo-research", per_second=6, burst=150),
)
BURST_AT_S = 1.5
PROMPT_TOKENS = (40, 320)
OUTPUT_TOKENS = (16, 48)


def arrivals(duration_s: float, seed: int = 1) -> list[Arrival]:
    """All requests of one run, in order of their times."""
    rng = random.Random(seed)
    burst_at_s = min(BURST_AT_S, duration_s / 4)  # also a short run spends most of its time in the overload
    found: list[Arrival] = []
    for stream in STREAMS:
        times = [burst_at_s] * stream.burst
        at_s = rng.expovariate(stream.per_second)
        while at_s < duration_s:
            times.append(at_s)
            at_s += rng.expovariate(stream.per_second)
        found += [Arrival(at_s, stream, rng.randint(*PROMPT_TOKENS), rng.randint(*OUTPUT_TOKENS)) for at_s in times]
    return sorted(found, key=lambda arrival: arrival.at_s)
