"""Replicas: two sidecars that share a pool in Redis, with skewed ingress, against one sidecar with the same requests.

Four of five requests of the top tier come in through the second sidecar, and four of five of the others through the
first. With more load than the engines have room for, each tier's share of the work must be what one sidecar gives it,
and no engine may be above its capacity. Routers without tiers and without a shared pool are the control.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.fleet import engines as emulated
from benchmarks.fleet import routers
from benchmarks.fleet.comparison import machine, within_capacity
from benchmarks.fleet.load import load, tokens_of
from benchmarks.fleet.routers import Router
from benchmarks.fleet.runs import Run, through
from benchmarks.fleet.setting import Setting
from benchmarks.fleet.verdict import Verdict
from benchmarks.redis_setup import running_server
from sidecar.tools.replay.plan import TIER_HEADER

RATE, REQUESTS = 3.0, 2_000
MIX = {"high": 0.3, "normal": 0.4, "batch": 0.3}
SKEW = 0.8
MOST_APART = 0.05


def run(name: str, setting: Setting) -> Sequence[Verdict]:
    """One sidecar, then two."""
    setting = replace(setting, rate=RATE, requests=REQUESTS)
    one, two = (_run(name, setting, count) for count in (1, 2))
    shares = {count: _shares(found) for count, found in ((1, one), (2, two))}
    print(f"{'share of the work':>20} {'one':>8} {'two':>8}")
    for tier in MIX:
        print(f"{tier:>20} {shares[1][tier]:8.3f} {shares[2][tier]:8.3f}")
    apart = [abs(shares[1][tier] - shares[2][tier]) for tier in MIX]
    failed = sum(not seen.is_complete for seen in (*one.seen, *two.seen))
    return [
        Verdict.at_most("a tier's share with two sidecars and with one, apart", max(apart), MOST_APART),
        Verdict.at_most("requests without a complete answer", failed, 0),
        *within_capacity(two, setting, "two"),
        *machine([one, two]),
    ]


def tiers(chance: random.Random) -> tuple[str, Mapping[str, str]]:
    """By the mix."""
    tier = chance.choices(list(MIX), list(MIX.values()))[0]
    return tier, {TIER_HEADER: tier}


def _run(name: str, setting: Setting, count: int) -> Run:
    requests = load(setting, tiers)
    chance = random.Random(f"{setting.seed} ingress")
    to = [_ingress(one.label, chance) if count == 2 else 0 for one in requests]
    with contextlib.ExitStack() as stack:
        engines = stack.enter_context(emulated.running(setting))
        store = None
        if name == routers.OURS and count == 2:
            store = stack.enter_context(running_server()).url
        started: list[Router] = [
            stack.enter_context(routers.running(name, engines, setting, tiers=routers.THREE_TIERS, store=store))
            for _ in range(count)
        ]
        return asyncio.run(through(started, engines, requests, setting, to=to))


def _ingress(tier: str, chance: random.Random) -> int:
    usual = 1 if tier == "high" else 0
    return usual if chance.random() < SKEW else 1 - usual


def _shares(run: Run) -> Mapping[str, float]:
    """Each tier's part of the tokens that ended while requests came: later, what is left decides."""
    last_s = max(seen.sent_s for seen in run.seen)
    work = Counter[str]()
    for seen in run.seen:
        if seen.is_complete and seen.end_s <= last_s:
            work[seen.planned.label] += sum(tokens_of(seen.planned))
    return {tier: work[tier] / max(sum(work.values()), 1) for tier in MIX}
