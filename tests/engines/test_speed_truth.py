"""Truth of the one model of an engine's speed: emulated engines in virtual time, quiet, in overload and in between.

What each reader gets is compared with what the engine's step model takes, or with what answers really took. The middle
error is bounded, and a wrong engine is noticed.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.observe import arrivals, request
from sidecar.engines import ENGINES
from sidecar.engines.speed import EngineSpeed
from sidecar.policy import compiler
from sidecar.pools import Pool
from sidecar.tools.emulator import Emulator, EmulatorConfig, StepModel
from sidecar.tools.loadgen import Planned, Seen
from sidecar.tools.simulate.model_fit import step_times
from tests.support.middleware import Caller, TestedMiddleware
from tests.support.virtual_time import run_virtually, virtual_now_us

ENGINES_BY_NAME = {
    "one step for everything": StepModel(step_us=50_000, max_sequences=8, chunk_tokens=512),
    "a GPU": StepModel(
        step_us=9_000, step_us_per_sequence=90, step_us_per_prefill_token=30, max_sequences=64, chunk_tokens=2048
    ),
    "slower with each sequence": StepModel(
        step_us=30_000, step_us_per_sequence=3_000, step_us_per_prefill_token=200, max_sequences=16, chunk_tokens=1024
    ),
}
LOADS = {"low": (0.15,), "overload": (2.0,), "changing": (0.2, 2.0, 0.2)}
"""Parts of what the engine serves, one after the other."""
PROMPTS, OUTPUTS = (50, 300, 1000, 4000), (16, 80)
REQUESTS = 150
"""Of each part of a load."""
POLICY = """\
engine: vllm
mode: {mode}
capacity: {{requests: {room}}}
tiers:
  high: {{slo: {{ttft: 2s, tpot: 100ms}}, gain: {{weight: 2}}}}
default_tier: high
anonymous: high
endpoints:
  /v1/chat/completions: {{}}
"""


class Truth(NamedTuple):
    """What an engine takes, in microseconds."""

    steps: StepModel

    def alone(self, prompt: int) -> float:
        """To the first token of a prompt that is alone."""
        count = -(-prompt // self.steps.chunk_tokens)
        return count * self.token(1) + prompt * self.steps.step_us_per_prefill_token

    def token(self, running: float) -> float:
        """For a token of each sequence, with no prompt in the steps."""
        return self.steps.step_us + self.steps.step_us_per_sequence * running

    @property
    def prompt_token(self) -> float:
        """For a prompt token, in full steps."""
        return self.steps.step_us_per_prefill_token + self.steps.step_us / self.steps.chunk_tokens


def plan(steps: StepModel, load: str) -> list[Planned]:
    luck, planned, at_s = random.Random(load), list[Planned](), 0.0
    truth = Truth(steps)
    output, prompt = sum(OUTPUTS) / 2, sum(PROMPTS) / len(PROMPTS)
    service_s = (output * truth.token(0) / steps.max_sequences + prompt * truth.prompt_token) / 1e6
    for part in LOADS[load]:
        ends_s = at_s + REQUESTS * service_s / part
        planned += [
            request(one_s, "high", prompt=luck.choice(PROMPTS), output=luck.randint(*OUTPUTS))
            for one_s in arrivals(luck, part / service_s, at_s, ends_s)
        ]
        at_s = ends_s + 2 * REQUESTS * service_s * max(0.0, part - 1)
    return planned


def played(steps: StepModel, load: str, folder: Path, mode: str) -> tuple[TestedMiddleware, Sequence[Sequence[float]]]:
    """A load in one mode. Returns what learned, and the moments at which each answer's chunks came."""
    room = steps.max_sequences
    (folder / "policy.yaml").write_text(POLICY.format(mode=mode, room=room))
    policy = compiler.load(folder)

    async def play() -> tuple[TestedMiddleware, Sequence[Sequence[float]]]:
        pool = Pool(policy, virtual_now_us)
        sidecar = TestedMiddleware(
            Emulator(EmulatorConfig(engine=ENGINES["vllm"], steps=steps)).app,
            policy=policy,
            pool=pool,
        )

        async def one(planned: Planned) -> Sequence[float]:
            await asyncio.sleep(planned.at_s)
            headers = [(name.encode(), value.encode()) for name, value in planned.headers.items()]
            moments: list[float] = []

            async def send(message: object) -> None:
                moments.append(virtual_now_us())

            caller = Caller(sidecar, planned.body, headers=headers)
            await sidecar(caller.scope, caller._receive, send)
            return moments

        moments = await asyncio.gather(*(one(planned) for planned in plan(steps, load)))
        await asyncio.sleep(600)
        return sidecar, moments

    return run_virtually(play())


BY_DEFAULT = (("one step for everything", "low"), ("slower with each sequence", "overload"), ("a GPU", "changing"))
EACH = [
    pytest.param(name, load, marks=() if (name, load) in BY_DEFAULT else pytest.mark.long)
    for name in ENGINES_BY_NAME
    for load in LOADS
]


def error(estimate: float, true: float) -> float:
    return abs(estimate - true) / max(estimate, true)


@pytest.mark.parametrize(("name", "load"), EACH)
def test_gain_and_placement_get_what_an_engine_takes_under_that_load(name: str, load: str, tmp_path: Path) -> None:
    steps = ENGINES_BY_NAME[name]
    sidecar, moments = played(steps, load, tmp_path, "enforce")
    speed = sidecar.gain.speeds.engine(None)
    found, document = speed.coefficients, speed.document(None)
    assert found.is_known
    assert error(found.prefill_ns / 1000, Truth(steps).prompt_token) < 0.2
    took_us = sorted((one[-3] - one[3]) / (len(one) - 6) for one in moments if len(one) > 20)
    assert 0.9 * took_us[0] < found.token_us < 1.1 * took_us[-1]
    assert document.first_error is not None
    assert document.token_error is not None
    assert document.first_error < (0.45 if load == "changing" else 0.25)
    assert document.token_error < 0.4


@pytest.mark.parametrize(("name", "load"), EACH)
def test_the_dry_run_gets_what_the_engine_would_take_with_less_to_do(name: str, load: str, tmp_path: Path) -> None:
    """Everything runs at once, so that a request in overload shows nothing of what the pool would leave."""
    steps = ENGINES_BY_NAME[name]
    sidecar, _ = played(steps, load, tmp_path, "observe")
    speed, truth = sidecar.engine_times.speed, Truth(steps)
    assert speed.first.line is not None
    firsts = [error(speed.first.line.at(prompt), truth.alone(prompt)) for prompt in PROMPTS]
    if load == "overload":  # there was no quiet time to learn in
        assert statistics.median(firsts) < 0.7
        return
    assert statistics.median(firsts) < 0.5
    assert error(speed.token.at(1) or 0.0, truth.token(1)) < 0.25


@pytest.mark.parametrize("name", ENGINES_BY_NAME)
def test_the_probe_of_the_doctor_gets_the_steps(name: str) -> None:
    steps = ENGINES_BY_NAME[name]
    truth = Truth(steps)
    lone = [seen(prompt, 2, truth.alone(prompt), 0.0) for prompt in (64, 490, 550, 1_000, 1_080, 2_010, 2_120, 3_900)]
    batches = [
        [seen(1, 32, truth.token(size), truth.token(size), label=size)] * size
        for size in (1, 4, 16, 64)
        if size <= steps.max_sequences
    ]
    found = step_times(lone * 3, batches)
    assert found.step_us == pytest.approx(steps.step_us, rel=0.02)
    assert found.step_us_per_sequence == pytest.approx(steps.step_us_per_sequence, rel=0.05, abs=1)
    assert found.step_us_per_prefill_token == pytest.approx(steps.step_us_per_prefill_token, rel=0.05, abs=1)
    assert found.chunk_tokens == steps.chunk_tokens


def seen(prompt: int, output: int, first_us: float, token_us: float, label: int | None = None) -> Seen:
    planned = Planned(0.0, "/", {}, b"", label=str(label or prompt))
    end_us = first_us + token_us * (output - 1)
    return Seen(planned, 0.0, first_us / 1e6, end_us / 1e6, 200, None, output, prompt, {}, None, 0)


def test_an_engine_that_becomes_four_times_as_slow_is_noticed() -> None:
    speed, fast, now_us = EngineSpeed(), Truth(ENGINES_BY_NAME["a GPU"]), 0
    for factor in (1.0, 4.0):
        for number in range(600):
            now_us = serve(speed, fast, factor, PROMPTS[number % 4], now_us)
        found = speed.coefficients
        assert error(found.prefill_ns / 1000, factor * fast.prompt_token) < 0.2
        assert error(found.token_us, factor * fast.token(1)) < 0.2


def serve(speed: EngineSpeed, truth: Truth, factor: float, prompt: int, now_us: int) -> int:
    """One request alone at the engine, which takes so many times as long. Returns when the next one comes."""
    call = speed.sent("acme", prompt, now_us)
    first_us = now_us + round(factor * truth.alone(prompt))
    since = speed.first_token(call, first_us)
    until = speed.load(first_us + round(factor * 31 * truth.token(1)))
    speed.tokens_came(call, since, until, 31.0)
    speed.ended(call, until.at_us)
    return until.at_us + 100_000
