"""What clients see: streams, whole answers, usage, disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from sidecar.engines import Engine
from sidecar.tools.emulator import StepModel
from tests.support.late import openai
from tests.tools.emulator.emulated import BODIES, ENGINES, PATHS, SGLANG, TRTLLM, VLLM, Client, emulated

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def openai_client(client: Client) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


@pytest.mark.parametrize("engine", ENGINES)
async def test_the_openai_client_reads_a_chat_stream(engine: type[Engine]) -> None:
    async with emulated(engine) as client, openai_client(client) as sdk:
        stream = await sdk.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "x" * 400}],
            max_tokens=7,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    first, *tokens, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert len(tokens) == 7
    assert all(chunk.choices[0].delta.content for chunk in tokens)
    assert [chunk.choices[0].finish_reason for chunk in tokens] == [None] * 6 + ["length"]
    assert usage.choices == []
    assert (usage.usage.prompt_tokens, usage.usage.completion_tokens, usage.usage.total_tokens) == (100, 7, 107)


async def test_the_openai_client_reads_every_other_api() -> None:
    async with emulated(VLLM, slots=4) as client, openai_client(client) as sdk:
        chat = await sdk.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], n=2, max_completion_tokens=5
        )
        assert [choice.index for choice in chat.choices] == [0, 1]
        assert chat.usage.completion_tokens == 10
        text = await sdk.completions.create(model="m", prompt=[[1, 2, 3], [4, 5]], max_tokens=2)
        assert (len(text.choices), text.usage.prompt_tokens) == (2, 5)
        response = await sdk.responses.create(model="m", input="hi", max_output_tokens=3)
        assert (response.output_text.split(), response.usage.output_tokens) == (["the", "quick", "brown"], 3)
        vectors = await sdk.embeddings.create(model="m", input=["a", "b"], encoding_format="float")
        assert len(vectors.data) == 2
        assert [model.id async for model in sdk.models.list()] == ["emulated"]


async def test_the_openai_client_reads_a_responses_stream() -> None:
    async with emulated(VLLM) as client, openai_client(client) as sdk:
        stream = await sdk.responses.create(model="m", input="hi", max_output_tokens=4, stream=True)
        events = [event async for event in stream]
    types = [event.type for event in events]
    assert types.count("response.output_text.delta") == 4
    assert (types[0], types[-1]) == ("response.created", "response.completed")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert events[-1].response.usage.output_tokens == 4


async def test_a_messages_stream_has_anthropics_events() -> None:
    async with emulated(VLLM) as client:
        _, events = await client.events("messages", max_tokens=4)
        _, whole = await client.post("messages")
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 4,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[-2]["usage"] == {"output_tokens": 4}
    assert whole["usage"] == {"input_tokens": 3, "output_tokens": 3}


async def test_a_stream_says_what_the_whole_answer_says() -> None:
    async with emulated(TRTLLM) as client:
        _, events = await client.events("completions", max_tokens=30)
        _, whole = await client.post("completions", max_tokens=30)
    assert events[-1] == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == whole["choices"][0]["text"]
    assert not any("usage" in event for event in events[:-1])


async def test_choices_stream_side_by_side() -> None:
    async with emulated(VLLM, slots=3) as client:
        _, events = await client.events(n=3, max_tokens=5)
    indexes = [event["choices"][0]["index"] for event in events[:-1]]
    assert indexes == [0, 1, 2] * 6  # a role each, then five tokens each


async def test_tokens_can_share_a_chunk_but_the_first_travels_alone() -> None:
    async with emulated(VLLM, tokens_per_chunk=4) as client:
        _, events = await client.events("completions", max_tokens=10)
    words = [len(event["choices"][0]["text"].split()) for event in events[:-1]]
    assert words == [1, 4, 4, 1]


async def test_chunks_arrive_one_by_one_as_they_are_generated() -> None:
    async with emulated(VLLM, step_s=0.1) as client:  # a busy machine may join two of them, not most
        body = {**BODIES["completions"], "stream": True, "max_tokens": 10}
        async with client.session.post(client.url + PATHS["completions"], json=body) as response:
            reads = [chunk async for chunk in response.content.iter_any()]
    assert len(reads) >= 8


async def test_without_a_maximum_the_configured_output_is_generated() -> None:
    async with emulated(VLLM, output_tokens=6) as client:
        _, body = await client.post(max_tokens=None)
        assert body["usage"]["completion_tokens"] == 6
    async with emulated(VLLM, output_tokens=60, context_tokens=10) as client:
        _, body = await client.post("completions", prompt=[1, 2, 3], max_tokens=None)
        assert body["usage"]["total_tokens"] == 10


async def test_text_parts_count_and_images_do_not() -> None:
    parts = [{"type": "text", "text": "x" * 40}, {"type": "image_url", "image_url": {"url": "data:" + "y" * 4_000}}]
    async with emulated(VLLM) as client:
        _, body = await client.post(messages=[{"role": "user", "content": parts}])
    assert body["usage"]["prompt_tokens"] == 10


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_slot_and_the_next_one_runs(stream: bool) -> None:
    async with emulated(TRTLLM) as client:
        busy = await client.occupied(stream=stream)
        following = await client.queued()
        busy.cancel()
        status, _ = await following
        assert status == 200
        assert (client.engine.aborted, client.engine.finished, client.engine.running) == (1, 1, 0)
        assert client.engine.core.cache.held_tokens == 0


async def test_a_client_that_leaves_while_it_waits_leaves_the_queue() -> None:
    async with emulated(VLLM) as client:
        busy = await client.occupied()
        waiting = await client.queued(stream=True)
        waiting.cancel()
        await client.until(lambda engine: engine.waiting == 0)
        assert (client.engine.aborted, client.engine.running) == (1, 1)
        busy.cancel()
        await client.until(lambda engine: engine.running == 0)
        assert [line.aborted for line in client.engine.log] == [True, True]


async def test_sglang_sends_no_status_line_before_the_first_token_and_vllm_does() -> None:
    for engine, early in ((VLLM, True), (SGLANG, False)):
        async with emulated(engine) as client:
            busy = await client.occupied()
            sent = client.session.post(client.url + PATHS["chat"], json={**BODIES["chat"], "stream": True})
            opening = asyncio.ensure_future(sent)
            await client.until(lambda engine: engine.waiting == 1)
            done, _ = await asyncio.wait([opening], timeout=0.05)
            assert bool(done) is early
            busy.cancel()
            async with await opening as response:
                await response.read()


async def test_a_stopped_server_aborts_what_runs() -> None:
    async with emulated(VLLM) as client:
        busy = await client.occupied()
        engine = client.engine
    assert (engine.running, engine.aborted) == (0, 1)
    await asyncio.gather(busy, return_exceptions=True)


async def test_time_follows_the_step_model() -> None:
    steps = StepModel(max_sequences=1, step_us=20_000, chunk_tokens=10)
    async with emulated(VLLM, steps=steps) as client:
        await client.post("completions", prompt=[1] * 25, max_tokens=3)
        (line,) = client.engine.log
    assert 0.06 <= line.first_token_s - line.arrival_s < 1  # three steps of prefill
    assert 0.10 <= line.end_s - line.arrival_s < 1  # and two more tokens
