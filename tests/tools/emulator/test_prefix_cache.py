"""The prefix cache as clients see it: shorter prefills, `usage`, metrics, and the pages that empty it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sidecar.engines import Engine
from sidecar.tools.emulator import EmulatorConfig, StepModel
from tests.tools.emulator.emulated import BODIES, DYNAMO, ENGINES, PATHS, SGLANG, TRTLLM, VLLM, Client, emulated
from tests.tools.emulator.test_engine_pages import samples

pytestmark = pytest.mark.anyio

PROMPT = "a prompt with some words in it; " * 16  # 128 tokens
FOUND = {TRTLLM: 96, VLLM: 112, SGLANG: 127, DYNAMO: 112}  # whole blocks of each engine's size, but the last token


def details(body: dict[str, Any]) -> Any:
    return body["usage"].get("prompt_tokens_details")


async def twice(client: Client, api: str = "completions", **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    first, second = [(await client.post(api, **fields))[1] for _ in range(2)]
    return first, second


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_prompt_seen_before_is_prefilled_from_its_last_block_on(engine: type[Engine]) -> None:
    steps = StepModel(max_sequences=1, step_us=1_000, chunk_tokens=1)
    async with emulated(engine, steps=steps, prefix_cache=True) as client:
        await twice(client, prompt=PROMPT, max_tokens=1)
        cold, warm = client.engine.log
        cache = client.engine.core.cache
    assert (cache.queried_tokens, cache.hit_tokens) == (256, FOUND[engine])
    assert warm.first_token_s - warm.arrival_s < (cold.first_token_s - cold.arrival_s) * 0.75


@pytest.mark.parametrize("engine", ENGINES)
async def test_usage_says_what_was_found_only_where_the_engine_does_with_its_switch_off(engine: type[Engine]) -> None:
    async with emulated(engine, prefix_cache=True) as client:
        first, second = await twice(client, prompt=PROMPT)
    always = engine in (TRTLLM, DYNAMO)
    assert details(first) == ({"cached_tokens": 0} if always else None)
    assert details(second) == ({"cached_tokens": FOUND[engine]} if always else None)


async def test_vllms_switch_reports_as_it_was_seen_running() -> None:
    async with emulated(VLLM, slots=4, prefix_cache=True, cache_report=True) as client:
        first, second = await twice(client, prompt=PROMPT)
        assert (details(first), details(second)) == ({"cached_tokens": 0}, {"cached_tokens": 112})
        _, several = await client.post("completions", prompt=[PROMPT, "another one " * 16])
        assert details(several) == {"cached_tokens": 0}  # of the last prompt alone
        messages = [{"role": "user", "content": PROMPT}]
        first, second = await twice(client, "chat", messages=messages)
        assert details(first) == {"cached_tokens": 0, "created_cache_tokens": 128}
        assert details(second) == {"cached_tokens": 112, "created_cache_tokens": 16}
        _, message = await client.post("messages", messages=messages)
        assert message["usage"] == {
            "input_tokens": 0, "cache_creation_input_tokens": 16, "cache_read_input_tokens": 112, "output_tokens": 3,
        }  # fmt: skip
        _, events = await client.events(messages=messages, stream_options={"include_usage": True})
        assert details(events[-2])["cached_tokens"] == 112
        _, quiet = await client.events(messages=messages)
        assert not any("usage" in event for event in quiet[:-1])


async def test_sglangs_switch_leaves_out_a_zero_and_covers_responses() -> None:
    async with emulated(SGLANG, prefix_cache=True, cache_report=True) as client:
        first, second = await twice(client, prompt=PROMPT)
        assert (details(first), details(second)) == (None, {"cached_tokens": 127})
        responses = await twice(client, "responses", input=PROMPT)
        assert [body["usage"]["input_tokens_details"]["cached_tokens"] for body in responses] == [0, 127]


async def test_a_conversations_next_turn_finds_the_last_answer() -> None:
    turn = [{"role": "user", "content": PROMPT}]
    async with emulated(DYNAMO, prefix_cache=True) as client:
        _, answer = await client.post(messages=turn, max_tokens=64)
        text = answer["choices"][0]["message"]["content"]
        _, following = await client.post(messages=[*turn, {"role": "assistant", "content": text}, *turn])
    assert details(following)["cached_tokens"] == (128 + 63) // 16 * 16


async def test_choices_share_their_prompt_and_count_it_once() -> None:
    async with emulated(DYNAMO, slots=3, prefix_cache=True) as client:
        await client.post(messages=[{"role": "user", "content": PROMPT}])
        _, body = await client.post(messages=[{"role": "user", "content": PROMPT}], n=3)
        assert client.engine.most_kv_tokens_held == 112 + 3 * 32
    assert details(body)["cached_tokens"] == 112


async def test_without_a_prefix_cache_nothing_is_found_and_the_pages_say_so() -> None:
    async with emulated(VLLM, cache_report=True) as client:
        first, second = await twice(client, prompt=PROMPT)
        _, text = await client.get("/metrics")
    assert details(first) == details(second) == {"cached_tokens": 0}
    assert 'enable_prefix_caching="False"' in text
    assert samples(text)['vllm:prefix_cache_queries_total{engine="0",model_name="emulated"}'] == 0


async def test_the_metrics_have_each_engines_own_names_and_figures() -> None:
    expected = {
        TRTLLM: {"trtllm_kv_cache_tokens_per_block": 32},
        VLLM: {"vllm:prefix_cache_queries_total": 256, "vllm:prefix_cache_hits_total": 112},
        DYNAMO: {"dynamo_frontend_model_kv_cache_block_size": 16},
    }
    for engine, figures in expected.items():
        async with emulated(engine, prefix_cache=True) as client:
            await twice(client, prompt=PROMPT)
            found = samples((await client.get("/prometheus/metrics" if engine is TRTLLM else "/metrics"))[1])
        by_name = {name.split("{")[0]: value for name, value in found.items()}
        assert {name: by_name.get(name) for name in figures} == figures


async def test_a_small_cache_serves_requests_that_fill_it_and_forgets_what_they_need() -> None:
    steps = StepModel(max_sequences=4, step_us=1_000, kv_tokens=150)  # nine blocks, and six tokens that are no block
    async with emulated(VLLM, steps=steps, prefix_cache=True, cache_report=True) as client:
        await client.post("completions", prompt=PROMPT)
        statuses = await asyncio.gather(*(client.post("completions", prompt=f"{n}" * 512) for n in range(4)))
        assert [status for status, _ in statuses] == [200] * 4
        assert client.engine.most_kv_tokens_held <= 144
        assert details((await client.post("completions", prompt=PROMPT))[1]) == {"cached_tokens": 0}
        status, refused = await client.post("completions", prompt=PROMPT, max_tokens=17)
        assert (status, "144 tokens" in json.dumps(refused)) == (400, True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"engine": TRTLLM, "cache_report": True},
        {"block_tokens": 16},
        {"block_tokens": 0, "prefix_cache": True},
        {"prefix_cache": True, "steps": StepModel(kv_tokens=15)},
        {"shutdown_timeout_s": -1},
    ],
)
def test_switches_that_the_engine_does_not_have_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|switch|needs|other engine"):
        EmulatorConfig(**{"engine": VLLM, **wrong})


async def test_the_emulators_own_page_shows_what_it_holds_and_the_most_it_ever_held() -> None:
    steps = StepModel(max_sequences=1, step_us=20_000, chunk_tokens=32)
    async with emulated(VLLM, steps=steps, prefix_cache=True, name="engine-7") as client:
        before = json.loads((await client.get("/_emulator"))[1])
        body = {**BODIES["completions"], "prompt": PROMPT, "max_tokens": 100_000, "stream": True}
        async with client.session.post(client.url + PATHS["completions"], json=body) as first:
            await first.content.readany()
            waiting = await client.queued("completions", prompt=PROMPT, max_tokens=2)
            during = json.loads((await client.get("/_emulator"))[1])
            assert client.engine.waiting == 1
        await waiting
        after = json.loads((await client.get("/_emulator"))[1])
    assert (before["name"], before["engine"], set(before["most"].values())) == ("engine-7", "vllm", {0})
    # The first prompt is computed, the second would find all of it but its last block.
    assert during["now"] == {
        "requests": 2, "tokens": 100_128 + 130, "unprefilled_tokens": 16, "running": 1, "waiting": 1,
        "kv_tokens": 100_128,
    }  # fmt: skip
    assert set(after["now"].values()) == {0}
    most = {"requests": 2, "tokens": 100_258, "unprefilled_tokens": 128, "running": 1, "kv_tokens": 100_128}
    assert after["most"] == most
    assert after["counts"] == {"finished": 1, "aborted": 1, "refused": 0, "preempted": 0}
    assert after["prefix_cache"]["hit_tokens"] == 112
