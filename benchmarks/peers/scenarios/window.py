"""Window: calls of 71 s against a limit of tokens by the minute."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from benchmarks.peers.playing import ground, played
from benchmarks.peers.setting import DEFAULT, Figure, Peer, Setting

TITLE = "a call of 300 tokens and 71 s every 5 s for 130 s; the limit is 600 tokens a minute"
TOKENS, STEP_MS, EVERY_S, SECONDS = 285, 250, 5.0, 130.0
"""With its prompt a call has some 300 tokens."""
SETTING = Setting(places=64, tokens_per_minute=600, reserves={})


def play(peer: Peer, is_quick: bool) -> Sequence[Figure]:
    """Plays it."""
    step_ms, seconds = (2, 3.0) if is_quick else (STEP_MS, SECONDS)
    every_s = 0.3 if is_quick else EVERY_S
    plan = [peer.request(DEFAULT, turn * every_s, TOKENS) for turn in range(int(seconds / every_s) + 1)]
    with ground(peer, SETTING, step_ms=step_ms) as found:
        seen = asyncio.run(played(found.url, plan))
        most = found.most("running")
    answered = [one for one in seen if one.is_complete]
    return [
        Figure(f"calls answered of {len(plan)}", len(answered), ""),
        Figure("their tokens", sum(one.output_tokens for one in answered), ""),
        Figure("calls at the engine at once", most, ""),
        Figure("refused with a time to come back", sum("retry-after" in one.headers for one in seen if one.error), ""),
    ]
