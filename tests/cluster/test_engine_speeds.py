from __future__ import annotations

from typing import Any

from sidecar.cluster.engine_speeds import engine_speed_rows
from sidecar.engines.speed import EngineSpeedDocument


def speed(engine: str | None = None, **more: Any) -> EngineSpeedDocument:
    plain: dict[str, Any] = {
        "prefill_ns": 100,
        "output_ns": 200,
        "token_us": 300,
        "first_us": 400,
        "is_known": True,
        "first_samples": 99,
        "token_samples": 99,
        "first_error": 0.1,
        "token_error": 0.2,
    }
    return EngineSpeedDocument(engine, **{**plain, **more})


def test_replicas_count_by_their_samples() -> None:
    (row,) = engine_speed_rows([[speed()], [speed(prefill_ns=500, first_samples=299, first_error=0.5)]])
    assert (row.prefill_ns, row.output_ns, row.first_error, row.is_known) == (400, 200, 0.4, True)


def test_a_replica_that_knows_nothing_yet_changes_nothing() -> None:
    unknown = speed(is_known=False, prefill_ns=9000, first_error=None, token_error=None)
    (row,) = engine_speed_rows([[unknown], [speed()]])
    assert (row.prefill_ns, row.first_error) == (100, 0.1)
    (alone,) = engine_speed_rows([[unknown]])
    assert (alone.prefill_ns, alone.is_known, alone.first_error) == (9000, False, None)


def test_every_engine_has_a_row_by_its_name() -> None:
    rows = engine_speed_rows([[speed("b"), speed("a")], [speed("b")], []])
    assert [row.engine for row in rows] == ["a", "b"]
