"""Learned leases before a real vLLM whose KV cache binds: throughput and preemptions by `learn`.

    python -m benchmarks.reservations_vllm [--json FILE] [--rounds N] [--requests N] [--stream-interval N]

The clients send chats one after another, each with `max_tokens` 512. The answers have about 60 tokens, and a tail: a
random model never ends by itself, so `min_tokens` keeps the ending token away, and a bias brings it then. The sidecar
uses neither. Every way to serve gets the same requests and the same answers. The engine's own page says what it
generated, ran and preempted, from the moment when enough answers were learned to the moment when the last request is
sent. The ways take turns; a ratio compares ways of one round. The command fails where a request failed, where a target
is missed, or where the KV cache did not bind.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import math
import platform
import random
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.one_request import ask
from benchmarks.processes import addresses, start
from benchmarks.real_engines import version_of
from sidecar.engines.pages import Metrics
from sidecar.tools.loadgen.connection import Target
from sidecar.tools.loadgen.statistics import quantile
from tests.real.lab import MODEL, vllm

MAX_TOKENS = 512
BLOCK_TOKENS, BLOCKS = 32, 256
"""A KV cache of 8,192 tokens: room for twelve requests of prompt and `max_tokens`, and for thirty as they really are.
The CPU build has no smaller blocks than 32."""
SEQUENCES = 128
"""More than ever run: vLLM's `--max-num-seqs` never binds."""
MODEL_TOKENS = 1024
PROMPT_WORDS = 100
MEAN_LENGTHS = ((0.6, 30), (0.3, 80), (0.1, 200))
"""Parts of the requests, and the mean output length of each, in tokens. An exponential length has no memory; a mixture
has: the longer an answer is, the longer it goes on, as in a trace of chats."""
EOS = 2
"""The token that ends an answer of the lab's model."""
SAMPLE_EVERY_S = 0.5
ANSWER_WITHIN_S = 300.0
SETTLE_S = 5.0
TEXT = "the queue serves a token under load while every tenant waits for some work before lunch"
ALONE = "alone"
TITLES = {
    "off": "learn: off",
    "cautious": "learn: cautious",
    "full": "learn: full",
    ALONE: "no admission: all clients in the engine",
}
TARGETS = {"off": (1.0, 0), "cautious": (1.25, 0), "full": (1.40, 2)}
"""Of `learn`: the least number of running requests relative to off, and the most preemptions for 1,000 requests. They
are those of benchmarks/reservations for a trace of chats. Throughput has no such target: on a CPU a step takes longer
with each request that runs, and this process, the sidecar and vLLM's server share its cores."""
POLICY = """\
engine: vllm
capacity: {{from: engine, requests: {sequences}, learn: {learn}}}
tiers: {{normal: {{}}}}
anonymous: normal
default_tier: normal
"""


def body_of(number: int) -> bytes:
    """The request of a number: always the same, and so is the length of its answer."""
    rng = random.Random(number)
    words = TEXT.split()
    text = f"{rng.randint(0, 10**6)} " + " ".join(rng.choice(words) for _ in range(PROMPT_WORDS))
    (mean,) = rng.choices([mean for _, mean in MEAN_LENGTHS], [part for part, _ in MEAN_LENGTHS])
    length = min(MAX_TOKENS, math.ceil(rng.expovariate(1 / mean)))
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "min_tokens": length - 1,  # no `seed`: vLLM 0.32 on a CPU ends when it preempts a request that has one
        "logit_bias": {str(EOS): 100},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


@dataclass(frozen=True, slots=True)
class Answered:
    """One request as its client saw it. Seconds of the monotonic clock; `error` is one line where it failed."""

    number: int
    sent_s: float
    ttft_s: float | None
    prompt_tokens: int
    output_tokens: int
    error: str | None


@dataclass(frozen=True, slots=True)
class Sample:
    """The engine at one moment. `generated` and `preempted` are counters, `kv` is the part of its blocks in use."""

    at_s: float
    generated: int
    preempted: int
    running: int
    waiting: int
    kv: float


def sample(url: str) -> Sample:
    """Reads the engine's page now."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
        metrics = Metrics(page.read().decode())
    counts = {
        name: metrics.count(f"vllm:{name}")
        for name in ("generation_tokens_total", "num_preemptions_total", "num_requests_running", "num_requests_waiting")
    }
    usage = metrics.sum("vllm:kv_cache_usage_perc")
    assert usage is not None, "vLLM says which part of its KV cache is in use"
    found = [count for count in counts.values() if count is not None]
    generated, preempted, running, waiting = found
    return Sample(time.monotonic(), generated, preempted, running, waiting, usage)


@dataclass
class Load:
    """Clients that share one list of requests: as soon as one has its answer, it sends the next of the list."""

    url: str
    engine_url: str
    numbers: collections.deque[int]
    warm_up: int
    answered: list[Answered] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    async def run(self, clients: int) -> None:
        """Sends everything. The first of the samples is taken when `warm_up` requests were sent, the last when all."""
        target = Target.of(self.url)
        sampler = asyncio.ensure_future(self._sample(len(self.numbers) - self.warm_up))
        await asyncio.gather(*(self._client(target) for _ in range(clients)))
        await sampler

    async def _client(self, target: Target) -> None:
        while self.numbers:
            self.answered.append(await _ask(target, self.numbers.popleft()))

    async def _sample(self, left: int) -> None:
        while self.numbers:
            if len(self.numbers) <= left:
                self.samples.append(await asyncio.to_thread(sample, self.engine_url))
            await asyncio.sleep(SAMPLE_EVERY_S)


async def _ask(target: Target, number: int) -> Answered:
    sent_s = time.monotonic()
    connection = await ask(target, body_of(number), {}, ANSWER_WITHIN_S)
    if isinstance(connection, str):
        return Answered(number, sent_s, None, 0, 0, connection)
    answer = connection.answer
    if answer is None:
        return Answered(number, sent_s, None, 0, 0, connection.error or "no answer")
    error = connection.error or answer.error
    ttft_s = None if answer.first_token_s is None else answer.first_token_s - sent_s
    return Answered(number, sent_s, ttft_s, answer.prompt_tokens or 0, answer.output_tokens, error)


@dataclass(frozen=True, slots=True)
class Figures:
    """One run of one way to serve, from the end of its warm-up to the last request sent.

    `raised` is how often the sidecar raised its quantile in the whole run, `quantile` the one in force at the end,
    None where that is the base of its `learn`. `lengths` is the sum of all output tokens, to compare runs.
    """

    tokens_per_s: float
    running: float
    kv: float
    ttft_p50_s: float
    ttft_p99_s: float
    requests: int
    preemptions: int
    preemptions_before: int
    raised: int
    quantile: float | None
    prompt: float
    lengths: int
    failed: int

    @property
    def preemptions_per_1000(self) -> float:
        """Preemptions in the engine for 1,000 requests."""
        return 1000 * self.preemptions / self.requests


def measure(load: Load, before: Sample, log: str) -> Figures:
    """The figures of one run; `log` is the sidecar's."""
    first, last = load.samples[0], load.samples[-1]
    inside = [one for one in load.answered if first.at_s <= one.sent_s <= last.at_s]
    done = [one for one in load.answered if one.error is None]
    waits = [one.ttft_s for one in inside if one.ttft_s is not None]
    steps = re.findall(r"leases hold quantile ([\d.]+)", log)
    return Figures(
        tokens_per_s=(last.generated - first.generated) / (last.at_s - first.at_s),
        running=statistics.fmean(one.running for one in load.samples),
        kv=statistics.fmean(one.kv for one in load.samples),
        ttft_p50_s=quantile(waits, 0.5),
        ttft_p99_s=quantile(waits, 0.99),
        requests=len(inside),
        preemptions=last.preempted - first.preempted,
        preemptions_before=first.preempted - before.preempted,
        raised=len(re.findall(r"the engine preempted \d+ requests", log)),
        quantile=float(steps[-1]) if steps else None,
        prompt=statistics.fmean(one.prompt_tokens for one in done),
        lengths=sum(one.output_tokens for one in done),
        failed=len(load.answered) - len(done),
    )


# -- servers and rounds


@contextlib.contextmanager
def served(way: str, engine_url: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """A fresh `sidecar serve` that has learned nothing; its address, and its log. The engine itself for `alone`."""
    log = folder / f"{way}.log"
    if way == ALONE:
        log.write_text("")
        yield engine_url, log
        return
    policy = folder / f"{way}.yaml"
    policy.write_text(POLICY.format(sequences=SEQUENCES, learn=way))
    line = ("serve", "--upstream", engine_url, "--policy", str(policy), "--port", "0", "--admin-port", "0")
    with log.open("w") as errors, start(*line, stderr=errors, SIDECAR_LOG_LEVEL="info") as process:
        try:
            yield addresses(process, 2)[0], log
        finally:
            process.terminate()


def run_of(way: str, engine_url: str, folder: Path, arguments: argparse.Namespace, seed: int) -> Figures:
    """Warms one way up and measures it. Requests of another seed differ; every way of a round has the same."""
    count = arguments.warm_up + arguments.requests
    numbers = collections.deque(range(seed * count, (seed + 1) * count))
    time.sleep(SETTLE_S)
    with served(way, engine_url, folder) as (url, log):
        load = Load(url, engine_url, numbers, arguments.warm_up)
        before = sample(engine_url)
        asyncio.run(load.run(arguments.clients))
        return measure(load, before, log.read_text())


def rounds_of(engine_url: str, folder: Path, arguments: argparse.Namespace) -> Mapping[str, Sequence[Figures]]:
    """Every way once a round, always in the same order; the requests of two rounds differ."""
    found: dict[str, list[Figures]] = {way: [] for way in TITLES}
    for number in range(1, arguments.rounds + 1):
        for way, runs in found.items():
            runs.append(run_of(way, engine_url, folder, arguments, number))
            cells = _cells(runs[-1], found["off"][-1])
            print(f"round {number}  {TITLES[way]:39} {cells}", file=sys.stderr, flush=True)
    return found


# -- what is printed


HEAD = (
    f"{'':48} {'tok/s':>6} {'to off':>7} {'running':>8} {'to off':>7} {'KV used':>8} {'TTFT p50 s':>11} {'p99':>6} "
    f"{'preempted':>10} {'per 1,000':>10} {'warm-up':>8} {'raised':>7} {'quantile':>9}"
)


def table(found: Mapping[str, Sequence[Figures]]) -> str:
    """One line for each run, and the median ratios of each way to `off` in the same round."""
    lines = [HEAD]
    for number, runs in enumerate(zip(*found.values(), strict=True), 1):
        lines += [
            f"round {number}  {TITLES[way]:39} {_cells(figures, runs[0])}"
            for way, figures in zip(found, runs, strict=True)
        ]
    for way in found:
        rate, running = _to_off(found, way)
        lines.append(f"median   {TITLES[way]:39} {'':>6} {rate:>7.2f} {'':>8} {running:>7.2f}")
    return "\n".join(lines)


def _to_off(found: Mapping[str, Sequence[Figures]], way: str) -> tuple[float, float]:
    """Tokens a second and running requests, relative to `off` in the same round: medians over rounds."""
    pairs = list(zip(found[way], found["off"], strict=True))
    return (
        statistics.median(mine.tokens_per_s / off.tokens_per_s for mine, off in pairs),
        statistics.median(mine.running / off.running for mine, off in pairs),
    )


def _cells(figures: Figures, off: Figures) -> str:
    return (
        f"{figures.tokens_per_s:>6.0f} {figures.tokens_per_s / off.tokens_per_s:>7.2f} {figures.running:>8.1f} "
        f"{figures.running / off.running:>7.2f} {figures.kv:>8.0%} {figures.ttft_p50_s:>11.2f} "
        f"{figures.ttft_p99_s:>6.2f} {figures.preemptions:>10} {figures.preemptions_per_1000:>10.1f} "
        f"{figures.preemptions_before:>8} {figures.raised:>7} {figures.quantile or 'base':>9}"
        + (f"  {figures.failed} failed" if figures.failed else "")
    )


def missed(found: Mapping[str, Sequence[Figures]]) -> list[str]:
    """The targets that were missed, and the conditions without which the comparison says nothing."""
    late = [f"{TITLES[way]}: {runs.failed} requests failed" for way in found for runs in found[way] if runs.failed]
    for way, (least, most) in TARGETS.items():
        rate, running = _to_off(found, way)
        if running < least:
            late.append(f"{TITLES[way]}: {running:.2f} of the requests run of learn: off, less than {least:g}")
        if rate < 1:
            late.append(f"{TITLES[way]}: {rate:.2f} of the tokens a second of learn: off")
        late += [
            f"{TITLES[way]}: {figures.preemptions_per_1000:.1f} preemptions for 1,000 requests, more than {most}"
            for figures in found[way]
            if figures.preemptions_per_1000 > most
        ]
    late += [
        "without admission the engine preempted nothing: its KV cache does not bind"
        for figures in found[ALONE]
        if not figures.preemptions
    ]
    return late


def main(arguments: argparse.Namespace) -> int:
    """Plays everything and prints the table. 1 where something was missed."""
    cache = ["--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(BLOCKS)]
    running = vllm(
        scheduling="fcfs",
        sequences=SEQUENCES,
        arguments=[*cache, "--stream-interval", str(arguments.stream_interval)],
        variables={"MAXLEN": str(MODEL_TOKENS)},
    )
    with tempfile.TemporaryDirectory() as folder, running as engine:
        version = version_of(engine.url, "vllm")
        found = rounds_of(engine.url, Path(folder), arguments)
    every = [figures for runs in found.values() for figures in runs]
    print(
        f"vLLM {version}, a KV cache of {BLOCK_TOKENS * BLOCKS:,} tokens in blocks of {BLOCK_TOKENS}, "
        f"{platform.machine()}, Python {platform.python_version()}\n"
        f"{arguments.clients} clients, {arguments.warm_up} requests to warm up and {arguments.requests} measured for "
        f"each row; max_tokens {MAX_TOKENS}, prompts of {statistics.fmean(one.prompt for one in every):.0f} tokens and "
        f"answers of {statistics.fmean(one.lengths for one in every) / (arguments.warm_up + arguments.requests):.0f} "
        "on average\n"
    )
    print(table(found))
    if arguments.json:
        rows = {way: [asdict(figures) for figures in runs] for way, runs in found.items()}
        arguments.json.write_text(json.dumps({"version": version, "rows": rows}, indent=2) + "\n")
    late = missed(found)
    print("\n" + ("\n".join(f"MISSED {one}" for one in late) if late else "every target was reached"))
    return 1 if late else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip(), formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures as JSON")
    parser.add_argument("--rounds", type=int, default=2, help="runs of every way (default %(default)s)")
    parser.add_argument("--requests", type=int, default=600, help="measured requests of a run (default %(default)s)")
    parser.add_argument("--warm-up", type=int, default=300, help="requests before them (default %(default)s)")
    parser.add_argument("--clients", type=int, default=96, help="requests under way at a time (default %(default)s)")
    parser.add_argument(
        "--stream-interval", type=int, default=8, help="vLLM's own option: tokens to a chunk (default %(default)s)"
    )
    raise SystemExit(main(parser.parse_args()))
