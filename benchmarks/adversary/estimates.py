"""What 1,000 hostile requests of one tenant do to the estimate of another one.

The other tenant sends a prompt of two bytes a token until its estimate is right. Then the hostile tenant sends bodies
whose bytes say nothing of their tokens, the engine reports its own count of each, and the same prompt is sized again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp

from benchmarks.adversary.engine import Engine, body_of, running
from benchmarks.adversary.report import Line, at_most
from benchmarks.adversary.serving import Held, Proxy, held_by, key_of, proxy, tenant_file

HOSTILE, AT_ONCE, WARM_UP = 1_000, 16, 80
MOST = 1.05
PATH = "/v1/chat/completions"
POLICY = """\
engine: vllm
capacity: {tokens: 4M, requests: 400}
tiers:
  only: {}
default_tier: only
anonymous: deny
sources: [key]
endpoints:
  /v1/chat/completions: {}
tenants: tenants/*.yaml
"""
TENANTS = {name: tenant_file(name, "only") for name in ("other", "hostile")}


def _body(text: str, model: str = "m", **members: Any) -> bytes:
    return body_of({"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1, **members})


PROMPT = _body("0123456789" * 400)

Trick = Callable[[int], bytes]
TRICKS: Mapping[str, Trick] = {
    "token ids in `input_ids`": lambda _: _body("hello", input_ids=list(range(3_000))),
    "text in `documents`": lambda _: _body("hello", documents=[{"text": "word " * 3_000}]),
    "20,000 spaces": lambda _: _body(" " * 20_000),
    "a model name of its own each": lambda number: _body("hello", model=f"m-{number}"),
}


def _mixed(number: int) -> bytes:
    return random.Random(number).choice(list(TRICKS.values()))(number)


async def rows() -> AsyncIterator[Line]:
    """A line for every trick, and a control: requests like the other tenant's own."""
    yield Line(f"another tenant's estimate after {HOSTILE:,} hostile requests, to before (or before to after)", "")
    async with running(Engine()) as engine, aiohttp.ClientSession() as client:
        for name, trick in [*TRICKS.items(), ("all of them, mixed", _mixed)]:
            yield at_most(f"  {name}", await moved(engine, client, trick), MOST)
        honest = await moved(engine, client, lambda _: PROMPT)
        yield at_most("  control, prompts like the other tenant's own", honest, MOST)


async def moved(engine: Engine, client: aiohttp.ClientSession, trick: Trick) -> float:
    """How many times larger, or smaller, the same prompt's lease is after the attack."""
    engine.gate = asyncio.Event()
    async with proxy(engine.url, POLICY, TENANTS) as where:
        engine.gate.set()
        await _send_all(client, where, [PROMPT] * WARM_UP, "other")
        before = await _sized(client, where, engine.gate)
        engine.gate.set()
        await _send_all(client, where, [trick(number) for number in range(HOSTILE)], "hostile")
        after = await _sized(client, where, engine.gate)
    return ratio(before, after)


def ratio(before: Held, after: Held) -> float:
    """At least 1: an estimate that falls admits too much, one that rises admits too little."""
    if before.refused or after.refused:
        raise RuntimeError(f"the other tenant's request was refused: {before}, {after}")
    return max(after.tokens / before.tokens, before.tokens / after.tokens)


async def _sized(client: aiohttp.ClientSession, where: Proxy, gate: asyncio.Event) -> Held:
    return await held_by(client, where, gate, PATH, PROMPT, key=key_of("other"))


async def _send_all(client: aiohttp.ClientSession, where: Proxy, bodies: list[bytes], tenant: str) -> None:
    """Sends them all, some at once. A body that is refused has done no harm."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {key_of(tenant)}"}
    left = list(reversed(bodies))

    async def sender() -> None:
        while left:
            async with client.post(where.url + PATH, data=left.pop(), headers=headers) as response:
                await response.read()
                if response.status >= 500:
                    raise RuntimeError(f"{response.status} from the proxy")

    await asyncio.gather(*(sender() for _ in range(AT_ONCE)))
