"""What a fleet costs while no request comes: CPU of the probes, of the readings of capacity, and of discovery.

    python -m benchmarks.fleet_idle [--engines 64] [--for-s 20] [--json FILE]

One process serves the pages of so many engines, each on a port of its own, with a page of metrics as long as a vLLM's.
In this process a fleet of all of them and a fleet of one take turns, with probes every 2 s. CPU is this process's own
accounting. Exits with 1 where all engines together take more than `MOST` of one processor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

from sidecar.engines import Vllm
from sidecar.fleet import EngineAddress, Fleet, FleetSettings, StaticDiscovery
from sidecar.policy.capacity import Capacity
from sidecar.policy.model import CapacitySource
from sidecar.policy.rules import UNLIMITED

MOST = 0.10
"""Of one processor, for 64 engines whose capacity is read."""
LINES = 400
"""Of a vLLM's metrics page: mostly buckets of histograms."""
READ = Capacity(read_from=CapacitySource.ENGINE, fraction=Fraction(1))
WRITTEN = Capacity(tokens=400_000, requests=160)


def metrics_page() -> bytes:
    """A page of about 40 KB."""
    buckets = [
        f'vllm:some_histogram_of_seconds_bucket{{engine="0",le="{line}.0",model_name="a-model-name"}} {line}.0'
        for line in range(LINES)
    ]
    info = 'vllm:cache_config_info{kv_cache_size_tokens="400000"} 1.0'
    counts = ["vllm:num_requests_running 0.0", "vllm:num_requests_waiting 0.0", "process_start_time_seconds 1.7e9"]
    return "\n".join([*buckets, info, *counts, ""]).encode()


async def serve(count: int) -> None:
    """Serves the pages, and prints the ports."""
    pages = {
        b"/metrics": metrics_page(),
        b"/v1/models": b'{"data": [{"id": "m", "owned_by": "vllm"}]}',
        b"/health": b"",
    }

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                page = pages.get(head.split(b" ", 2)[1])
                status = b"404 Not Found" if page is None else b"200 OK"
                writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(page or b""), page or b""))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    servers = [await asyncio.start_server(connected, "127.0.0.1", 0) for _ in range(count)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.Event().wait()


async def cpu_share(ports: list[int], capacity: Capacity, for_s: float) -> float:
    """The part of one processor that a fleet of engines at these ports takes."""
    engines = [EngineAddress(f"e{port}", f"http://127.0.0.1:{port}", capacity, UNLIMITED) for port in ports]
    fleet = Fleet(FleetSettings(Vllm), StaticDiscovery(engines), lambda: time.monotonic_ns() // 1000)
    await fleet.open()
    assert all(member.takes_new for member in fleet.members()), fleet
    began_s, cpu_s = time.monotonic(), time.process_time()
    await asyncio.sleep(for_s)
    share = (time.process_time() - cpu_s) / (time.monotonic() - began_s)
    assert all(member.takes_new for member in fleet.members()), fleet
    await fleet.close()
    return share


async def measure(ports: list[int], for_s: float) -> dict[str, float]:
    """The shares of all, and of one."""
    found = {}
    for name, capacity in (("capacity read", READ), ("capacity written", WRITTEN)):
        found[f"1 engine, {name}"] = await cpu_share(ports[:1], capacity, for_s)
        found[f"{len(ports)} engines, {name}"] = await cpu_share(ports, capacity, for_s)
    return found


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--for-s", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.engines))
    command = [sys.executable, "-m", "benchmarks.fleet_idle", "--serve", "--engines", str(args.engines)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ports = json.loads(server.stdout.readline())
        try:
            found = asyncio.run(measure(ports, args.for_s))
        finally:
            server.kill()
    for name, share in found.items():
        of_one = share / found["1 engine, " + name.split(", ")[1]]
        print(f"{name:32} {share:7.2%} of one processor, {of_one:5.1f}x one engine")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(found[f"{args.engines} engines, capacity read"] > MOST)


if __name__ == "__main__":
    sys.exit(main())
