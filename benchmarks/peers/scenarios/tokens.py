"""Tokens: 500 requests of 1,000 tokens at once, on an engine whose KV cache holds 10,000."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from benchmarks.peers.playing import ground, last_end, played, refusals_and_failures
from benchmarks.peers.setting import BULK, Figure, Peer, Setting
from sidecar.tools.replay.prompts import Words

TITLE = "500 requests of 1,000 tokens at once; the KV cache holds 10,000 tokens"
REQUESTS, OUTPUT_TOKENS, STEP_MS = 500, 50, 10
PROMPT_TOKENS = 950
"""Of words that are a token each, also by the tokenizer that Dynamo has here. With the output it is 1,000 tokens."""
SETTING = Setting(places=64, tokens=10_000, reserves={})


def play(peer: Peer, is_quick: bool) -> Sequence[Figure]:
    """Plays it."""
    words = Words()
    plan = [
        peer.request(BULK, 0.0, OUTPUT_TOKENS, stream=False, prompt=words.text(PROMPT_TOKENS, random.Random(number)))
        for number in range(50 if is_quick else REQUESTS)
    ]
    options = ["--kv-tokens", str(SETTING.tokens), "--prefill-tokens-per-step", "8192"]
    with ground(peer, SETTING, step_ms=STEP_MS, options=options) as found:
        seen = asyncio.run(played(found.url, plan))
        most = found.most("tokens")
    return [Figure("most tokens at the engine", most, ""), last_end(seen, BULK), *refusals_and_failures(seen)]
