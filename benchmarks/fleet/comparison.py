"""Comparison of routers on the same engines and the same trace: first tokens, hits, and whether ours reach the targets.

Every router gets new engines. The checks of the load say whether the run shows anything: round robin has to saturate,
and the machine must not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from benchmarks.fleet import engines as emulated
from benchmarks.fleet import routers
from benchmarks.fleet.load import load
from benchmarks.fleet.runs import Run, shown, through
from benchmarks.fleet.setting import Setting
from benchmarks.fleet.verdict import Verdict
from benchmarks.fleet_routers import RULES

LEAST_TIMES_P99 = 1.5
LEAST_OF_BEST_HIT_RATE = 0.85
LEAST_GROWTH = 2.0
"""A queue that grows without end: the last quarter waits at least so many times longer than the second."""
MOST_LOST = 0.02
LEAST_IDLE = 0.10
MOST_STALLED_S = 0.25


def compare(names: Sequence[str], seeds: Iterable[int], setting: Setting) -> Sequence[Run]:
    """Runs each router with each seed, and prints a line for each as it ends. Raises NotStarted."""
    print(HEAD)
    runs = []
    for seed in seeds:
        seeded = replace(setting, seed=seed)
        requests = load(seeded)
        for name in names:
            with emulated.running(seeded) as engines, routers.running(name, engines, seeded) as router:
                run = asyncio.run(through([router], engines, requests, seeded))
            print(line(run), flush=True)
            runs.append(run)
    return runs


HEAD = (
    f"{'router':>20} {'seed':>4} {'<5 s':>6} {'p50 s':>8} {'p99 s':>8} {'hits':>6} {'engines':>8} {'failed':>6}  "
    f"{'median by quarter, s':>31}  {'most requests, tokens, un-prefilled':>35}  "
    f"{'cores: router, engines, load':>28} {'idle':>5} {'lost':>6} {'stall':>6}"
)


def line(run: Run) -> str:
    """One run for people. `engines` is the hit rate that the engines counted, the warm-up included."""
    figures = run.figures
    quarters = " ".join(shown(quarter, "7.2f") for quarter in run.quarters)
    most = (
        f"{max(each.most_requests for each in run.engines):>9} "
        f"{max(each.most_tokens for each in run.engines):>12,} "
        f"{max(each.most_unprefilled for each in run.engines):>12,}"
    )
    use = " ".join(f"{run.use[part]:9.2f}" for part in ("router", "engines", "load"))
    machine = f"{run.idle:5.0%} {run.lost:6.1%} {run.stalled_s:5.2f}s"
    return (
        f"{run.router:>20} {run.seed:>4} {figures.soon:6.3f} {shown(figures.p50_s)} {shown(figures.p99_s)} "
        f"{figures.hit_rate:6.3f} {run.engines_hit_rate:>8.3f} {run.failed:>6}  {quarters}  {most}  {use} {machine}"
    )


def judge(runs: Sequence[Run], setting: Setting) -> Sequence[Verdict]:
    """What the runs show, for each seed; and what was not run."""
    found: list[Verdict] = []
    for seed in sorted({run.seed for run in runs}):
        by_name = {run.router: run for run in runs if run.seed == seed}
        found += [*_load(by_name, seed), *_ours(by_name, seed, setting)]
        found += machine(list(by_name.values()), f"seed {seed}: ")
    return found


def _load(runs: Mapping[str, Run], seed: int) -> Iterable[Verdict]:
    """Whether the load is the one that was meant."""
    if (turns := runs.get("round-robin")) is not None:
        early, late = turns.quarters[1], turns.quarters[3]
        growth = None if early is None or late is None else late / early
        yield Verdict.at_least(f"seed {seed}: round robin's wait grows, last quarter to second", growth, LEAST_GROWTH)


def machine(runs: Sequence[Run], which: str = "") -> Iterable[Verdict]:
    """Whether the engines and the router were measured, and not the machine."""
    yield Verdict.at_most(f"{which}share of the engines' time lost", max(run.lost for run in runs), MOST_LOST)
    yield Verdict.at_least(f"{which}idle share of the machine", min(run.idle for run in runs), LEAST_IDLE)
    yield Verdict.at_most(f"{which}longest stall of the load, s", max(r.stalled_s for r in runs), MOST_STALLED_S)


def _ours(runs: Mapping[str, Run], seed: int, setting: Setting) -> Iterable[Verdict]:
    ours = runs.get(routers.OURS)
    others = [run for name, run in runs.items() if name in RULES or "=" in name]
    if ours is None or not others:
        yield Verdict(f"seed {seed}: ours against the others", None, "not run")
        return
    yield Verdict.at_most(f"seed {seed}: ours, failed requests", ours.failed, 0)
    p99s = [run.figures.p99_s for run in others if run.figures.p99_s is not None]
    times = min(p99s) / ours.figures.p99_s if p99s and ours.figures.p99_s else None
    yield Verdict.at_least(f"seed {seed}: best other p99 to ours", times, LEAST_TIMES_P99)
    best_soon = max(run.figures.soon for run in others)
    yield Verdict.at_least(f"seed {seed}: ours, share with a first token within 5 s", ours.figures.soon, best_soon)
    best_rate = max(run.figures.hit_rate for run in others)
    part = ours.figures.hit_rate / best_rate if best_rate else None
    yield Verdict.at_least(f"seed {seed}: ours, hit rate of the best's", part, LEAST_OF_BEST_HIT_RATE)
    yield from within_capacity(ours, setting, f"seed {seed}: ours")


def within_capacity(run: Run, setting: Setting, whose: str) -> Iterable[Verdict]:
    """Whether no engine was ever above what it has, as the engines themselves counted."""
    requests = max(each.most_requests for each in run.engines)
    tokens = max(each.most_tokens for each in run.engines)
    yield Verdict.at_most(f"{whose}, most requests in an engine", requests, setting.sequences)
    yield Verdict.at_most(f"{whose}, most tokens in an engine", tokens, setting.engine_tokens)
