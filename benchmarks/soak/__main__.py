"""A soak: overload with faults for half an hour, and a count of everything at the end.

    python -m benchmarks.soak [--minutes 30] [--seed N] [--json FILE]

Two replicas of `sidecar serve` share a pool in a real Redis, before an emulated engine. Clients of eight tenants in
five tiers, two of them with limits of their own, send 120% of what the engine can do, streaming and not; some
disconnect in the queue or in the middle of an answer, some come again when they are told to. Meanwhile, by a seeded
chance: the engine is killed and started, Redis is killed, paused and flushed, the policy is changed, broken and mended.

A soak that is long enough to judge memory begins with as many short requests as the replicas remember (2 to 5 minutes,
which are not counted in): from five minutes behind them on, memory should stay as it is.

Then the load ends, everything under way comes to its end, and it is counted: by the clients, and by the replicas' own
metrics. The command fails where a request is not accounted for, a lease is left, memory has grown, or a replica has
logged a defect. It runs on Linux: memory is read from /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.soak import judging, setting, watching
from benchmarks.soak.clients import GIVE_UP_S, LOAD, Clients, Ledger
from benchmarks.soak.faults import Faults
from benchmarks.soak.judging import Verdict
from benchmarks.soak.setting import PER_S, REPLICAS, Setting
from benchmarks.soak.watching import Counted, Watch
from sidecar.telemetry.journal import MOST_ADMISSIONS

PRIMED_WITHIN_S = 300.0
SETTLED_WITHIN_S = 30.0
"""After the last answer: heartbeats, and idle connections to the engine, which are closed after 4 s."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a soak found."""

    verdicts: Sequence[Verdict]
    ledger: Ledger
    counted: Counted
    watch: Watch
    faults: Faults
    primed: int


async def soak(place: Setting, seconds: float, seed: int) -> Result:
    """Load and faults for so long, then the count."""
    luck = random.Random(seed)
    clients, faults = Clients(place.proxies, luck.randrange(2**32)), Faults(place, random.Random(luck.random()))
    pids = {f"replica {number}": replica.pid for number, replica in enumerate(place.replicas)}
    watch = Watch(pids)
    looking = asyncio.ensure_future(watch.look())
    telling = asyncio.ensure_future(_tell(clients, faults, watch))
    try:
        await _prime(clients, seconds)
        watch.begin()
        await asyncio.gather(clients.send_for(seconds), faults.make_for(seconds))
        await clients.finish(GIVE_UP_S + 10)
        left = await _settled(place)
    finally:
        for task in (looking, telling):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    watch.sample()
    counted = watching.counted(place)
    verdicts = [*judging.accounting(clients.ledger, counted), judging.nothing_left(left)]
    for name, samples in watch.samples.items():
        verdicts += judging.steadiness(name, samples, seconds)
    verdicts.append(judging.no_defects(setting.errors(place.folder)))
    return Result(verdicts, clients.ledger, counted, watch, faults, clients.primed)


async def _prime(clients: Clients, seconds: float) -> None:
    """Where memory is going to be judged, what the replicas remember fills up before anything else begins."""
    if judging.is_long(seconds):
        await clients.prime(REPLICAS * MOST_ADMISSIONS, PRIMED_WITHIN_S)


async def _settled(place: Setting) -> list[str]:
    """What is still there when everything should be gone, and idle connections with it."""
    deadline_s = time.monotonic() + SETTLED_WITHIN_S
    await asyncio.sleep(8)
    while (left := watching.left_over(place)) and time.monotonic() < deadline_s:  # noqa: ASYNC110 - other processes
        await asyncio.sleep(1)
    return left


async def _tell(clients: Clients, faults: Faults, watch: Watch) -> None:
    """A line a minute for progress."""
    began_s = time.monotonic()
    while True:
        await asyncio.sleep(60)  # the minutes before the load included
        memory = ", ".join(f"{samples[-1].rss_mib:.0f} MiB" for samples in watch.samples.values())
        sent = sum(clients.ledger.sent.values())
        minute = round((time.monotonic() - began_s) / 60)
        print(f"minute {minute}: {sent} requests ended, {faults.made.total()} faults, {memory}", file=sys.stderr)


def table(result: Result) -> str:
    """The report, as lines."""
    ledger, counted = result.ledger, result.counted
    lines = ["what went wrong on purpose"]
    lines += [f"  {number:5}  {what}" for what, number in sorted(result.faults.made.items())]
    lines += ["", "how requests ended at the proxy, by the code of the answer"]
    lines += [f"  {number:5}  {code}" for code, number in sorted(ledger.codes.items())]
    lines += [f"  {ledger.broken_off:5}  admitted, and broken off or failed with the engine"]
    lines += [f"  {result.primed:5}  short requests before, which fill what the replicas remember"]
    lines += [f"  {counted.preemptions.total():5}  preemptions, {ledger.preempted} of them told to clients", ""]
    marks = {True: "ok  ", False: "FAIL", None: "-   "}
    lines += [f"{marks[one.is_so]}  {one.what}: {one.found}" for one in result.verdicts]
    lines += [f"      lost: {why}" for why in ledger.lost[:20]]
    return "\n".join(lines)


def as_json(result: Result) -> dict[str, object]:
    """The figures, for programs."""
    return {
        "verdicts": [asdict(one) for one in result.verdicts],
        "faults": dict(result.faults.made),
        "codes": dict(result.ledger.codes),
        "sent": dict(result.ledger.sent),
        "counted": {name: dict(getattr(result.counted, name)) for name in Counted.__slots__},
        "samples": {name: [asdict(one) for one in samples] for name, samples in result.watch.samples.items()},
        "lost": result.ledger.lost,
    }


def main() -> int:
    """Returns 1 where something was not as it must be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="length of the overload (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of load and faults (default: any)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()
    print(
        f"{arguments.minutes:g} minutes of {LOAD:.0%} load ({LOAD * PER_S:g} requests a second), {REPLICAS} replicas, "
        f"seed {arguments.seed}\n",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder, setting.running(Path(folder)) as place:
        result = asyncio.run(soak(place, arguments.minutes * 60, arguments.seed))
    print(table(result))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(as_json(result), indent=2) + "\n")
    failed = [one for one in result.verdicts if one.is_so is False]
    print(
        f"\n{len(failed)} of {len(result.verdicts)} are not as they must be"
        if failed
        else "\neverything is as it must be"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
