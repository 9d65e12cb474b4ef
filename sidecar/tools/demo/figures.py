"""Figures of a demo run: clients' results joined with the engine's record. Waits, starvation, shares, utilization by
tier.

Waiting is measured the same way in all three runs, before the engine and in it together: from the arrival of a request
to the moment it gets a slot. The arrival is that at the engine, less the wait in the sidecar. The way from a replica to
the engine takes milliseconds; it is part of the TTFT but of no wait. Starvation is the part of the wait after a
request that arrived later got a slot.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from sidecar.tools.emulator.generation import ServedGeneration
from sidecar.tools.loadgen import Planned, Seen, quantile, starvation_s

# -- Clients of the demo: one fixed, seeded sequence of requests, which every run replays.
#
# The loop is open: no client waits for an answer before it sends the next request. Each tier's requests are a
# Poisson process. Critical, high and normal together fill the engine; with low and batch it gets about a third more
# work than it can do. All tiers arrive alike, so at equal priority they wait alike. When the engine is full there is
# an incident: a burst of critical requests within a tenth of a second.


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


WAIT_HEADER = "x-admission-wait-ms"
QUANTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
FILLED_AFTER_S = 2.0
"""Shares and utilization are those of the overload: from here on, when the engine is full, to the last arrival. A run
of less than twice as long counts from its middle."""
Distribution = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TierMeasurement:
    """One tier in one run. `requests` were sent, `answered` are those that the distributions are of.

    `share` is its part of the tokens that got a slot during the overload.
    """

    requests: int
    answered: int
    share: float
    ttft_s: Distribution
    queue_wait_s: Distribution
    starvation_s: Distribution


@dataclass(frozen=True, slots=True)
class RunMeasurement:
    """One run. `utilization` is the part of the engine's slots that was in use during the overload.

    `stalled_s` is the longest time for which the clients did not get to run: no time is more exact than that.
    `replicas` is how many sidecars stood before the engine, and `answered_by_replica` what each of them answered.
    """

    name: str
    utilization: float
    failed: int
    tiers: Mapping[str, TierMeasurement]
    replicas: int = 0
    answered_by_replica: Sequence[int] = ()
    stalled_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Request:
    tier: str
    tokens: int
    ttft_s: float
    arrived_s: float
    admitted_s: float
    end_s: float


def measure(
    name: str,
    tiers: Sequence[str],
    arrivals: Sequence[Arrival],
    seen: Sequence[Seen],
    log: Sequence[ServedGeneration],
    *,
    slots: int,
) -> RunMeasurement:
    """The figures of a run. `tiers` gives the order of the table, most important first; `seen` is by arrival."""
    requests = _join(arrivals, seen, log)
    if not requests:
        return RunMeasurement(name, 0.0, len(seen), {})
    times = sorted(request.arrived_s for request in requests)
    began_s, ended_s = min(times[0] + FILLED_AFTER_S, (times[0] + times[-1]) / 2), times[-1]
    busy_s = sum(max(0.0, min(r.end_s, ended_s) - max(r.admitted_s, began_s)) for r in requests)
    starved_s = starvation_s([r.arrived_s for r in requests], [r.admitted_s for r in requests])
    in_time = [request for request in requests if began_s <= request.admitted_s <= ended_s]
    all_tokens = sum(request.tokens for request in in_time) or 1
    sent = Counter(arrival.stream.tier for arrival in arrivals)
    found: dict[str, TierMeasurement] = {}
    for tier in tiers:
        mine = [
            (request, starved) for request, starved in zip(requests, starved_s, strict=True) if request.tier == tier
        ]
        if mine:
            found[tier] = TierMeasurement(
                requests=sent[tier],
                answered=len(mine),
                share=sum(request.tokens for request in in_time if request.tier == tier) / all_tokens,
                ttft_s=distribution([request.ttft_s for request, _ in mine]),
                queue_wait_s=distribution([request.admitted_s - request.arrived_s for request, _ in mine]),
                starvation_s=distribution([starved for _, starved in mine]),
            )
    utilization = busy_s / (slots * max(ended_s - began_s, 1e-9))
    return RunMeasurement(name, utilization, len(seen) - len(requests), found)


def _join(arrivals: Sequence[Arrival], seen: Sequence[Seen], log: Sequence[ServedGeneration]) -> list[_Request]:
    """The answered requests. The engine's own id is what follows the API's prefix in that of the answer."""
    served = {record.request_id: record for record in log}
    joined: list[_Request] = []
    for arrival, one in zip(arrivals, seen, strict=True):
        record = served.get((one.request_id or "").rpartition("-")[2])
        if record is None or record.admitted_s is None or not one.is_complete or one.ttft_s is None:
            continue
        arrived_s = record.arrival_s - float(one.headers.get(WAIT_HEADER, 0)) / 1000
        tokens = arrival.prompt_tokens + arrival.output_tokens
        joined.append(_Request(arrival.stream.tier, tokens, one.ttft_s, arrived_s, record.admitted_s, record.end_s))
    return joined


def distribution(values: Sequence[float]) -> Distribution:
    """The quantiles of some values."""
    return {name: quantile(values, part) for name, part in QUANTILES.items()}
