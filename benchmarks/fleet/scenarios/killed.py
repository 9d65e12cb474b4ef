"""Killed engines: one of four for good, and all of them for 10 s.

A client may see an error only if it had received a first byte. What a lost engine costs the others is at most its work:
their p99 is compared with a run that has had three engines from the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace

from benchmarks.fleet import engines as emulated
from benchmarks.fleet import routers
from benchmarks.fleet.comparison import machine
from benchmarks.fleet.engines import Engine
from benchmarks.fleet.load import load
from benchmarks.fleet.runs import Figures, Run, errors_of, shown, through
from benchmarks.fleet.setting import Setting
from benchmarks.fleet.verdict import Verdict
from sidecar.tools.loadgen import Planned, Seen

RATE, REQUESTS = 1.3, 1_000
"""Three engines have room for it: it is 1.73 for four."""
KILLED_AT = 0.4
"""Of the run's time."""
MOST_TIMES_THREE = 1.25
"""Two runs of one setting differ by less."""
DOWN_S = 10.0


def one(name: str, setting: Setting) -> Sequence[Verdict]:
    """Kill -9 of one of four."""
    setting = replace(setting, rate=RATE, requests=REQUESTS)
    requests = load(setting)
    at_s = requests[-1].at_s * KILLED_AT
    runs = {
        "four engines": _run(name, setting, requests),
        "three engines": _run(name, replace(setting, engines=3), requests),
        "one of four killed": _run(name, setting, requests, kills=1, at_s=at_s),
    }
    after = {title: [seen for seen in run.seen if seen.sent_s >= at_s] for title, run in runs.items()}
    figures = {title: Figures.of(seen, setting) for title, seen in after.items()}
    print(f"{'sent after the kill':>24} {'<5 s':>6} {'p50 s':>8} {'p99 s':>8} {'hits':>6} {'failed':>7}")
    for title, found in figures.items():
        print(
            f"{title:>24} {found.soon:6.3f} {shown(found.p50_s)} {shown(found.p99_s)} {found.hit_rate:6.3f} "
            f"{found.failed:>7}"
        )
    killed, three = runs["one of four killed"], figures["three engines"].p99_s
    p99_s = figures["one of four killed"].p99_s
    times = None if three is None or p99_s is None else p99_s / three
    return [
        *_errors(killed.seen, at_s),
        Verdict.at_most("p99 of what was sent after the kill, to that of three engines", times, MOST_TIMES_THREE),
        *machine(list(runs.values())),
    ]


def all_of_them(name: str, setting: Setting) -> Sequence[Verdict]:
    """All four, for 10 s."""
    setting = replace(setting, rate=RATE, requests=REQUESTS)
    requests = load(setting)
    at_s = requests[-1].at_s * KILLED_AT
    run = _run(name, setting, requests, kills=setting.engines, at_s=at_s, down_s=DOWN_S)
    during = [seen for seen in run.seen if at_s <= seen.sent_s < at_s + DOWN_S]
    print(
        f"{len(during)} requests were sent while no engine ran, {sum(seen.is_complete for seen in during)} were served"
    )
    return [
        *_errors(run.seen, at_s),
        Verdict.at_least("requests sent while no engine ran", len(during), 1),
        Verdict.at_most("of these without a complete answer", sum(not seen.is_complete for seen in during), 0),
        *machine([run]),
    ]


def _run(
    name: str,
    setting: Setting,
    requests: Sequence[Planned],
    *,
    kills: int = 0,
    at_s: float = 0.0,
    down_s: float | None = None,
) -> Run:
    """One run on new engines. `kills` of them are killed at `at_s`, and come back after `down_s`, if ever."""
    with emulated.running(setting) as engines, routers.running(name, engines, setting) as router:
        chosen = engines[:kills]

        async def kill() -> None:
            await asyncio.sleep(at_s)
            for engine in chosen:
                engine.kill()
            if down_s is not None:
                await asyncio.sleep(down_s)
                await _start_again(chosen)

        return asyncio.run(through([router], engines, requests, setting, meanwhile=kill))


async def _start_again(engines: Iterable[Engine]) -> None:
    """All at once, as after a lost node; in threads, so that the load goes on."""
    await asyncio.gather(*(asyncio.to_thread(engine.start_again) for engine in engines))


def _errors(seen: Sequence[Seen], at_s: float) -> Iterable[Verdict]:
    failed = [one for one in seen if not one.is_complete]
    for error, number in errors_of(seen).items():
        print(f"  {number} x {error}")
    begun = sum(one.first_token_s is not None and one.sent_s < at_s for one in failed)
    yield Verdict.at_most("errors of clients that had no first byte", len(failed) - begun, 0)
    yield Verdict.at_least("errors of clients that had one: the kill met running requests", begun, 1)
