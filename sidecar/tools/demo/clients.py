"""Clients of the demo: one fixed, seeded sequence of requests, which every run replays.

The loop is open: no client waits for an answer before it sends the next request. Each tier's requests are a Poisson
process. Critical, high and normal together fill the engine; with low and batch it gets about a third more work than it
can do. All tiers arrive alike, so at equal priority they wait alike. When the engine is full there is an incident: a
burst of critical requests within a tenth of a second.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from sidecar.tools.loadgen import Planned


@dataclass(frozen=True, slots=True)
class ArrivalStream:
    """One kind of traffic. `header` is the tier that its client asks for, None where the key says it."""

    tier: str
    key: str
    per_second: float
    header: str | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `at_s` counts from the start of the run, sizes are in tokens."""

    at_s: float
    stream: ArrivalStream
    prompt_tokens: int
    output_tokens: int


STREAMS = (
    ArrivalStream("critical", "sk-demo-interactive", per_second=5, header="critical"),
    ArrivalStream("high", "sk-demo-interactive", per_second=36),
    ArrivalStream("normal", "sk-demo-standard", per_second=74),
    ArrivalStream("low", "sk-demo-standard", per_second=10, header="low"),
    ArrivalStream("batch", "sk-demo-research", per_second=24),
)
PROMPT_TOKENS = (40, 320)
OUTPUT_TOKENS = (16, 48)


BURST = 24
"""Requests of the incident: half as many again as the critical tier's reserve of the shipped pool."""
BURST_S = 0.1
BURST_AT = 5 / 8
"""The part of the run after which it begins: the engine has been full for a while, and stays so."""


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
        found += [_arrival(at_s, stream, rng) for at_s in times]
    burst = (BURST_AT * duration_s + BURST_S * number / BURST for number in range(BURST))
    found += [_arrival(at_s, STREAMS[0], rng) for at_s in burst if at_s < duration_s]
    return sorted(found, key=lambda arrival: arrival.at_s)


def _arrival(at_s: float, stream: ArrivalStream, rng: random.Random) -> Arrival:
    return Arrival(at_s, stream, rng.randint(*PROMPT_TOKENS), rng.randint(*OUTPUT_TOKENS))


PATH = "/v1/chat/completions"
_TEXT = "the queue serves a token under load while every tenant waits for some work before lunch and then goes home "
_BYTES_PER_TOKEN = 4

Asking = Callable[[ArrivalStream], tuple[Mapping[str, str], Mapping[str, object]]]
"""A request's headers and additional body members: what the three runs differ in."""


def planned(arrival: Arrival, asking: Asking) -> Planned:
    """The request of an arrival."""
    headers, members = asking(arrival.stream)
    size = arrival.prompt_tokens * _BYTES_PER_TOKEN
    body = {
        "model": "emulated",
        "messages": [{"role": "user", "content": (_TEXT * (size // len(_TEXT) + 1))[:size]}],
        "max_tokens": arrival.output_tokens,
        "stream": True,
        **members,
    }
    return Planned(arrival.at_s, PATH, headers, msgspec.json.encode(body))
