"""Agreement of all reports: 1,000 replayed requests, and their waits added up from four places.

    python -m benchmarks.agreement [--requests 1000] [--json FILE]

`sidecar emulate` and `sidecar serve` run as processes; `sidecar replay` sends a third more than the engine can do, in
four tiers, one of which gives up after two seconds. Then, for each tier, the seconds of queue wait and of starvation
are added up from the spans (as an OTLP receiver got them), from the metrics (the sums of the histograms of
`GET /metrics`, and those that went out over OTLP), and from the replay's own output (what every answer said). The
command fails where two of them differ by more than 1%.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.processes import command
from sidecar.telemetry import semconv
from sidecar.telemetry.metrics.histograms import QUEUE_WAIT, STARVATION
from tests.support.otlp import Received, otlp_over_http

POLICY = """\
engine: vllm
capacity: {tokens: 100k, requests: 8}
aging: {promote_after: 1s, ceiling: normal}
tiers:
  high: {reserve: 25%, slo: {queue_wait: 1s}}
  normal: {reserve: 15%}
  low: {}
  batch: {reserve: 10%, queue: {max_wait: 2s}, slo: {starvation: 1s}}
default_tier: normal
anonymous: high
sources: [header]
endpoints:
  /v1/chat/completions: {}
"""
MIX = "high=20,normal=30,low=20,batch=30"
STEP_MS = 5
SLOTS = 8
OUTPUT_TOKENS = 16
OVERLOAD = 4 / 3
MOST_APART = 0.01
LEAST_S = 0.001
"""Below this a sum is nothing that can be compared."""

Sums = dict[str, "Waits"]


@dataclass
class Waits:
    """Of one tier, in seconds."""

    queue_wait_s: float = 0.0
    starvation_s: float = 0.0


def measure(requests: int) -> Mapping[str, Sums]:
    """Plays so many requests; the sums by where they come from, then by tier."""
    with tempfile.TemporaryDirectory() as name, otlp_over_http() as received:
        folder = Path(name)
        (folder / "policy.yaml").write_text(POLICY)
        write_trace(folder / "trace.jsonl", requests)
        emulated = ("emulate", "--engine", "vllm", "--max-num-seqs", str(SLOTS), "--step-ms", str(STEP_MS))
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": received.url,
            "OTEL_METRICS_EXPORTER": "prometheus,otlp",
            # Its default holds 2,048 spans and drops the rest: 5 s of this load.
            "OTEL_BSP_MAX_QUEUE_SIZE": "65536",
        }
        with (
            command(*emulated, "--port", "0") as (engine,),
            command(
                "serve", "--upstream", engine, "--policy", name, "--port", "0", "--admin-port", "0", **variables
            ) as (proxy, admin),
        ):
            told = replayed(folder, proxy)
            scraped = from_metrics_page(admin)
        return {
            "answers": told,
            "spans": from_spans(received, requests),
            "metrics, scraped": scraped,
            "metrics, OTLP": from_otlp_metrics(received),
        }


def write_trace(path: Path, requests: int) -> None:
    """Arrivals by chance, a third more of them than the engine can do."""
    luck = random.Random(7)
    per_s = OVERLOAD * SLOTS / (OUTPUT_TOKENS * STEP_MS / 1000)
    at_s = 0.0
    lines = []
    for _ in range(requests):
        at_s += luck.expovariate(per_s)
        row = {"timestamp": round(at_s * 1000), "input_length": 20, "output_length": OUTPUT_TOKENS}
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n")


def replayed(folder: Path, proxy: str) -> Sums:
    """Plays the trace; what the answers said."""
    out = folder / "figures.json"
    arguments = ["replay", str(folder / "trace.jsonl"), "--upstream", proxy, "--policy", str(folder)]
    arguments += ["--by", "tier", "--mix", MIX, "--json", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "sidecar.cli", *arguments], check=False, capture_output=True, text=True
    )
    if done.returncode not in {0, 1}:  # 1: some were refused, and that is meant
        raise RuntimeError(done.stderr)
    (run,) = json.loads(out.read_text())["runs"]
    return {
        tier: Waits(figures["door"]["queue_wait_s"], figures["door"]["starvation_s"])
        for tier, figures in run["tiers"].items()
    }


def from_spans(received: Received, requests: int) -> Sums:
    """The attributes of every `admission` span. Fails where there is not one for each request."""
    sums: Sums = defaultdict(Waits)
    spans = [span for span in received.spans if span.name == semconv.ADMISSION]
    if len(spans) != requests:
        raise RuntimeError(f"{requests} requests left {len(spans)} admission spans")
    for span in spans:
        waits = sums[span.attributes[semconv.ADMISSION_TIER]]
        waits.queue_wait_s += span.attributes[semconv.ADMISSION_QUEUE_WAIT_S]
        waits.starvation_s += span.attributes[semconv.ADMISSION_STARVATION_S]
    return dict(sums)


def from_metrics_page(admin: str) -> Sums:
    """The histograms' sums, as Prometheus would scrape them."""
    with urllib.request.urlopen(f"{admin}/metrics", timeout=30) as response:
        text = response.read().decode()
    sums: Sums = defaultdict(Waits)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "admission_queue_wait_seconds_sum":
                sums[sample.labels["admission_tier"]].queue_wait_s += sample.value
            elif sample.name == "admission_starvation_seconds_sum":
                sums[sample.labels["admission_tier"]].starvation_s += sample.value
    return dict(sums)


def from_otlp_metrics(received: Received) -> Sums:
    """The histograms' sums in the last export, which the server's end brings."""
    sums: Sums = defaultdict(Waits)
    scopes = received.metrics[-1].resource_metrics[0].scope_metrics
    for metric in (metric for scope in scopes for metric in scope.metrics):
        for point in metric.histogram.data_points:
            labels = {pair.key: pair.value.string_value for pair in point.attributes}
            if metric.name == QUEUE_WAIT.name:
                sums[labels[semconv.ADMISSION_TIER]].queue_wait_s += point.sum
            elif metric.name == STARVATION.name:
                sums[labels[semconv.ADMISSION_TIER]].starvation_s += point.sum
    return dict(sums)


def apart(figures: Sequence[float]) -> float:
    """By how much of the largest the figures differ; 0 for figures that are all next to nothing."""
    most = max(figures)
    return 0.0 if most < LEAST_S else (most - min(figures)) / most


def worst(found: Mapping[str, Sums]) -> float:
    """The largest difference of any tier's sum between any two places."""
    tiers = {tier for sums in found.values() for tier in sums}
    return max(
        apart([getattr(sums.get(tier, Waits()), name) for sums in found.values()])
        for tier in tiers
        for name in ("queue_wait_s", "starvation_s")
    )


def table(found: Mapping[str, Sums]) -> str:
    """A line for each tier and sum."""
    tiers = next(iter(found.values()))
    lines = [f"{'seconds in sum':24}" + "".join(f"{place:>20}" for place in found) + f"{'apart':>10}"]
    for name, label in (("queue_wait_s", "queue wait"), ("starvation_s", "starvation")):
        for tier in tiers:
            figures = [getattr(sums.get(tier, Waits()), name) for sums in found.values()]
            cells = "".join(f"{figure:>20.3f}" for figure in figures)
            lines.append(f"{label + ', ' + tier:24}{cells}{apart(figures):>9.3%}")
    return "\n".join(lines)


def main() -> int:
    """Returns 1 where the places differ by more than 1%."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    found = measure(arguments.requests)
    print(f"{arguments.requests} requests replayed at {OVERLOAD:.2f} times what the engine can do\n")
    print(table(found))
    if arguments.json:
        sums = {place: {tier: asdict(waits) for tier, waits in by_tier.items()} for place, by_tier in found.items()}
        Path(arguments.json).write_text(json.dumps(sums, indent=2) + "\n")
    difference = worst(found)
    print(f"\nat most {difference:.3%} apart; {MOST_APART:.0%} is allowed")
    return 0 if difference <= MOST_APART else 1


if __name__ == "__main__":
    sys.exit(main())
