"""Whether `mode: observe` predicts what enforcing does.

    python -m benchmarks.observe [--only LOAD] [--json FILE]

Seven loads that differ in kind, each played twice at the same time: once to a proxy that observes and once to one that
enforces, with the same policy, the same arrivals, and an emulated engine of their own each. The engine is slow (about 8
requests a second), so that the noise of a machine matters little. Every load but one begins with some seconds of little
traffic, as any day does: there the dry run learns what the engine takes. The other is the quickstart's.

Compared are the waits of the admitted (median and 99th percentile) and the number of refused requests, by tier. A wait
agrees within 25% or 0.5 s, a number within 25% or 5 requests. The command fails where a figure does not agree and the
report did not say that it is not to be trusted; where the report says so of more than a quarter of the rows although
they agree (the load `closed loop` left out, which a dry run cannot know); and where it predicts no load at all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import platform
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import command
from sidecar.tools.loadgen import Planned, Seen, play

CHAT = "/v1/chat/completions"
STEP_MS = 50
SHARE, SECONDS, REQUESTS = 0.25, 0.5, 5
"""What counts as agreement: a quarter, or half a second of a wait, or five requests."""
MOST_NEEDLESS = 0.25
"""A report that always doubts itself says nothing: so many rows that agree may be doubted, of loads it can know."""
TIMEOUT_S = 300.0
ENGINE = {"max-num-seqs": 8, "step-ms": STEP_MS, "scheduling": "fcfs"}

POLICY = """\
engine: vllm
{mode}capacity: {capacity}
tiers:
{tiers}
default_tier: batch
anonymous: {first}
tenants: tenants.yaml
sources: [header]
endpoints:
  /v1/chat/completions: {{}}
"""
TENANT = """\
tenant: crawler
keys: ["sha256:{hash}"]
tier: batch
max_tier: batch
limits: {{requests_per_minute: 60}}
"""
KEY = "sk-crawler-of-the-benchmark"
THREE = {
    "high": "{reserve: 40%}",
    "normal": "{reserve: 20%, queue: {max_wait: 20s}}",
    "batch": "{reserve: 10%, queue: {max_requests: 60, max_wait: 20s}}",
}


@dataclass(frozen=True, slots=True)
class Load:
    """One load. `is_knowable` is whether the dry run can know all that matters, so that its report is to be trusted."""

    name: str
    what: str
    plan: Callable[[random.Random], list[Planned]]
    tiers: Mapping[str, str]
    capacity: str = "{requests: 8}"
    engine: Mapping[str, Any] | None = None
    is_knowable: bool = True


def request(
    at_s: float, tier: str, *, prompt: int = 40, output: int = 20, key: str | None = None, **more: Any
) -> Planned:
    """One streaming request: `prompt` and `output` in tokens."""
    text = ("word " * math.ceil(prompt * 4 / 5))[: prompt * 4]
    body = {
        "model": "emulated",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": output,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"x-priority": tier, **({"authorization": f"Bearer {key}"} if key else {})}
    return Planned(at_s, CHAT, headers, json.dumps(body).encode(), label=tier, **more)


def arrivals(luck: random.Random, per_s: float, from_s: float, to_s: float) -> list[float]:
    """The times of a Poisson process."""
    found, at_s = [], from_s + luck.expovariate(per_s)
    while at_s < to_s:
        found.append(at_s)
        at_s += luck.expovariate(per_s)
    return found


QUIET_S = 15.0
"""The time with little traffic at the start of every load."""


def quiet(luck: random.Random, **more: Any) -> list[Planned]:
    """A third of what the engine does."""
    return [request(at_s, luck.choice(("high", "normal")), **more) for at_s in arrivals(luck, 2.5, 0, QUIET_S)]


def light(luck: random.Random) -> list[Planned]:
    """Half of what the engine does, of every length."""
    return [
        request(at_s, luck.choice(("high", "normal", "batch")), output=luck.randint(5, 40))
        for at_s in arrivals(luck, 3.0, 0, 40)
    ]


def bursty(luck: random.Random) -> list[Planned]:
    """Bursts of batch beside some traffic of the others, one tenant over its limit, and a tier that preempts."""
    plan = quiet(luck, output=20)
    plan += [request(at_s, "high", output=luck.randint(5, 30)) for at_s in arrivals(luck, 2.0, QUIET_S, 50)]
    plan += [request(at_s, "batch", output=20, key=KEY) for at_s in arrivals(luck, 2.0, QUIET_S, 50)]
    for number in range(3):
        burst_s = QUIET_S + 3 + 11 * number
        plan += [request(burst_s + luck.random(), "batch", output=luck.randint(10, 30)) for _ in range(40)]
        plan += [request(burst_s + luck.random(), "normal", output=20) for _ in range(15)]
    return plan


def bulk(luck: random.Random) -> list[Planned]:
    """200 beside interactive requests, in three seconds: a busy machine accepts them no faster."""
    plan = quiet(luck)
    plan += [request(at_s, "high") for at_s in arrivals(luck, 3.0, QUIET_S, 50)]
    return plan + [request(QUIET_S + 3 * luck.random(), "batch") for _ in range(200)]


def long_prompts(luck: random.Random) -> list[Planned]:
    """Prompts that take longer than their answers: the engine is bound by its prefill."""

    def one(at_s: float, tier: str) -> Planned:
        return request(at_s, tier, prompt=luck.choice((100, 1000, 4000, 8000)), output=luck.randint(5, 20))

    plan = [one(at_s, luck.choice(("high", "normal"))) for at_s in arrivals(luck, 0.8, 0, 2 * QUIET_S)]
    plan += [one(at_s, "high") for at_s in arrivals(luck, 0.7, 2 * QUIET_S, 65)]
    return plan + [one(at_s, "batch") for at_s in arrivals(luck, 4.0, 2 * QUIET_S, 65)]


def mixed_lengths(luck: random.Random) -> list[Planned]:
    """A pool that is bound by tokens, an engine that runs more than it and slows down with each."""

    def one(at_s: float, tier: str) -> Planned:
        prompt, output = luck.choice(((50, 10), (50, 80), (400, 20), (1200, 40)))
        return request(at_s, tier, prompt=prompt, output=output)

    plan = [one(at_s, luck.choice(("high", "normal"))) for at_s in arrivals(luck, 2.0, 0, 2 * QUIET_S)]
    plan += [one(at_s, "high") for at_s in arrivals(luck, 1.0, 2 * QUIET_S, 65)]
    plan += [one(at_s, "normal") for at_s in arrivals(luck, 0.7, 2 * QUIET_S, 65)]
    return plan + [one(at_s, "batch") for at_s in arrivals(luck, 4.0, 2 * QUIET_S, 65)]


def overload(_: random.Random) -> list[Planned]:
    """The quickstart's: a nightly run that comes at once, to a process that has seen nothing, and a chat beside it."""
    nightly = [request(number / 1000, "batch", prompt=64, output=120) for number in range(80)]
    return nightly + [request(2.003 + number, "high", prompt=32, output=16) for number in range(30)]


def closed_loop(luck: random.Random) -> list[Planned]:
    """Clients that send the next request when the last was answered: what they send depends on how long they wait."""
    plan = quiet(luck)
    for tier, clients, turns in (("high", 10, 30), ("batch", 20, 12)):
        for _ in range(clients):
            at_s = QUIET_S + luck.random()
            for turn in range(turns):
                after = len(plan) - 1 if turn else None
                plan.append(request(at_s, tier, output=20, after=after))
    return plan


LOADS = (
    Load("light", "half of what the engine does", light, THREE),
    Load(
        "bursty",
        "bursts, a tenant over its limit, preemption",
        bursty,
        {
            "high": "{reserve: 20%, preempt_after: 100ms}",
            "normal": "{reserve: 20%, queue: {max_wait: 20s}}",
            "batch": "{reserve: 10%, preemptible: true, queue: {max_requests: 30, max_wait: 20s}}",
        },
    ),
    Load("bulk", "200 in three seconds beside interactive requests", bulk, THREE),
    Load(
        "long prompts",
        "more prompt tokens than the engine prefills",
        long_prompts,
        THREE,
        engine={"prefill-tokens-per-step": 512, "context-tokens": 20_000},
    ),
    Load(
        "mixed lengths",
        "a pool of 4,000 tokens; the engine runs four times as many, slower",
        mixed_lengths,
        THREE,
        capacity="{tokens: 4k, requests: 100}",
        engine={"max-num-seqs": 64, "step-ms": 30, "step-ms-per-seq": 4},
    ),
    Load(
        "overload",
        "80 at once beside a chat, and no quiet time before",
        overload,
        {
            "high": "{reserve: 20%, preempt_after: 500ms}",
            "normal": "{reserve: 10%}",
            "batch": "{reserve: 10%, preemptible: true, queue: {max_requests: 10k, max_wait: 30m}}",
        },
        capacity="{requests: 6}",
        engine={"max-num-seqs": 4, "step-ms": 20, "scheduling": "priority"},
    ),
    Load("closed loop", "clients that wait for their answers", closed_loop, THREE, is_knowable=False),
)


# -- what came of it


@dataclass(frozen=True, slots=True)
class Figures:
    """One tier in one run: its requests, the waits of the admitted in seconds, and how many were refused."""

    requests: int
    p50_s: float
    p99_s: float
    refused: int


@dataclass(frozen=True, slots=True)
class Line:
    """One tier of one load, observed and enforced. `reasons` are why the report is not to be trusted."""

    load: str
    tier: str
    predicted: Figures
    real: Figures
    reasons: Sequence[str]

    @property
    def apart(self) -> list[str]:
        """The figures that do not agree."""
        predicted, real = self.predicted, self.real
        pairs = (("p50", predicted.p50_s, real.p50_s), ("p99", predicted.p99_s, real.p99_s))
        found = [name for name, one, other in pairs if abs(one - other) > max(SECONDS, SHARE * other)]
        is_apart = abs(predicted.refused - real.refused) > max(REQUESTS, SHARE * real.refused)
        return [*found, *(["refused"] if is_apart else [])]


def enforced(seen: Sequence[Seen]) -> dict[str, Figures]:
    """What clients saw, by tier."""
    by_tier: dict[str, list[Seen]] = {}
    for one in seen:
        if one.status is None:
            raise RuntimeError(f"a request has no answer: {one.error}")
        by_tier.setdefault(one.planned.label, []).append(one)
    found = {}
    for tier, all_seen in by_tier.items():
        waits_s = sorted(float(one.headers["x-admission-wait-ms"]) / 1000 for one in all_seen if one.status == 200)
        refused = sum(one.status in (429, 503) for one in all_seen)
        found[tier] = figures(len(all_seen), waits_s, refused)
    return found


def figures(requests: int, waits_s: Sequence[float], refused: int) -> Figures:
    """The figures of a tier; the waits are sorted."""
    return Figures(requests, _quantile(waits_s, 0.5), _quantile(waits_s, 0.99), refused)


def observed(report: Mapping[str, Any]) -> dict[str, Figures]:
    """What the report predicts, by tier."""
    return {
        row["name"]: Figures(row["requests"], row["wait_p50_s"], row["wait_p99_s"], sum(row["refused"].values()))
        for row in report["tiers"]
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0


def measure(load: Load) -> list[Line]:
    """Plays one load to both."""
    import hashlib

    engine = {**ENGINE, **(load.engine or {})}
    emulate = ["emulate", "--engine", "vllm", "--port", "0"]
    for name, value in engine.items():
        emulate += [f"--{name}", str(value)]
    plan = load.plan(random.Random(load.name))
    urls = {}
    with ExitStack() as running:
        for mode in ("observe", "enforce"):
            folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
            tiers = "\n".join(f"  {name}: {rules}" for name, rules in load.tiers.items())
            first = next(iter(load.tiers))
            (folder / "policy.yaml").write_text(
                POLICY.format(mode=f"mode: {mode}\n", capacity=load.capacity, tiers=tiers, first=first)
            )
            (folder / "tenants.yaml").write_text(TENANT.format(hash=hashlib.sha256(KEY.encode()).hexdigest()))
            (upstream,) = running.enter_context(command(*emulate))
            serve = ("serve", "--upstream", upstream, "--policy", str(folder), "--port", "0", "--admin-port", "0")
            urls[mode] = running.enter_context(command(*serve))
        seen = asyncio.run(_play_both(plan, [urls["observe"][0], urls["enforce"][0]]))
        report = _settled_report(urls["observe"][1])
    predicted, real = observed(report), enforced(seen)
    reasons = {tier: [one["reason"] for one in report.get("doubts", ()) if one["tier"] in ("", tier)] for tier in real}
    return [Line(load.name, tier, predicted[tier], real[tier], reasons[tier]) for tier in load.tiers if tier in real]


async def _play_both(plan: list[Planned], urls: Sequence[str]) -> list[Seen]:
    """The answers of the second."""
    _, seen = await asyncio.gather(*(play([url], plan, timeout_s=TIMEOUT_S) for url in urls))
    return seen


def _settled_report(admin_url: str) -> dict[str, Any]:
    """The report, when none waits any more."""
    until_s = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(f"{admin_url}/observed", timeout=10) as answer:
            report: dict[str, Any] = json.load(answer)
        if report["undecided"] == 0 or time.monotonic() > until_s:
            return report
        time.sleep(0.5)


def table(lines: Sequence[Line]) -> str:
    """A line for each tier of each load."""
    rows = [f"{'':24}{'requests':>9}{'p50: predicted, real':>23}{'p99: predicted, real':>23}{'refused':>14}"]
    for line in lines:
        one, other = line.predicted, line.real
        verdict = f"apart: {', '.join(line.apart)}" if line.apart else "agrees"
        said = "; said not to be trusted" if line.reasons else ""
        rows.append(
            f"{line.load + ', ' + line.tier:24}{other.requests:>9}{one.p50_s:>12.2f} s{other.p50_s:>7.2f} s"
            f"{one.p99_s:>12.2f} s{other.p99_s:>7.2f} s{one.refused:>8}{other.refused:>6}   {verdict}{said}"
        )
    for name in dict.fromkeys(line.load for line in lines):
        reasons = dict.fromkeys(reason for line in lines if line.load == name for reason in line.reasons)
        rows += [f"{name}: {reason}" for reason in reasons]
    return "\n".join(rows)


def missed(lines: Sequence[Line], *, of_all: bool = True) -> list[str]:
    """What is not as it should be, a sentence each. `of_all` says that these are the lines of all loads."""
    knowable = {load.name: load.is_knowable for load in LOADS}
    found = []
    for line in lines:
        name = f"{line.load}, {line.tier}"
        if line.apart and not line.reasons:
            found.append(f"{name}: {', '.join(line.apart)} do not agree, and the report did not say so")
    needless = [line for line in lines if line.reasons and knowable[line.load] and not line.apart]
    if of_all and len(needless) > MOST_NEEDLESS * len(lines):
        said = "; ".join(dict.fromkeys(reason for line in needless for reason in line.reasons))
        found.append(f"{len(needless)} of {len(lines)} rows are doubted without need: {said}")
    if of_all and not any(line.real.refused for line in lines):
        found.append("no load made the pool refuse anything: nothing was predicted")
    return found


def main(arguments: argparse.Namespace) -> int:
    """Plays everything and prints the table. 1 where something is not as it should be."""
    chosen = [load for load in LOADS if arguments.only in (None, load.name)]
    lines: list[Line] = []
    for load in chosen:
        print(f"{load.name}: {load.what}", file=sys.stderr, flush=True)
        played = measure(load)
        print(table(played), file=sys.stderr, flush=True)
        lines += played
    print(f"an engine of about 8 requests a second, two runs at the same time; {platform.machine()}\n")
    print(table(lines))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(line) for line in lines], indent=2) + "\n")
    found = missed(lines, of_all=arguments.only is None)
    print("\n" + ("\n".join(f"MISSED {one}" for one in found) if found else "every target was reached"))
    return 1 if found else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[load.name for load in LOADS], help="one load alone")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures there")
    sys.exit(main(parser.parse_args()))
