"""The SLO of a tier in the dry run: what is said that `hold` would do comes when enforcing, in virtual time.

The engine is the emulator's own: it is slow when it is full. What is played while observing is played while enforcing.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path

from sidecar.cluster.dry_run import ObservedSlo, observed_report
from sidecar.engines import ENGINES
from sidecar.lengths.token_estimates import Estimator
from sidecar.policy import compiler
from sidecar.policy.model import Policy
from sidecar.pools import Pool
from sidecar.pools.guards import GuardFigures
from sidecar.telemetry.dry_run import DryRunStats
from sidecar.tools.emulator import Emulator, EmulatorConfig, Scheduling, StepModel
from sidecar.tools.loadgen import Planned
from tests.support.middleware import Caller, TestedMiddleware, monitor
from tests.support.virtual_time import run_virtually, virtual_now_us

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


class Played:
    """The requests, played to one controller."""

    def __init__(self, mode: str, folder: Path) -> None:
        (folder / f"{mode}.yaml").write_text(POLICY.replace("MODE", mode))
        self.policy: Policy = compiler.load(folder / f"{mode}.yaml")
        self.pool = Pool(self.policy, virtual_now_us)
        steps = StepModel(max_sequences=128, step_us=20_000, step_us_per_sequence=1500, chunk_tokens=2048)
        engine = Emulator(EmulatorConfig(engine=ENGINES["vllm"], scheduling=Scheduling("priority"), steps=steps))
        self.sidecar = TestedMiddleware(
            engine.app,
            policy=self.policy,
            pool=self.pool,
            dialect=self.policy.engine(self.policy.carrier),
            estimator=Estimator(),
            observer=None,
        )
        names = [tier.name for tier in self.policy.tiers]
        self.stats = DryRunStats(
            lambda: 0.0, holds=lambda: {names[n]: held for n, held in self.sidecar.engine_times.counted().items()}
        )
        self.stats.begin(self.policy.generation, 0)
        monitor(self.sidecar, observed=self.stats.note)
        self.share = 0.0
        self.guards: Sequence[GuardFigures] = ()

    async def play(self, requests: Sequence[Planned]) -> None:
        asyncio.get_running_loop().call_later(SECONDS, self._look)
        await asyncio.gather(*(self._one(request) for request in requests))
        await asyncio.sleep(600)  # shadows outlive their requests
        assert len(self.sidecar.shadows) == 0
        self.guards = self.pool.guards()

    def _look(self) -> None:
        self.share = self.pool.guards()[0].share

    async def _one(self, request: Planned) -> None:
        await asyncio.sleep(request.at_s)
        await Caller(self.sidecar, request.body, headers=[(b"x-priority", request.label.encode())]).run()

    def report(self) -> ObservedSlo:
        report = observed_report(self.policy, self.stats.read(20), "a", [], 1.0, self.guards)
        (found,) = report.slo
        return found


def test_what_hold_would_do_comes_when_enforcing(tmp_path: Path) -> None:
    requests = plan()

    async def both() -> tuple[Played, Played]:
        observing, enforcing = Played("observe", tmp_path), Played("enforce", tmp_path)
        await asyncio.gather(observing.play(requests), enforcing.play(requests))
        return observing, enforcing

    observing, enforcing = run_virtually(both())
    said, did = observing.report(), enforcing.guards[0]
    people = sum(request.label == "high" for request in requests)
    assert said.met + said.missed == said.would_meet + said.would_miss == did.met + did.missed == people
    assert said.met / people < 0.6
    assert abs(said.would_meet - did.met) / people < 0.1
    assert 0.4 < observing.share / enforcing.share < 2.5


def test_of_answers_that_do_not_stream_nothing_is_said(tmp_path: Path) -> None:
    async def observe() -> Played:
        observing = Played("observe", tmp_path)
        await observing.play(plan(stream=False))
        return observing

    said = run_virtually(observe()).report()
    assert (said.met, said.missed, said.would_meet, said.would_miss) == (0, 0, 0, 0)


def test_without_hold_no_slo_is_reported(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY.replace("MODE", "observe").replace(", hold: 97%", ""))
    policy = compiler.load(tmp_path / "policy.yaml")
    stats = DryRunStats(lambda: 0.0)
    stats.begin(policy.generation, 0)
    assert observed_report(policy, stats.read(20), "a", [], 1.0).slo == []
