"""Storm: an engine that answers 503 for seconds, one that refuses now and then, one that resets, and one that flaps.

At the end every ledger is empty, none was ever negative, and the replays were within their budget. Clients see errors
only where a first byte was sent, or where two engines broke the same request (502).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.fleet import admin, routers
from benchmarks.fleet import engines as emulated
from benchmarks.fleet.comparison import machine
from benchmarks.fleet.engines import Engine
from benchmarks.fleet.load import load
from benchmarks.fleet.runs import Run, errors_of, through
from benchmarks.fleet.setting import Setting
from benchmarks.fleet.verdict import Verdict

RATE, REQUESTS = 0.8, 900
EVERY_S, DOWN_S = 7.0, 1.5
REPLAYS = "admission_replays_total"
LEAST_BUDGET, BUDGET = 10, 0.10
"""A minute's least, and the part of the admissions."""
EMPTY_WITHIN_S = 10.0


def run(name: str, setting: Setting) -> Sequence[Verdict]:
    """One run; what the ledgers say is read at its end."""
    setting = replace(setting, rate=RATE, requests=REQUESTS)
    requests = load(setting)
    with emulated.running(setting) as engines, routers.running(name, engines, setting) as router:
        rounds = max(1, int(requests[-1].at_s / EVERY_S))
        found = asyncio.run(through([router], engines, requests, setting, meanwhile=lambda: _storm(engines, rounds)))
        done = [engine.page("/_emulator/faults")["done"] for engine in engines]
        ledgers = [] if router.admin is None else _ledgers(router.admin, found)
    print(f"faults by engine: {done}; {len(found.seen)} requests, {found.failed} failed")
    for error, number in errors_of(found.seen).items():
        print(f"  {number} x {error}")
    unbegun = [seen for seen in found.seen if not seen.is_complete and seen.first_token_s is None]
    broken_twice = sum(seen.status == 502 for seen in unbegun)
    refused = sum(each.get("refuse", 0) + each.get("reset", 0) for each in done)
    return [
        Verdict.at_least("requests that an engine refused or reset", refused, 20),
        Verdict.at_most("errors without a first byte, but for a 502", len(unbegun) - broken_twice, 0),
        Verdict.at_most("502 after two engines broke a request", broken_twice, 0.01 * len(found.seen)),
        *ledgers,
        *machine([found]),
    ]


async def _storm(engines: Sequence[Engine], rounds: int) -> None:
    """The flapping engine is up at the end."""
    stormy, now_and_then, resets, flapping = engines
    now_and_then.set_faults({"kind": "refuse", "status": 429, "every": 20})
    resets.set_faults({"kind": "reset", "every": 25})
    for _ in range(rounds):
        stormy.set_faults({"kind": "refuse", "status": 503, "retry_after": 1, "for_s": EVERY_S / 2})
        await asyncio.sleep(EVERY_S - DOWN_S)
        flapping.kill()
        await asyncio.sleep(DOWN_S)
        await asyncio.to_thread(flapping.start_again)


def _ledgers(address: str, found: Run) -> Sequence[Verdict]:
    """What the pool's own ledgers say when nothing runs any more."""

    async def empty() -> dict[str, int]:
        held = dict(admin.held(address))
        for _ in range(int(EMPTY_WITHIN_S / 0.2)):
            if not any(held.values()):
                break
            await asyncio.sleep(0.2)
            held = dict(admin.held(address))
        return held

    held = asyncio.run(empty())
    replays = admin.count(address, REPLAYS)
    minutes = max(seen.end_s for seen in found.seen) / 60
    budget = max(LEAST_BUDGET * max(minutes, 1), BUDGET * len(found.seen))
    return [
        Verdict.at_most("held by the ledgers at the end, tokens", held["tokens"], 0),
        Verdict.at_most("held by the ledgers at the end, requests", held["requests"], 0),
        Verdict.at_most("held by the ledgers at the end, un-prefilled tokens", held["unprefilled_tokens"], 0),
        Verdict.at_least("replays", replays, 1),
        Verdict.at_most("replays, within the budget", replays, budget),
    ]
