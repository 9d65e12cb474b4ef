"""A KV cache that overflows, as a user of `sidecar emulate` sees it."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager

import aiohttp
import pytest

from sidecar.engines.pages import Metrics
from sidecar.tools.emulator.config import EmulatorConfig
from tests.support.in_process import serving_engine
from tests.tools.emulator.emulated import DYNAMO, SGLANG, TRTLLM, VLLM

pytestmark = pytest.mark.anyio
CLIENTS, OUTPUT = 12, 60
BODY = {"model": "m", "prompt": "one two three four five six seven eight", "max_tokens": OUTPUT}


def emulator(engine: str, *flags: str) -> AbstractAsyncContextManager[str]:
    """`sidecar emulate` with twelve slots and room for about three of the requests."""
    settings = ("--max-num-seqs", str(CLIENTS), "--kv-tokens", "250", "--step-ms", "1")
    return serving_engine("--engine", engine, *settings, *flags)


async def streamed(client: aiohttp.ClientSession, url: str) -> str:
    """The whole text of one stream."""
    text = ""
    async with client.post(f"{url}/v1/completions", json={**BODY, "stream": True}) as response:
        assert response.status == 200
        async for line in response.content:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                text += "".join(choice["text"] for choice in json.loads(data)["choices"])
    return text


async def whole(client: aiohttp.ClientSession, url: str) -> tuple[str, int]:
    async with client.post(f"{url}/v1/completions", json=BODY) as response:
        answer = await response.json()
    return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]


async def found(client: aiohttp.ClientSession, url: str, path: str) -> str:
    async with client.get(url + path) as response:
        return await response.text()


@pytest.mark.parametrize("engine", [VLLM, SGLANG, TRTLLM, DYNAMO], ids=lambda engine: engine.name)
@pytest.mark.parametrize("flags", [(), ("--enable-prefix-caching", "--block-size", "4")], ids=["plain", "prefixes"])
async def test_an_overcommitted_engine_preempts_and_every_answer_is_complete(
    engine: type, flags: tuple[str, ...]
) -> None:
    async with emulator(engine.name, "--preempt", *flags) as url, aiohttp.ClientSession() as client:
        alone, tokens = await whole(client, url)
        assert tokens == OUTPUT
        before = json.loads(await found(client, url, "/_emulator"))
        assert before["counts"]["preempted"] == 0
        streams = [streamed(client, url) for _ in range(CLIENTS // 2)]
        answers = await asyncio.gather(*streams, *(whole(client, url) for _ in range(CLIENTS // 2)))
        assert set(answers) == {alone, (alone, OUTPUT)}
        state = json.loads(await found(client, url, "/_emulator"))
        preempted = state["counts"]["preempted"]
        assert preempted > 0
        assert state["most"]["kv_tokens"] <= state["capacity"]["kv_tokens"]
        assert {name: state["now"][name] for name in ("requests", "tokens", "unprefilled_tokens", "kv_tokens")} == {
            "requests": 0, "tokens": 0, "unprefilled_tokens": 0, "kv_tokens": 0,
        }  # fmt: skip
        if engine is TRTLLM:
            assert "trtllm_num_paused_requests" in await found(client, url, "/prometheus/metrics")
        elif engine is not DYNAMO:
            name = "vllm:num_preemptions_total" if engine is VLLM else "sglang:num_retracted_requests_total"
            assert Metrics(await found(client, url, "/metrics")).count(name) == preempted


async def test_without_the_switch_no_one_is_preempted() -> None:
    async with emulator("vllm") as url, aiohttp.ClientSession() as client:
        answers = await asyncio.gather(*(whole(client, url) for _ in range(CLIENTS)))
        assert {tokens for _, tokens in answers} == {OUTPUT}
        assert Metrics(await found(client, url, "/metrics")).count("vllm:num_preemptions_total") == 0


def test_an_unbounded_kv_cache_is_never_full() -> None:
    with pytest.raises(ValueError, match="preempts needs kv_tokens"):
        EmulatorConfig(engine=VLLM, preempts=True)
