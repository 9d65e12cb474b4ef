"""The dry run before an engine that queues and slows down: the benchmark's loads, in virtual time, many seeds.

The engine is the emulator's own, with its step model. `benchmarks/observe.py` plays the same through real processes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import observe
from sidecar.cluster.dry_run import doubts
from sidecar.engines import ENGINES
from sidecar.policy import compiler
from sidecar.policy.model import Policy
from sidecar.telemetry.dry_run import added_up
from sidecar.tools.emulator import Emulator, EmulatorConfig, Scheduling, StepModel
from sidecar.tools.loadgen import Planned
from tests.admission.dry_run.played import Played
from tests.support.middleware import Caller
from tests.support.virtual_time import run_virtually

LOADS = {load.name: load for load in observe.LOADS}


def policy_of(load: observe.Load, mode: str, folder: Path) -> Policy:
    folder.mkdir(exist_ok=True)
    tiers = "\n".join(f"  {name}: {rules}" for name, rules in load.tiers.items())
    written = observe.POLICY.format(
        mode=f"mode: {mode}\n", capacity=load.capacity, tiers=tiers, first=next(iter(load.tiers))
    )
    (folder / "policy.yaml").write_text(written)
    (folder / "tenants.yaml").write_text(observe.TENANT.format(hash=hashlib.sha256(observe.KEY.encode()).hexdigest()))
    return compiler.load(folder)


def engine_of(load: observe.Load) -> Emulator:
    engine: Mapping[str, Any] = {**observe.ENGINE, **(load.engine or {})}
    steps = StepModel(
        max_sequences=engine["max-num-seqs"],
        step_us=engine["step-ms"] * 1000,
        step_us_per_sequence=engine.get("step-ms-per-seq", 0) * 1000,
        chunk_tokens=engine.get("prefill-tokens-per-step", 512),
    )
    config = EmulatorConfig(
        engine=ENGINES["vllm"],
        scheduling=Scheduling(engine["scheduling"]),
        steps=steps,
        max_queued=engine.get("max-queued"),
        context_tokens=engine.get("context-tokens", 131_072),
    )
    return Emulator(config)


def lines_of(load: observe.Load, seed: str, folder: Path) -> list[observe.Line]:
    """Both runs of a load: what was predicted and what came."""
    plan = load.plan(random.Random(seed))

    async def both() -> tuple[Played, list[tuple[Planned, Caller]]]:
        observing = Played(policy_of(load, "observe", folder / "observe"), engine_of(load))
        enforcing = Played(policy_of(load, "enforce", folder / "enforce"), engine_of(load))
        _, answers = await asyncio.gather(observing.play(plan), enforcing.play(plan))
        return observing, answers

    observing, answers = run_virtually(both())
    read = observing.stats.read(20)
    assert read is not None
    real: dict[str, list[tuple[int, float]]] = {}
    for planned, caller in answers:
        headers = dict(caller.sent[0]["headers"])
        wait_s = float(headers.get(b"x-admission-wait-ms", 0)) / 1000
        real.setdefault(planned.label, []).append((caller.status, wait_s))
    found, total = [], added_up(read.by_tier.values())
    for tier, all_real in real.items():
        waits_s = sorted(wait_s for status, wait_s in all_real if status == 200)
        refused = sum(status in (429, 503) for status, _ in all_real)
        did = observe.figures(len(all_real), waits_s, refused)
        counts = read.by_tier[tier]
        would = observe.Figures(
            counts.requests, counts.wait_us(0.5) / 1e6, counts.wait_us(0.99) / 1e6, sum(counts.refused.values())
        )
        reasons = [doubt.reason for doubt in doubts(total, read.by_tier, read.holds) if doubt.tier in ("", tier)]
        found.append(observe.Line(load.name, tier, would, did, reasons))
    return found


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", LOADS)
def test_what_is_predicted_comes_or_the_report_says_that_it_is_not_to_be_trusted(
    name: str, seed: int, tmp_path: Path
) -> None:
    lines = lines_of(LOADS[name], f"{name} {seed}", tmp_path)
    assert observe.missed(lines, of_all=False) == [], observe.table(lines)
    if name == "overload":  # a process that has seen one request without a load knows enough of such a flood
        assert not any(line.apart or line.reasons for line in lines), observe.table(lines)


def not_streamed(planned: Planned) -> Planned:
    body = {**json.loads(planned.body), "stream": False}
    del body["stream_options"]
    return replace(planned, body=json.dumps(body).encode())


@pytest.mark.parametrize("name", [
    pytest.param("bulk", marks=pytest.mark.soak),
    pytest.param("bursty", marks=pytest.mark.long),
])  # fmt: skip
def test_it_is_so_for_responses_that_are_not_streamed(name: str, tmp_path: Path) -> None:
    load = LOADS[name]
    whole = replace(load, plan=lambda luck: [not_streamed(planned) for planned in load.plan(luck)])
    lines = lines_of(whole, "whole", tmp_path)
    assert observe.missed(lines, of_all=False) == [], observe.table(lines)


def test_an_engine_that_refuses_most_of_them_itself_is_a_doubt(tmp_path: Path) -> None:
    lines = lines_of(replace(LOADS["bulk"], engine={"max-queued": 20}), "refusing", tmp_path)
    (batch,) = (line for line in lines if line.tier == "batch")
    assert any("The engine refused or failed" in reason for reason in batch.reasons), observe.table(lines)


def test_without_a_quiet_time_it_says_that_it_does_not_know(tmp_path: Path) -> None:
    load = LOADS["bulk"]

    def at_once(luck: random.Random) -> list[Planned]:
        return [replace(planned, at_s=luck.random() / 100) for planned in load.plan(luck) if planned.label == "batch"]

    lines = lines_of(replace(load, plan=at_once), "cold", tmp_path)
    assert [line.tier for line in lines] == ["batch"]
    assert not lines[0].apart or lines[0].reasons, observe.table(lines)
