"""A streaming client that queues hears comments, and whatever comes behind them as its own library expects it."""

from __future__ import annotations

import asyncio
import json
import re
from types import ModuleType
from typing import Any

import pytest

from sidecar.events import Refused, Settled
from sidecar.policy.model import Policy
from tests.support.middleware import CHAT, App, Guarded, answer, chat, chunk, guarding, key, policy, start, whole_body
from tests.support.wire import connected, post

pytestmark = pytest.mark.anyio

KEPT_ALIVE = "keep_alive: 20ms\n"
COMMENT = b": queued, 0 ahead"
MESSAGES: Any = [{"role": "user", "content": "hi"}]
OPENAI_EVENTS = [
    b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n' % word
    for word in (b"a", b"b")
]


def one_at_a_time(**settings: str) -> Policy:
    return policy(KEPT_ALIVE, requests="1", **settings)


class Engine(App):
    """Holds the first request; answers the others as it should: a status, a type, and chunks."""

    def __init__(self, *chunks: bytes, status: int = 200, content_type: bytes = b"text/event-stream") -> None:
        super().__init__()
        self.chunks, self.status, self.content_type = chunks, status, content_type
        self.first_may_end = asyncio.Event()
        self.headers: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        self.headers.append(dict(scope["headers"]))
        await whole_body(receive)
        if len(self.headers) == 1:
            await self.first_may_end.wait()
            await answer(send, b"{}")
            return
        await start(send, self.status, self.content_type)
        for part in self.chunks:
            await chunk(send, part)
        await chunk(send, b"", more=False)


async def pool_taken(guarded: Guarded) -> asyncio.Task[Any]:
    """Somebody holds the whole pool."""
    holder = asyncio.create_task(guarded.ask())
    await guarded.until(leases=1)
    return holder


def openai_client(openai: ModuleType, guarded: Guarded) -> Any:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{guarded.port}/v1", api_key="sk-acme", max_retries=0)


async def test_a_stream_that_waits_hears_comments_and_then_its_own_events() -> None:
    engine = Engine(*OPENAI_EVENTS, b"data: [DONE]\n\n")
    async with guarding(engine, one_at_a_time()) as guarded, connected(guarded.port) as (reader, writer):
        holder = await pool_taken(guarded)
        writer.write(post(CHAT, json.dumps(chat(stream=True)).encode(), "accept-encoding: gzip"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        for line in (b"content-type: text/event-stream", b"x-admission-tier: normal", b"x-request-id: "):
            assert line in head
        for _ in range(3):
            await reader.readuntil(COMMENT)
        assert (guarded.leases, guarded.waiting) == (1, 1)
        engine.first_may_end.set()
        rest = await reader.read()
        await holder
    assert b": admitted after " in rest
    assert all(event in rest for event in OPENAI_EVENTS)
    assert rest.endswith(b"0\r\n\r\n")  # a whole answer
    assert engine.headers[1][b"accept-encoding"] == b"identity"  # what has begun as plain text cannot go on compressed
    assert guarded.recorder.ends == ["completed", "completed"]


async def test_the_head_of_a_stream_that_waits_says_what_is_known_already() -> None:
    engine = Engine(*OPENAI_EVENTS)
    async with guarding(engine, one_at_a_time()) as guarded, connected(guarded.port) as (reader, writer):
        holder = await pool_taken(guarded)
        body = json.dumps(chat(stream=True, priority="critical")).encode()
        writer.write(post(CHAT, body, key("acme"), "x-vllm-priority: 1"))
        head = await reader.readuntil(b"\r\n\r\n")
        for line in (b"tier: high", b"clamped-from: critical", b"ignored: x-vllm-priority"):
            assert b"x-admission-" + line in head
        engine.first_may_end.set()
        await reader.read()
        await holder


async def test_an_openai_client_reads_through_the_comments(openai: ModuleType) -> None:
    engine = Engine(*OPENAI_EVENTS, b"data: [DONE]\n\n")
    async with guarding(engine, one_at_a_time()) as guarded:
        holder = await pool_taken(guarded)
        async with openai_client(openai, guarded) as client:
            stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            assert guarded.waiting == 1  # it has its answer's head, and no room yet
            engine.first_may_end.set()
            words = [event.choices[0].delta.content async for event in stream]
        await holder
    assert words == ["a", "b"]


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_a_refusal_behind_comments_is_an_error_that_an_openai_client_raises(api: str, openai: ModuleType) -> None:
    engine = Engine()
    async with guarding(engine, one_at_a_time(max_wait="2s")) as guarded:
        holder = await pool_taken(guarded)
        async with openai_client(openai, guarded) as client:
            if api == "chat":
                stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            else:
                stream = await client.responses.create(model="m", input="hi", stream=True)
            with pytest.raises(openai.APIError) as raised:
                _ = [event async for event in stream]
        engine.first_may_end.set()
        await holder
    assert raised.value.code == "queue_timeout" or api == "responses"
    assert "no room came free for tier normal" in str(raised.value)
    (refused,) = [story.end for story in guarded.recorder.stories if isinstance(story.end, Refused)]
    assert (refused.status, refused.code) == (503, "queue_timeout")


async def test_a_refusal_behind_comments_is_an_error_event_of_the_messages_api() -> None:
    engine = Engine()
    async with guarding(engine, one_at_a_time(max_wait="2s")) as guarded:
        holder = await pool_taken(guarded)
        refused = await guarded.ask(
            {"model": "m", "messages": MESSAGES, "max_tokens": 5, "stream": True}, path="/v1/messages"
        )
        engine.first_may_end.set()
        await holder
    assert refused.status == 200
    (said,) = re.findall(rb"event: error\ndata: (.*)\n", refused.body)
    assert (json.loads(said)["type"], json.loads(said)["error"]["code"]) == ("error", "queue_timeout")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            b'{"error": {"message": "the model is on fire", "type": "server_error", "code": 500}}',
            "the model is on fire",
        ),
        (b'{"object": "error", "message": "too long", "code": 500}', "too long"),
        (b"it broke\n", "it broke"),
        (b"", "Internal Server Error"),
    ],
)
async def test_an_engines_error_behind_comments_keeps_its_words(body: bytes, message: str, openai: ModuleType) -> None:
    engine = Engine(body, status=500, content_type=b"application/json")
    async with guarding(engine, one_at_a_time()) as guarded:
        holder = await pool_taken(guarded)
        async with openai_client(openai, guarded) as client:
            stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            engine.first_may_end.set()
            with pytest.raises(openai.APIError) as raised:
                _ = [event async for event in stream]
        await holder
    assert raised.value.message == message
    (end,) = [
        story.end for story in guarded.recorder.stories if isinstance(story.end, Settled) and story.end.status == 500
    ]
    assert end.outcome.value == "completed"


async def test_an_app_that_fails_behind_comments_ends_the_stream_with_an_error(openai: ModuleType) -> None:
    class Failing(Engine):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if len(self.headers) == 1:
                raise RuntimeError("the app is broken")
            await super().__call__(scope, receive, send)

    engine = Failing()
    async with guarding(engine, one_at_a_time()) as guarded:
        holder = await pool_taken(guarded)
        async with openai_client(openai, guarded) as client:
            stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            engine.first_may_end.set()
            with pytest.raises(openai.APIError, match="Internal Server Error"):
                _ = [event async for event in stream]
        await holder
    assert guarded.recorder.ends == ["completed", "failed"]


async def test_a_whole_answer_to_a_stream_goes_on_as_one_event() -> None:
    engine = Engine(b'{"id":\n1}', content_type=b"application/json")
    async with guarding(engine, one_at_a_time()) as guarded:
        holder = await pool_taken(guarded)
        async with connected(guarded.port) as (reader, writer):
            writer.write(post(CHAT, json.dumps(chat(stream=True)).encode()))
            await reader.readuntil(COMMENT)
            engine.first_may_end.set()
            rest = await reader.read()
        await holder
    assert b'data: {"id":\ndata: 1}\n\n' in rest


@pytest.mark.parametrize(
    ("path", "body", "more"),
    [
        (CHAT, chat(stream=False), KEPT_ALIVE),
        (CHAT, chat(stream=True), ""),
        ("/v1/embeddings", {"model": "m", "input": "hi", "stream": True}, KEPT_ALIVE),
    ],
)
async def test_only_a_stream_and_only_by_the_policy(path: str, body: dict[str, Any], more: str) -> None:
    engine = Engine(b"{}", content_type=b"application/json")
    async with guarding(engine, policy(more, requests="1")) as guarded:
        holder = await pool_taken(guarded)
        asked = asyncio.create_task(guarded.ask(body, "accept-encoding: gzip", path=path))
        await guarded.until(waiting=1)
        await asyncio.sleep(0.1)
        engine.first_may_end.set()
        got = await asked
        await holder
    assert got.body == b"{}"
    assert float(got.headers["x-admission-wait-ms"]) > 0
