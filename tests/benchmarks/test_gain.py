"""The benchmark of the gain order: its arrivals, its check of floors, its targets, and one small run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.gain.floors import floors
from benchmarks.gain.runs import GAIN, LEVEL, THREE, Common, Job, Measured, measure, saturated_rate, weighted_jobs
from benchmarks.gain.targets import Target, targets
from benchmarks.gain.traces import CONV, window
from sidecar.tools.replay.trace import TraceRow
from sidecar.tools.simulate.baselines import NAMES
from sidecar.tools.simulate.load import Assign, Request

pytestmark = pytest.mark.long

FOLDER = Path(__file__).parent / "traces"
COMMON = Common(FOLDER, 1, 2, "llama-3.1-8b-h100")
MIX = {"high": 20.0, "normal": 50.0, "batch": 30.0}
WEIGHTS = ((4, 2, 1), (16, 4, 1))


def request(tier: int, at_s: float, started_s: float | None, end_s: float, tokens: int = 100) -> Request:
    one = Request(TraceRow(line=1, at_s=at_s, input_tokens=tokens - 10, output_tokens=10), tier, "tenant", ())
    one.started_us = None if started_s is None else round(started_s * 1e6)
    one.end_us = round(end_s * 1e6)
    return one


def test_a_floor_is_kept_where_a_waiting_tier_gets_its_part_in_time() -> None:
    others = [request(1, 0, second, second + 1) for second in range(20)]
    waits = [request(0, 2, 4, 5), request(0, 2, 5, 6)]
    top, _ = floors([*others, *waits], [0.1, 0.1], 10_000)
    assert top.stall_s == pytest.approx(2.0), "from 2 to 4 s"
    assert top.bound_s == pytest.approx(2.0)
    assert top.share == pytest.approx(0.25 / 0.1), "of 400 token seconds in three seconds it had 100"
    assert top.is_kept


def test_a_tier_that_is_starved_has_lost_its_floor() -> None:
    others = [request(1, 0, second, second + 1) for second in range(20)]
    (top, _) = floors([*others, request(0, 2, 12, 13)], [0.1, 0.1], 10_000)
    assert top.stall_s == pytest.approx(10.0)
    assert top.share == pytest.approx(0.0)
    assert not top.is_kept


def test_a_request_larger_than_the_floor_does_not_stall_it() -> None:
    others = [request(1, 0, second, second + 1) for second in range(20)]
    large = request(0, 2, 12, 13, tokens=2_000)
    assert floors([*others, large], [0.1, 0.1], 10_000)[0].stall_s == 0.0
    assert floors([*others, large, request(0, 3, None, 9)], [0.1, 0.1], 10_000)[0].stall_s == pytest.approx(6.0)


def runs(candidate: str, seed: int) -> list[Measured]:
    rate = saturated_rate(COMMON, CONV.name, 150, seed)
    found = window(CONV.name, FOLDER, 150, seed, 2)
    scale = 1.5 * rate * found.duration_s / 150
    job = Job(CONV.name, THREE, Assign.REQUEST, "heavy", scale, 150, seed, candidate, WEIGHTS)
    return [one for each in weighted_jobs(job) for one in measure(COMMON, each)]


def test_a_run_is_the_same_for_the_same_arguments_and_judged_by_every_weighting() -> None:
    found = runs(GAIN, 1)
    assert found == runs(GAIN, 1)
    assert [one.weights for one in found] == ["4:2:1", "16:4:1"]
    level = runs(LEVEL, 1)
    assert level[0].slo == level[1].slo, "it is played once"
    assert all(0 < one.tdg <= 1 and len(one.tier_slo) == 3 for one in found + level)


def test_targets_say_by_how_much_they_are_missed() -> None:
    one = runs(LEVEL, 1)[0]

    def of(candidate: str, tdg: float, slo: float, top_wait_s: float) -> list[Measured]:
        change = {"candidate": candidate, "tdg": tdg, "slo": slo, "top_wait_s": top_wait_s}
        return [msgspec.structs.replace(one, seed=seed, **change) for seed in (1, 2)]

    rivals = [run for name in NAMES for run in of(name, 0.8, 0.5, 9.0)]
    found = {
        (target.what, target.unit): target
        for target in targets([*of(GAIN, 0.88, 0.55, 1.0), *of(LEVEL, 0.6, 0.5, 0.5), *rivals])
    }
    by_tdg = found["TDG above that of engine-priority", "%"]
    assert by_tdg.value == pytest.approx(10.0)
    assert by_tdg.is_reached
    by_slo = found["SLO above that of engine-priority", "%"]
    assert by_slo.row()[-1] == "missed by 10.0"
    assert found["longest wait of the top tier, below that of sjf", "s"].value == pytest.approx(8.0)
    assert Target("kept", "x", 90.0, None, 100.0, "%").row()[2:] == ["+90.0 %", "+100", "missed by 10.0"]
