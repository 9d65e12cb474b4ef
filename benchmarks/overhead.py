"""What admission costs a request where it is mounted: CPU time.

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
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.load import burst, exchange, get, post
from benchmarks.servers import Server, started

CONNECTIONS, WARM_UP = 8, 1000
Rounds = Mapping[str, Sequence[float]]
"""Each server's CPU microseconds a request, round by round."""
MOUNTED = {
    "plain": "(a) the app alone",
    "base_http": "(b) + a do-nothing BaseHTTPMiddleware",
    "admission": "(c) + admission, no SDK",
    "admission_traced": "(d) + admission, every span recorded",
    "contributed": "(e) + contributed OpenTelemetry ASGI, as it comes",
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


async def cpu_s(port: int) -> float:
    """CPU seconds that a server's process has used."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    _, body = await exchange(reader, writer, get("/cpu"))
    writer.close()
    return float(body)


async def rounds_of(servers: Mapping[str, Server], request: bytes, rounds: int, requests: int) -> Rounds:
    """Measures all servers, in turns."""
    for server in servers.values():  # connections, caches and the adaptive interpreter warm up unmeasured
        await burst(server.port, request, requests=WARM_UP, connections=CONNECTIONS)
    seen: dict[str, list[float]] = {name: [] for name in servers}
    for turn in range(rounds):
        order = list(servers.items())
        for name, server in order if turn % 2 == 0 else reversed(order):  # a drift of the machine cancels out
            before_s = await cpu_s(server.port)
            await burst(server.port, request, requests=requests, connections=CONNECTIONS)
            seen[name].append((await cpu_s(server.port) - before_s) / requests * 1e6)
    return seen


def table(title: str, measured: Rounds, labels: Mapping[str, str], without: Mapping[str, str]) -> str:
    """Each server's CPU, and what is added to that of the server `without` it: medians of the rounds."""
    lines = [f"{title}: CPU microseconds a request", f"{'':56} {'CPU us':>8} {'added':>8}"]
    for name, label in labels.items():
        added = f"{statistics.median(added_us(measured, name, without[name])):8.0f}" if name in without else ""
        lines.append(f"{label:56} {statistics.median(measured[name]):8.0f} {added}".rstrip())
    return "\n".join(lines)


def added_us(measured: Rounds, name: str, without: str) -> Sequence[float]:
    """What a server takes more than another, round by round."""
    return [one - other for one, other in zip(measured[name], measured[without], strict=True)]


def ratio(measured: Rounds, name: str, other: str) -> float:
    """What one adds to the app alone, to what another adds."""
    pairs = zip(added_us(measured, name, "plain"), added_us(measured, other, "plain"), strict=True)
    return statistics.median(part / whole for part, whole in pairs)


async def run(rounds: int, requests: int) -> dict[str, object]:
    """Runs everything, prints it, and returns the figures."""
    with started(list(MOUNTED)) as servers:
        measured = await rounds_of(servers, REQUEST, rounds, requests)
    print(table("Mounted", measured, MOUNTED, dict.fromkeys([*MOUNTED][1:], "plain")) + "\n")
    ratios = {
        "(c) / (b): admission against a do-nothing BaseHTTPMiddleware; at most 0.4": ("admission", "base_http"),
        "(d) / (e): admission and its spans against the contributed instrumentation; below 1": (
            "admission_traced",
            "contributed",
        ),
    }
    found = {name: ratio(measured, *pair) for name, pair in ratios.items()}
    for name, figure in found.items():
        print(f"{figure:8.2f}  {name}")
    return {"rounds_us": measured, "ratios": found}


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
