"""Lending: a lower tier's burst fills the engine before the owner of half of it asks for its share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from benchmarks.peers.playing import Ground, ground, played, refusals_and_failures
from benchmarks.peers.setting import BULK, INTERACTIVE, Figure, Peer, Setting
from sidecar.tools.loadgen import Seen

TITLE = "32 bulk requests of 10 s each; 5 s later the owner of half of 8 places asks for it"
BULK_REQUESTS, OWNERS = 32, 8
BULK_TOKENS, OWNER_TOKENS, STEP_MS, ASKS_AT_S = 200, 60, 50, 5.0
SETTING = Setting(preempts=True)


def play(peer: Peer, is_quick: bool) -> Sequence[Figure]:
    """Plays it."""
    bulk, bulk_tokens, asks_at_s = (12, 80, 2.0) if is_quick else (BULK_REQUESTS, BULK_TOKENS, ASKS_AT_S)
    plan = [peer.request(BULK, 0.0, bulk_tokens, stream=False) for _ in range(bulk)]
    plan += [peer.request(INTERACTIVE, asks_at_s, OWNER_TOKENS) for _ in range(OWNERS)]

    async def both(found: Ground) -> tuple[list[Seen], int]:
        playing = asyncio.ensure_future(played(found.url, plan))
        await asyncio.sleep(asks_at_s - 0.2)
        used = await asyncio.to_thread(found.running)
        return await playing, used

    with ground(peer, SETTING, step_ms=STEP_MS) as found:
        seen, used = asyncio.run(both(found))
    starts = sorted(one.ttft_s for one in seen if one.planned.label == INTERACTIVE and one.ttft_s is not None)
    share = int(SETTING.reserves[INTERACTIVE] * SETTING.places)
    return [
        Figure("places in use before", used, ""),
        Figure("owner has its share after", starts[share - 1] if len(starts) >= share else None),
        *refusals_and_failures(seen),
    ]
