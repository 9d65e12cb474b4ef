"""What a priority does on real engines: vLLM on the CPU and Dynamo's router, alone and with admission before them.

    python -m benchmarks.real_engines [--json FILE] [--rounds N] [--only vllm|dynamo] [--stream-interval N]

The same burst in every way to serve it: 120 streaming requests at time zero over 4 sequences, three tiers in equal
parts, shuffled. Clients measure the time to the first token. The ways take turns, so that each round compares what ran
within a minute; ratios are medians over rounds. The command fails where one of the targets is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import command
from sidecar.tools.loadgen.client import Planned, Seen, play
from sidecar.tools.loadgen.statistics import quantile, spearman
from tests.real.lab import Engine, dynamo, vllm

TIERS = ("high", "normal", "batch")
REQUESTS, SEQUENCES, OUTPUT_TOKENS, PROMPT_WORDS = 120, 4, 32, 60
ANSWER_WITHIN_S = 120.0
SETTLE_S = 5.0
"""Between bursts: vLLM's processes spin for seconds after their last request, on the cores of the next engine."""
TEXT = "the queue serves a token under load while every tenant waits for some work before lunch"
CHAT = "/v1/chat/completions"

POLICY = """\
engine: {engine}
capacity: {capacity}
tiers: {tiers}
anonymous: high
default_tier: high
{more}
"""
PASSES_CHAT = "endpoints: {/v1/embeddings: {}}"
"""A policy that guards another endpoint: our processes are in the way, and admission is not."""
ORDER_ALONE = "{high: {}, normal: {}, batch: {}}"
FLOORS = "{high: {reserve: 20%}, normal: {reserve: 10%}, batch: {reserve: 5%}}"
EVERYTHING = "{requests: 10k}"
FROM_ENGINE = "{from: engine}"
"""Mounted, vLLM says how many sequences it runs. Behind a network it does not, and Dynamo does."""
FROM_ENGINE_BESIDE = "{from: engine, requests: 6}"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to serve the burst. `says_tier` is whether its clients name their tier; if not, all are equal."""

    name: str
    title: str
    server: str
    says_tier: bool


@dataclass(frozen=True, slots=True)
class Figures:
    """One burst, as its clients saw it. Seconds, and output tokens a second; `p50_s` by tier."""

    p50_s: Mapping[str, float]
    tokens_per_s: float
    correlation: float
    failed: int

    @property
    def lowest_over_highest(self) -> float:
        """The median TTFT of the last tier over that of the first."""
        return self.p50_s[TIERS[-1]] / self.p50_s[TIERS[0]]


def requests(seed: int, way: str, *, says_tier: bool) -> list[Planned]:
    """One burst of a `way` to serve it, in the round that `seed` stands for.

    The order of arrival is the same for every way of a round, the words are not: several share an engine, and its
    prefix cache would help later requests.
    """
    tiers = [TIERS[number % len(TIERS)] for number in range(REQUESTS)]
    random.Random(seed).shuffle(tiers)
    rng = random.Random(f"{seed} {way}")
    return [_request(rng, tier, says_tier=says_tier) for tier in tiers]


def _request(rng: random.Random, tier: str, *, says_tier: bool) -> Planned:
    words = TEXT.split()
    text = f"{rng.randint(0, 10**6)} " + " ".join(rng.choice(words) for _ in range(PROMPT_WORDS))
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    headers = {"content-type": "application/json", **({"x-priority": tier} if says_tier else {})}
    return Planned(0.0, CHAT, headers, json.dumps(body).encode(), label=tier)


def measure(seen: Sequence[Seen]) -> Figures:
    """The figures of one burst."""
    done = [one for one in seen if one.is_complete and one.ttft_s is not None]
    by_tier = {tier: [one.ttft_s or 0.0 for one in done if one.planned.label == tier] for tier in TIERS}
    wall_s = max(one.end_s for one in done) - min(one.sent_s for one in done)
    importance = [-float(TIERS.index(one.planned.label)) for one in done]
    correlation = spearman(importance, [one.ttft_s or 0.0 for one in done])
    return Figures(
        p50_s={tier: quantile(values, 0.5) for tier, values in by_tier.items()},
        tokens_per_s=OUTPUT_TOKENS * len(done) / wall_s,
        correlation=correlation.value if correlation else 0.0,
        failed=len(seen) - len(done),
    )


# -- servers

MIDDLEWARE = ("sidecar.AdmissionMiddleware",)


@contextlib.contextmanager
def proxy(upstream: str, policy: Path) -> Iterator[str]:
    """`sidecar serve` before an engine; its address."""
    with command("serve", "--upstream", upstream, "--policy", str(policy), "--port", "0", "--admin-port", "0") as (
        url,
        _,
    ):
        yield url


@contextlib.contextmanager
def vllm_servers(folder: Path, stream_interval: int) -> Iterator[tuple[Sequence[Way], Mapping[str, str]]]:
    """Every way to serve from a real vLLM, and the addresses of their servers by name."""
    policies = {
        name: _policy(folder, f"vllm-{name}", "vllm", capacity)
        for name, capacity in (("all", EVERYTHING), ("mounted", FROM_ENGINE), ("proxy", FROM_ENGINE_BESIDE))
    }
    floors = _policy(folder, "vllm-floors", "vllm", FROM_ENGINE_BESIDE, tiers=FLOORS)
    passing = _policy(folder, "vllm-passing", "vllm", EVERYTHING, more=PASSES_CHAT)
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context

        def mounted(scheduling: str, policy: str) -> str:
            variables = {"SIDECAR_POLICY": str(policies[policy])}
            return enter(_vllm(scheduling, stream_interval, middleware=MIDDLEWARE, variables=variables)).url

        fcfs = enter(_vllm("fcfs", stream_interval)).url
        by_priority = enter(_vllm("priority", stream_interval)).url
        urls = {
            "alone": fcfs,
            "passing-proxy": enter(proxy(fcfs, passing)),
            "engine-mounted": mounted("priority", "all"),
            "engine-proxy": enter(proxy(by_priority, policies["all"])),
            "admission-mounted": mounted("fcfs", "mounted"),
            "admission-proxy": enter(proxy(fcfs, policies["proxy"])),
            "both-mounted": mounted("priority", "mounted"),
            "both-proxy": enter(proxy(by_priority, policies["proxy"])),
            "floors-proxy": enter(proxy(by_priority, floors)),
        }
        ways = [
            Way("a", "a  engine alone, fcfs", "alone", says_tier=True),
            Way("proxy", "   the same behind our proxy without admission", "passing-proxy", says_tier=True),
        ]
        for form in ("mounted", "proxy"):
            ways += [
                Way(f"b-{form}", f"b  engine priority through us, {form}", f"engine-{form}", says_tier=True),
                Way(f"c-{form}", f"c  admission, engine fcfs, {form}", f"admission-{form}", says_tier=True),
                Way(f"d-{form}", f"d  both, {form}", f"both-{form}", says_tier=True),
                Way(f"e-{form}", f"e  control: both, equal tiers, {form}", f"both-{form}", says_tier=False),
            ]
        ways.append(Way("f", "f  both, a floor for every tier, proxy", "floors-proxy", says_tier=True))
        yield ways, urls


def _vllm(scheduling: str, stream_interval: int, **more: Any) -> contextlib.AbstractContextManager[Engine]:
    return vllm(scheduling=scheduling, arguments=["--stream-interval", str(stream_interval)], **more)


@contextlib.contextmanager
def dynamo_servers(folder: Path, _: int) -> Iterator[tuple[Sequence[Way], Mapping[str, str]]]:
    """The same for Dynamo, which has no place for a middleware: its frontend is written in Rust."""
    everything = _policy(folder, "dynamo-all", "dynamo", EVERYTHING)
    from_engine = _policy(folder, "dynamo-from-engine", "dynamo", FROM_ENGINE)
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        plain, queueing = enter(dynamo(router_queue=False)), enter(dynamo(router_queue=True))
        urls = {
            "alone": plain,
            "engine": enter(proxy(queueing, everything)),
            "admission": enter(proxy(plain, from_engine)),
            "both": enter(proxy(queueing, from_engine)),
        }
        yield (
            [
                Way("a", "a  engine alone, no router queue", "alone", says_tier=True),
                Way("b", "b  router's priority through us, proxy", "engine", says_tier=True),
                Way("c", "c  admission, no router queue, proxy", "admission", says_tier=True),
                Way("d", "d  both, proxy", "both", says_tier=True),
                Way("e", "e  control: both, equal tiers, proxy", "both", says_tier=False),
            ],
            urls,
        )


def _policy(folder: Path, name: str, engine: str, capacity: str, *, tiers: str = ORDER_ALONE, more: str = "") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(POLICY.format(engine=engine, capacity=capacity, tiers=tiers, more=more))
    return path


# -- rounds and what is printed


def rounds_of(ways: Sequence[Way], urls: Mapping[str, str], rounds: int) -> Mapping[str, Sequence[Figures]]:
    """Every way once a round, in an order that turns with the rounds. A first burst warms each server up."""
    for server in urls.values():
        asyncio.run(play([server], requests(0, server, says_tier=False)[:16], timeout_s=ANSWER_WITHIN_S))
    found: dict[str, list[Figures]] = {way.name: [] for way in ways}
    for number in range(rounds):
        start = number % len(ways)
        for way in [*ways[start:], *ways[:start]]:
            time.sleep(SETTLE_S)
            planned = requests(number + 1, way.name, says_tier=way.says_tier)
            figures = measure(asyncio.run(play([urls[way.server]], planned, timeout_s=ANSWER_WITHIN_S)))
            found[way.name].append(figures)
            print(
                f"round {number + 1}  {way.title:44} {figures.lowest_over_highest:5.2f}x", file=sys.stderr, flush=True
            )
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """One way over all rounds: medians of what each round gave."""

    title: str
    p50_s: Mapping[str, float]
    lowest_over_highest: float
    correlation: float
    tokens_per_s: float
    throughput_to_alone: float
    failed: int


def rows_of(ways: Sequence[Way], found: Mapping[str, Sequence[Figures]]) -> Mapping[str, Row]:
    """The medians, and the throughput against the engine alone in the same round."""
    return {way.name: _row(way, found[way.name], found["a"]) for way in ways}


def _row(way: Way, figures: Sequence[Figures], alone: Sequence[Figures]) -> Row:
    ratios = [mine.tokens_per_s / other.tokens_per_s for mine, other in zip(figures, alone, strict=True)]
    return Row(
        title=way.title,
        p50_s={tier: statistics.median(one.p50_s[tier] for one in figures) for tier in TIERS},
        lowest_over_highest=statistics.median(one.lowest_over_highest for one in figures),
        correlation=statistics.median(one.correlation for one in figures),
        tokens_per_s=statistics.median(one.tokens_per_s for one in figures),
        throughput_to_alone=statistics.median(ratios),
        failed=sum(one.failed for one in figures),
    )


def table(engine: str, rows: Mapping[str, Row]) -> str:
    """One line a way."""
    head = f"{engine:44} {'TTFT p50 s: high/normal/batch':>29} {'batch/high':>11} {'rho':>6} {'tok/s':>7} {'to (a)':>7}"
    return "\n".join([head, *(_line(row) for row in rows.values())])


def _line(row: Row) -> str:
    waits = " / ".join(f"{row.p50_s[tier]:.2f}" for tier in TIERS)
    failed = f"  {row.failed} failed" if row.failed else ""
    return (
        f"{row.title:44} {waits:>29} {row.lowest_over_highest:>10.2f}x {row.correlation:>+6.2f} "
        f"{row.tokens_per_s:>7.0f} {row.throughput_to_alone:>7.3f}{failed}"
    )


def missed(rows: Mapping[str, Row]) -> list[str]:
    """The targets that were missed; they are vLLM's."""
    found = [f"{row.title}: {row.failed} requests failed" for row in rows.values() if row.failed]
    for name, row in rows.items():
        kind, ratio = name[0], row.lowest_over_highest
        least = {"b": 3.0, "d": 4.0}.get(kind)
        if least is not None and ratio < least:
            found.append(f"{row.title}: batch/high {ratio:.2f}x, less than {least:.1f}x")
        if kind == "e" and not 0.9 <= ratio <= 1.1:
            found.append(f"{row.title}: batch/high {ratio:.2f}x, more than 10% from 1")
        if kind in "cd" and row.throughput_to_alone < 0.97:
            found.append(f"{row.title}: {row.throughput_to_alone:.3f} of the engine's own throughput, less than 0.97")
    return found


def version_of(url: str, engine: str) -> str:
    """What a running engine says of its version."""
    path, member = ("/version", "version") if engine == "vllm" else ("/openapi.json", "info")
    with urllib.request.urlopen(url + path, timeout=5) as response:
        said = json.load(response)[member]
    return str(said if engine == "vllm" else said["version"])


def main(arguments: argparse.Namespace) -> int:
    """Plays everything and prints the tables. 1 where a target was missed."""
    results: dict[str, object] = {"machine": f"{platform.machine()}, Python {platform.python_version()}"}
    late: list[str] = []
    kinds = {"vllm": vllm_servers, "dynamo": dynamo_servers}
    print(
        f"{REQUESTS} streaming requests at once over {SEQUENCES} sequences, {OUTPUT_TOKENS} output tokens each, three "
        f"tiers in equal parts; medians of {arguments.rounds} rounds.\nrho: Spearman's correlation of importance and "
        "TTFT; to (a): output tokens a second to those of the engine alone in the same round.\n"
    )
    for engine in [arguments.only] if arguments.only else kinds:
        with (
            tempfile.TemporaryDirectory() as folder,
            kinds[engine](Path(folder), arguments.stream_interval) as (ways, urls),
        ):
            version = version_of(urls["alone"], engine)
            rows = rows_of(ways, rounds_of(ways, urls, arguments.rounds))
        print(table(f"{engine} {version}", rows) + "\n", flush=True)
        results[engine] = {"version": version, "ways": {name: asdict(row) for name, row in rows.items()}}
        late += [f"{engine}: {one}" for one in missed(rows)] if engine == "vllm" else []
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    print("\n".join(f"MISSED {one}" for one in late) if late else "every target was reached")
    return 1 if late else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip(), formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures as JSON")
    parser.add_argument("--rounds", type=int, default=5, help="bursts of every way (default %(default)s)")
    parser.add_argument(
        "--stream-interval",
        type=int,
        default=1,
        help="vLLM's own option: tokens to a chunk after the first (default 1)",
    )
    parser.add_argument("--only", choices=("vllm", "dynamo"), help="one engine")
    raise SystemExit(main(parser.parse_args()))
