"""Second scene of the demo: batch work fills an engine beside people, and then their tier's SLO is held.

The engine is slow when it is full: of 128 places it keeps the SLO with about 26. All batch requests come at once, more
than it can do, and people's requests are a Poisson process. Both runs are admission with the engine's own priority, by
policies that differ in `hold` alone. What has no answer at the end of a run is broken off.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from sidecar.policy.compiler import load
from sidecar.tools.demo.figures import Arrival, ArrivalStream, Distribution, distribution, planned
from sidecar.tools.demo.runs import Ports, commands, engine_flags, sidecar_flags
from sidecar.tools.loadgen import Progress, Seen, play
from sidecar.tools.text import table

PLACES, TTFT_S, TPOT_S, HOLD = 128, 0.5, 0.060, "97%"
STEP_MS, STEP_MS_PER_SEQUENCE = 20.0, 1.5
"""20 ms a token alone, 60 ms among 26, 210 ms where it is full."""
SECONDS = 20.0
PEOPLE_PER_S = 4.0
BATCH = 400
"""Requests that come at once: the engine does half of them, however full it may be."""
LAST_S = 5.0
"""No one comes in the last seconds: an answer takes three."""
PEOPLE = ArrivalStream("interactive", "", PEOPLE_PER_S)
NIGHTLY = ArrivalStream("batch", "", 0.0, header="batch")
POLICY = f"""\
engine: tensorrt-llm
capacity: {{tokens: 400k, requests: {PLACES}}}
tiers:
  interactive: {{slo: {{ttft: {TTFT_S * 1000:.0f}ms, tpot: {TPOT_S * 1000:.0f}ms, hold: {HOLD}}}}}
  batch: {{queue: {{max_requests: 1k}}}}
default_tier: interactive
anonymous: interactive
endpoints: {{/v1/chat/completions: {{}}}}
"""
FREE, HELD = "free", "held"
POLICIES = {FREE: POLICY.replace(f", hold: {HOLD}", ""), HELD: POLICY}
COLUMNS = {FREE: "without hold", HELD: f"hold: {HOLD}"}
CLEARLY = 0.5


@dataclass(frozen=True, slots=True)
class SloMeasurement:
    """One run. `met` is the share of people's requests that met the SLO, as their clients saw it.

    Those of batch that were broken off at the end are neither answered nor failed.
    """

    name: str
    requests: int
    failed: int
    met: float
    ttft_s: Distribution
    tpot_s: Distribution
    batch_answered: int
    batch_tokens_per_s: float
    stalled_s: float = 0.0


def arrivals(seconds: float, seed: int) -> list[Arrival]:
    """All requests of a run."""
    rng = random.Random(seed)
    found = [Arrival(0.0, NIGHTLY, rng.randint(40, 320), rng.randint(20, 60)) for _ in range(BATCH)]
    at_s = rng.expovariate(PEOPLE_PER_S)
    while at_s < max(seconds - LAST_S, seconds / 2):
        found.append(Arrival(at_s, PEOPLE, rng.randint(40, 320), rng.randint(20, 60)))
        at_s += rng.expovariate(PEOPLE_PER_S)
    return found


@contextmanager
def servers() -> Iterator[Mapping[str, Ports]]:
    """Starts an engine with a sidecar before it for each run, and ends them. Raises CannotStart."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        paths = [Path(folder, f"{name}.yaml") for name in POLICIES]
        for path, text in zip(paths, POLICIES.values(), strict=True):
            path.write_text(text, encoding="utf-8")
        flags = engine_flags(load(paths[0]), PLACES, STEP_MS, STEP_MS_PER_SEQUENCE, tokens_per_chunk=1)
        engines = stack.enter_context(commands([flags] * len(paths)))
        lines = [sidecar_flags(path, engine) for path, (engine,) in zip(paths, engines, strict=True)]
        found = stack.enter_context(commands(lines))
        yield {name: Ports(*ports) for name, ports in zip(POLICIES, found, strict=True)}


def _asking(stream: ArrivalStream) -> tuple[Mapping[str, str], Mapping[str, object]]:
    return ({} if stream.header is None else {"x-priority": stream.header}), {}


def play_run(
    name: str, port: int, coming: Sequence[Arrival], seconds: float, report: Callable[[float, Progress], None]
) -> SloMeasurement:
    """Plays the arrivals at one server, and measures what people saw of it."""
    progress = Progress()
    requests = [planned(arrival, _asking) for arrival in coming]
    seen = asyncio.run(
        play([f"http://127.0.0.1:{port}"], requests, timeout_s=seconds, report=report, progress=progress)
    )
    return measure(name, coming, seen, seconds, progress.stalled_s)


def measure(
    name: str, coming: Sequence[Arrival], seen: Sequence[Seen], seconds: float, stalled_s: float
) -> SloMeasurement:
    """The figures of a run."""
    pairs = list(zip(coming, seen, strict=True))
    people = [one for arrival, one in pairs if arrival.stream is PEOPLE]
    batch = [one for arrival, one in pairs if arrival.stream is NIGHTLY and one.is_complete]
    answered = [one for one in people if one.is_complete]
    met = [one for one in answered if (one.ttft_s or 0.0) < TTFT_S and (one.tpot_s or 0.0) <= TPOT_S]
    return SloMeasurement(
        name=name,
        requests=len(people),
        failed=len(people) - len(answered),
        met=len(met) / max(1, len(people)),
        ttft_s=distribution([one.ttft_s or 0.0 for one in answered]),
        tpot_s=distribution([one.tpot_s or 0.0 for one in answered]),
        batch_answered=len(batch),
        batch_tokens_per_s=sum(one.output_tokens for one in batch) / seconds,
        stalled_s=stalled_s,
    )


def summary(runs: Sequence[SloMeasurement]) -> str:
    """The figures, a line each and a column for each run, and what they show."""
    slo = f"{TTFT_S * 1000:.0f} ms, then a token each {TPOT_S * 1000:.0f} ms"
    rows: list[tuple[str, Callable[[SloMeasurement], str]]] = [
        (f"people's answers that met the SLO ({slo})", lambda run: f"{run.met:.0%}"),
        ("99 of 100 of them begin within", lambda run: f"{run.ttft_s['p99']:.2f} s"),
        ("half of them have a token each", lambda run: f"{run.tpot_s['p50'] * 1000:.0f} ms"),
        ("batch tokens a second", lambda run: f"{run.batch_tokens_per_s:.0f}"),
    ]
    columns = ("In short", *(COLUMNS[run.name] for run in runs))
    return "\n".join([conclusion(runs), "", *table([columns, *((name, *map(show, runs)) for name, show in rows)])])


def conclusion(runs: Sequence[SloMeasurement]) -> str:
    """A sentence on the figures. It claims no more than they show."""
    free, held = runs
    if free.failed or held.failed:
        return "Requests failed: these figures show nothing until that is mended."
    if held.met - free.met > CLEARLY:
        return (
            "Batch work fills the engine, and people's answers are slow, whatever their priority. With `hold` it gets\n"
            "as much of the engine as their SLO leaves; nobody had to know how much that is."
        )
    stalled_s = max(one.stalled_s for one in runs)
    return f"The two runs do not differ clearly. The demo itself did not get to run for {stalled_s:.2f} s meanwhile."
