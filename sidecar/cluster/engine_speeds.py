"""Speeds of the engines as all replicas measure them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from sidecar.cluster.document import EngineSpeedRow
from sidecar.engines.speed import EngineSpeedDocument


def engine_speed_rows(replicas: Iterable[Iterable[EngineSpeedDocument]]) -> list[EngineSpeedRow]:
    """A row for each engine. Replicas that know its speed count by their samples; without one the defaults stand."""
    by_engine: dict[str | None, list[EngineSpeedDocument]] = {}
    for speed in (speed for documents in replicas for speed in documents):
        by_engine.setdefault(speed.engine, []).append(speed)
    return [_row(engine, by_engine[engine]) for engine in sorted(by_engine, key=lambda name: name or "")]


def _row(engine: str | None, found: list[EngineSpeedDocument]) -> EngineSpeedRow:
    known = [speed for speed in found if speed.is_known] or found
    return EngineSpeedRow(
        engine=engine,
        prefill_ns=round(_mean(known, lambda speed: speed.prefill_ns) or 0),
        output_ns=round(_mean(known, lambda speed: speed.output_ns) or 0),
        token_us=round(_mean(known, lambda speed: speed.token_us) or 0),
        is_known=known[0].is_known,
        first_error=_mean(known, lambda speed: speed.first_error),
        token_error=_mean(known, lambda speed: speed.token_error),
    )


def _mean(found: Sequence[EngineSpeedDocument], figure: Callable[[EngineSpeedDocument], float | None]) -> float | None:
    """The mean by samples; of all alike where there are none."""
    figures = [(figure(speed), speed.first_samples + 1) for speed in found]
    counted = [(value, samples) for value, samples in figures if value is not None]
    whole = sum(samples for _, samples in counted)
    return round(sum(value * samples for value, samples in counted) / whole, 4) if whole else None
