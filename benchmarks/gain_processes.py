"""What `sidecar simulate` predicts of the service gain, and what real processes earn with the same trace and policy.

    python -m benchmarks.gain_processes [--seconds 600] [--order gain] [--order level] [--engines N] [--check]

The trace is the first seconds of Azure's conversation trace, with a tier for each row. An emulated vLLM with the step
model of `simulate`, `sidecar serve` and `sidecar replay` run as processes of their own, over loopback. Clients ask for
512 tokens at most; the answers are as long as the trace says. The gain and the SLO of the processes are those that the
sidecar itself measured (`GET /state`). The target: within 5 points of what `simulate` predicts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import random
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.processes import command
from sidecar.tools.replay.trace import read_trace

TRACE = Path("../shared/traces/azure_conv.csv")
TARGET = 5.0
MAX_TOKENS = 512
MIX = {"high": 20, "normal": 50, "batch": 30}
MODEL = {
    "name": "small",
    "step_us": 18_000.0,
    "step_us_per_sequence": 150.0,
    "step_us_per_prefill_token": 25.0,
    "kv_tokens": 50_000,
    "max_sequences": 24,
    "chunk_tokens": 1024,
}
POLICY = """\
engine: vllm
{engines}
order: {order}
tiers:
  high: {{reserve: 20%, slo: {{ttft: 1s, tpot: 60ms}}, gain: {{weight: 4}}, default_output_tokens: 512}}
  normal: {{reserve: 10%, slo: {{ttft: 3s, tpot: 100ms}}, gain: {{weight: 2}}, default_output_tokens: 512}}
  batch: {{reserve: 5%, slo: {{ttft: 15s, tpot: 200ms}}, gain: {{weight: 1}}, default_output_tokens: 512}}
default_tier: normal
anonymous: high
sources: [header]
"""
SIZE = "{tokens: 50k, requests: 24}"


class Figures(NamedTuple):
    """Of one run, in percent: the gain, the requests within their objective, and the same by tier."""

    gain: float
    slo: float
    by_tier: Mapping[str, float]


def write_traces(folder: Path, seconds: float, engines: int) -> int:
    """The rows for `simulate`, and the same for `replay`. Returns how many there are."""
    luck = random.Random(1)
    planned, sent = [], []
    for row in read_trace(str(TRACE)).rows:
        if row.at_s is None or row.input_tokens is None or row.output_tokens is None:
            continue
        if row.at_s >= seconds * engines:
            break
        at_ms = row.at_s * 1000 / engines
        tier = luck.choices(list(MIX), list(MIX.values()))[0]
        answer = min(MAX_TOKENS, row.output_tokens)
        same = {"timestamp": at_ms, "input_length": min(4000, row.input_tokens), "tier": tier}
        planned.append({**same, "output_length": answer})
        sent.append({**same, "output_length": MAX_TOKENS, "extra": {"answer_tokens": answer}})
    for name, rows in (("planned.jsonl", planned), ("sent.jsonl", sent)):
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return len(planned)


def simulated(folder: Path, engines: int) -> Figures:
    """What `sidecar simulate` predicts."""
    out = folder / "simulated.json"
    arguments = [str(folder / "planned.jsonl"), "--policy", str(folder), "--engine-model", str(folder / "model.yaml")]
    arguments += ["--engines", str(engines), "--seeds", "1", "--json", str(out)]
    subprocess.run([sys.executable, "-m", "sidecar.cli", "simulate", *arguments], check=True, capture_output=True)
    (run,) = json.loads(out.read_text())["runs"]
    return Figures(100 * run["tdg"], 100 * run["slo"], {name: 100 * tier["slo"] for name, tier in run["tiers"].items()})


def measured(folder: Path, engines: int, order: str) -> Figures:
    """What the processes earn."""
    with contextlib.ExitStack() as stack:
        model = str(folder / "model.yaml")
        started = [stack.enter_context(command(model, module="benchmarks.gain_engine")) for _ in range(engines)]
        urls = [url for (url,) in started]
        write_policy(folder, order, urls if engines > 1 else [])
        arguments = ["--policy", str(folder), "--port", "0", "--admin-port", "0"]
        upstream = [] if engines > 1 else ["--upstream", urls[0]]
        proxy, admin = stack.enter_context(command("serve", *upstream, *arguments))
        replayed = [str(folder / "sent.jsonl"), "--upstream", proxy, "--policy", str(folder), "--by", "tier"]
        done = subprocess.run(
            [sys.executable, "-m", "sidecar.cli", "replay", *replayed, "--no-ignore-eos"],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode not in {0, 1}:
            raise RuntimeError(done.stderr)
        with urllib.request.urlopen(f"{admin}/state", timeout=30) as response:
            return earned(json.load(response))


def earned(state: Mapping[str, Any]) -> Figures:
    """The figures of the sidecar's own page."""
    tiers: Sequence[Mapping[str, Any]] = state["gain"]["tiers"]
    offered = {tier["tier"]: sum(tier["outcomes"].values()) for tier in tiers}
    met = {tier["tier"]: tier["outcomes"].get("met", 0) for tier in tiers}
    gain = sum(tier["earned"] for tier in tiers) / sum(tier["attainable"] for tier in tiers)
    return Figures(
        100 * gain,
        100 * sum(met.values()) / sum(offered.values()),
        {name: 100 * met[name] / offered[name] for name in offered},
    )


def write_policy(folder: Path, order: str, urls: Sequence[str]) -> None:
    """The policy before one engine, or before these."""
    engines = f"capacity: {SIZE}"
    if urls:
        listed = ", ".join(f"{{name: e{number}, url: '{url}'}}" for number, url in enumerate(urls))
        engines = f"engines:\n  static: [{listed}]\n  capacity: {SIZE}\n  prefill: 1024\n  affinity: {{prefix: false}}"
    (folder / "policy.yaml").write_text(POLICY.format(order=order, engines=engines))


def main() -> int:
    """Prints a table for each order. 1 where `--check` finds a figure further away than the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--order", action="append", choices=["level", "gain"])
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    furthest = 0.0
    print(f"CPython {platform.python_version()}, {args.engines} emulated engine(s), {args.seconds:g} s of {TRACE.name}")
    for order in args.order or ["level", "gain"]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "model.yaml").write_text(yaml.safe_dump(MODEL))
            write_policy(folder, order, ["http://127.0.0.1:1"] * args.engines if args.engines > 1 else [])
            rows = write_traces(folder, args.seconds, args.engines)
            planned = simulated(folder, args.engines)
            found = measured(folder, args.engines, order)
        print(f"\norder: {order}, {rows:,} requests{'simulated':>20}{'processes':>12}{'apart':>8}")
        lines = {"gain (TDG)": (planned.gain, found.gain), "SLO": (planned.slo, found.slo)}
        furthest = max(furthest, *(abs(one - other) for one, other in lines.values()))
        lines |= {f"SLO of {tier}": (planned.by_tier[tier], found.by_tier[tier]) for tier in planned.by_tier}
        for what, (one, other) in lines.items():
            print(f"{what:32}{one:>13.1f}%{other:>11.1f}%{other - one:>+8.1f}", flush=True)
    print(f"\ngain and SLO within {TARGET:g} points are asked; the furthest is {furthest:.1f}")
    return int(args.check and furthest > TARGET)


if __name__ == "__main__":
    sys.exit(main())
