"""Results of the demo for people: a table of every run and tier, and the five figures that matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from sidecar.tools.demo.figures import Distribution, RunMeasurement
from sidecar.tools.demo.runs import RUNS, DemoRun
from sidecar.tools.text import table as aligned

_HEAD = ("", "requests", "share", "TTFT p50/p95/p99 s", "queue wait s", "starvation s")


def table(runs: Sequence[RunMeasurement], played: Sequence[DemoRun] = RUNS) -> str:
    """Every run and tier, a line each. `played` says what the runs were."""
    headings = {run.name: run.heading for run in played}
    rows = [
        (f"  {tier}", str(of.requests), f"{of.share:.0%}", *map(_cell, (of.ttft_s, of.queue_wait_s, of.starvation_s)))
        for run in runs
        for tier, of in run.tiers.items()
    ]
    head, *lines_of_tiers = aligned([_HEAD, *rows])
    lines, tiers = [head], iter(lines_of_tiers)
    for run in runs:
        failed = f", {run.failed} failed and are in no percentile" if run.failed else ""
        lines.append(f"{headings[run.name]}  (utilization {run.utilization:.0%}{failed})")
        lines += islice(tiers, len(run.tiers))
    return "\n".join(lines)


URGENT, INTERACTIVE, BULK = "critical", "high", "batch"
PAYING = "normal"
"""The tier with most of the work, which waits longer than by the engine's own priority so that none stops."""
_COLUMNS = {"control": "equal priority", "engine": "engine priority", "admission": "admission"}
CLEARLY = 3.0
"""A difference from here on is no accident of one run of a few seconds."""

BUSY_FROM_S = 0.1
"""Clients that stood still for longer make a difference to what was measured."""


def summary(runs: Sequence[RunMeasurement]) -> str:
    """The five figures that matter, a line each and a column for each run, and what they show."""
    rows: list[tuple[str, Callable[[RunMeasurement], str]]] = [
        ("part of the overloaded engine that is in use", lambda run: f"{run.utilization:.1%}"),
        (f"99 of 100 urgent answers ({URGENT}, burst) begin within", lambda run: _ttft(run, URGENT)),
        (f"99 of 100 interactive answers ({INTERACTIVE}) begin within", lambda run: _ttft(run, INTERACTIVE)),
        (f"bulk work ({BULK}) gets this part of the overloaded engine", _bulk_share),
        (f"the tier that pays ({PAYING}): 99 of 100 answers begin within", lambda run: _ttft(run, PAYING)),
    ]
    columns = ("In short", *(_COLUMNS[run.name] for run in runs))
    lines = aligned([columns, *((name, *map(show, runs)) for name, show in rows)])
    return "\n".join([conclusion(runs), "", *lines])


def conclusion(runs: Sequence[RunMeasurement]) -> str:
    """A sentence on the figures. It claims no more than they show."""
    control, engine, admission = ((run.tiers.get(INTERACTIVE), run.tiers.get(BULK)) for run in runs)
    if any(run.failed for run in runs) or not all((*control, *engine, *admission)):
        return "Requests failed: these figures show nothing until that is mended."
    waits = [run.tiers[INTERACTIVE].ttft_s["p99"] for run in runs]
    shares = [run.tiers[BULK].share for run in runs]
    if waits[2] * CLEARLY < waits[0] and shares[1] * CLEARLY < shares[2]:
        return (
            "With more requests than the engine can run: at equal priority people wait, the engine's own priority\n"
            "stops bulk work, and admission control does neither."
        )
    stalled_s = max(run.stalled_s for run in runs)
    if stalled_s > BUSY_FROM_S:
        return (
            f"This machine is busy: the demo itself did not get to run for {stalled_s:.2f} s. The figures show that,\n"
            "and not the three ways; play it again when the machine is idle."
        )
    return "In so short a run the three ways do not differ clearly."


def _ttft(run: RunMeasurement, name: str) -> str:
    tier = run.tiers.get(name)
    return "-" if tier is None else f"{tier.ttft_s['p99']:.2f} s"


def _bulk_share(run: RunMeasurement) -> str:
    tier = run.tiers.get(BULK)
    return "-" if tier is None else f"{tier.share:.0%}"


def _cell(values: Distribution) -> str:
    return " / ".join(f"{value:.2f}" for value in values.values())
