"""Requests that their engine takes too long for: what their clients get, what the app sees, and what is held."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from sidecar.events import Outcome, Settled
from sidecar.policy.model import Policy
from sidecar.policy.tier import Timeouts
from sidecar.proxy.proxy import ReverseProxy
from sidecar.server.http_protocol import BoundedHttpProtocol
from tests.admission.test_pending_aborts import LONG
from tests.admission.test_preemption import rules
from tests.support.engine import Connection, Script, raw_engine
from tests.support.middleware import CHAT, answer, chat, chunk, guarding, key, policy, start, whole_body
from tests.support.waiting import until
from tests.support.wire import connected, post

pytestmark = pytest.mark.anyio

SERVERS = {"uvicorn's server": "httptools", "our own": BoundedHttpProtocol}
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BEGIN = "timeouts: {first_byte: 100ms}"
GO_ON = "timeouts: {between_bytes: 100ms}"
END = "timeouts: {total: 100ms}"
OF_TIERS = {"normal": Timeouts(first_byte_s=0.1)}


def asked(path: str = CHAT, *headers: str, stream: bool = True) -> bytes:
    body = chat(stream=stream) if path != RESPONSES else {"model": "m", "input": "hi", "stream": stream}
    return post(path, json.dumps(body).encode(), *headers, close=False)


async def ended(port: int, request: bytes, seen: bytes = b"") -> bytes:
    """All that the server sends: until `seen`, or until it closes the connection."""
    async with connected(port) as (reader, writer):
        writer.write(request)
        return await asyncio.wait_for(reader.readuntil(seen) if seen else reader.read(), 60)


async def proxied(script: Script, request: bytes, rule: str | Policy, server: str, seen: bytes = b"") -> bytes:
    """What a client gets through a proxy before a scripted engine, whose connection is closed. Nothing is charged."""
    left = asyncio.Event()

    async def engine(connection: Connection) -> None:
        await connection.request()
        await script(connection)
        await connection.hung_up()
        left.set()

    rule = policy(rule) if isinstance(rule, str) else rule
    async with raw_engine(engine) as found:
        proxy = ReverseProxy(found.url)
        async with guarding(proxy, rule, http=SERVERS[server]) as guarded:
            got = await ended(guarded.port, request, seen)
            await asyncio.wait_for(left.wait(), 60)
            await guarded.nothing_left()
            (story,) = guarded.recorder.stories
            end = story.one(Settled)
            assert (end.outcome, end.error) == (Outcome.FAILED, "engine_timeout")
            assert len(found.requests) == 1
        await proxy.close()
    return got


async def silent(_: Connection) -> None:
    """Says nothing."""


async def head_alone(connection: Connection) -> None:
    await connection.send(HEAD)


async def begun(connection: Connection) -> None:
    await connection.send(HEAD)
    await connection.send_chunk(b'data: {"n": 1}\n\n')


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize(
    ("rule", "stream"), [(BEGIN, True), (END, True), (END, False)], ids=["begin", "end", "end, no stream"]
)
async def test_an_engine_that_says_nothing_is_a_504(rule: str, stream: bool, server: str) -> None:
    got = await proxied(silent, asked(stream=stream), rule, server, b"}}")
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 504")
    assert b"\r\nretry-after: " in head
    error = json.loads(body)["error"]
    assert (error["code"], error["type"]) == ("engine_timeout", "server_error")
    assert "within 100 ms" in error["message"]


async def test_anthropics_clients_get_it_in_their_own_shape() -> None:
    got = await proxied(silent, asked(MESSAGES), BEGIN, "our own", b"}")
    assert json.loads(got.partition(b"\r\n\r\n")[2] + b"}")["error"]["type"] == "timeout_error"


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize(
    ("script", "rule"), [(begun, GO_ON), (begun, END), (head_alone, BEGIN)], ids=["silence", "end", "head alone"]
)
async def test_an_answer_that_has_begun_ends_with_an_error_and_never_looks_complete(
    script: Script, rule: str, server: str
) -> None:
    got = await proxied(script, asked(), rule, server)
    assert got.startswith(b"HTTP/1.1 200")
    assert (b'data: {"n": 1}' in got) == (script is begun)
    event = json.loads(got[got.rindex(b"data: ") + 6 :].partition(b"\n")[0])
    assert event["error"]["code"] == "engine_timeout"
    assert not got.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize(("path", "kind"), [(MESSAGES, "timeout_error"), (RESPONSES, None)])
async def test_the_error_of_an_answer_that_has_begun_is_an_event_of_its_api(path: str, kind: str | None) -> None:
    got = await proxied(begun, asked(path), GO_ON, "our own")
    assert b"\n\nevent: error\ndata: " in got
    event = json.loads(got[got.rindex(b"data: ") + 6 :].partition(b"\n")[0])
    assert event["type"] == "error"
    assert event["error"].get("type") == kind or kind is None
    assert (event["error"]["code"], not got.endswith(b"0\r\n\r\n")) == ("engine_timeout", True)


async def test_an_answer_that_does_not_stream_gets_no_event() -> None:
    async def half(connection: Connection) -> None:
        await connection.send(b'HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{"half":')

    got = await proxied(half, asked(stream=True), GO_ON, "our own")
    assert got.endswith(b'{"half":')


@pytest.mark.parametrize("server", SERVERS)
async def test_a_preemptible_request_is_answered_and_not_sent_again(server: str, tmp_path: Any) -> None:
    got = await proxied(silent, asked(), rules(tmp_path, more=BEGIN), server, b"}}")
    assert got.startswith(b"HTTP/1.1 504")


@pytest.mark.parametrize("server", SERVERS)
async def test_its_room_stays_held_for_the_abort_latency(server: str) -> None:
    async def computing(connection: Connection) -> None:
        await connection.request()
        await connection.hung_up()

    async with raw_engine(computing) as engine:
        proxy = ReverseProxy(engine.url)
        async with guarding(proxy, policy(f"{BEGIN}\n{LONG}"), http=SERVERS[server]) as guarded:
            assert (await ended(guarded.port, asked(), b"}}")).startswith(b"HTTP/1.1 504")
            await until(lambda: len(guarded.sidecar.watchdog) == 0)
            assert (guarded.leases, guarded.sidecar.pending_aborts.held().requests) == (1, 1)
            await guarded.sidecar.pending_aborts.close(waits=False)
        await proxy.close()


# Slow, and not too slow


async def test_an_answer_that_does_not_stream_may_begin_late_and_so_may_that_of_another_tier() -> None:
    """They are answered after one that came later was ended."""
    may_end = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await whole_body(receive)
        await may_end.wait()
        await answer(send, b"{}")

    rule = policy(grace="50ms")
    tiers = (replace(tier, timeouts=OF_TIERS.get(tier.name, tier.timeouts)) for tier in rule.tiers)
    rule = replace(rule, tiers=tuple(tiers))
    async with guarding(app, rule, lifespan="off") as guarded:
        whole = asyncio.ensure_future(guarded.ask())
        slow = asyncio.ensure_future(guarded.ask(chat(stream=True), key("nightly")))
        await guarded.until(leases=2)
        assert b"engine_timeout" in await ended(guarded.port, asked(), b"}}")
        may_end.set()
        assert [(await asking).status for asking in (whole, slow)] == [200, 200]


@pytest.mark.parametrize(("is_mounted", "server"), [(True, "uvicorn's server"), (False, "our own")])
async def test_a_client_that_does_not_read_is_no_silence_of_the_engine(is_mounted: bool, server: str) -> None:
    blocked = asyncio.Event()
    event = b"data: " + b"x" * 2**16 + b"\n\n"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await whole_body(receive)
        await start(send, content_type=b"text/event-stream")
        for _ in range(200):
            sending = asyncio.ensure_future(send({"type": "http.response.body", "body": event, "more_body": True}))
            if not blocked.is_set() and not (await asyncio.wait((sending,), timeout=0.3))[0]:
                blocked.set()
            await sending
        await chunk(send, b"", more=False)

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(HEAD)
        for _ in range(200):
            sending = asyncio.ensure_future(connection.send_chunk(event))
            if not blocked.is_set() and not (await asyncio.wait((sending,), timeout=0.3))[0]:
                blocked.set()
            await sending
        await connection.send_chunk(b"")

    async with raw_engine(script) as engine:
        proxy = ReverseProxy(engine.url)
        rule = policy("timeouts: {between_bytes: 1s}")
        async with guarding(app if is_mounted else proxy, rule, http=SERVERS[server], lifespan="off") as guarded:
            async with connected(guarded.port) as (reader, writer):
                writer.write(asked())
                await asyncio.wait_for(blocked.wait(), 60)
                await asyncio.sleep(2.5)
                got, read = b"", b"begins"
                while read and not got.endswith(b"\r\n0\r\n\r\n"):
                    read = await asyncio.wait_for(reader.read(2**16), 60)
                    got = got[-10:] + read
                assert read
            await guarded.nothing_left()
            assert guarded.recorder.stories[0].one(Settled).outcome is Outcome.COMPLETED
        await proxy.close()


# Mounted apps


async def listens(receive: Any, send: Any) -> None:
    await receive()


async def listens_twice(receive: Any, send: Any) -> None:
    """As Starlette's stream and a task of the route's own do."""
    await asyncio.gather(receive(), receive())


async def answers_the_disconnect(receive: Any, send: Any) -> None:
    """As FastAPI does with a route that ends without a value: `null`."""
    await receive()
    await answer(send, b"null")


async def raises(receive: Any, send: Any) -> None:
    await receive()
    raise RuntimeError("the client left")


async def does_not_listen(receive: Any, send: Any) -> None:
    await asyncio.Event().wait()


async def asks_now_and_then(receive: Any, send: Any) -> None:
    """As Starlette's `is_disconnected` does."""
    message = {"type": "none"}
    while message["type"] != "http.disconnect":
        asking = asyncio.ensure_future(receive())
        await asyncio.wait((asking,), timeout=0.01)
        if not asking.done():
            asking.cancel()
            continue
        message = asking.result()


async def has_a_listener(receive: Any, send: Any) -> None:
    """As vLLM's `with_cancellation`: the first of its two tasks ends the other one."""
    tasks = [asyncio.ensure_future(asyncio.Event().wait()), asyncio.ensure_future(receive())]
    _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()


Waiting = Callable[[Any, Any], Awaitable[None]]


@pytest.mark.parametrize(
    "waiting",
    [
        listens,
        listens_twice,
        answers_the_disconnect,
        raises,
        does_not_listen,
        asks_now_and_then,
        has_a_listener,
    ],
    ids=lambda waiting: waiting.__name__,
)
@pytest.mark.parametrize("has_begun", [False, True], ids=["before its answer", "in its answer"])
async def test_an_app_learns_that_its_client_has_left(waiting: Waiting, has_begun: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await whole_body(receive)
        if has_begun:
            await start(send, content_type=b"text/event-stream")
            await chunk(send, b"data: 1\n\n")
        await waiting(receive, send)

    rule = policy("timeouts: {first_byte: 100ms, between_bytes: 100ms}", grace="50ms")
    async with guarding(app, rule, lifespan="off") as guarded:
        got = await ended(guarded.port, asked(), b"" if has_begun else b"}}")
        assert b"engine_timeout" in got
        assert got.startswith(b"HTTP/1.1 200" if has_begun else b"HTTP/1.1 504")
        assert b"null" not in got.replace(b'"param":null', b"")
        assert not got.endswith(b"0\r\n\r\n")
        await guarded.nothing_left()
        assert guarded.recorder.stories[0].one(Settled).error == "engine_timeout"


async def test_a_stream_that_began_with_comments_ends_with_the_error() -> None:
    """Comments are ours: they are no bytes of the engine."""
    first, release = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await whole_body(receive)
        if not first.is_set():
            first.set()
            await release.wait()
            await answer(send, b"{}")
        else:
            await receive()

    rule = policy(f"{BEGIN}\nkeep_alive: 50ms", requests="1")
    async with guarding(app, rule, lifespan="off") as guarded:
        async with connected(guarded.port) as (_, holding):
            holding.write(asked(stream=False))
            await asyncio.wait_for(first.wait(), 60)
            async with connected(guarded.port) as (reader, writer):
                writer.write(asked())
                await asyncio.wait_for(reader.readuntil(b": queued"), 60)
                release.set()
                got = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 60)
        assert b'"code":"engine_timeout"' in got
        await guarded.nothing_left()
