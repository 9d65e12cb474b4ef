"""Backlog: bulk requests at once, then interactive ones, on an engine with 8 places that ends 8 requests a second."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from benchmarks.peers.playing import ground, last_end, played, refusals_and_failures, ttft
from benchmarks.peers.setting import BULK, INTERACTIVE, Figure, Peer, Setting

TITLE = "200 bulk requests at once, then 3 interactive a second for 45 s; 8 places, 1 s a request"
BULK_REQUESTS, SECONDS = 200, 45
PER_S, TOKENS, STEP_MS = 3, 20, 50
SETTING = Setting(lends=False)
"""Half of the places are interactive's and not lent, a quarter bulk's."""


def play(peer: Peer, is_quick: bool) -> Sequence[Figure]:
    """Plays it."""
    bulk, seconds = (40, 5) if is_quick else (BULK_REQUESTS, SECONDS)
    plan = [peer.request(BULK, 0.0, TOKENS, stream=False) for _ in range(bulk)]
    plan += [peer.request(INTERACTIVE, 0.5 + turn / PER_S, TOKENS) for turn in range(seconds * PER_S)]
    with ground(peer, SETTING, step_ms=STEP_MS) as found:
        seen = asyncio.run(played(found.url, plan))
        most = found.most("requests")
    figures = [*ttft(seen, INTERACTIVE), last_end(seen, BULK), Figure("most requests at the engine", most, "")]
    return [*figures, *refusals_and_failures(seen)]
