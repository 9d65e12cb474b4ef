"""Slow engine: one of four takes four times as long for each step as its capacity says.

Its share of the work has to fall to about a fourth of the others', and the top tier's p99 may rise by a half.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.fleet import engines as emulated
from benchmarks.fleet import routers
from benchmarks.fleet.comparison import machine
from benchmarks.fleet.load import load
from benchmarks.fleet.runs import Figures, Run, shown, through
from benchmarks.fleet.setting import Setting
from benchmarks.fleet.verdict import Verdict
from sidecar.tools.replay.plan import TIER_HEADER

RATE, REQUESTS = 1.3, 1_500
"""The three and a quarter engines have room for it."""
SLOW = (1.0, 1.0, 1.0, 0.25)
HIGH_SHARE = 0.2
LEAST_SHARE, MOST_SHARE = 0.10, 0.40
MOST_TIMES_P99 = 1.5


def run(name: str, setting: Setting) -> Sequence[Verdict]:
    """All engines alike, then with the slow one."""
    setting = replace(setting, rate=RATE, requests=REQUESTS)
    even, slow = _run(name, setting), _run(name, replace(setting, speeds=SLOW))
    print(f"{'':>12} {'high: <5 s':>10} {'p50 s':>8} {'p99 s':>8}  prompt tokens by engine")
    for title, found in (("all alike", even), ("one slow", slow)):
        high = _high(found, setting)
        work = " ".join(f"{each.queried_tokens:>9,}" for each in found.engines)
        print(f"{title:>12} {high.soon:10.3f} {shown(high.p50_s)} {shown(high.p99_s)}  {work}")
    *others, last = (each.queried_tokens for each in slow.engines)
    share = last / max(statistics.fmean(others), 1)
    before, after = _high(even, setting).p99_s, _high(slow, setting).p99_s
    return [
        Verdict.at_least("the slow engine's work, to the mean of the others", share, LEAST_SHARE),
        Verdict.at_most("the slow engine's work, to the mean of the others", share, MOST_SHARE),
        Verdict.at_most(
            "high's p99, to that without a slow engine",
            None if before is None or after is None else after / before,
            MOST_TIMES_P99,
        ),
        Verdict.at_most("requests without a complete answer", even.failed + slow.failed, 0),
        *machine([even, slow]),
    ]


def tiers(chance: random.Random) -> tuple[str, Mapping[str, str]]:
    """A fifth is high, the rest normal."""
    tier = "high" if chance.random() < HIGH_SHARE else "normal"
    return tier, {TIER_HEADER: tier}


def _run(name: str, setting: Setting) -> Run:
    requests = load(setting, tiers)
    with (
        emulated.running(setting) as engines,
        routers.running(name, engines, setting, tiers=routers.THREE_TIERS) as router,
    ):
        return asyncio.run(through([router], engines, requests, setting))


def _high(run: Run, setting: Setting) -> Figures:
    first = int(len(run.seen) * setting.warm_up)
    return Figures.of([seen for seen in run.seen[first:] if seen.planned.label == "high"], setting)
