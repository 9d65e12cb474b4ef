"""Skew: two gateways of one pool, of which one gets 9 of 10 requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from benchmarks.peers.playing import Ground, ground, last_end, played, refusals_and_failures, ttft
from benchmarks.peers.setting import BULK, INTERACTIVE, Figure, Peer, Setting
from sidecar.tools.loadgen import Planned, Seen

TITLE = "two gateways, one of which gets 9 of 10 requests: 100 bulk at once, 3 interactive a second for 25 s; 8 places"
BULK_REQUESTS, SECONDS = 100, 25
PER_S, TOKENS, STEP_MS = 3, 20, 50
SETTING = Setting(lends=False, gateways=2)


def play(peer: Peer, is_quick: bool) -> Sequence[Figure]:
    """Plays it."""
    bulk, seconds = (20, 4) if is_quick else (BULK_REQUESTS, SECONDS)
    plan = [peer.request(BULK, 0.0, TOKENS, stream=False) for _ in range(bulk)]
    plan += [peer.request(INTERACTIVE, 0.5 + turn / PER_S, TOKENS) for turn in range(seconds * PER_S)]
    plans = [[one for number, one in enumerate(plan) if (number % 10 == 9) == is_second] for is_second in (False, True)]
    with ground(peer, SETTING, step_ms=STEP_MS) as found:
        seen = asyncio.run(_both(found, plans))
        most = found.most("requests")
    figures = [*ttft(seen, INTERACTIVE), last_end(seen, BULK), Figure("most requests at the engine", most, "")]
    return [*figures, *refusals_and_failures(seen)]


async def _both(found: Ground, plans: Sequence[Sequence[Planned]]) -> list[Seen]:
    parts = await asyncio.gather(
        *(played(gateway.url, plan) for gateway, plan in zip(found.gateways, plans, strict=True))
    )
    return [one for part in parts for one in part]
