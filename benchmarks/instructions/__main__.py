"""Counts of instructions per request and per streamed chunk, held to committed budgets.

    python -m benchmarks.instructions [--check | --write] [--tool perf|callgrind] [--json FILE]

Instructions repeat where microseconds do not: a mounted figure differs by less than 1% between runs, whatever else the
machine does. Linux perf counts where it is permitted, else valgrind's callgrind. `--check` exits with 1 where a figure
exceeds its budget in benchmarks/budgets.json by more than 15%. It says NOT CHECKED, and exits with 0, where this
machine has no tool or the file has no budgets for the tool and this Python. `--write` writes the budgets.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.instructions import budgets, mounted, proxied
from benchmarks.instructions.counters import COUNTERS, IDLE, CannotCount, Counter
from sidecar.policy.compiler import shipped_policies


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table: the instructions of a part, less those of another part."""

    label: str
    part: str
    less: str | None = None
    has_budget: bool = True


FIGURES = {
    "bare": Figure("the app alone, a request", "bare", has_budget=False),
    "base_http": Figure("+ a do-nothing BaseHTTPMiddleware", "base_http", "bare", has_budget=False),
    "mounted": Figure("+ admission, mounted", "mounted", "bare"),
    "observed": Figure("+ admission, mounted, with traces and metrics", "observed", "bare"),
    "contributed": Figure(
        "+ OpenTelemetry's ASGI instrumentation, spans and metrics", "contributed", "bare", has_budget=False
    ),
    "proxied": Figure("`sidecar serve`, a request, its whole process", "proxied"),
    "mounted_chunk": Figure("admission, mounted, a streamed chunk", "mounted_chunk", "bare_chunk"),
    "observed_chunk": Figure("the same with traces and metrics", "observed_chunk", "bare_chunk"),
    "measured": Figure("+ admission, mounted, with service gain", "measured", "bare"),
    "measured_chunk": Figure("admission, mounted, a streamed chunk, with service gain", "measured_chunk", "bare_chunk"),
    "proxied_chunk": Figure("`sidecar serve`, a streamed chunk, its whole process", "proxied_chunk"),
    "pool": Figure("local pool: enter + settle", "pool"),
    "scheduler": Figure("scheduler: one decision, 1,000 waiting", "scheduler"),
}
MOUNTED = (
    "bare",
    "base_http",
    "mounted",
    "bare_chunk",
    "mounted_chunk",
    "pool",
    "scheduler",
    "measured",
    "measured_chunk",
    "observed",
    "observed_chunk",
    "contributed",
)
PROXIED = ("proxied", "proxied_chunk", IDLE)


def measure(counter: Counter) -> dict[str, float]:
    """All figures, in instructions. The two programs run at the same time."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as threads:
        policy = Path(folder) / "policies"
        shutil.copytree(shipped_policies(), policy)
        shared = policy / "policy.yaml"
        # vLLM's dialect writes the priority into the body, and asks the engine nothing before.
        shared.write_text(shared.read_text().replace("engine: tensorrt-llm", "engine: vllm"))
        programs = [(mounted.run, MOUNTED), (proxied.run, PROXIED)]
        running = [threads.submit(counter.measure, partial(run, policy=policy), parts) for run, parts in programs]
        counts = {name: count for each in running for name, count in each.result().items()}
    return {
        name: counts[figure.part] - (0 if figure.less is None else counts[figure.less])
        for name, figure in FIGURES.items()
    }


def print_table(measured: Mapping[str, float], entry: budgets.Entry | None) -> None:
    """The figures beside their budgets."""
    print(f"{'':52} {'instructions':>12} {'budget':>12}")
    for name, figure in FIGURES.items():
        budget = None if entry is None or not figure.has_budget else entry.instructions.get(name)
        against = "" if budget is None else f"{budget:12,} {measured[name] / budget - 1:+7.1%}"
        print(f"{figure.label:52} {measured[name]:12,.0f} {against}".rstrip())
    added = measured["mounted"] / measured["base_http"]
    observed = measured["observed"] / measured["contributed"]
    print(f"\n{added:.2f}  admission, mounted, to a do-nothing BaseHTTPMiddleware")
    print(f"{observed:.2f}  admission with traces and metrics, to OpenTelemetry's ASGI instrumentation")


def usable(tool: str | None, *, for_check: bool) -> Counter:
    """The first counter that works here; for a check, the first that has budgets. Raises CannotCount without one."""
    reasons, working = [], []
    for counter in COUNTERS:
        if tool in {None, counter.name}:
            reason = counter.missing()
            if reason is None:
                working.append(counter)
            else:
                reasons.append(f"{counter.name}: {reason}")
    if not working:
        raise CannotCount("; ".join(reasons))
    with_budgets = [counter for counter in working if budgets.entry_of(budgets.FILE, counter.name) is not None]
    return (with_budgets or working)[0] if for_check else working[0]


def budgeted(measured: Mapping[str, float]) -> dict[str, float]:
    """The figures that have a budget."""
    return {name: count for name, count in measured.items() if FIGURES[name].has_budget}


def check(measured: Mapping[str, float], entry: budgets.Entry | None, tool: str) -> int:
    """Says how the figures compare with their budgets. Returns the exit code."""
    found = budgets.compare(budgeted(measured), entry, tool)
    for reason in found.not_checked:
        not_checked(reason)
    for sentence in found.below:
        print(f"below its budget, lower it with --write: {sentence}")
    for sentence in found.exceeded:
        print(f"BUDGET EXCEEDED: {sentence}", file=sys.stderr)
    if found.exceeded and entry is not None and (changed := budgets.changed_packages(entry)):
        print(f"packages that changed since the budgets were written: {', '.join(changed)}", file=sys.stderr)
    if not found.exceeded and not found.not_checked:
        print(f"instructions: {len(budgeted(measured))} figures within {budgets.TOLERANCE:.0%} of their budgets")
    return 1 if found.exceeded else 0


def not_checked(reason: str) -> None:
    """Says that nothing was compared, where a log's reader sees it."""
    print(f"instruction budgets: NOT CHECKED: {reason}", file=sys.stderr)


def main() -> int:
    """Parses the command line, measures, compares."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.instructions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="exit with 1 where a figure exceeds its budget by 15%%")
    what.add_argument("--write", action="store_true", help="make the figures the budgets of this tool and Python")
    parser.add_argument("--tool", choices=[counter.name for counter in COUNTERS], help="default: the first that works")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    try:
        counter = usable(arguments.tool, for_check=arguments.check)
    except CannotCount as reason:
        not_checked(str(reason))
        return 0 if arguments.check else 1
    entry = budgets.entry_of(budgets.FILE, counter.name)
    if arguments.check and (entry is None or entry.build != budgets.python_build()):
        return check({}, entry, counter.name)
    measured = measure(counter)
    if arguments.check and budgets.compare(budgeted(measured), entry, counter.name).exceeded:
        # A moment in which the machine is busy adds instructions of background tasks; nothing takes any away.
        again = measure(counter)
        measured = {name: min(count, again[name]) for name, count in measured.items()}
    print(f"{counter.name}, Python {budgets.python_minor()}, {budgets.python_build()}\n")
    print_table(measured, entry)
    if arguments.json:
        arguments.json.write_text(json.dumps({"tool": counter.name, "instructions": measured}, indent=2) + "\n")
    if arguments.write:
        budgets.write(budgets.FILE, counter.name, budgeted(measured))
    return check(measured, entry, counter.name) if arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
