"""When requests are sent and how long they are."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sidecar.tools.replay.plan import Sizing, rounding_s, schedule
from sidecar.tools.replay.trace import TraceRow, read_trace

REAL = Path(__file__).parent / "traces"


def row(at_s: float | None, session: str | None = None, delay_s: float = 0.0, line: int = 1) -> TraceRow:
    return TraceRow(line, at_s, input_tokens=1000, output_tokens=100, session=session, delay_s=delay_s)


def test_real_mooncake_timestamps_are_known_to_be_rounded_and_those_of_azure_are_not() -> None:
    assert rounding_s(read_trace(str(REAL / "mooncake.jsonl")).rows) == pytest.approx(3.0, abs=0.01)
    assert rounding_s(read_trace(str(REAL / "azure.csv")).rows) == 0.0
    assert rounding_s(read_trace("burst").rows) == 0.0


def test_jitter_spreads_what_was_rounded_and_keeps_the_beginning_at_zero() -> None:
    rows = read_trace(str(REAL / "mooncake.jsonl")).rows
    moved = schedule(rows, Sizing(), 3.0, random.Random(1))
    times = [one.at_s or 0.0 for one in moved]
    assert min(times) == 0.0
    assert len(set(times)) == len(times)
    late = [after - (one.at_s or 0.0) for one, after in zip(rows, times, strict=True)]
    assert max(late) - min(late) < 3.0
    assert moved == schedule(rows, Sizing(), 3.0, random.Random(1))


def test_speed_divides_times_and_delays() -> None:
    found = schedule([row(0.0), row(10.0, "a"), row(None, "a", 4.0)], Sizing(speed=4), 0.0, random.Random(1))
    assert [(one.at_s, one.delay_s) for one in found] == [(0.0, 0.0), (2.5, 0.0), (None, 1.0)]


def test_scale_comes_before_the_caps_and_leaves_a_token() -> None:
    [found] = schedule([row(0.0)], Sizing(scale=0.1, max_input_tokens=60), 0.0, random.Random(1))
    assert (found.input_tokens, found.output_tokens) == (60, 10)
    [found] = schedule([row(0.0)], Sizing(scale=1e-9), 0.0, random.Random(1))
    assert (found.input_tokens, found.output_tokens) == (1, 1)
    assert Sizing(scale=0.25).block_tokens == 128
    unknown = TraceRow(1, 0.0, text="x")
    [found] = schedule([unknown], Sizing(scale=2, max_output_tokens=3), 0.0, random.Random(1))
    assert (found.input_tokens, found.output_tokens) == (None, None)
