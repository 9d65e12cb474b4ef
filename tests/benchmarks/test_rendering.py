"""Rendered prompts of the emulated vLLM: token ids, by which a router finds a prefix again."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from benchmarks.fleet_routers.emulated_engine import add_routers_pages
from benchmarks.fleet_routers.rendering import RENDERED
from sidecar.apis import Api
from tests.tools.emulator.emulated import DYNAMO, SGLANG, TRTLLM, VLLM, Client, emulated

pytestmark = pytest.mark.anyio

with_pages = partial(emulated, extend=add_routers_pages)

CHAT, COMPLETIONS = RENDERED[Api.CHAT], RENDERED[Api.COMPLETIONS]


async def rendered(client: Client, path: str, body: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with client.session.post(client.url + path, data=data) as response:
        return response.status, await response.json()


def chat(*texts: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text} for text in texts], "max_tokens": 3}


async def test_a_prompt_has_as_many_ids_as_usage_reports_tokens() -> None:
    async with with_pages(VLLM) as client:
        for text in ("", "a", "four", "hello engine, it is late", "ünï€𝄞"):
            status, found = await rendered(client, CHAT, chat(text))
            _, answer = await client.post(messages=chat(text)["messages"])
            assert status == 200
            assert len(found["token_ids"]) == answer["usage"]["prompt_tokens"]
            assert (found["model"], found["sampling_params"], found["stream"]) == ("m", {"max_tokens": 3}, False)


async def test_the_same_beginning_has_the_same_ids() -> None:
    async with with_pages(VLLM) as client:
        short = (await rendered(client, CHAT, chat("the same beginning of ")))[1]["token_ids"]
        longer = (await rendered(client, CHAT, chat("the same beginning of ", "two")))[1]["token_ids"]
        other = (await rendered(client, CHAT, chat("the some beginning of ")))[1]["token_ids"]
    assert longer[: len(short) - 1] == short[:-1]
    assert other[0] == short[0]
    assert other[1:3] != short[1:3]


async def test_completions_render_every_prompt_and_keep_token_ids() -> None:
    async with with_pages(VLLM) as client:
        status, found = await rendered(client, COMPLETIONS, {"prompt": [[5, 2**31, 7], [9]], "model": "m"})
    assert status == 200
    assert [one["token_ids"] for one in found] == [[5, 2**31, 7], [9]]


async def test_rendering_computes_nothing() -> None:
    async with with_pages(VLLM) as client:
        await rendered(client, CHAT, chat("hello"))
        assert client.engine.finished == client.engine.peak == client.engine.generated_tokens == 0


@pytest.mark.parametrize("raw", [b"{", b"[]", b'{"messages": 5}', b'{"messages": [], "max_tokens": "x"}'])
async def test_a_body_that_is_wrong_is_refused_as_the_engine_does(raw: bytes) -> None:
    async with with_pages(VLLM) as client:
        status, found = await rendered(client, CHAT, raw)
        expected = await client.post(raw=raw)
    assert (status, found) == expected
    assert status == 400


@pytest.mark.parametrize("engine", [SGLANG, TRTLLM, DYNAMO])
async def test_no_other_engine_renders(engine: Any) -> None:
    async with (
        with_pages(engine) as client,
        client.session.post(client.url + CHAT, json=chat("hello")) as response,
    ):
        assert response.status == 404
