"""Real routers before emulated engines: each takes them as workers, streams, and finds a prefix again.

`python -m benchmarks.fleet_routers.real NAME` installs a router; the tests skip those that are not.
"""

from __future__ import annotations

import asyncio
import random
import re

import pytest

from benchmarks.fleet_routers import real
from benchmarks.fleet_routers.behavior import PROMPT_TOKENS, ask, planned
from benchmarks.fleet_routers.engines import Engines, free_ports

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

OUTPUT_TOKENS = 5


@pytest.mark.parametrize("name", [*real.ROUTERS])
async def test_a_router_takes_emulated_engines_and_finds_a_prefix_again(name: str) -> None:
    if not (real.folder_of(name) / ".ready").is_file():
        pytest.skip(f"{name} is not installed: run python -m benchmarks.fleet_routers.real {name} once")
    numbers = [random.randrange(10**9) for _ in range(4)]
    async with Engines(real.ROUTERS[name].engine, 2) as engines:
        [port] = free_ports(1)
        process = await asyncio.to_thread(real.start, name, engines.urls, port)
        try:
            url = f"http://127.0.0.1:{port}"
            first = [one for number in numbers for one in await ask(url, planned(number, output_tokens=OUTPUT_TOKENS))]
            await asyncio.sleep(0.5)  # events travel
            again = [one for number in numbers for one in await ask(url, planned(number, output_tokens=OUTPUT_TOKENS))]
            states = await engines.states()
        finally:
            await asyncio.to_thread(real.stop, process)
    assert [one.error for one in first + again] == [None] * 8
    assert {(one.prompt_tokens, one.output_tokens) for one in first + again} == {(PROMPT_TOKENS, OUTPUT_TOKENS)}
    assert [one.cached_tokens or 0 for one in first] == [0] * 4
    assert [one.cached_tokens for one in again] == [PROMPT_TOKENS - 16] * 4  # all but the block with the last token
    assert sum(state["counts"]["finished"] for state in states) == 8
    if name == "dynamo":
        overlaps = re.findall(r"overlap_blocks=(\d+)", plain(real.log_of(name, port).read_text()))
        assert [int(blocks) for blocks in overlaps] == [0] * 4 + [PROMPT_TOKENS // 16] * 4


def plain(text: str) -> str:
    """Without colors."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
