"""What the pool in Redis costs and keeps, on one real server on loopback, each figure with its target.

    python -m benchmarks.redis_pool [--json FILE] [--quick]

Everything runs on uvloop, as `sidecar serve` does, with the server on a core of its own. Ratios are medians over rounds
in which both sides took turns. The command fails where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from benchmarks.redis_batching import round_trips, throughput
from benchmarks.redis_latency import latency
from benchmarks.redis_limit import limit
from benchmarks.redis_script import script_cost
from benchmarks.redis_setup import Figure, running_server, version_of
from benchmarks.redis_shares import shares

FIGURES: Sequence[Callable[[str, bool], Figure]] = (round_trips, throughput, script_cost, latency, shares, limit)


def lines(figure: Figure) -> list[str]:
    """One figure for a reader, and below it what it was made from."""
    target = f"{'at least' if figure.at_least else 'at most'} {figure.target:,g}"
    verdict = "" if figure.is_met else "   MISSED"
    head = f"{figure.name:70} {shown(figure.value):>9}   {target:16}{verdict}".rstrip()
    return [head, *(f"    {name:66} {shown(part)}" for name, part in figure.parts.items())]


def shown(part: float | Sequence[float]) -> str:
    """A number as it is worth reading."""
    if not isinstance(part, int | float):
        return "   ".join(map(shown, part))
    if part == int(part) or part >= 1000:
        return f"{part:,.0f}"
    return f"{part:.1f}" if part >= 10 else f"{part:.3f}" if part < 0.1 else f"{part:.2f}"


def measure(quick: bool) -> tuple[dict[str, str], list[Figure]]:
    """Measures and prints one figure after the other. Returns what it was measured with, and the figures."""
    figures = []
    with running_server() as server:
        about = {"server": version_of(server), "redis-py": version("redis"), "hiredis": version("hiredis")}
        about["python"] = platform.python_version()
        print(", ".join(f"{name} {what}" for name, what in about.items()) + (", quick" if quick else ""), flush=True)
        for take in FIGURES:
            figure = take(server.url, quick)
            print("\n" + "\n".join(lines(figure)), flush=True)
            figures.append(figure)
    return about, figures


def main() -> int:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures as JSON")
    parser.add_argument("--quick", action="store_true", help="short rounds: to see that it runs, not to quote")
    arguments = parser.parse_args()
    about, figures = measure(arguments.quick)
    if arguments.json:
        records = [asdict(figure) | {"is_met": figure.is_met} for figure in figures]
        arguments.json.write_text(json.dumps({**about, "quick": arguments.quick, "figures": records}, indent=2) + "\n")
    missed = [figure.name for figure in figures if not figure.is_met]
    print("\nevery target is met" if not missed else f"\nTHE TARGET IS MISSED: {'; '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
