"""Engines that follow `admission.capacity.wanted` by the rule of examples/kubernetes/scaling, in virtual time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from sidecar.policy.compiler import load
from sidecar.tools.replay.trace import TraceRow
from sidecar.tools.simulate.load import Request
from sidecar.tools.simulate.play import SimulatedEngines, VirtualLoop, play
from sidecar.tools.step_model.model import EngineModel
from tests.tools.simulate.autoscaler import Autoscaler, Scaling, of_the_example

MODEL = EngineModel(name="slow", step_us=500_000, kv_tokens=100_000, max_sequences=16)
"""An answer takes a minute, so that an engine serves one every four seconds. Chance weighs more than on a large one."""
GUARDED = EngineModel(name="guarded", step_us=200_000, step_us_per_sequence=20_000, kv_tokens=100_000, max_sequences=16)
"""It has 380 ms a token up to 9 of its 16 places."""
POLICY = """\
engine: vllm
engines: {static: [{name: a, url: "http://a:8000"}], capacity: {tokens: 100k, requests: 16}, prefill: 8k}
tiers:
  high: {reserve: 40%HIGH}
  batch: {reserve: 5%, limit: LIMIT, queue: {max_requests: 100k}}
default_tier: high
anonymous: high
endpoints: {/v1/chat/completions: {}}
"""
HOUR_S = 600.0
"""A day is played in four hours: an autoscaler finds that harder, and a test shorter."""
MOST_PER_S = 2.0
Rate = Callable[[float], float]
EXAMPLE = of_the_example()


def hardly(_: float) -> float:
    return 0.05


def day(at_s: float) -> float:
    """Requests a second: most at one in the afternoon, when they fill five engines; next to none from 20 to 6."""
    return 0.05 + 1.2 * max(0.0, math.sin(math.pi * (at_s / HOUR_S - 6) / 14)) ** 2


def coming(seed: int, rate: Rate, seconds: float, tier: int) -> list[Request]:
    rng, found, at_s = random.Random(seed), [], 0.0
    while (at_s := at_s + rng.expovariate(MOST_PER_S)) < seconds:
        if rng.random() * MOST_PER_S < rate(at_s):
            row = TraceRow(line=1, at_s=at_s, input_tokens=rng.randint(100, 1500), output_tokens=rng.randint(60, 180))
            found.append(Request(row, tier, f"tenant-{tier}", ()))
    return found


@dataclass(frozen=True)
class Run:
    """One run."""

    offered: Sequence[Request]
    scaler: Autoscaler

    def longest_wait_s(self, tier: int = 0) -> float:
        """Until an engine began; every request was answered."""
        assert {one.refusal for one in self.offered} == {None}
        return max((one.started_us or 0) - one.at_us for one in self.offered if one.tier == tier) / 1e6

    def engines_at(self, at_s: float) -> int:
        return [count for since_s, count in self.scaler.changes if since_s <= at_s][-1]


@pytest.fixture
def played(tmp_path: Path) -> Callable[..., Run]:
    def played(
        high: Rate,
        batch: Rate = lambda _: 0.0,
        *,
        seconds: float = 24 * HOUR_S,
        limit: str = "60%",
        slo: str = "",
        scaling: Scaling = EXAMPLE,
        model: EngineModel = MODEL,
    ) -> Run:
        (tmp_path / "policy.yaml").write_text(POLICY.replace("HIGH", slo).replace("LIMIT", limit))
        offered = [*coming(1, high, seconds, 0), *coming(2, batch, seconds, 1)]
        offered.sort(key=lambda one: one.at_us)
        loop = VirtualLoop()
        with loop.running():
            stage = SimulatedEngines(model, max(1, scaling.least), loop)
            scaler = Autoscaler(scaling, load(tmp_path), stage)
            play(offered, stage, scaler.admission)
        return Run(offered, scaler)

    return played


def test_a_day_has_one_rise_and_one_fall_and_nobody_waits_for_an_engine(played: Callable[..., Run]) -> None:
    run = played(day)
    assert run.scaler.turns == 1
    assert run.engines_at(5 * HOUR_S) == run.engines_at(23.5 * HOUR_S) == 1
    assert 5 <= run.engines_at(13 * HOUR_S) <= run.scaler.most <= 7, "five would be full"
    assert run.longest_wait_s() < EXAMPLE.down_s / 10


@pytest.mark.long
def test_at_ten_times_the_load_no_one_waits_for_longer_than_an_engine_takes_to_start(
    played: Callable[..., Run],
) -> None:
    run = played(lambda at_s: 1.5 if 600 < at_s < 2400 else 0.15, seconds=3600)
    assert run.scaler.turns == 1
    assert run.longest_wait_s() < 300 < EXAMPLE.down_s


def test_from_no_engine_the_first_request_gets_one_and_the_last_one_ends_after_the_cooldown(
    played: Callable[..., Run],
) -> None:
    run = played(
        lambda at_s: 0.05 if 600 < at_s < 1200 or at_s > 3600 else 0.0, seconds=4000, scaling=EXAMPLE._replace(least=0)
    )
    assert [count for _, count in run.scaler.changes] == [0, 1, 0, 1]
    (came_s, gone_s) = (at_s for at_s, _ in run.scaler.changes[1:3])
    assert 600 < came_s < 700
    assert gone_s > 1200 + EXAMPLE.down_s
    assert run.longest_wait_s() < 300


@pytest.mark.long
@pytest.mark.parametrize(("limit", "most", "turns"), [("100%", 8, 1), ("60%", 2, 0)])
def test_a_backlog_asks_for_engines_up_to_its_tiers_own_limit(
    played: Callable[..., Run], limit: str, most: int, turns: int
) -> None:
    def backlog(at_s: float) -> float:
        return 2.0 if 600 < at_s < 1500 else 0.0

    run = played(hardly, backlog, seconds=3600, limit=limit)
    assert (run.scaler.most, run.scaler.turns) == (most, turns)
    assert run.longest_wait_s() < 30
    assert (run.longest_wait_s(1) < EXAMPLE.down_s) == (limit == "100%")


@pytest.mark.long
def test_a_guard_that_bounds_batch_work_does_not_make_engines_come_and_go(played: Callable[..., Run]) -> None:
    """With the room that the guard keeps free counted as room there were 16 turns."""
    slo = ", slo: {ttft: 5s, tpot: 380ms, hold: 97%}"
    run = played(lambda _: 0.2, lambda _: 0.6, limit="100%", slo=slo, model=GUARDED)
    assert run.scaler.turns <= 6
    assert run.longest_wait_s(1) < EXAMPLE.down_s
