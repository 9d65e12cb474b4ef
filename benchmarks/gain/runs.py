"""One run of the benchmark: a window of a trace, a load, and an order or a baseline; with its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from benchmarks.gain.floors import floors
from benchmarks.gain.traces import SOURCES, offered, window
from sidecar.policy.choices import Order
from sidecar.policy.compiler import load as load_policy
from sidecar.policy.model import Policy
from sidecar.tools.simulate.baselines import BaselineAdmission, new_queue
from sidecar.tools.simulate.comparison import ComparedPolicy
from sidecar.tools.simulate.figures import result
from sidecar.tools.simulate.load import Assign, Request
from sidecar.tools.simulate.play import Played, SimulatedAdmission, SimulatedEngines, VirtualLoop, play
from sidecar.tools.simulate.product import ProductAdmission
from sidecar.tools.step_model.model import EngineModel, load_model
from sidecar.tools.step_model.queue import KeyQueue

LEVEL, GAIN = "level", "gain"
WEIGHTED = (GAIN, "density", "vtc")
"""What the weights change: the others do the same with any."""
SATURATED = 0.95
"""The part of the requests whose end says how fast the engines are when all come at once. The last ones run alone."""


_CAPACITY = "capacity: {tokens: 400k, requests: 256}"
"""The simulation has engines of its own. Several get prompts by `prefill`, which has its default, 8k."""


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier of the policies. The reserve is in percent of the pool."""

    name: str
    percent: float
    reserve: int
    slo: str


@dataclass(frozen=True, slots=True)
class Tiers:
    """Tiers, the part of the requests that each gets, and the weights that are played."""

    tiers: Sequence[Tier]
    weightings: Sequence[tuple[int, ...]]

    @property
    def names(self) -> list[str]:
        """From the most important on."""
        return [tier.name for tier in self.tiers]

    @property
    def mix(self) -> Mapping[str, float]:
        """The parts, in percent."""
        return {tier.name: tier.percent for tier in self.tiers}


THREE, PAPER = "three", "paper"
TIERS: Mapping[str, Tiers] = {
    THREE: Tiers(
        (
            Tier("high", 20, 20, "{ttft: 1s, tpot: 60ms}"),
            Tier("normal", 50, 10, "{ttft: 3s, tpot: 100ms}"),
            Tier("batch", 30, 5, "{ttft: 15s, tpot: 200ms}"),
        ),
        ((4, 2, 1), (16, 4, 1)),
    ),
    PAPER: Tiers(
        (Tier("first", 50, 20, "{ttft: 3s, tpot: 100ms}"), Tier("second", 50, 10, "{ttft: 3s, tpot: 100ms}")),
        ((2, 1),),
    ),
}


@dataclass(frozen=True, slots=True)
class Common:
    """What all runs have in common. `model` is None for each trace's own engine."""

    folder: Path
    engines: int
    seeds: int
    model: str | None


@dataclass(frozen=True, slots=True)
class Job:
    """One run: `rows` requests of a trace at `scale`, and what is played. `load` is its name."""

    trace: str
    tiers: str
    by: Assign
    load: str
    scale: float
    rows: int
    seed: int
    candidate: str
    weightings: Sequence[tuple[int, ...]]
    patience_s: float | None = None


class Measured(msgspec.Struct, frozen=True):
    """The figures of one run with one set of weights. Of the floors the worst tier's: see `floors`.

    `top_wait_s` is the longest wait of the most important tier.
    """

    trace: str
    tiers: str
    by: str
    load: str
    weights: str
    candidate: str
    seed: int
    scale: float
    tdg: float
    slo: float
    tier_slo: Sequence[float]
    top_wait_s: float
    kept: bool
    stall: float
    share: float | None
    abandoned: int
    tokens_per_s: float


def model_of(common: Common, trace: str) -> EngineModel:
    """The engine before which a trace is played."""
    source = SOURCES[trace]
    model = load_model(source.model if common.model is None else common.model)
    chunk_tokens = source.chunk_tokens if common.model is None else model.chunk_tokens
    return msgspec.structs.replace(model, chunk_tokens=chunk_tokens, block_tokens=source.block_tokens)


def shown(weights: Sequence[int]) -> str:
    """As 4:2:1."""
    return ":".join(map(str, weights))


@lru_cache(maxsize=32)
def policy_of(tiers: str, weights: tuple[int, ...], engines: int) -> Policy:
    """The policy with these tiers and weights, and level order. All else has the product's default."""
    lines = ["engine: vllm", "tiers:"]
    for tier, weight in zip(TIERS[tiers].tiers, weights, strict=True):
        lines.append(f"  {tier.name}: {{reserve: {tier.reserve}%, slo: {tier.slo}, gain: {{weight: {weight}}}}}")
    last = TIERS[tiers].names[-1]
    lines += [f"default_tier: {last}", f"anonymous: {last}"]
    lines.append(_CAPACITY if engines == 1 else f"engines: {{mounted: true, {_CAPACITY}}}")
    with TemporaryDirectory() as folder:
        (Path(folder) / "policy.yaml").write_text("\n".join(lines) + "\n")
        return load_policy(Path(folder))


def saturated_rate(common: Common, trace: str, rows: int, seed: int) -> float:
    """Requests a second that the engines end when all come at once, first come, first served."""
    job = Job(trace, THREE, Assign.REQUEST, "all at once", inf, rows, seed, "engine-fcfs", ((4, 2, 1),))
    played = _play(common, job)
    ends_us = sorted(one.end_us or 0 for one in played.offered)
    count = max(1, round(len(ends_us) * SATURATED))
    return count / max(1, ends_us[count - 1]) * 1e6


def _offered(common: Common, job: Job) -> list[Request]:
    kind, model = TIERS[job.tiers], model_of(common, job.trace)
    found = window(job.trace, common.folder, job.rows, job.seed, common.seeds)
    return offered(
        found, kind.names, kind.mix, by=job.by, scale=job.scale, block_tokens=model.block_tokens, seed=job.seed
    )


def _play(common: Common, job: Job) -> Played:
    policy = policy_of(job.tiers, job.weightings[0], common.engines)
    objectives = ComparedPolicy(job.candidate, policy).objectives
    requests = _offered(common, job)
    is_own = job.candidate in (LEVEL, GAIN)
    loop = VirtualLoop()
    with loop.running():
        queue = KeyQueue if is_own else new_queue(job.candidate, policy, objectives)
        stage = SimulatedEngines(model_of(common, job.trace), common.engines, loop, queue)
        admission: SimulatedAdmission
        if is_own:
            admission = ProductAdmission(policy.ordered_by(Order(job.candidate)), stage)
        else:
            admission = BaselineAdmission(job.candidate, policy, objectives, stage)
        return play(requests, stage, admission, None if job.patience_s is None else round(job.patience_s * 1e6))


def measure(common: Common, job: Job) -> list[Measured]:
    """Plays a job, and judges it by each of its weightings. The same for the same arguments."""
    played = _play(common, job)
    return [_judged(common, job, played, weights) for weights in job.weightings]


def _judged(common: Common, job: Job, played: Played, weights: tuple[int, ...]) -> Measured:
    kind, policy = TIERS[job.tiers], policy_of(job.tiers, weights, common.engines)
    objectives = ComparedPolicy(job.candidate, policy).objectives
    run = result(
        played, kind.names, objectives, name=job.candidate, order=job.candidate, seed=job.seed, scale=job.scale
    )
    fair = 1.0 if job.candidate == LEVEL else float(policy.fair)
    pool_tokens = model_of(common, job.trace).kv_tokens * common.engines
    each = floors(played.offered, [fair * tier.reserve / 100 for tier in kind.tiers], pool_tokens)
    tiers = [run.tiers[name] for name in kind.names if name in run.tiers]
    return Measured(
        trace=job.trace,
        tiers=job.tiers,
        by=job.by.value,
        load=job.load,
        weights=shown(weights),
        candidate=job.candidate,
        seed=job.seed,
        scale=job.scale,
        tdg=run.tdg or 0.0,
        slo=run.slo or 0.0,
        tier_slo=[tier.slo or 0.0 for tier in tiers],
        top_wait_s=tiers[0].queue_wait_s.max or 0.0,
        kept=all(one.is_kept for one in each),
        stall=max(one.stall_s / one.bound_s if one.bound_s else 0.0 for one in each),
        share=min((one.share for one in each if one.share is not None), default=None),
        abandoned=sum(tier.abandoned for tier in tiers),
        tokens_per_s=run.tokens_per_s,
    )


def weighted_jobs(job: Job) -> list[Job]:
    """One job for each weighting where the candidate depends on weights, else one for all."""
    if job.candidate not in WEIGHTED:
        return [job]
    return [replace(job, weightings=(weights,)) for weights in job.weightings]
