"""Killed: `kill -9` of one of two gateways, while it holds half of the pool and the other has requests that wait."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

from benchmarks.peers.playing import Ground, ground, played
from benchmarks.peers.processor_time import tree
from benchmarks.peers.setting import DEFAULT, Figure, Peer, Setting

TITLE = "kill -9 of a gateway that holds 4 of 8 places, while 8 requests wait at the other"
TOKENS, STEP_MS, AT_S, WITHIN_S = 1_000, 50, 4.0, 40.0
SETTING = Setting(gateways=2, reserves={})


def play(peer: Peer, is_quick: bool) -> Sequence[Figure]:
    """Plays it."""
    del is_quick  # a lease's time is what is measured
    with ground(peer, SETTING, step_ms=STEP_MS) as found:
        back_s = asyncio.run(_play(found))
        most = found.most("requests")
    return [Figure("its places in use again after", back_s), Figure("most requests at the engine", most, "")]


async def _play(found: Ground) -> float | None:
    half = SETTING.places // 2
    first, second = found.gateways
    held = [found.peer.request(DEFAULT, 0.0, TOKENS) for _ in range(half)]
    waiting = [found.peer.request(DEFAULT, 0.5, TOKENS) for _ in range(half + SETTING.places)]
    playing = [asyncio.ensure_future(played(first.url, held)), asyncio.ensure_future(played(second.url, waiting))]
    try:
        await asyncio.sleep(AT_S)
        for process in [*tree(first.process.pid)]:
            os.kill(process, signal.SIGKILL)
        if await found.until(lambda running: running <= half, 1.0) is None:
            return 0.0  # never less than all were seen to run: what waited in the engine took the places
        return await found.until(lambda running: running >= SETTING.places, WITHIN_S)
    finally:
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
