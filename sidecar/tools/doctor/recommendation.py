"""The `capacity` to write for an engine. Apart from the burst that finds it out: `sidecar init` sends none."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from sidecar.engines.base import Gauges
from sidecar.policy.capacity import DEFAULT_FRACTION as FRACTION
from sidecar.policy.capacity import DEFAULT_WAITING as WAITING

if TYPE_CHECKING:
    from sidecar.tools.doctor.burst import Burst


class Queueing(str, Enum):
    """Where requests waited."""

    INSIDE = "inside the engine"
    BEFORE = "before the engine"
    BOUNDED = "behind a bound"
    TOO_LITTLE = "too little load"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """One line of YAML, ready to paste, and why it says what it says."""

    yaml: str
    reason: str


def recommend(gauges: Gauges, burst: Burst | None, where: Queueing, others: int | None) -> Recommendation | None:
    """None where nothing is known of either dimension."""
    requests, reason = gauges.max_running, "the engine says how many run at once"
    if requests is None and burst is not None and where in (Queueing.INSIDE, Queueing.BOUNDED):
        requests, reason = ran_at_once(burst), "as many ran at once while others waited"
        if others:
            reason += f", beside {others} requests of other clients: measure again when there are none"
    if gauges.kv_tokens is not None and gauges.max_running is not None:
        reason = f"the engine says both: {gauges.kv_tokens:,} tokens in its KV cache, {gauges.max_running:,} requests"
        return Recommendation(f"capacity: {{from: engine, fraction: {FRACTION}, waiting: {WAITING}}}", reason)
    if gauges.kv_tokens is not None:
        tokens = f"the engine says that its KV cache holds {gauges.kv_tokens:,} tokens"
        if requests is None:
            text = f"capacity: {{from: engine, fraction: {FRACTION}, waiting: {WAITING}}}"
            return Recommendation(text, f"{tokens}, but not how many requests run at once, and no burst showed it")
        text = f"capacity: {{from: engine, fraction: {FRACTION}, waiting: {WAITING}, requests: {requests + WAITING}}}"
        return Recommendation(text, f"{tokens}; {requests} requests, {reason}, and {WAITING} that may wait in it")
    if requests is None:
        return None
    return Recommendation(
        f"capacity: {{requests: {requests}}}", f"{reason}; the engine does not say how many tokens its KV cache holds"
    )


def ran_at_once(burst: Burst) -> int:
    """By the engine's own gauge where it shows a queue, otherwise as the clients saw it."""
    if burst.waiting_inside and burst.running_inside:
        return burst.running_inside
    return burst.at_once
