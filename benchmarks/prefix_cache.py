"""Prefix cache of the emulated engine: hit rates on a slice of the Mooncake conversation trace, against an oracle.

    python -m benchmarks.prefix_cache [--trace FILE] [--requests 400] [--clients 4] [--json FILE]

One `sidecar emulate` runs as a process, with its prefix cache off and on, in several sizes. The requests of the trace
are sent in its order, as token ids, by so many clients at once and without its pauses. The oracle is a literal LRU over
the trace's own block hashes: the hit rate that the trace has in a cache of that size. Both keep the blocks of outputs.
The command fails where they differ by more than a hundredth, or where the engine's counters, the answers' `usage` and
its metrics page do not say the same.

The trace is Mooncake's (FAST'25 release, Apache-2.0), by default in the folder `shared/` beside the checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.processes import command
from sidecar.engines.pages import Metrics

TRACE = Path(__file__).parents[2] / "shared" / "traces" / "mooncake_conversation.jsonl"
BLOCK_TOKENS = 512
"""The trace's own: one hash stands for 512 tokens."""
SIZES = (500_000, 1_500_000, 4_000_000)
MOST_APART = 0.01
OUTPUT_TOKENS = 8
"""For every request. The trace's own outputs would only make the run longer: no later prompt begins with them."""
STEP_MS = 2.0
PREFILL_TOKENS = 2_048


@dataclass(frozen=True)
class Asked:
    """One request of the trace: its prompt's tokens, and a hash for every 512 of them."""

    tokens: int
    hashes: tuple[int, ...]

    def token_ids(self) -> list[int]:
        """A prompt with the same blocks in common with others."""
        return [number for number in self.hashes for _ in range(BLOCK_TOKENS)][: self.tokens]


@dataclass(frozen=True)
class Result:
    """One run. Rates are shares of all prompt tokens; `first_token_ms` is the median. Off: `cache_tokens` 0."""

    cache_tokens: int
    hit_rate: float
    usage_rate: float
    metrics_rate: float
    oracle_rate: float
    first_token_ms: float
    most_kv_tokens: int

    @property
    def is_right(self) -> bool:
        """Whether all say the same, and the oracle nearly."""
        return self.hit_rate == self.usage_rate == self.metrics_rate and self.apart <= MOST_APART

    @property
    def apart(self) -> float:
        """Difference to the oracle."""
        return abs(self.hit_rate - self.oracle_rate)


def read(trace: Path, most: int) -> Sequence[Asked]:
    """The first requests of the trace."""
    with trace.open() as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(most), strict=False)]
    return [Asked(row["input_length"], tuple(row["hash_ids"])) for row in rows]


def oracle(trace: Sequence[Asked], blocks: int) -> float:
    """The hit rate of a literal LRU. A prompt's last token is never found, as in the engines."""
    kept: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = 0
    for number, asked in enumerate(trace):
        names = [(0, name) for name in asked.hashes[: asked.tokens // BLOCK_TOKENS]]
        found = 0
        for name in names[: (asked.tokens - 1) // BLOCK_TOKENS]:
            if name not in kept:
                break
            found += 1
        hits += found * BLOCK_TOKENS
        if (asked.tokens + OUTPUT_TOKENS - 1) // BLOCK_TOKENS > len(names):
            names.append((1, number))  # the output has filled the last block
        for name in reversed(names):
            kept[name] = None
            kept.move_to_end(name)
        while len(kept) > blocks:
            kept.popitem(last=False)
    return hits / sum(asked.tokens for asked in trace)


async def replay(url: str, trace: Sequence[Asked], clients: int) -> tuple[int, Sequence[float]]:
    """The cached tokens that the answers reported, and the seconds to each first token."""
    waiting = iter(trace)
    cached, first_s = 0, list[float]()

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal cached
        for asked in waiting:
            found, waited_s = await send(session, url, asked)
            cached += found
            first_s.append(waited_s)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    return cached, first_s


async def send(session: aiohttp.ClientSession, url: str, asked: Asked) -> tuple[int, float]:
    """One stream to its end."""
    body = {
        "model": "emulated",
        "prompt": asked.token_ids(),
        "max_tokens": OUTPUT_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun_s, first_s, cached = time.monotonic(), None, 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if first_s is None and line.startswith(b"data:"):
                first_s = time.monotonic()
            if b'"cached_tokens":' in line:
                cached = json.loads(line[5:])["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first_s is not None
    return cached, first_s - begun_s


async def measure(url: str, trace: Sequence[Asked], clients: int, cache_tokens: int) -> Result:
    """One run on an engine that has served nothing yet."""
    cached, first_s = await replay(url, trace, clients)
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/_emulator") as response:
            page: dict[str, Any] = await response.json()
        async with session.get(f"{url}/metrics") as response:
            metrics = Metrics(await response.text())
    tokens = sum(asked.tokens for asked in trace)
    hits = metrics.count("vllm:prefix_cache_hits_total") or 0
    return Result(
        cache_tokens=cache_tokens,
        hit_rate=page["prefix_cache"]["hit_tokens"] / tokens if cache_tokens else 0.0,
        usage_rate=cached / tokens,
        metrics_rate=hits / tokens,
        oracle_rate=oracle(trace, cache_tokens // BLOCK_TOKENS),
        first_token_ms=statistics.median(first_s) * 1_000,
        most_kv_tokens=page["most"]["kv_tokens"],
    )


def run(trace: Sequence[Asked], clients: int, cache_tokens: int) -> Result:
    """One engine, started and stopped. 0 tokens: without a prefix cache."""
    flags = ["--engine", "vllm", "--port", "0", "--max-num-seqs", str(clients), "--step-ms", str(STEP_MS)]
    flags += ["--prefill-tokens-per-step", str(PREFILL_TOKENS), "--context-tokens", "200000", "--cache-report"]
    if cache_tokens:
        flags += ["--kv-tokens", str(cache_tokens), "--enable-prefix-caching", "--block-size", str(BLOCK_TOKENS)]
    with command("emulate", *flags) as (url,):
        return asyncio.run(measure(url, trace, clients, cache_tokens))


def table(results: Iterable[Result]) -> str:
    """For people."""
    head = f"{'cache, tokens':>14} {'hit rate':>9} {'oracle':>9} {'apart':>7} {'first token':>12} {'most KV held':>13}"
    rows = [
        f"{result.cache_tokens or 'off':>14} {result.hit_rate:9.4f} {result.oracle_rate:9.4f} {result.apart:7.4f} "
        f"{result.first_token_ms:9.0f} ms {result.most_kv_tokens:>13,}"
        for result in results
    ]
    return "\n".join([head, *rows])


def main() -> int:
    """Returns 1 where the engine and the oracle disagree, 2 without a trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not args.trace.is_file():
        print(f"no trace at {args.trace}: give --trace")
        return 2
    trace = read(args.trace, args.requests)
    results = [run(trace, args.clients, size) for size in (0, *SIZES)]
    print(f"{len(trace)} requests, {sum(asked.tokens for asked in trace):,} prompt tokens, {args.clients} clients")
    print(f"hit rate in a cache without an end: {oracle(trace, sys.maxsize):.4f}")
    print(table(results))
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return 0 if all(result.is_right for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
