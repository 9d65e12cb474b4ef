"""Interactive requests in time, and batch tokens a second beside them: by the guard of an SLO, and by other ways.

    python -m benchmarks.guard [--quick] [--seeds 1,2,3] [--json FILE]

One engine in virtual time (`sidecar.tools.step_model`: steps of 10 ms, and .05 ms a prompt token and .15 ms a
sequence, chunks of 2048), interactive requests, and batch work without end. TTFT is 500 ms. Nine settings: three
engines and SLOs times a steady load, bursts of four times the load, and lulls. For each

- `priority`: the engine's own priority alone;
- `constant`: the largest constant limit of batch with which 97% of the interactive requests meet both targets, or the
  one that holds most, found by trying them all on this load;
- `aimd`: the plain rule, g of what batch may hold: .7 of it after a miss of more than 3%, else .005 more;
- `guard`: `sidecar.scheduling.guard`.

Means over seeds. The guard is to hold what the constant limit holds, at most 97%, less 2 points; with .95 of its batch
tokens, in bursts 1.3. This engine computes prompts in the order of priority. A second table, without demands, is of one
that finishes a prompt that it has begun, as vLLM does: beside large prompts of batch no limit holds the SLO there.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, Protocol

from sidecar.scheduling.guard import DECIDE_EVERY_S, GuardedPeriod, decide, first_state
from sidecar.tools.step_model.engine import StepEngine
from sidecar.tools.step_model.kv_cache import KvCache
from sidecar.tools.step_model.model import EngineModel
from sidecar.tools.step_model.queue import Job, KeyQueue

ORDERS = {False: "The engine computes prompts in the order of priority", True: "It finishes a prompt that it has begun"}
HOLD, TTFT_US, SECONDS, WARM_UP_S, QUICK_S = 0.97, 500_000, 600.0, 60.0, 90.0
LIMITS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.12, 0.14, 0.17, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
BURST_PER_S = 8.0
LESS_MET, BATCH_KEPT, BATCH_KEPT_IN_BURSTS = 0.02, 0.95, 1.3


@dataclass(frozen=True, slots=True)
class Setting:
    """One engine, SLO and load. Prompts of batch have `batch_prompt` tokens in the median."""

    name: str
    kv_tokens: int
    sequences: int
    batch_prompt: int
    tpot_ms: float
    load: str


_ENGINES = (
    ("64 places, TPOT 60 ms", 200_000, 64, 2500, 60.0),
    ("256 places, TPOT 40 ms", 1_000_000, 256, 2500, 40.0),
    ("256, large batch prompts, 60 ms", 1_000_000, 256, 8000, 60.0),
)
_LOADS: dict[str, Callable[[float], float]] = {
    "2/s": lambda _: 2.0,
    "bursts of 8/s": lambda at_s: BURST_PER_S if 200 < at_s % 300 < 230 else 2.0,
    "3/s with lulls": lambda at_s: 3.0 if at_s % 200 < 100 else 0.0,
}
SETTINGS = [Setting(*engine, load) for engine in _ENGINES for load in _LOADS]


class Request(Job):
    """One request. It is `late` when its first token was."""

    __slots__ = ("arrived_us", "first_us", "is_batch", "is_late")

    def __init__(self, arrived_us: int, prompt: int, output: int, *, is_batch: bool) -> None:
        super().__init__(prompt, output)
        self.arrived_us, self.is_batch = arrived_us, is_batch
        self.first_us = 0
        self.is_late = False


class PriorityEngine(StepEngine[Request]):
    """Engine that computes prompts in the order of priority, whichever it began first."""

    def _prefill(self) -> int:
        self._prefilling = deque(sorted(self._prefilling, key=lambda job: job.place))
        return super()._prefill()


class Bound(Protocol):
    """How much may be held where batch work is admitted: `share` of each dimension, by batch or by all."""

    share: float
    counts_all: bool

    def decide(self, seen: GuardedPeriod) -> None:
        """Another period has passed."""


class Constant:
    """A constant limit of batch."""

    counts_all = False

    def __init__(self, share: float) -> None:
        self.share = share

    def decide(self, seen: GuardedPeriod) -> None:
        """See `Bound`."""


class PlainAimd:
    """The plain rule."""

    counts_all = False

    def __init__(self) -> None:
        self.share, self._met, self._missed = 0.1, 0.0, 0.0

    def decide(self, seen: GuardedPeriod) -> None:
        """See `Bound`."""
        self._met, self._missed = self._met + seen.met, self._missed + seen.missed
        requests = self._met + self._missed
        if 0 < requests < 10:
            return
        if self._missed > (1 - HOLD) * requests:
            self.share = max(0.01, 0.7 * min(self.share, seen.held))
        else:
            self.share = min(1.0, self.share + 0.005)
        self._met = self._missed = 0.0


class Guard:
    """The product's controller."""

    counts_all = True

    def __init__(self) -> None:
        self._state = first_state(0.0)
        self.share = self._state.share

    def decide(self, seen: GuardedPeriod) -> None:
        """See `Bound`."""
        self._state = decide(self._state, seen, HOLD)
        self.share = self._state.share


class Outcome(NamedTuple):
    """The share of interactive requests that met both targets, and batch tokens a second."""

    met: float
    batch: float


class Play:
    """One run of a setting. The engine `finishes` a prompt that it has begun, else the order of priority is first."""

    def __init__(self, setting: Setting, bound: Bound, seed: int, seconds: float, *, finishes: bool) -> None:
        self._setting, self._bound, self._end_us = setting, bound, round(seconds * 1e6)
        self._arrivals = deque(_arrivals(_LOADS[setting.load], seconds, random.Random(seed)))
        self._batch = random.Random(seed + 1000)
        model = EngineModel(
            name="guard", step_us=10_000, step_us_per_sequence=150, step_us_per_prefill_token=50,
            kv_tokens=setting.kv_tokens, max_sequences=setting.sequences, block_tokens=1,
        )  # fmt: skip
        engine = StepEngine[Request] if finishes else PriorityEngine
        cache = KvCache(setting.kv_tokens)
        self._engine = engine(model, KeyQueue(), cache, preempts=False, admits_ahead=not finishes)
        self._waiting = deque[Request]()
        self._tokens, self._requests = [0, 0], [0, 0]
        self._now_us = self._admitted = self._batch_tokens = 0
        self._next_batch = self._new_batch()
        self._met = self._missed = 0
        self._waits = False
        self._outcomes: list[bool] = []

    def run(self) -> Outcome:
        """Plays it to its end."""
        engine, decide_us = self._engine, round(DECIDE_EVERY_S * 1e6)
        next_us = decide_us
        while self._now_us < self._end_us:
            times = [next_us, self._end_us, *([] if engine.due_us is None else [engine.due_us])]
            self._now_us = min(*times, *(one.arrived_us for one in list(self._arrivals)[:1]))
            if engine.due_us == self._now_us:
                self._step()
            while self._arrivals and self._arrivals[0].arrived_us <= self._now_us:
                self._waiting.append(self._arrivals.popleft())
            if self._now_us == next_us:
                self._decide()
                next_us += decide_us
            self._admit()
            if engine.due_us is None:
                engine.begin(self._now_us)
        return Outcome(fmean(self._outcomes), self._batch_tokens / self._end_us * 1e6)

    def _step(self) -> None:
        plan = self._engine.advance()
        for one in plan.first:
            one.first_us = self._now_us
            one.is_late = self._now_us - one.arrived_us > TTFT_US
            self._missed += one.is_late and not one.is_batch
        for one in plan.finished:
            self._tokens[one.is_batch] -= one.tokens
            self._requests[one.is_batch] -= 1
            if one.is_batch:
                self._batch_tokens += one.output
            else:
                self._ended(one)

    def _ended(self, one: Request) -> None:
        tpot_us = (self._now_us - one.first_us) / max(1, one.output - 1)
        is_met = not one.is_late and tpot_us <= self._setting.tpot_ms * 1000
        self._met += is_met
        self._missed += not is_met and not one.is_late
        if one.arrived_us > WARM_UP_S * 1e6:
            self._outcomes.append(is_met)

    def _decide(self) -> None:
        held, total = (
            self._share(self._tokens[1], self._requests[1]),
            self._share(sum(self._tokens), sum(self._requests)),
        )
        # One request of batch is always let through: beside it the guard has nothing to give.
        held = held if self._requests[1] > 1 else 0.0
        self._bound.decide(GuardedPeriod(self._met, self._missed, held, total, 0.0, self._waits))
        self._met = self._missed = 0
        self._waits = False

    def _share(self, tokens: int, requests: int) -> float:
        return max(tokens / self._setting.kv_tokens, requests / self._setting.sequences)

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0]):
            self._put(self._waiting.popleft())
        while not self._waiting and self._fits(self._next_batch):
            if not self._is_within(self._next_batch):
                self._waits = True
                break
            self._put(self._next_batch)
            self._next_batch = self._new_batch()

    def _fits(self, one: Request) -> bool:
        return self._share(sum(self._tokens) + one.tokens, sum(self._requests) + 1) <= 1.0

    def _is_within(self, one: Request) -> bool:
        others = 0 if self._bound.counts_all else 1
        tokens, requests = sum(self._tokens[others:]), sum(self._requests[others:])
        return not self._requests[1] or self._share(tokens + one.tokens, requests + 1) <= self._bound.share

    def _put(self, one: Request) -> None:
        self._admitted += 1
        one.place = (one.is_batch,), self._admitted
        self._tokens[one.is_batch] += one.tokens
        self._requests[one.is_batch] += 1
        self._engine.push(one, self._now_us)

    def _new_batch(self) -> Request:
        prompt = self._setting.batch_prompt
        tokens = _length(self._batch, prompt, 0.7, 100, 4 * max(prompt, 4000)), _length(self._batch, 400, 0.5, 10, 2000)
        return Request(self._now_us, *tokens, is_batch=True)


def _arrivals(rate: Callable[[float], float], seconds: float, rng: random.Random) -> list[Request]:
    at_s, found = rng.expovariate(BURST_PER_S), list[Request]()
    while at_s < seconds:
        if rng.random() * BURST_PER_S < rate(at_s):
            tokens = _length(rng, 800, 0.6, 50, 8000), _length(rng, 150, 0.6, 5, 1500)
            found.append(Request(round(at_s * 1e6), *tokens, is_batch=False))
        at_s += rng.expovariate(BURST_PER_S)
    return found


def _length(rng: random.Random, median: float, sigma: float, least: int, most: int) -> int:
    return int(min(most, max(least, median * math.exp(rng.gauss(0, sigma)))))


WAYS: dict[str, Callable[[], Bound]] = {"priority": lambda: Constant(1.0), "aimd": PlainAimd, "guard": Guard}


class Task(NamedTuple):
    """One run: a setting by its place, a way by its name or a constant limit, a seed, and how long (see `Play`)."""

    finishes: bool
    setting: int
    way: str | float
    seed: int
    seconds: float


def played(task: Task) -> Outcome:
    """Plays a task."""
    bound = Constant(task.way) if isinstance(task.way, float) else WAYS[task.way]()
    return Play(SETTINGS[task.setting], bound, task.seed, task.seconds, finishes=task.finishes).run()


class Figure(NamedTuple):
    """Mean and range of the outcomes of one way."""

    met: float
    batch: float
    met_range: tuple[float, float]
    batch_range: tuple[float, float]


def _figure(outcomes: Sequence[Outcome]) -> Figure:
    met, batch = [one.met for one in outcomes], [one.batch for one in outcomes]
    return Figure(fmean(met), fmean(batch), (min(met), max(met)), (min(batch), max(batch)))


class Row(NamedTuple):
    """Figures of a setting by way, the best constant limit, and the demands that the guard does not meet."""

    name: str
    figures: dict[str, Figure]
    limit: float
    short: list[str]


def row(setting: Setting, found: dict[str | float, Sequence[Outcome]]) -> Row:
    """The row of a setting, from the outcomes of each way over seeds."""
    figures = {way: _figure(outcomes) for way, outcomes in found.items()}
    limits = {way: figure for way, figure in figures.items() if isinstance(way, float)}
    holding = [way for way, figure in limits.items() if figure.met >= HOLD]
    limit = max(holding) if holding else max(limits, key=lambda way: limits[way].met)
    constant, guard = limits[limit], figures["guard"]
    part = BATCH_KEPT_IN_BURSTS if "bursts" in setting.load else BATCH_KEPT
    demands = {
        f"met {min(constant.met, HOLD) - LESS_MET:.3f}": guard.met >= min(constant.met, HOLD) - LESS_MET,
        f"batch {part * constant.batch:.0f}": guard.batch >= part * constant.batch,
    }
    named = {way: figure for way, figure in figures.items() if isinstance(way, str)}
    short = [demand for demand, is_met in demands.items() if not is_met]
    return Row(f"{setting.name}, {setting.load}", {**named, "constant": constant}, limit, short)


def text(rows: Sequence[Row], *, has_demands: bool = True) -> str:
    """A table: met share / batch tokens a second, and their ranges over seeds."""
    lines = [f"{'met / batch tokens/s':48}{'priority':>20}{'constant':>20}{'aimd':>20}{'guard':>20}  range over seeds"]
    for one in rows:
        cells = {way: f"{it.met:.3f} / {it.batch:5.0f}" for way, it in one.figures.items()}
        cells["constant"] += f" {one.limit:4.0%}"
        guard = one.figures["guard"]
        spread = "{:.3f}-{:.3f} / {:.0f}-{:.0f}".format(*guard.met_range, *guard.batch_range)
        mark = ("short of " + ", ".join(one.short) if one.short else "PASS") if has_demands else ""
        ways = "".join(f"{cells[way]:>20}" for way in ("priority", "constant", "aimd", "guard"))
        lines.append(f"{one.name:48}{ways}  {spread}  {mark}".rstrip())
    return "\n".join(lines)


def measure(seeds: Sequence[int], seconds: float, limits: Sequence[float] = LIMITS, *, finishes: bool) -> list[Row]:
    """All rows of an engine."""
    ways: list[str | float] = [*WAYS, *limits]
    tasks = [Task(finishes, n, way, seed, seconds) for n in range(len(SETTINGS)) for way in ways for seed in seeds]
    with Pool(2) as pool:
        outcomes = iter(pool.map(played, tasks, chunksize=4))
    return [row(setting, {way: [next(outcomes) for _ in seeds] for way in ways}) for setting in SETTINGS]


def main() -> int:
    """Prints the tables; 1 where the guard misses a demand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a short run that only shows that it works")
    parser.add_argument("--seeds", default="1,2,3", help="comma-separated")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    tables = {}
    for finishes, order in ORDERS.items():
        rows = (
            measure([1], QUICK_S, (0.1, 0.4), finishes=finishes)
            if args.quick
            else measure(seeds, SECONDS, finishes=finishes)
        )
        tables[order] = rows
        print(f"{order}, seeds {', '.join(map(str, seeds))}\n{text(rows, has_demands=not finishes)}\n", flush=True)
    if args.json:
        found = {order: [one._asdict() for one in rows] for order, rows in tables.items()}
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if args.quick or not any(one.short for one in tables[ORDERS[False]]) else 1


if __name__ == "__main__":
    sys.exit(main())
