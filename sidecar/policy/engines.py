"""What an engine can and cannot do with a priority, as far as a policy must not ask for the impossible.

The engines' dialects themselves are in `sidecar.engines`, which the policy does not import.
"""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.policy.model import Carrier, EngineName

_CARRIERS = {
    EngineName.TENSORRT_LLM: (Carrier.BODY,),
    EngineName.VLLM: (Carrier.HEADER, Carrier.BODY),
    EngineName.SGLANG: (Carrier.BODY, Carrier.HEADER),
    EngineName.DYNAMO: (Carrier.HEADER,),
    EngineName.NONE: (),
}
_LOWER_FIRST = frozenset({EngineName.VLLM})  # everywhere else a higher number is the more important one


def carried_by(engine: object, carrier: Carrier | None) -> Carrier | None:
    """Refuses a way of forwarding that the engine does not have."""
    if carrier is None or not isinstance(engine, EngineName) or carrier in _CARRIERS[engine]:
        return carrier
    if engine is EngineName.NONE:
        raise ValueError("the engine none is sent no priority; remove this line")
    raise ValueError(f"{engine.value} reads no priority from a {carrier.value}; write {_CARRIERS[engine][0].value}")


def thresholds_of(
    engine: EngineName, listed: bool, thresholds: dict[str, float] | None, tiers: Sequence[str]
) -> dict[str, float] | None:
    """Checks the thresholds for the source `engine`: there exactly when it is listed, and in the engine's direction."""
    if not listed and thresholds is None:
        return None
    if not listed:
        raise ValueError("only read for the source engine; add engine to sources, or remove this")
    if engine is EngineName.NONE:
        raise ValueError("the engine none has no priority of its own; remove engine from sources")
    if not thresholds:
        raise ValueError("missing; the source engine needs it, such as engine_levels: {high: 10, normal: 5, batch: 0}")
    if engine is EngineName.TENSORRT_LLM and any(not 0 <= value <= 1 for value in thresholds.values()):
        raise ValueError("tensorrt-llm's priorities go from 0 to 1; write thresholds from 0.0 to 1.0")
    named = [thresholds[name] for name in tiers if name in thresholds]
    best_first = sorted(set(named), reverse=engine not in _LOWER_FIRST)
    if named != best_first:
        word = "lower" if engine in _LOWER_FIRST else "higher"
        raise ValueError(f"{engine.value} serves {word} numbers first; give each more important tier a {word} number")
    return thresholds
