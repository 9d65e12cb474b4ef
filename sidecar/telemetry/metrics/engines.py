"""The metrics of a pool of several engines, by engine. A pool of one has none of them.

An engine is labeled with its name, not with its incarnation, and a pool has 64 at most. The series of an engine end
when it is gone and holds nothing any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sidecar.telemetry import semconv

MOST_SHOWN = 64
STATES = ("ready", "starting", "capped", "suspect", "down", "draining", "gone", "unreachable")

_REQUESTS, _TOKENS = "{request}", "{token}"


@dataclass(frozen=True, slots=True)
class EngineSample:
    """One engine. None is unbounded, or not known. What it holds is the pool's; the counts are this process's."""

    name: str
    state: str
    capacity_tokens: int | None = None
    capacity_requests: int | None = None
    held_tokens: int = 0
    held_requests: int = 0
    unprefilled_tokens: int = 0
    claims: int = 0
    in_flight: int = 0
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    measured_tokens: int | None = None
    ejections: Mapping[str, int] = field(default_factory=dict)
    replays: Mapping[str, int] = field(default_factory=dict)


class EngineMetric(NamedTuple):
    """One metric. `value` is the attribute of `EngineSample` that it reports, unless that is None.

    With a `label` that attribute has a number for each of the label's values.
    """

    name: str
    value: str
    description: str
    unit: str = _REQUESTS
    label: str | None = None


ENGINE_GAUGES = (
    EngineMetric(
        semconv.ENGINE_CAPACITY_TOKENS, "capacity_tokens", "Tokens of the engine, whole, also in a slow start.", _TOKENS
    ),
    EngineMetric(semconv.ENGINE_CAPACITY_REQUESTS, "capacity_requests", "Requests that the engine has room for."),
    EngineMetric(semconv.ENGINE_HELD_TOKENS, "held_tokens", "Tokens that leases hold on the engine.", _TOKENS),
    EngineMetric(semconv.ENGINE_HELD_REQUESTS, "held_requests", "Requests that leases hold on the engine."),
    EngineMetric(
        semconv.ENGINE_UNPREFILLED,
        "unprefilled_tokens",
        "Prompt tokens that were sent to the engine, and not answered with a first byte yet.",
        _TOKENS,
    ),
    EngineMetric(semconv.ENGINE_CLAIMS, "claims", "Requests in line for this engine."),
    EngineMetric(semconv.ENGINE_IN_FLIGHT, "in_flight", "Admitted requests of this process at the engine."),
)

ENGINE_COUNTERS = (
    EngineMetric(
        semconv.ENGINE_EJECTIONS,
        "ejections",
        "How often this process stopped to use the engine, by what it found.",
        "{ejection}",
        semconv.ADMISSION_REASON,
    ),
    EngineMetric(
        semconv.REPLAYS,
        "replays",
        "Requests that left the engine before the first byte of their answer, and waited for one again, by the reason.",
        _REQUESTS,
        semconv.ADMISSION_REASON,
    ),
    EngineMetric(semconv.PROMPT_TOKENS, "prompt_tokens", "Tokens of the prompts sent to the engine.", _TOKENS),
    EngineMetric(
        semconv.PREFIX_PREDICTED,
        "predicted_tokens",
        "Tokens of these prompts that the engine was predicted to have cached.",
        _TOKENS,
    ),
    EngineMetric(
        semconv.PREFIX_MEASURED,
        "measured_tokens",
        "Tokens of these prompts that the engine has reported as cached, where it reports them.",
        _TOKENS,
    ),
)


def engine_values(metric: EngineMetric, sample: EngineSample) -> Sequence[tuple[int, dict[str, str]]]:
    """The numbers of one engine, each with its labels but the pool's."""
    labels, value = {semconv.ADMISSION_ENGINE: sample.name}, getattr(sample, metric.value)
    if value is None:
        return ()
    if metric.label is None:
        return ((value, labels),)
    return [(number, {**labels, metric.label: of}) for of, number in value.items()]


def state_values(sample: EngineSample) -> Sequence[tuple[int, dict[str, str]]]:
    """1 for the state that the engine is in, and 0 for each other."""
    labels = {semconv.ADMISSION_ENGINE: sample.name}
    return [(int(state == sample.state), {**labels, semconv.ENGINE_STATE: state}) for state in STATES]
