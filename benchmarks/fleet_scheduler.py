"""What admission costs in a saturated pool of 1, 4, 16 and 64 engines: instructions or time of the scheduler alone.

Every pool holds the same per engine, has 1,000 tickets waiting from 200 tenants in four tiers, and gets one request for
each that ends. A cycle is one request: submit, the first bytes of those admitted before, settle of the oldest, and the
decision after each of the three. Sizes are log-normal; half of the tickets have predicted hits on up to two engines.
`plain` is the scheduler of a pool without engines in the same cycle, without first bytes. Bound by tokens, a first byte
comes before the next request. Bound by prefill, one comes in each cycle, of the request that has none for longest, and
the engines have tokens to spare.

    python -m benchmarks.fleet_scheduler [--bound tokens|prefill] [--cycles 300] [--time] [--json FILE]

Counts with the same tools as `benchmarks.instructions`. `--time` gives microseconds, the least of 5 runs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from benchmarks.instructions import marks
from benchmarks.instructions.counters import COUNTERS, Run, call
from sidecar.policy.rules import PoolRules, Shares, pool_rules
from sidecar.pools.engines import EngineOffer
from sidecar.scheduling import Scheduler
from sidecar.scheduling.fleet_scheduler import FleetScheduler

ENGINES = (1, 4, 16, 64)
WAITING = 1_000
WARM_UP = 200
TENANTS = 200
TIERS = (("critical", 10), ("high", 20), ("normal", 10), ("low", 5), ("batch", 5))
TOKENS, REQUESTS, PREFILL = 60_000, 64, 8_000
"""One engine: about 50 of the requests below fill its tokens."""


def rules_of(tokens: int | None, requests: int | None, prefill: int | None) -> PoolRules:
    """The default ladder, half of the pool reserved."""
    shares = tuple(Shares(name, reserve=Fraction(percent, 100), lend=Fraction(1, 2)) for name, percent in TIERS)
    return pool_rules(
        tokens=tokens, requests=requests, prefill=prefill, tiers=shares, promote_after_us=30_000_000, ceiling=2
    )


class Crowd:
    """A saturated pool; without engines where `engines` is 0."""

    def __init__(self, engines: int, *, is_prefill_bound: bool = False) -> None:
        self.engines = engines
        self._is_prefill_bound = is_prefill_bound
        spare = 100 if is_prefill_bound else 1
        self.now_us = 0
        self.admitted = 0
        self._luck = random.Random(7)
        self._count = 0
        self._held: deque[str] = deque()
        self._silent: deque[str] = deque()  # without a first byte
        self._fleet: FleetScheduler | None = None
        if engines:
            self._fleet = FleetScheduler(rules_of)
            self._fleet.set_engines(
                [
                    EngineOffer(f"engine-{number:02}#1", TOKENS * spare, REQUESTS * spare, PREFILL)
                    for number in range(engines)
                ],
                0,
            )
        self.scheduler: Scheduler = self._fleet or Scheduler(rules_of(TOKENS, REQUESTS, None))
        while self.scheduler.waiting() < WAITING:
            self._enter()
            self._dispatch()
            if not is_prefill_bound:
                self._first_bytes(len(self._silent))

    def cycle(self) -> None:
        """One request."""
        self.now_us += 20_000
        self._enter()
        self._dispatch()
        if self._fleet is not None and self._silent:
            self._first_bytes(1 if self._is_prefill_bound else len(self._silent))
            self._dispatch()
        self.scheduler.settle(self._held.popleft(), self.now_us)
        self._dispatch()

    def _first_bytes(self, count: int) -> None:
        for _ in range(count):
            name = self._silent.popleft()
            if self._fleet is not None:
                self._fleet.prefilled(name, self.now_us)

    def _enter(self) -> None:
        self._count += 1
        luck, name, tier = self._luck, str(self._count), 1 + self._count % (len(TIERS) - 1)
        prompt = min(6_000, max(20, round(luck.lognormvariate(6, 1))))
        tokens = prompt + min(4_000, max(20, round(luck.lognormvariate(6, 0.8))))
        tenant = f"tenant-{luck.randrange(TENANTS)}"
        wanted = {luck.randrange(max(1, self.engines)) for _ in range(2)} if luck.random() < 0.5 else ()
        hits = [(f"engine-{number:02}#1", luck.randint(0, prompt)) for number in wanted]
        if self._fleet is None:
            self.scheduler.submit(name, tier=tier, tokens=tokens, now_us=self.now_us, tenant=tenant)
        else:
            self._fleet.submit(
                name, tier=tier, tokens=tokens, now_us=self.now_us, tenant=tenant, prompt=prompt, hits=hits
            )

    def _dispatch(self) -> None:
        for admission in self.scheduler.dispatch(self.now_us):
            self.admitted += 1
            self._held.append(admission.ticket.id)
            self._silent.append(admission.ticket.id)


def timed(engines: int, cycles: int, *, is_prefill_bound: bool) -> float:
    """Microseconds of one cycle."""
    crowd = Crowd(engines, is_prefill_bound=is_prefill_bound)
    for _ in range(WARM_UP):
        crowd.cycle()
    began_s = time.process_time()
    for _ in range(cycles):
        crowd.cycle()
    return (time.process_time() - began_s) / cycles * 1e6


def count(engines: int, cycles: int, *, is_prefill_bound: bool) -> None:
    """The counted program: so many cycles between two marks."""
    crowd = Crowd(engines, is_prefill_bound=is_prefill_bound)
    for _ in range(WARM_UP):
        crowd.cycle()
    before = crowd.admitted
    marks.begin()
    for _ in range(cycles):
        crowd.cycle()
    marks.end()
    if cycles and abs(crowd.admitted - before - cycles) > cycles / 4:
        raise RuntimeError(f"{crowd.admitted - before} admissions in {cycles} cycles: the pool is not saturated")


def program_of(bound: str) -> Run:
    """Runs this module under a command `prefix`: see `counters.Run`."""

    def run(prefix: Sequence[str], environment: Mapping[str, str], parts: Mapping[str, int]) -> dict[str, float]:
        program = [sys.executable, "-m", "benchmarks.fleet_scheduler", "--bound", bound, "--count"]
        call([*prefix, *program, *(f"{name}={cycles}" for name, cycles in parts.items())], environment)
        return {}

    return run


def _number(engines: str) -> int:
    return 0 if engines == "plain" else int(engines)


def main() -> int:
    """Parses the command line, measures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet_scheduler", description=__doc__)
    parser.add_argument("--bound", choices=["tokens", "prefill"], default="tokens")
    parser.add_argument("--cycles", type=int, default=300)
    parser.add_argument("--time", action="store_true", help="microseconds in place of instructions")
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--count", nargs="+", metavar="ENGINES=CYCLES", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    is_prefill_bound = arguments.bound == "prefill"
    if arguments.count:
        for part in arguments.count:
            engines, _, cycles = part.partition("=")
            count(_number(engines), int(cycles), is_prefill_bound=is_prefill_bound)
        return 0
    names = [*([] if is_prefill_bound else ["plain"]), *map(str, ENGINES)]
    if arguments.time:
        for name in names:
            runs = [timed(_number(name), arguments.cycles, is_prefill_bound=is_prefill_bound) for _ in range(5)]
            print(f"{name:>6} engines: {min(runs):8.1f} us a request")
        return 0
    counter = next((each for each in COUNTERS if each.missing() is None), None)
    if counter is None:
        print("no tool here counts instructions", file=sys.stderr)
        return 1
    counter.repetitions = arguments.cycles  # type: ignore[attr-defined]  # both have it
    measured = counter.measure(program_of(arguments.bound), names)
    for name, instructions in measured.items():
        print(f"{name:>6} engines: {instructions:12,.0f} instructions a request, {instructions / measured['1']:5.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(measured, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
