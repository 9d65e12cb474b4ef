"""A stream's usage is asked of the engine where the client does not ask, and the client sees no more than before."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from sidecar.admission.client import LARGEST_USAGE, UsageHider
from sidecar.events import Settled
from sidecar.proxy.proxy import ReverseProxy
from sidecar.server.http_protocol import BoundedHttpProtocol
from tests.support.each import each
from tests.support.engine import Connection, raw_engine
from tests.support.in_process import serving_engine
from tests.support.middleware import (
    CHAT,
    COMPLETIONS,
    App,
    Caller,
    Guarded,
    chat,
    chunk,
    guarding,
    policy,
    start,
    whole_body,
)
from tests.support.wire import connected, post

ASK = {"include_usage": True, "continuous_usage_stats": False}
ENGINES = ("vllm", "sglang", "tensorrt-llm", "dynamo")
USAGE = {"prompt_tokens": 9, "completion_tokens": 400, "total_tokens": 409}


def event(end: bytes = b"\n\n", **members: Any) -> bytes:
    data = json.dumps({"id": "cmpl-1", "object": "chunk", **members}, separators=(",", ":"))
    return b"data: " + data.encode() + end


def streamed(engine: str, path: str, texts: Iterable[str], usage: Any) -> list[bytes]:
    """A stream as the engine writes it: SGLang, and TensorRT-LLM for completions, have a null usage in every event."""
    null: Any = {"usage": None} if engine == "sglang" or (engine, path) == ("tensorrt-llm", COMPLETIONS) else {}
    role_end = b" \n\n" if engine == "tensorrt-llm" else b"\n\n"
    events = []
    if path == CHAT:
        events.append(event(role_end, choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}], **null))
    for text in texts:
        said = {"delta": {"content": text}} if path == CHAT else {"text": text}
        events.append(event(choices=[{"index": 0, **said, "logprobs": None, "finish_reason": None}], **null))
    if engine == "sglang":
        events.append(event(choices=[], sglext={"routed_experts": "x"}, **null))  # no choices, and yet no usage
    counted = (
        [] if usage is None else [event(choices=[], usage=usage, **({"nvext": None} if engine == "dynamo" else {}))]
    )
    return [*events, *counted, b"data: [DONE]\n\n"]


# The question


def members(stream_options: Any = ...) -> bytes:
    written = "" if stream_options is ... else f', "stream_options" : {json.dumps(stream_options)}'
    return f'{{"model":"m", "messages":["hi"], "stream":true{written}, "seed":1e400}}'.encode()


QUESTIONS: list[tuple[str, Any, Any]] = [
    *((engine, ..., ASK if engine != "sglang" else {"include_usage": True}) for engine in ENGINES),
    ("vllm", None, ASK),
    ("vllm", {}, ASK),
    ("vllm", {"include_usage": None}, ASK),
    ("vllm", {"include_usage": "False"}, ASK),
    ("vllm", {"include_usage": 0, "x": {"include_usage": True}}, {**ASK, "x": {"include_usage": True}}),
    ("vllm", {"continuous_usage_stats": True}, ASK),
    ("sglang", {"continuous_usage_stats": True}, {"include_usage": True, "continuous_usage_stats": True}),
    ("tensorrt-llm", {"include_usage": False}, ASK),
    # The client asks itself, or for what the engine refuses.
    ("vllm", {"include_usage": True}, {"include_usage": True}),
    ("vllm", {"include_usage": "yes"}, {"include_usage": "yes"}),
    ("vllm", {"include_usage": [1]}, {"include_usage": [1]}),
    ("vllm", "usage", "usage"),
    ("tensorrt-llm", {}, {}),
    ("none", ..., ...),
]


@pytest.mark.anyio
@each(("engine", "sent", "forwarded"), QUESTIONS)
async def test_the_engine_is_asked_and_every_other_member_stays(engine: str, sent: Any, forwarded: Any) -> None:
    app = App()
    await Caller(Guarded(app, policy(engine=engine)).sidecar, members(sent)).run()
    body, got = app.seen[0].body, app.seen[0].json
    assert got.pop("stream_options", ...) == forwarded
    assert body.count(b'"stream_options"') == (forwarded is not ...)
    assert {name: got[name] for name in ("model", "messages", "stream")} == {
        "model": "m", "messages": ["hi"], "stream": True,
    }  # fmt: skip
    assert b'"seed":1e400}' in body
    assert app.seen[0].all(b"content-length") == []  # the caller sent none


@pytest.mark.anyio
@each(
    ("more", "path", "body"),
    [
        ("usage: as_sent\n", CHAT, chat(stream=True)),
        ("", CHAT, chat()),
        ("", CHAT, chat(stream=False, stream_options=None)),
        ("", "/v1/responses", {"model": "m", "input": "hi", "stream": True}),
        ("", "/v1/messages", {**chat(stream=True)}),
        ("mode: observe\n", CHAT, chat(stream=True)),
    ],
)
async def test_where_there_is_nothing_to_ask_the_body_is_the_clients(more: str, path: str, body: Any) -> None:
    app = App()
    raw = json.dumps(body).encode()
    await Caller(Guarded(app, policy(more, engine="vllm")).sidecar, raw, path=path).run()
    assert app.seen[0].body == raw


# The answer


STREAM = ((b"content-type", b"text/event-stream"),)


class Shown:
    """What the client sees of a stream, sent in pieces: all by messages, or those that pass as they are without."""

    def __init__(self, pieces: Iterable[Any], *, by_chunks: bool, head: Any = STREAM) -> None:
        self.bodies: list[bytes] = []
        self.head: Any = None
        hider = UsageHider(self.send)
        hider.send({"type": "http.response.start", "status": 200, "headers": list(head)})
        for piece in pieces:
            if by_chunks and piece and hider.passes(piece):
                self.bodies.append(piece)
            else:
                hider.send({"type": "http.response.body", "body": piece, "more_body": True})
        self.before_end = b"".join(self.bodies)
        hider.send({"type": "http.response.body", "body": b"", "more_body": False})
        self.body = b"".join(self.bodies)

    def send(self, message: Any) -> Any:
        if message["type"] == "http.response.start":
            self.head = dict(message["headers"])
        else:
            self.bodies.append(message["body"])


TEXTS = ["Hi", ' "usage":{"prompt_tokens":1}', '\n\ndata: {"choices":[],"usage":{"a":1}}\n\n', "[]"]


def streams() -> Iterator[tuple[bytes, bytes]]:
    """Streams, and what is seen of them."""
    for engine in ENGINES:
        for path in (CHAT, COMPLETIONS):
            asked, plain = (b"".join(streamed(engine, path, TEXTS, usage)) for usage in (USAGE, None))
            yield asked, plain
            yield asked.replace(b"\n\n", b"\r\n\r\n"), plain.replace(b"\n\n", b"\r\n\r\n")
    first = event(choices=[{"text": "a"}])
    spaced = b'event: x\ndata: {"choices": [],\ndata: "usage": {"prompt_tokens": 1}}\n\n'
    done = b": kept\n\ndata: [DONE]\n\n"
    yield first + spaced + done, first + done
    yield first + spaced.rstrip(), first  # no end
    error = b'data: {"error":{"message":"no"},"choices":null,"usage":{"a":1}}\n\ndata: {"choices":[],"usage":{"a"}}\n\n'
    yield error, error
    yield b"\n\n\n\n\r\n\r\n", b"\n\n\n\n\r\n\r\n"


STREAMS = [*streams()]


@each(("asked", "seen"), STREAMS)
def test_the_client_sees_what_it_would_have_seen_wherever_the_stream_is_cut(asked: bytes, seen: bytes) -> None:
    for by_chunks in (False, True):
        assert Shown([asked], by_chunks=by_chunks).body == seen
        assert Shown([memoryview(asked)], by_chunks=False).body == seen
        assert Shown((bytes([byte]) for byte in asked), by_chunks=by_chunks).body == seen
        for cut in range(0, len(asked), 3):
            assert Shown((asked[:cut], asked[cut:]), by_chunks=by_chunks).body == seen, cut


@each("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_an_event_that_is_too_large_for_usage_is_not_held_until_its_end(end: bytes) -> None:
    text = b'data: {"choices":[],"usage":{"x":"' + b"y" * LARGEST_USAGE
    usage = b'data: {"choices":[],"usage":{"a":1}}' + end
    for cut in range(1, len(end) + 1):
        shown = Shown((text, b'"}}' + end[:cut], end[cut:] + usage, b"data: [DONE]" + end), by_chunks=True)
        assert shown.bodies[0] == text
        assert shown.body == text + b'"}}' + end + b"data: [DONE]" + end


def test_what_is_held_passes_with_the_end_and_a_length_is_not_promised() -> None:
    head = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"Content-Length", b"99"), (b"x-a", b"b"))
    shown = Shown([b"data: {", b"}"], by_chunks=True, head=head)
    assert (shown.before_end, shown.body) == (b"", b"data: {}")
    assert shown.head == {b"content-type": b"text/event-stream; charset=utf-8", b"x-a": b"b"}


def test_what_is_held_passes_with_an_end_that_has_no_bytes_of_its_own() -> None:
    sent: list[Any] = []
    hider = UsageHider(sent.append)  # type: ignore[arg-type]
    hider.send({"type": "http.response.start", "status": 200, "headers": [*STREAM]})
    hider.send({"type": "http.response.body", "body": b"data: {}", "more_body": True})
    hider.send({"type": "http.response.body"})
    assert [message["body"] for message in sent[1:]] == [b"", b"data: {}"]


def test_a_message_without_bytes_passes_while_an_event_is_held() -> None:
    """The server answers it when the client has read enough: so a client that does not read is no silent engine."""
    shown = Shown([b"data: {", b"", b"}\n\n"], by_chunks=False)
    assert shown.bodies == [b"", b"", b"data: {}\n\n", b""]


@each(
    "head",
    [
        ((b"content-type", b"application/json"), (b"content-length", b"9")),
        ((b"content-type", b"text/event-stream"), (b"content-encoding", b"gzip")),
        (),
    ],
)
def test_what_is_no_stream_of_events_passes_untouched(head: Any) -> None:
    usage = event(choices=[], usage=USAGE)
    for by_chunks in (False, True):
        shown = Shown([usage, b"da", b"ta"], by_chunks=by_chunks, head=head)
        assert shown.bodies[:3] == [usage, b"da", b"ta"]
        assert shown.head == dict(head)


def test_nearly_all_events_pass_without_a_message() -> None:
    hider = UsageHider(lambda _: None)  # type: ignore[arg-type, return-value]  # no one waits
    hider.send({"type": "http.response.start", "status": 200, "headers": list(STREAM)})
    for engine in ENGINES:
        for path in (CHAT, COMPLETIONS):
            *events, last, _ = streamed(engine, path, ["Hi", "you"], USAGE)
            assert all(map(hider.passes, events[1:]))
            assert not hider.passes(last)


# Both, through the middleware


class Engine:
    """Streams texts in an engine's form, with usage where it is asked. `tokens` are those of the answer."""

    def __init__(self, name: str, texts: list[str], tokens: int, path: str = CHAT, *, breaks_off: bool = False) -> None:
        self.name, self.texts, self.path, self.tokens, self.breaks_off = name, texts, path, tokens, breaks_off

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await App()(scope, receive, send)
            return
        options = json.loads(await whole_body(receive)).get("stream_options") or {}
        usage = {**USAGE, "completion_tokens": self.tokens} if options.get("include_usage") else None
        await start(send, content_type=b"text/event-stream")
        events = streamed(self.name, self.path, self.texts, usage)
        for one in events[: len(self.texts)] if self.breaks_off else events:
            await chunk(send, one)
        if self.breaks_off:
            raise ConnectionError
        await chunk(send, b"", more=False)


async def counted(guarded: Guarded, **fields: Any) -> tuple[bytes, Settled]:
    """What the client of one stream saw, and how it was settled."""
    engine: Engine = guarded.engine  # type: ignore[attr-defined]
    body = {**chat(stream=True), **fields}
    if engine.path == COMPLETIONS:
        body["prompt"] = body.pop("messages")[0]["content"]
    caller = Caller(guarded.sidecar, json.dumps(body).encode(), path=engine.path)
    try:
        await caller.run()
    except ConnectionError:
        assert engine.breaks_off
    settled: Settled = guarded.recorder.stories[-1].one(Settled)
    return b"".join(message["body"] for message in caller.sent[1:]), settled


def guarded_by(engine: Engine, more: str = "") -> Guarded:
    guarded = Guarded(engine, policy(more, engine=engine.name, max_wait="30s"))
    guarded.engine = engine  # type: ignore[attr-defined]
    return guarded


@pytest.mark.anyio
@each(("name", "path"), [(name, path) for name in ENGINES for path in (CHAT, COMPLETIONS)])
async def test_joined_tokens_are_counted_and_the_client_sees_no_more_than_it_asked_for(name: str, path: str) -> None:
    guarded = guarded_by(Engine(name, ["eight tokens in one event or so"] * 50, 400, path))
    shown, settled = await counted(guarded)
    assert shown == b"".join(streamed(name, path, guarded.engine.texts, None))  # type: ignore[attr-defined]
    assert (settled.tokens_used, settled.output_tokens) == (409, 400)
    shown, settled = await counted(guarded, stream_options={"include_usage": True})
    assert event(choices=[], usage=USAGE)[:60] in shown
    assert settled.tokens_used == 409


@pytest.mark.anyio
async def test_a_chunk_that_the_proxy_passes_without_a_message_shows_no_usage_either() -> None:
    """Over connections to a client and an engine, which joins eight tokens."""
    async with serving_engine("--engine", "vllm", "--tokens-per-chunk", "8", "--step-ms", "0.1") as url:
        proxy = ReverseProxy(url)
        async with guarding(proxy, policy(engine="vllm"), http=BoundedHttpProtocol) as guarded:
            answer = await guarded.ask(chat(stream=True, max_tokens=400, model="emulated"))
            settled: Settled = guarded.recorder.stories[0].one(Settled)
        await proxy.close()
    assert answer.body.endswith(b'"finish_reason":"length"}]}\n\ndata: [DONE]\n\n')
    assert b"usage" not in answer.body
    assert settled.output_tokens == 400


@pytest.mark.anyio
async def test_the_head_does_not_wait_for_the_end_of_an_event() -> None:
    """The engine has sent it together with half of the first one."""
    seen = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 12\r\n\r\n"
        await connection.send(head + b"data: ")
        await seen.wait()
        await connection.send(b"{}\n\n\n\n")

    async with raw_engine(script) as engine:
        proxy = ReverseProxy(engine.url)
        async with (
            guarding(proxy, policy(engine="vllm"), http=BoundedHttpProtocol, access_log=False) as guarded,
            connected(guarded.port) as (reader, writer),
        ):
            writer.write(post(CHAT, json.dumps(chat(stream=True)).encode()))
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            seen.set()
            assert (await asyncio.wait_for(reader.read(), 60)).endswith(b"data: {}\n\n\n\n\r\n0\r\n\r\n")
        await proxy.close()


def text(tokens: int, seed: int) -> list[str]:
    """So many tokens of text, each as a model's tokenizer cuts it."""
    words = [" the", " a", " tokenizer", "s", " of", " queue", ",", ' "', " starv", "ation", "\n", " is", " né"]
    return random.Random(seed).choices(words, k=tokens)


def joined(tokens: list[str], seed: int) -> list[str]:
    """The same in events of one to twelve tokens, as the load has it."""
    chance, events = random.Random(seed), []
    while tokens:
        many = chance.randint(1, 12)
        events.append("".join(tokens[:many]))
        tokens = tokens[many:]
    return events


@pytest.mark.anyio
@each(("name", "path"), [(name, path) for name in (*ENGINES, "none") for path in (CHAT, COMPLETIONS)])
async def test_where_no_one_asks_the_text_tells_the_tokens_as_other_answers_taught(name: str, path: str) -> None:
    engine = Engine(name, [], 400, path)
    guarded = guarded_by(engine, "usage: as_sent\n")
    for seed in range(3):
        engine.texts = joined(text(400, seed), seed)
        await counted(guarded, stream_options={"include_usage": True})
    for events in (joined(text(400, 7), 7), text(400, 8)):  # joined, and one token each
        engine.texts = events
        shown, settled = await counted(guarded)
        assert b"completion_tokens" not in shown
        assert settled.tokens_used == pytest.approx(409, rel=0.05)


@pytest.mark.anyio
@each("more", ["", "usage: as_sent\n"])
async def test_a_stream_that_breaks_off_before_its_usage_counts_as_other_answers_taught(more: str) -> None:
    engine = Engine("vllm", ["".join(text(8, seed)) for seed in range(50)], 400)
    guarded = guarded_by(engine, more)
    for _ in range(3):
        await counted(guarded, stream_options={"include_usage": True})
    engine.breaks_off = True
    _, settled = await counted(guarded)
    assert settled.output_tokens is None
    assert settled.tokens_used == pytest.approx(9 + 392, rel=0.05)


@pytest.mark.anyio
async def test_joined_tokens_count_even_where_no_answer_ever_had_a_usage() -> None:
    """A tenant cannot choose to pay a token an event."""
    engine = Engine("none", joined(text(400, 7), 7), 400)
    _, settled = await counted(guarded_by(engine))
    assert settled.tokens_used == pytest.approx(409, rel=0.2)
