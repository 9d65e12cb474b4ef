"""The demo's result for people: one table and one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.tools.demo.figures import Distribution, RunMeasurement
from sidecar.tools.demo.runs import RUNS, Run

_HEAD = f"{'':24} {'requests':>8} {'share':>6}  {'TTFT p50/p95/p99 s':>20}  {'queue wait s':>20}  {'starvation s':>20}"


def table(runs: Sequence[RunMeasurement], played: Sequence[Run] = RUNS) -> str:
    """Every run and tier, a line each. `played` says what the runs were."""
    headings = {run.name: run.heading for run in played}
    lines = [_HEAD]
    for run in runs:
        failed = f", {run.failed} failed" if run.failed else ""
        lines.append(f"{headings[run.name]}  (utilization {run.utilization:.0%}{failed})")
        for tier, figures in run.tiers.items():
            waits = "  ".join(
                f"{_cell(values):>20}" for values in (figures.ttft_s, figures.queue_wait_s, figures.starvation_s)
            )
            lines.append(f"  {tier:22} {figures.requests:>8} {figures.share:>6.0%}  {waits}")
    return "\n".join(lines)


def sentence(runs: Sequence[RunMeasurement]) -> str:
    """The conclusion, with the figures of this run."""
    control, engine, admission = runs
    first, last = "high", "batch"
    if any(tier not in run.tiers for run in runs for tier in (first, last)):
        return f"Too many requests failed: a run without {first} or {last} shows nothing."

    def ttft(run: RunMeasurement) -> str:
        return f"{run.tiers[first].ttft_s['p50']:.2f} s"

    def share(run: RunMeasurement) -> str:
        return f"{run.tiers[last].share:.0%}"

    gains = admission.tiers[last].share > engine.tiers[last].share
    return (
        f"With more requests than the engine can run, {first} has its first token after {ttft(admission)} at the "
        f"median (at equal priority {ttft(control)}, with engine priority {ttft(engine)}), and {last}, which engine "
        f"priority leaves {share(engine)} of the engine, "
        f"{'keeps' if gains else 'gets'} {share(admission)}{': its floor holds' if gains else ' in so short a run'}."
    )


def _cell(values: Distribution) -> str:
    return " / ".join(f"{value:.2f}" for value in values.values())
