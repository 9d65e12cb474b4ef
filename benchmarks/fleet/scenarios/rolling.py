"""Rolling update: each engine is drained, ended, started again and resumed, under more load than there is room for.

The same load runs without the update before: what four engines do with it in each moment depends on the trace.
A router that cannot drain has its engines ended under load. That is the control: it must show errors.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.fleet import admin, routers
from benchmarks.fleet import engines as emulated
from benchmarks.fleet.comparison import machine
from benchmarks.fleet.engines import Engine
from benchmarks.fleet.load import load, tokens_of
from benchmarks.fleet.routers import Router
from benchmarks.fleet.runs import errors_of, through
from benchmarks.fleet.setting import Setting
from benchmarks.fleet.verdict import Verdict
from sidecar.tools.loadgen import Seen

RATE, REQUESTS = 3.0, 3_000
BEGINS_S = 10.0
"""After so long the engines are full."""
WINDOW_S = 8.0
"""Requests differ much in size: in so long, some 400 end."""
LEAST_PART = 0.75


def run(name: str, setting: Setting) -> Sequence[Verdict]:
    """All engines, one after the other."""
    setting = replace(setting, rate=RATE, requests=REQUESTS)
    requests = load(setting)
    took: list[tuple[float, float]] = []
    with emulated.running(setting) as engines, routers.running(name, engines, setting) as router:
        alone = asyncio.run(through([router], engines, requests, setting))
    with emulated.running(setting) as engines, routers.running(name, engines, setting) as router:

        async def update() -> None:
            await asyncio.sleep(BEGINS_S)
            begun_s = time.monotonic()
            for engine in engines:
                await asyncio.to_thread(_replace, engine, router)
            took.append((BEGINS_S, BEGINS_S + time.monotonic() - begun_s))

        found = asyncio.run(through([router], engines, requests, setting, meanwhile=update))
    for error, number in errors_of(found.seen).items():
        print(f"  {number} x {error}")
    failed = [seen for seen in found.seen if not seen.is_complete]
    cut = [seen for seen in found.seen if is_cut(seen)]
    begun_s, ended_s = took[0]
    part = _worst(found.seen, alone.seen, begun_s, ended_s)
    after = sum(seen.end_s > ended_s for seen in found.seen)
    print(f"the update took {ended_s - begun_s:.1f} s; {len(found.seen)} requests, {len(failed)} failed")
    return [
        Verdict.at_least("requests that ended after the update: it was under load", after, 1),
        Verdict.at_most("requests without a complete answer", len(failed), 0),
        Verdict.at_most("answers that were cut after a first byte, also those that say they are complete", len(cut), 0),
        Verdict.at_least(f"tokens in the worst {WINDOW_S:g} s of the update, to those without one", part, LEAST_PART),
        *machine([alone, found]),
    ]


def is_cut(seen: Seen) -> bool:
    """Whether an answer had begun and is shorter than it was to be: a vLLM that ends says `[DONE]` and nothing else."""
    return seen.first_token_s is not None and seen.output_tokens < tokens_of(seen.planned)[1]


def _replace(engine: Engine, router: Router) -> None:
    """What a rolling update does with one engine; the preStop hook is the drain."""
    if router.admin is not None:
        admin.drain(router.admin, engine.name)
    engine.kill(signal.SIGTERM)
    while engine.answers:
        time.sleep(0.05)
    engine.start_again()
    if router.admin is not None:
        admin.resume(router.admin, engine.name)
        while not admin.takes_new(router.admin, engine.name):  # an orchestrator waits for an instance's readiness
            time.sleep(0.05)


def _worst(seen: Sequence[Seen], alone: Sequence[Seen], begun_s: float, ended_s: float) -> float | None:
    """Tokens of the requests that ended in the worst window of the update, to those of the same window without it."""

    def within(run: Sequence[Seen], start_s: float) -> float:
        ended = [one for one in run if one.is_complete and start_s <= one.end_s < start_s + WINDOW_S]
        return sum(sum(tokens_of(one.planned)) for one in ended)

    steps = max(1, int((ended_s - begun_s) / WINDOW_S * 8) - 7)
    starts = [begun_s + step * WINDOW_S / 8 for step in range(steps)]
    parts = [within(seen, start_s) / before for start_s in starts if (before := within(alone, start_s))]
    return min(parts, default=None)
