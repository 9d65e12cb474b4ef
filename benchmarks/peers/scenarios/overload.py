"""Overload: 120% of what the engine can do for a minute, from three tiers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from benchmarks.peers.playing import ground, of_tier, played, refusals_and_failures
from benchmarks.peers.setting import BULK, DEFAULT, INTERACTIVE, Figure, Peer, Setting

TITLE = "120% load for 60 s: 30% interactive, 40% default, 50% bulk of what 8 places can do"
SECONDS, TOKENS, STEP_MS = 60, 20, 50
LOADS = {INTERACTIVE: 0.3, DEFAULT: 0.4, BULK: 0.5}
SETTING = Setting(reserves={INTERACTIVE: 0.25, DEFAULT: 0.25, BULK: 0.125})


def play(peer: Peer, is_quick: bool) -> Sequence[Figure]:
    """Plays it."""
    seconds = 5 if is_quick else SECONDS
    capacity_per_s = SETTING.places / (TOKENS * STEP_MS / 1_000)
    plan = [
        peer.request(tier, turn / (load * capacity_per_s), TOKENS)
        for tier, load in LOADS.items()
        for turn in range(int(seconds * load * capacity_per_s))
    ]
    with ground(peer, SETTING, step_ms=STEP_MS) as found:
        seen = asyncio.run(played(found.url, sorted(plan, key=lambda one: one.at_s)))
    longest = []
    for tier in LOADS:
        waits = [one.ttft_s for one in of_tier(seen, tier) if one.ttft_s is not None]
        longest.append(Figure(f"longest TTFT, {tier}", max(waits, default=None)))
    within = []
    for tier in LOADS:
        own = of_tier(seen, tier)
        share = sum(one.is_complete and one.end_s <= seconds for one in own) / len(own)
        within.append(Figure(f"{tier} answered within the {seconds} s", share * 100, "%"))
    return [*longest, *within, *refusals_and_failures(seen)]
