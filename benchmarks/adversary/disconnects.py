"""Clients that disconnect in a loop, before an engine that notices it late: what the engine runs at once.

16 clients send to a pool of 8 requests through a real `sidecar serve`, disconnect 0.3 s later and send again. The
engine goes on with such a request for as long as the real ones do: SGLang up to 4 s, TensorRT-LLM 1 s, vLLM 0.1 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from benchmarks.adversary.engine import Engine, body_of, running
from benchmarks.adversary.report import Line
from benchmarks.adversary.serving import proxy

CLIENTS, PLACES, DISCONNECT_S = 16, 8, 0.3
NOTICES_S = {"sglang": 4.0, "tensorrt-llm": 1.0, "vllm": 0.1}
LEAST_ATTACK_S, ANSWER_S = 5.0, 30.0
POLICY = """\
engine: {engine}
capacity: {{requests: {places}}}
tiers:
  only: {{}}
default_tier: only
anonymous: only
sources: [key]
endpoints:
  /v1/chat/completions: {{}}
"""
BODY = body_of({"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 400})


async def rows() -> AsyncIterator[Line]:
    """A line for every engine."""
    for engine, notice_s in NOTICES_S.items():
        yield line(engine, notice_s, await attacked(engine, notice_s))


def line(name: str, notice_s: float, engine: Engine) -> Line:
    """One engine's peak. It also fails where the engine was never full: then there was no attack."""
    figure = f"{engine.peak} at once, {engine.aborted} aborted"
    asked = f"at most {PLACES}, and no fewer"
    attack = f"16 clients disconnect after {DISCONNECT_S} s, {name} notices after {notice_s:g} s"
    return Line(attack, figure, asked, engine.peak == PLACES)


async def attacked(name: str, notice_s: float) -> Engine:
    """The engine after the attack."""
    async with running(Engine(answer_s=ANSWER_S, notice_s=notice_s)) as engine:
        async with proxy(engine.url, POLICY.format(engine=name, places=PLACES)) as where:
            end_s = asyncio.get_running_loop().time() + max(LEAST_ATTACK_S, 3 * notice_s)
            await asyncio.gather(*(_client(where.url, end_s) for _ in range(CLIENTS)))
        await asyncio.sleep(notice_s)
        return engine


async def _client(url: str, end_s: float) -> None:
    where = urlsplit(url)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(BODY)}\r\n\r\n"
    )
    while asyncio.get_running_loop().time() < end_s:
        _, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(head.encode() + BODY)
        await asyncio.sleep(DISCONNECT_S)
        writer.transport.abort()
