"""What `order: gain` earns, against `order: level` with the same reserves and against engines without admission.

    python -m benchmarks.gain [--quick] [--engines N] [--seeds N] [--processes N] [--only TRACE] [--json FILE] [--check]

Traces are played in virtual time through the product's own scheduler, pools and learned lengths, before engines that
are a step model, as `sidecar simulate` does. Load 1 is the rate at which the engines end requests when all of a
window's come at once (engine-fcfs), so it is the most that they can serve; a trace's times are divided by a scale that
brings its window to 1.5 (heavy), 1.2 (moderate) and 0.5 (low). Each seed plays another window, with other tiers.
`--check` exits with 1 where a target is missed. `--quick` plays two short windows, and targets may be missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.gain.runs import (
    GAIN,
    LEVEL,
    PAPER,
    THREE,
    TIERS,
    Common,
    Job,
    Measured,
    measure,
    model_of,
    saturated_rate,
    weighted_jobs,
)
from benchmarks.gain.targets import JUDGED_AT_LOW, cells, targets
from benchmarks.gain.traces import CONV, SOURCES, window
from benchmarks.reservations.traces import FOLDER
from sidecar.tools.simulate.baselines import ROUTERS, names
from sidecar.tools.simulate.comparison import interval, shown
from sidecar.tools.simulate.load import Assign
from sidecar.tools.text import table as aligned

ENGINES = 4
LOADS = {"heavy": 1.5, "moderate": 1.2, "low": 0.5}
PATIENCE_S = 30.0
LEAVING = f"heavy, clients leave after {PATIENCE_S:g} s"
WORK_S, QUICK_WORK_S = 150.0, 30.0
"""A window's requests are so many seconds of all engines' work."""
SAMPLE = 500
"""Requests for each engine from which the size of a window is estimated."""


def jobs(common: Common, trace: str, rows: int, seed: int, rate: float) -> Iterator[Job]:
    """All runs of one window. `rate` is that of its load 1, in requests a second."""
    found = window(trace, common.folder, rows, seed, common.seeds)
    whole = rate * found.duration_s / len(found.trace.rows)
    for name in (GAIN, LEVEL, *names(common.engines)):
        settings: list[tuple[str, Assign, str, float | None]] = [
            (THREE, by, load, None) for by in Assign for load in LOADS if _says_something(name, by, load)
        ]
        if name not in ROUTERS:
            settings += [(PAPER, Assign.REQUEST, "heavy", None)]
            settings += [(THREE, Assign.REQUEST, LEAVING, PATIENCE_S)] if trace == CONV.name else []
        for tiers, by, load, patience_s in settings:
            scale = whole * LOADS["heavy" if patience_s else load]
            weightings = TIERS[tiers].weightings[: 1 if patience_s else None]
            job = Job(trace, tiers, by, load, scale, rows, seed, name, weightings, patience_s)
            yield from weighted_jobs(job)


def _says_something(name: str, by: Assign, load: str) -> bool:
    """Routers take no notice of tiers, and at low load all are alike: there the targets are enough."""
    if name in ROUTERS:
        return by is Assign.REQUEST and load == "heavy"
    return load != "low" or name in JUDGED_AT_LOW


def sized(common: Common, traces: Sequence[str], work_s: float, pool: ProcessPoolExecutor) -> list[Job]:
    """All runs, the longest first: those of the product."""
    sample = SAMPLE * common.engines
    rates = pool.map(partial(saturated_rate, common), traces, [sample] * len(traces), [1] * len(traces))
    rows = {
        trace: min(len(window(trace, common.folder, 10**9, 1, 1).trace.rows), round(rate * work_s))
        for trace, rate in zip(traces, rates, strict=True)
    }
    places = [(trace, rows[trace], seed) for trace in traces for seed in range(1, common.seeds + 1)]
    exact = pool.map(partial(saturated_rate, common), *zip(*places, strict=True))
    found = [job for place, rate in zip(places, exact, strict=True) for job in jobs(common, *place, rate)]
    return sorted(found, key=lambda job: (job.candidate not in (GAIN, LEVEL), job.trace, job.seed))


def measured(common: Common, traces: Sequence[str], work_s: float, processes: int) -> list[Measured]:
    """All figures, from as many processes as are asked for."""
    found: list[Measured] = []
    with ProcessPoolExecutor(max_workers=processes) as pool:
        every = sized(common, traces, work_s, pool)
        for count, one in enumerate(pool.map(partial(measure, common), every), 1):
            found += one
            if count % 50 == 0 or count == len(every):
                print(f"{count} of {len(every)} runs", file=sys.stderr, flush=True)
    return found


def tables(found: Sequence[Measured]) -> Iterator[str]:
    """A table for each cell: a line for each order and baseline."""
    for (tiers, trace, by, load, weights), runs in cells(found).items():
        scales = [one.scale for one in next(iter(runs.values()))]
        title = "the paper's two tiers" if tiers == PAPER else "/".join(TIERS[tiers].names)
        yield f"\n{trace}, {load} (x{min(scales):.3g} to x{max(scales):.3g}), {title} by {by}, weights {weights}"
        heads = ["", "TDG", "SLO", "SLO by tier", "top's longest wait s", "floors", "share", "stall", "tokens/s"]
        yield "\n".join(aligned([heads, *([name, *_line(each)] for name, each in runs.items())]))


def _line(runs: Sequence[Measured]) -> list[str]:
    waits = interval([one.top_wait_s for one in runs])
    shares = [one.share for one in runs if one.share is not None]
    assert waits is not None
    return [
        shown([one.tdg for one in runs]),
        shown([one.slo for one in runs]),
        " / ".join(f"{sum(each) / len(each):.2f}" for each in zip(*(one.tier_slo for one in runs), strict=True)),
        f"{waits[0]:.1f} ±{waits[1]:.1f}",
        f"{sum(one.kept for one in runs)} of {len(runs)}",
        f"{min(shares):.2f}" if shares else "-",
        f"{max(one.stall for one in runs):.2f}",
        f"{sum(one.tokens_per_s for one in runs) / len(runs):.0f}",
    ]


LEGEND = """\
TDG and SLO are of all requests offered, refused and abandoned ones too, with 95% confidence intervals (Student's t over
the seeds). floors: the runs in which every tier's floor was kept. The floor is `fair` (25%) of the reserve for gain and
for the baselines, which promise none, and all of the reserve for level. It is kept where for each tier both hold:
share, at least 1: tokens of the tier's running requests, of all running ones, while the tier had requests waiting,
relative to its floor's part of the pool. stall, at most 1: the longest time in which a request of the tier no larger
than its floor waited and none of the tier began, relative to twice the longest time that a request ran. The columns
show the worst tier of the worst run."""


def main(arguments: argparse.Namespace) -> int:
    """Plays everything and prints the tables. With `--check`, 1 where a target is missed."""
    seeds, work_s = (2, QUICK_WORK_S) if arguments.quick else (arguments.seeds, arguments.work_seconds)
    common = Common(arguments.traces, arguments.engines, seeds, arguments.engine_model)
    traces = arguments.only or list(SOURCES)
    found = measured(common, traces, work_s, arguments.processes)
    print(
        f"Virtual time, {seeds} seeds, {common.engines} engine{'s' * (common.engines > 1)}, {work_s:g} s of their work."
    )
    for trace in traces:
        model = model_of(common, trace)
        print(f"{trace}: {model.name}, steps of at most {model.chunk_tokens} prompt tokens")
    print(
        f"Loads relative to the engines' highest rate: {', '.join(f'{name} {load:g}' for name, load in LOADS.items())}"
    )
    judged = list(targets(found))
    print("\nTargets\n")
    print("\n".join(aligned([["gain", "where", "figure", "at least", ""], *(one.row() for one in judged)])))
    print(f"\n{sum(one.is_reached for one in judged)} of {len(judged)} reached\n\n{LEGEND}")
    print("\n".join(tables(found)))
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    return 1 if arguments.check and not all(one.is_reached for one in judged) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    parser.add_argument("--quick", action="store_true", help="two seeds of short windows; targets may be missed")
    parser.add_argument("--engines", type=int, default=ENGINES, metavar="N", help="engines (default %(default)s)")
    parser.add_argument(
        "--engine-model", metavar="NAME", help="before which all traces are played (default: each trace's own)"
    )
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="windows and tiers (default 5)")
    parser.add_argument(
        "--work-seconds", type=float, default=WORK_S, metavar="S", help="a window (default %(default)s)"
    )
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="processes (default 2)")
    parser.add_argument("--only", action="append", choices=list(SOURCES), help="this trace; repeated")
    parser.add_argument("--traces", metavar="FOLDER", type=Path, default=FOLDER, help="the folder of the public traces")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures of all runs there")
    given = parser.parse_args()
    if given.engines < 1:
        parser.error(f"--engines {given.engines}: at least 1")
    sys.exit(main(given))
