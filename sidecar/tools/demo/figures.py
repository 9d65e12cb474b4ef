"""Figures of a demo run: clients' results joined with the engine's record. Waits, starvation, shares, utilization by
tier.

Waiting is measured the same way in all three runs, before the engine and in it together: from the arrival of a request
to the moment it gets a slot. The arrival is that at the engine, less the wait in the sidecar. The way from a replica to
the engine takes milliseconds; it is part of the TTFT but of no wait. Starvation is the part of the wait after a
request that arrived later got a slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sidecar.tools.demo.clients import Arrival
from sidecar.tools.emulator.generation import ServedGeneration
from sidecar.tools.loadgen import Seen, quantile, starvation_s

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
