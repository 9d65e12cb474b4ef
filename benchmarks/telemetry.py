"""What our telemetry costs a request in CPU time, beside the contributed OpenTelemetry instrumentation.

    python -m benchmarks.telemetry [--json FILE] [--rounds 25] [--requests 400]

One run; the servers take turns, each its own uvicorn process, with 2 KB chat bodies and 8 connections. CPU is each
process's own accounting, threads that export included. What counts is what telemetry adds to the same server without
it, in the same round; a figure is the median over the rounds. The target in microseconds is for a machine on which the
app alone takes 56 for a whole answer, and is compared at that speed. Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load import post
from benchmarks.overhead import BODY, HEADERS, Rounds, added_us, rounds_of, table
from benchmarks.servers import started

SERVERS = {
    "plain": "the app alone",
    "contributed": "+ contributed instrumentation, no spans per message",
    "admission": "the app with admission, unobserved",
    "everything": "+ all our telemetry, 100% sampled",
    "sampled_out": "+ all our telemetry, 0% sampled",
}
WITHOUT = {
    "contributed": "plain",
    "everything": "admission",
    "sampled_out": "admission",
}
"""What each is an addition to."""
MOST_SAMPLED_OUT_US = 25.0
APP_ALONE_US = 56.0
"""What the app alone takes for a whole answer on the machine of that target."""
MOST_OF_CONTRIBUTED = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """One kind of request."""

    title: str
    request: bytes


def loads() -> Sequence[Load]:
    """A whole answer, and a stream."""
    stream = json.dumps({**json.loads(BODY), "stream": True}).encode()
    return [
        Load("A whole answer", post("/v1/chat/completions", BODY, HEADERS)),
        Load("A stream of 64 chunks", post("/v1/chat/completions", stream, HEADERS)),
    ]


def added(measured: Rounds, name: str) -> float:
    """What it adds to the same server without telemetry."""
    return statistics.median(added_us(measured, name, WITHOUT[name]))


def figures(measured: Rounds, app_alone_us: float) -> Mapping[str, float]:
    """What was asked for, by name. The app alone took so long for a whole answer."""
    sampled_out_us = added(measured, "sampled_out")
    return {
        "all our telemetry to contributed": added(measured, "everything") / added(measured, "contributed"),
        "sampled out, us": sampled_out_us,
        "sampled out, us at the target's speed": sampled_out_us * APP_ALONE_US / app_alone_us,
    }


def verdict(found: Mapping[str, float]) -> tuple[str, bool]:
    """The figures beside their targets, and whether all are reached."""
    bare, out_us, compared_us = found.values()
    at_speed = f"{compared_us:.1f} where the app alone takes {APP_ALONE_US:.0f} for a whole answer"
    lines = [
        (f"{bare:8.2f}  all our telemetry to the contributed spans alone; at most 1", bare <= MOST_OF_CONTRIBUTED),
        (
            f"{out_us:8.1f}  us added at 0% sampling with metrics on, {at_speed}; at most {MOST_SAMPLED_OUT_US:.0f}",
            compared_us <= MOST_SAMPLED_OUT_US,
        ),
    ]
    text = "\n".join(line if is_reached else f"{line}: MISSED" for line, is_reached in lines)
    return text, all(is_reached for _, is_reached in lines)


async def run(rounds: int, requests: int) -> tuple[Mapping[str, object], bool]:
    """Runs everything, prints it, and returns the figures and whether all targets are reached."""
    results: dict[str, object] = {}
    is_good, app_alone_us = True, 0.0
    for load in loads():
        with started(list(SERVERS), apps="telemetry_apps") as servers:
            measured = await rounds_of(servers, load.request, rounds, requests)
        app_alone_us = app_alone_us or statistics.median(measured["plain"])  # whole answers come first
        found = figures(measured, app_alone_us)
        text, is_reached = verdict(found)
        print(f"{table(load.title, measured, SERVERS, WITHOUT)}\n\n{text}\n", flush=True)
        is_good = is_good and is_reached
        results[load.title] = {"figures": found, "rounds_us": measured}
    return results, is_good


def main() -> int:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--requests", type=int, default=400, help="in each server's turn")
    args = parser.parse_args()
    results, is_good = asyncio.run(run(args.rounds, args.requests))
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
