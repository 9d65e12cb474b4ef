"""One run: a load through one or several routers, and its figures in the trace's time."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import statistics
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.fleet.engines import Engine, EngineFigures
from benchmarks.fleet.load import tokens_of
from benchmarks.fleet.machine import Moment, Use
from benchmarks.fleet.routers import Router
from benchmarks.fleet.setting import Setting
from sidecar.tools.loadgen import Planned, Progress, Seen, play

TIMEOUT_S = 240.0
"""Real seconds for one answer: round robin's longest is a seventh of it."""
Meanwhile = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of some requests. Times are in the trace's seconds; `soon` is a share of all, failed ones included.

    `hit_rate` is what `usage` reported as cached, of all prompt tokens. None where no request had a first token.
    """

    requests: int
    failed: int
    soon: float
    p50_s: float | None
    p99_s: float | None
    hit_rate: float

    @staticmethod
    def of(seen: Sequence[Seen], setting: Setting) -> Figures:
        """Of these requests. A request without a first token counts as infinitely late."""
        waits = sorted(math.inf if one.ttft_s is None else one.ttft_s * setting.compression for one in seen)
        prompts = sum(one.prompt_tokens or 0 for one in seen)
        cached = sum(one.cached_tokens or 0 for one in seen if one.prompt_tokens)

        def at(part: float) -> float | None:
            found = waits[min(len(waits) - 1, int(part * len(waits)))] if waits else math.inf
            return found if math.isfinite(found) else None

        return Figures(
            requests=len(seen),
            failed=sum(not one.is_complete for one in seen),
            soon=sum(wait < setting.soon_s for wait in waits) / max(len(waits), 1),
            p50_s=at(0.50),
            p99_s=at(0.99),
            hit_rate=cached / max(prompts, 1),
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `quarters` are the median times to a first token of each quarter of the requests.

    `use` are cores by part, `idle` is the share of the machine that nothing used, `lost` is the share of the engines'
    time that the machine added to their steps, and `stalled_s` how long the load generator once did not run (real).
    """

    router: str
    seed: int
    figures: Figures
    quarters: Sequence[float | None]
    engines: Sequence[EngineFigures]
    use: Mapping[str, float]
    idle: float
    stalled_s: float
    seen: Sequence[Seen] = field(repr=False)

    @property
    def failed(self) -> int:
        """Requests without a complete answer, the warm-up included."""
        return sum(not one.is_complete for one in self.seen)

    @property
    def lost(self) -> float:
        """See the class."""
        return sum(each.lost_s for each in self.engines) / max(sum(each.computed_s for each in self.engines), 1e-9)

    @property
    def engines_hit_rate(self) -> float:
        """As the engines counted it, the warm-up included."""
        queried = sum(each.queried_tokens for each in self.engines)
        return sum(each.hit_tokens for each in self.engines) / max(queried, 1)

    def document(self) -> dict[str, Any]:
        """For a JSON file; without the requests."""
        found = {name: value for name, value in asdict(_bare(self)).items() if name != "seen"}
        return {**found, "failed": self.failed, "lost": self.lost, "engines_hit_rate": self.engines_hit_rate}


def _bare(run: Run) -> Run:
    return Run(run.router, run.seed, run.figures, run.quarters, run.engines, run.use, run.idle, run.stalled_s, ())


async def through(
    routers: Sequence[Router],
    engines: Sequence[Engine],
    requests: Sequence[Planned],
    setting: Setting,
    *,
    to: Sequence[int] | None = None,
    meanwhile: Meanwhile | None = None,
) -> Run:
    """Plays a load. `to` says which router gets each request; by default the first gets all.

    `meanwhile` runs beside the load, and to its own end; what it raises is raised.
    """
    progress = Progress()
    parts = {
        "router": [router.process for router in routers],
        "engines": [engine.process for engine in engines],
        "load": [os.getpid()],
    }
    begun = Moment.now(parts)
    beside = asyncio.ensure_future(_nothing() if meanwhile is None else meanwhile())
    pick = _Listed([0] * len(requests) if to is None else to)
    try:
        seen = await play(
            [router.url for router in routers], requests, timeout_s=TIMEOUT_S, progress=progress, pick=pick
        )
        await beside
    finally:
        beside.cancel()
    use = Use.between(begun, Moment.now(parts))
    first = int(len(seen) * setting.warm_up)
    return Run(
        router=" + ".join(router.name for router in routers),
        seed=setting.seed,
        figures=Figures.of(seen[first:], setting),
        quarters=quarters(seen, setting),
        engines=[EngineFigures.of(engine) for engine in engines if engine.answers],
        use=use.cores,
        idle=use.idle,
        stalled_s=progress.stalled_s,
        seen=seen,
    )


async def _nothing() -> None:
    """Runs beside a load where nothing else does."""


class _Listed(random.Random):
    """Chooses what a list says, in its order: the load generator asks once for each request."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(0)
        self._numbers = iter(numbers)

    def choice(self, seq: Any) -> Any:
        """See `random.Random`."""
        return seq[next(self._numbers)]


def quarters(seen: Sequence[Seen], setting: Setting) -> Sequence[float | None]:
    """The median time to a first token of each quarter of the requests, in the trace's seconds."""
    size = max(len(seen) // 4, 1)
    parts = [seen[start : start + size] for start in range(0, 4 * size, size)]
    waits = [[one.ttft_s * setting.compression for one in part if one.ttft_s is not None] for part in parts]
    return [statistics.median(part) if part else None for part in waits]


def work_of(seen: Sequence[Seen]) -> int:
    """Tokens of prompts and answers of the complete ones among them, as planned."""
    return sum(sum(tokens_of(one.planned)) for one in seen if one.is_complete)


def errors_of(seen: Sequence[Seen]) -> Mapping[str, int]:
    """How often each error came."""
    found: dict[str, int] = {}
    for one in seen:
        if one.error is not None:
            said = f"{one.error[:100]}{' (after a first token)' if one.first_token_s is not None else ''}"
            found[said] = found.get(said, 0) + 1
    return found


def shown(value: float | None, form: str = "8.2f") -> str:
    """A figure in a table; `none` where there is none."""
    width = int(form.partition(".")[0])
    return f"{'none':>{width}}" if value is None else f"{value:{form}}"


def written(document: object) -> str:
    """JSON for a file."""
    return json.dumps(document, indent=2, default=str) + "\n"
