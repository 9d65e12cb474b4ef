"""The SLO of a tier in the dry run: what is said that `hold` would do comes when enforcing, in virtual time.

The engine is the emulator's own: it is slow when it is full. What is played while observing is played while enforcing.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

from sidecar.cluster.dry_run import ObservedSlo, observed_report
from sidecar.engines import ENGINES
from sidecar.policy import compiler
from sidecar.telemetry.dry_run import DryRunStats
from sidecar.tools.emulator import Emulator, EmulatorConfig, Scheduling, StepModel
from sidecar.tools.loadgen import Planned
from tests.admission.dry_run.played import Played
from tests.support.virtual_time import run_virtually

SECONDS, QUIET_S = 60, 10
POLICY = """\
engine: vllm
mode: MODE
capacity: {tokens: 400k, requests: 128}
tiers:
  high: {slo: {ttft: 500ms, tpot: 60ms, hold: 97%}}
  batch: {queue: {max_requests: 10k}}
default_tier: high
anonymous: high
endpoints: {/v1/chat/completions: {}}
"""


def plan(*, stream: bool = True) -> list[Planned]:
    """People from the start on, and after some seconds more batch work than the engine can do within their SLO."""
    rng, found = random.Random(1), []
    for tier, per_s, from_s, output in (("high", 3, 0, (20, 60)), ("batch", 5, QUIET_S, (40, 120))):
        at_s = float(from_s)
        while (at_s := at_s + rng.expovariate(per_s)) < SECONDS:
            words = [{"role": "user", "content": "x " * rng.randint(100, 600)}]
            body = {"model": "m", "max_tokens": rng.randint(*output), "stream": stream, "messages": words}
            headers = {"x-priority": tier}
            found.append(Planned(at_s, "/v1/chat/completions", headers, json.dumps(body).encode(), tier))
    return found


def new(mode: str, folder: Path) -> Played:
    (folder / f"{mode}.yaml").write_text(POLICY.replace("MODE", mode))
    steps = StepModel(max_sequences=128, step_us=20_000, step_us_per_sequence=1500, chunk_tokens=2048)
    engine = Emulator(EmulatorConfig(engine=ENGINES["vllm"], scheduling=Scheduling("priority"), steps=steps))
    return Played(compiler.load(folder / f"{mode}.yaml"), engine)


def report_of(played: Played) -> ObservedSlo:
    (found,) = observed_report(played.policy, played.stats.read(20), "a", [], 1.0, played.guards).slo
    return found


def test_what_hold_would_do_comes_when_enforcing(tmp_path: Path) -> None:
    requests = plan()

    async def both() -> tuple[Played, Played, list[float]]:
        observing, enforcing = new("observe", tmp_path), new("enforce", tmp_path)
        playing = asyncio.gather(observing.play(requests), enforcing.play(requests))
        await asyncio.sleep(SECONDS)
        shares = [played.pool.guards()[0].share for played in (observing, enforcing)]
        await playing
        return observing, enforcing, shares

    observing, enforcing, shares = run_virtually(both())
    said, did = report_of(observing), enforcing.guards[0]
    people = sum(request.label == "high" for request in requests)
    assert said.met + said.missed == said.would_meet + said.would_miss == did.met + did.missed == people
    assert said.met / people < 0.6
    assert abs(said.would_meet - did.met) / people < 0.1
    assert 0.4 < shares[0] / shares[1] < 2.5


def test_of_answers_that_do_not_stream_nothing_is_said(tmp_path: Path) -> None:
    async def observe() -> Played:
        observing = new("observe", tmp_path)
        await observing.play(plan(stream=False))
        return observing

    said = report_of(run_virtually(observe()))
    assert (said.met, said.missed, said.would_meet, said.would_miss) == (0, 0, 0, 0)


def test_without_hold_no_slo_is_reported(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY.replace("MODE", "observe").replace(", hold: 97%", ""))
    policy = compiler.load(tmp_path / "policy.yaml")
    stats = DryRunStats(lambda: 0.0)
    stats.begin(policy.generation, 0)
    assert observed_report(policy, stats.read(20), "a", [], 1.0).slo == []
