"""What admission costs a request: CPU time, throughput and latency, mounted and as a reverse proxy.

    python -m benchmarks.overhead [--json FILE] [--rounds 25] [--requests 500]

One run; the servers take turns, each its own uvicorn process, with 2 KB chat bodies and 8 connections. CPU is each
process's own accounting. A machine's speed drifts, so every figure is to be read as a ratio to another of the same run;
the ratios themselves are medians over the rounds, each of what stood beside it in its round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.load import Burst, burst, exchange, get, post
from benchmarks.servers import Server, started

CONNECTIONS = 8
MOUNTED = {
    "plain": "(a) the app alone",
    "base_http": "(b) + a do-nothing BaseHTTPMiddleware",
    "admission": "(c) + admission, no SDK",
    "admission_traced": "(d) + admission, every span recorded",
    "contributed": "(e) + contributed OpenTelemetry ASGI, as it comes",
    "contributed_lean": "(f) the same, without spans per message",
}
PROXIED = {
    "plain": "the engine itself",
    "proxy": "our reverse proxy",
    "proxy_admission": "our reverse proxy with admission",
}
BODY = json.dumps(
    {
        "model": "llama",
        "messages": [
            {"role": "system", "content": "You are a helpful assistant. " * 6},
            {"role": "user", "content": "word " * 325},
        ],
        "max_tokens": 256,
        "temperature": 0.7,
    }
).encode()
HEADERS = (
    ("Authorization", "Bearer sk-demo-standard"),
    ("User-Agent", "OpenAI/Python 3.51.0"),
    ("Accept", "application/json"),
    ("Accept-Encoding", "gzip, deflate"),
    ("X-Stainless-Lang", "python"),
)
REQUEST = post("/v1/chat/completions", BODY, HEADERS)


@dataclass(frozen=True, slots=True)
class Cost:
    """One server, medians of its rounds; `rounds_us` is each round's CPU microseconds a request."""

    cpu_us: float
    per_second: float
    p50_ms: float
    p99_ms: float
    rounds_us: tuple[float, ...]


async def cpu_s(port: int) -> float:
    """CPU seconds that a server's process has used."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    _, body = await exchange(reader, writer, get("/cpu"))
    writer.close()
    return float(body)


async def costs(servers: Mapping[str, Server], rounds: int, requests: int) -> dict[str, Cost]:
    """Measures all servers, in turns."""
    for server in servers.values():  # connections, caches and the adaptive interpreter warm up unmeasured
        await burst(server.port, REQUEST, requests=1000, connections=CONNECTIONS)
    seen: dict[str, list[tuple[float, Burst]]] = {name: [] for name in servers}
    for _ in range(rounds):
        for name, server in servers.items():
            before = await cpu_s(server.port)
            measured = await burst(server.port, REQUEST, requests=requests, connections=CONNECTIONS)
            seen[name].append(((await cpu_s(server.port) - before) / requests * 1e6, measured))
    return {name: _cost(measurements) for name, measurements in seen.items()}


def _cost(measurements: Sequence[tuple[float, Burst]]) -> Cost:
    return Cost(
        cpu_us=statistics.median(cpu_us for cpu_us, _ in measurements),
        per_second=statistics.median(measured.per_second for _, measured in measurements),
        p50_ms=statistics.median(measured.percentile_s(0.5) for _, measured in measurements) * 1000,
        p99_ms=statistics.median(measured.percentile_s(0.99) for _, measured in measurements) * 1000,
        rounds_us=tuple(cpu_us for cpu_us, _ in measurements),
    )


def print_costs(title: str, labels: Mapping[str, str], measured: Mapping[str, Cost]) -> None:
    """A table of servers; what each adds is compared with the first."""
    base = measured["plain"]
    print(f"\n{title}\n{'':52} {'CPU us':>8} {'added':>8} {'req/s':>8} {'p50 ms':>8} {'p99 ms':>8}")
    for name, label in labels.items():
        cost = measured[name]
        added = f"{cost.cpu_us - base.cpu_us:8.0f}" if name != "plain" else " " * 8
        print(f"{label:52} {cost.cpu_us:8.0f} {added} {cost.per_second:8.0f} {cost.p50_ms:8.2f} {cost.p99_ms:8.2f}")


def verdicts(mounted: Mapping[str, Cost]) -> dict[str, float]:
    """The ratios that were asked for."""
    rounds = range(len(mounted["plain"].rounds_us))

    def added(name: str, turn: int) -> float:
        return mounted[name].rounds_us[turn] - mounted["plain"].rounds_us[turn]

    def ratio(part: Callable[[int], float], whole: str) -> float:
        return statistics.median(part(turn) / added(whole, turn) for turn in rounds)

    return {
        "(c) / (b): admission against a do-nothing BaseHTTPMiddleware; at most 0.4": ratio(
            lambda turn: added("admission", turn), "base_http"
        ),
        "(d) / (e): admission and its spans against the contributed instrumentation; below 1": ratio(
            lambda turn: added("admission_traced", turn), "contributed"
        ),
        "(d) / (f): the same against the contributed one without spans per message": ratio(
            lambda turn: added("admission_traced", turn), "contributed_lean"
        ),
        "(d - c) / (f): our spans alone against that": ratio(
            lambda turn: added("admission_traced", turn) - added("admission", turn), "contributed_lean"
        ),
    }


async def run(rounds: int, requests: int) -> dict[str, object]:
    """Runs everything, prints it, and returns the figures."""
    with started(list(MOUNTED)) as servers:
        mounted = await costs(servers, rounds, requests)
    print_costs("Mounted: CPU microseconds a request, and what is added to the app alone", MOUNTED, mounted)
    print()
    ratios = verdicts(mounted)
    for name, ratio in ratios.items():
        print(f"{ratio:8.2f}  {name}")
    with started(["plain"]) as upstream, started(["proxy", "proxy_admission"], upstream["plain"].port) as proxies:
        proxied = await costs({**upstream, **proxies}, rounds, requests)
    print_costs("Reverse proxy: CPU of the proxy's process alone, and what is added to the engine's", PROXIED, proxied)
    return {
        "mounted": {name: asdict(cost) for name, cost in mounted.items()},
        "ratios": ratios,
        "proxied": {name: asdict(cost) for name, cost in proxied.items()},
    }


def main() -> int:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--requests", type=int, default=500, help="in each server's turn")
    args = parser.parse_args()
    figures = asyncio.run(run(args.rounds, args.requests))
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
