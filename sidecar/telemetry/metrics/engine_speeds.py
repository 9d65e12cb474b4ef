"""The metrics of the engines' speed, where a tier's service gain is measured. They are those of one process.

In a pool of several engines each has its series, labeled with its name, of 64 engines at most. In a pool of one there
is no such label.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sidecar.telemetry import semconv


@dataclass(frozen=True, slots=True)
class EngineSpeedSample:
    """The speed of one engine, in seconds. `engine` is None in a pool of one engine.

    The errors are None while the stated defaults predict.
    """

    engine: str | None
    prefill_token_s: float
    output_token_s: float
    between_tokens_s: float
    first_error: float | None = None
    token_error: float | None = None


class EngineSpeedMetric(NamedTuple):
    """One metric. `value` is the attribute of `EngineSpeedSample` that it reports, unless that is None."""

    name: str
    value: str
    description: str
    unit: str = "s"


ENGINE_SPEED_GAUGES = (
    EngineSpeedMetric(
        semconv.ENGINE_PREFILL_TIME, "prefill_token_s", "The engine's time for an uncached token of a prompt."
    ),
    EngineSpeedMetric(
        semconv.ENGINE_OUTPUT_TIME, "output_token_s", "The engine's time for an output token, as one of all that run."
    ),
    EngineSpeedMetric(
        semconv.ENGINE_TOKEN_TIME, "between_tokens_s", "The time between two tokens of an answer, at the present load."
    ),
    EngineSpeedMetric(
        semconv.ENGINE_FIRST_ERROR,
        "first_error",
        "Mean error of the predicted times to first tokens, in parts of the larger of both times.",
        "",
    ),
    EngineSpeedMetric(
        semconv.ENGINE_TOKEN_ERROR,
        "token_error",
        "Mean error of the predicted times between tokens, in parts of the larger of both times.",
        "",
    ),
)
