"""Requests a second of `sidecar serve --workers N` over those of one process; see README.md.

Both commands stand before one small engine, and take turns. One process keeps its pool to itself; the workers share
theirs in the Valkey that the command starts. The figure is taken from processor time, because on a machine with few
processors the load, the engine and the store take theirs from the workers. Where there are enough, requests are counted
by the clock, too, with the workers alone on as many processors as there are workers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.load import burst, post
from benchmarks.processes import addresses, start
from benchmarks.servers import started

TARGET = 1.7
"""For two workers."""
CONNECTIONS = 64
POLICY = """\
engine: none
capacity: {tokens: 100M, requests: 10k}
tiers: {high: {reserve: 20%}, normal: {reserve: 20%}, batch: {reserve: 20%}}
anonymous: normal
"""
ASKED = post(
    "/v1/chat/completions",
    json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 380}], "max_tokens": 40}).encode(),
)
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Running(NamedTuple):
    """A command that serves: its port, the processes that take requests, and those of its store."""

    port: int
    takers: Sequence[int]
    stores: Sequence[int]


class Round(NamedTuple):
    """One burst: requests a second, and microseconds of processor time for each, of the processes and the store."""

    per_second: float
    cpu_us: float
    store_us: float


def main() -> int:
    """Runs it. Returns 1 where a target was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=4000, help="of a round (default %(default)s)")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    is_roomy = len(cores) >= args.workers + 3  # the store, the engine and the load have one each
    if is_roomy:
        os.sched_setaffinity(0, cores[args.workers + 1 :])
    with (
        tempfile.TemporaryDirectory() as folder,
        started(["plain"]) as servers,
        _command(Path(folder), servers["plain"].port, 1) as one,
        _command(Path(folder), servers["plain"].port, args.workers) as several,
    ):
        if is_roomy:
            _place(one, several, cores, args.workers)
        rounds = [(_round(one, args.requests), _round(several, args.requests)) for _ in range(args.rounds + 1)][1:]
    return _report(rounds, args.workers, cores, is_roomy=is_roomy)


@contextlib.contextmanager
def _command(folder: Path, engine: int, workers: int) -> Iterator[Running]:
    policy = folder / "policy.yaml"
    policy.write_text(POLICY)
    arguments = ("--upstream", f"http://127.0.0.1:{engine}", "--policy", str(policy), "--workers", str(workers))
    with start("serve", "--port", "0", "--admin-port", "0", *arguments) as process:
        try:
            port = int(addresses(process, 2)[0].rpartition(":")[2])
            offspring = _children(process.pid)
            stores = [pid for pid, program in offspring.items() if "valkey" in program or "redis" in program]
            takers = [pid for pid in offspring if pid not in stores] if workers > 1 else [process.pid]
            yield Running(port, takers, stores)
        finally:
            process.terminate()
            process.wait(60)


def _place(one: Running, several: Running, cores: Sequence[int], workers: int) -> None:
    for running in (one, several):
        for pid in running.takers:
            os.sched_setaffinity(pid, cores[:workers])
        for pid in running.stores:
            os.sched_setaffinity(pid, cores[workers : workers + 1])


def _round(running: Running, requests: int) -> Round:
    before, store_before = _cpu_s(running.takers), _cpu_s(running.stores)
    took_s = asyncio.run(burst(running.port, ASKED, requests=requests, connections=CONNECTIONS))
    used_s, store_s = _cpu_s(running.takers) - before, _cpu_s(running.stores) - store_before
    return Round(requests / took_s, used_s / requests * 1e6, store_s / requests * 1e6)


def _report(rounds: Sequence[tuple[Round, Round]], workers: int, cores: Sequence[int], *, is_roomy: bool) -> int:
    ratio = statistics.median(workers * one.cpu_us / several.cpu_us for one, several in rounds)
    squeezed = statistics.median(workers * one.cpu_us / (several.cpu_us + several.store_us) for one, several in rounds)
    one_us, several_us, store_us = (
        statistics.median(values)
        for values in zip(*((one.cpu_us, more.cpu_us, more.store_us) for one, more in rounds), strict=True)
    )
    print(f"processor time of a request: {one_us:.0f} us in one process")
    print(f"  {several_us:.0f} us in one of {workers} workers, and {store_us:.0f} us in their store")
    print(f"requests a second of {workers} workers over one process, by processor time: {ratio:.2f}")
    print(f"  with the store on the workers' own processors: {squeezed:.2f}")
    figures = [ratio]
    if is_roomy:
        figures.append(statistics.median(several.per_second / one.per_second for one, several in rounds))
        print(f"  by the clock, on {workers} processors of their own: {figures[-1]:.2f}")
    else:
        print(f"  by the clock: NOT MEASURED, this machine has {len(cores)} processors of the {workers + 3} it takes")
    if workers != 2:
        return 0
    missed = [figure for figure in figures if figure < TARGET]
    print(f"target: {TARGET} or more: {'MISSED' if missed else 'met'}")
    return 1 if missed else 0


def _children(pid: int) -> dict[int, str]:
    """The processes that it started, and their programs."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((path / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found[int(path.name)] = (path / "comm").read_text().strip()
    return found


def _cpu_s(pids: Sequence[int]) -> float:
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum((int(field[11]) + int(field[12])) * _TICK_S for field in fields)


if __name__ == "__main__":
    sys.exit(main())
