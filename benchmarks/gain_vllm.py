"""`order: gain` and `order: level` before a real vLLM, measured by clients: a burst, and Poisson arrivals in overload.

    python -m benchmarks.gain_vllm [--requests N] [--seconds S] [--sequences N] [--rounds N] [--json FILE]

`sidecar replay` sends the same requests each way: through `sidecar serve` by gain and by level, and straight to vLLM
with the tier as its own priority (`--scheduling-policy priority`). Tiers are drawn 20/50/30, weights are 4:2:1. In the
burst all come at once; then they come at random at 1.5 times the rate at which the burst was answered. Each asks for
256 tokens at most and gets an answer of about 60: a random model never ends by itself, so `min_tokens` keeps the ending
token away, and a bias brings it then. Gain and SLO are of all requests offered, by the clients' clocks.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import command
from benchmarks.real_engines import version_of
from benchmarks.reservations_vllm import EOS, MEAN_LENGTHS
from sidecar.tools.text import table as aligned
from tests.real.lab import vllm

MAX_TOKENS = 256
PROMPT_TOKENS = 100
MIX = {"high": 20, "normal": 50, "batch": 30}
OVERLOAD = 1.5
PRIORITY = "vLLM's priority"
WAYS = ("gain", "level", PRIORITY)
"""In every other round they are played the other way around."""
POLICY = """\
engine: vllm
capacity: {{tokens: {tokens}, requests: {sequences}}}
order: {order}
tiers:
  high: {{reserve: 20%, slo: {{ttft: 1s, tpot: 60ms}}, gain: {{weight: 4}}}}
  normal: {{reserve: 10%, slo: {{ttft: 3s, tpot: 100ms}}, gain: {{weight: 2}}}}
  batch: {{reserve: 5%, slo: {{ttft: 15s, tpot: 200ms}}, gain: {{weight: 1}}}}
default_tier: normal
anonymous: high
sources: [header]
"""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run: the gain (TDG) and the SLO of all requests offered, in percent, the SLO by tier, and more."""

    gain: float
    slo: float
    by_tier: Mapping[str, float]
    high_p99_s: float
    slowest_p99_s: float
    duration_s: float
    tokens_per_s: float
    failed: int


def write_trace(folder: Path, count: int, rate: float | None, seed: int) -> Path:
    """So many requests at once, or at random at a rate, in requests a second."""
    rng = random.Random(seed)
    at_ms, rows = 0.0, []
    for _ in range(count):
        at_ms += 0.0 if rate is None else rng.expovariate(rate) * 1000
        (mean,) = rng.choices([mean for _, mean in MEAN_LENGTHS], [part for part, _ in MEAN_LENGTHS])
        answer = min(MAX_TOKENS, math.ceil(rng.expovariate(1 / mean)))
        rows.append(
            {
                "timestamp": round(at_ms),
                "input_length": PROMPT_TOKENS,
                "output_length": MAX_TOKENS,
                "tier": rng.choices(list(MIX), list(MIX.values()))[0],
                "extra": {"min_tokens": answer - 1, "logit_bias": {str(EOS): 100}},
            }
        )
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def play(way: str, engine_url: str, folder: Path, trace: Path, sequences: int) -> Figures:
    """Replays the trace one way."""
    order = way if way != PRIORITY else "level"
    tokens = sequences * (MAX_TOKENS + 2 * PROMPT_TOKENS)
    policy = folder / "policy.yaml"
    policy.write_text(POLICY.format(order=order, sequences=sequences, tokens=tokens))
    out = folder / "out.json"
    with ExitStack() as stack:
        url = engine_url
        if way != PRIORITY:
            arguments = ["--policy", str(policy), "--port", "0", "--admin-port", "0"]
            url, _ = stack.enter_context(command("serve", "--upstream", engine_url, *arguments))
        line = [sys.executable, "-m", "sidecar.cli", "replay", str(trace), "--upstream", url, "--policy", str(policy)]
        line += ["--by", "priority" if way == PRIORITY else "tier", "--engine", "vllm", "--no-ignore-eos"]
        done = subprocess.run([*line, "--jitter", "0", "--json", str(out)], check=False, capture_output=True, text=True)
    if done.returncode not in {0, 1}:
        raise RuntimeError(done.stdout + done.stderr)
    return figures_of(json.loads(out.read_text()))


def figures_of(report: Mapping[str, Any]) -> Figures:
    """Those of the only run in a report of `sidecar replay`."""
    (run,) = report["runs"]
    objectives, tiers = run["objectives"], run["tiers"]
    total = objectives["total"]
    return Figures(
        gain=100 * total["tdg"],
        slo=100 * total["met"] / total["requests"],
        by_tier={name: 100 * tier["met"] / tier["requests"] for name, tier in objectives["tiers"].items()},
        high_p99_s=tiers["high"]["ttft_of_all_s"]["p99"] or math.inf,
        slowest_p99_s=max(tier["ttft_of_all_s"]["p99"] or math.inf for tier in tiers.values()),
        duration_s=run["duration_s"],
        tokens_per_s=run["output_tokens_per_s"],
        failed=run["failed"],
    )


def runs_of(engine_url: str, folder: Path, arguments: argparse.Namespace) -> Iterator[tuple[str, int, str, Figures]]:
    """Each load and round, and each way in it."""
    rates = []
    for number in range(1, arguments.rounds + 1):
        trace = write_trace(folder, arguments.requests, None, number)
        for way in WAYS[:: 1 if number % 2 else -1]:
            found = play(way, engine_url, folder, trace, arguments.sequences)
            rates.append(arguments.requests / found.duration_s)
            yield "burst", number, way, found
    rate = OVERLOAD * statistics.median(rates)
    for number in range(1, arguments.rounds + 1):
        trace = write_trace(folder, round(rate * arguments.seconds), rate, number)
        for way in WAYS[:: 1 if number % 2 else -1]:
            yield f"Poisson, {rate:.1f}/s", number, way, play(way, engine_url, folder, trace, arguments.sequences)


HEAD = [
    "",
    "round",
    "",
    "TDG",
    "SLO",
    *(f"SLO {tier}" for tier in MIX),
    "p99 TTFT of high, s",
    "of the slowest tier",
    "tokens/s",
    "failed",
]


def cells(load: str, number: int, way: str, found: Figures) -> list[str]:
    """A line of the table."""
    shares = [found.gain, found.slo, *found.by_tier.values()]
    times = [f"{found.high_p99_s:.1f}", f"{found.slowest_p99_s:.1f}", f"{found.tokens_per_s:.0f}", str(found.failed)]
    return [load, str(number), way, *(f"{share:.1f}%" for share in shares), *times]


def main() -> int:
    """Plays everything and prints a table. 1 where a request failed, or where gain earns less than level."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300, help="of the burst (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of random arrivals (default %(default)s)")
    parser.add_argument("--sequences", type=int, default=8, help="that vLLM runs at once (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="of each load (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name, vllm(scheduling="priority", sequences=arguments.sequences) as engine:
        version = version_of(engine.url, "vllm")
        for row in runs_of(engine.url, Path(name), arguments):
            rows.append(row)
            print("  ".join(cells(*row)), file=sys.stderr, flush=True)
    print(f"vLLM {version}, {platform.machine()}, Python {platform.python_version()}, {arguments.sequences} at once\n")
    print("\n".join(aligned([HEAD, *(cells(*row) for row in rows)])))
    if arguments.json:
        every = [{"load": load, "round": number, "way": way, **asdict(found)} for load, number, way, found in rows]
        arguments.json.write_text(json.dumps({"version": version, "runs": every}, indent=2) + "\n")
    gains = {way: statistics.fmean(found.gain for _, _, its, found in rows if its == way) for way in WAYS}
    return int(gains["gain"] < gains["level"] or any(found.failed for *_, found in rows))


if __name__ == "__main__":
    sys.exit(main())
