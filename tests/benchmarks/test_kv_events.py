"""The KV events of the emulated engine: whoever follows them knows at any time what a prompt would hit."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import pytest

from benchmarks.fleet_routers.emulated_engine import add_routers_pages
from sidecar.tools.emulator import StepModel
from sidecar.tools.step_model.kv_cache import BlockHash, Holding, KvCache
from tests.tools.emulator.emulated import VLLM, Client, emulated

pytestmark = pytest.mark.anyio

with_pages = partial(emulated, extend=add_routers_pages)

WITHIN_S = 10.0


class Follower:
    """A router's view, made from events alone. Fails for an event that cannot be."""

    def __init__(self) -> None:
        self.parents: dict[BlockHash, BlockHash | None] = {}

    def changed(self, kind: str, block: BlockHash, parent: BlockHash | None) -> None:
        if kind == "removed":
            del self.parents[block]
            return
        assert block not in self.parents, "stored twice"
        assert parent != block
        self.parents[block] = parent

    def hit_blocks(self, prompt: list[BlockHash]) -> int:
        found = 0
        while found < len(prompt) and prompt[found] in self.parents:
            assert self.parents[prompt[found]] == (prompt[found - 1] if found else None)
            found += 1
        return found


@pytest.mark.parametrize("seed", range(20))
def test_a_follower_predicts_every_hit_of_a_small_cache(seed: int) -> None:
    rng = random.Random(seed)
    cache, follower, size = KvCache(40, 4, caches_prefixes=True), Follower(), 4
    cache.on_change = follower.changed
    running: list[tuple[Holding, list[BlockHash]]] = []
    hits = 0
    for _ in range(2_000):
        text = bytes(rng.choices(b"ab", k=rng.randrange(1, 6)))
        blocks = [text[: end + 1] for end in range(len(text))]
        tokens = len(text) * size + 1
        predicted = follower.hit_blocks(blocks) * size
        assert cache.hit_length(blocks, tokens) == predicted
        hits += predicted > 0
        holding = cache.reserve(tokens + rng.randrange(4), blocks, tokens)
        if holding is not None:
            running.append((holding, blocks))
        for held, its in rng.sample(running, k=min(2, len(running))):
            cache.publish(held, its, rng.randrange(len(its) * size + 1))
        while running and (holding is None or rng.random() < 0.5):
            cache.release(running.pop(rng.randrange(len(running)))[0])
        assert len(follower.parents) == cache.cached_blocks
    assert hits > 100


@asynccontextmanager
async def followed(client: Client) -> AsyncIterator[aiohttp.StreamReader]:
    async with client.session.get(client.url + "/_emulator/kv_events") as response:
        assert await asyncio.wait_for(response.content.readline(), WITHIN_S) == b"[]\n"
        yield response.content


async def changes(stream: aiohttp.StreamReader, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        found += json.loads(await asyncio.wait_for(stream.readline(), WITHIN_S))
    return found


async def test_the_stream_says_what_is_stored_and_removed() -> None:
    steps = StepModel(kv_tokens=4 * 16, step_us=1_000)
    async with (
        with_pages(VLLM, prefix_cache=True, steps=steps) as client,
        followed(client) as stream,
    ):
        await client.post("completions", prompt=list(range(32)), max_tokens=1)
        [first, second] = await changes(stream, 2)
        assert (first[0], first[2], second[0], second[2]) == ("stored", None, "stored", first[1])
        await client.post("completions", prompt=list(range(100, 148)), max_tokens=1)
        later = await changes(stream, 5)
        assert [kind for kind, *_ in later] == ["removed", "removed", "stored", "stored", "stored"]
        assert [change[1] for change in later[:2]] == [second[1], first[1]]
