"""An engine that answers with what could be two responses, or none: its client gets one, or a 502 of ours."""

from __future__ import annotations

import asyncio

import pytest

from sidecar.proxy.proxy import ReverseProxy
from sidecar.server.http_protocol import BoundedHttpProtocol as Served
from tests.security.responses import responses
from tests.support.each import each
from tests.support.engine import Connection, raw_engine
from tests.support.middleware import CHAT, SMALL, guarding, key, policy
from tests.support.wire import connected, get, post

pytestmark = pytest.mark.anyio

OK = b"HTTP/1.1 200 OK\r\n"
SECOND = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nx-poison: 1\r\n\r\npoison"

# Each is what the engine sends for one request; whatever is made of it, it is one response, and the next is untouched.
ANSWERS = {
    "two responses": OK + b"content-length: 2\r\n\r\nok" + SECOND,
    "two lengths": OK + b"content-length: 2\r\ncontent-length: 90\r\n\r\nok" + SECOND,
    "length and chunks": OK + b"content-length: 90\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n" + SECOND,
    "chunks twice": OK
    + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
    + SECOND,
    "unknown coding": OK + b"transfer-encoding: xchunked\r\n\r\n2\r\nok\r\n0\r\n\r\n" + SECOND,
    "a body on 204": b"HTTP/1.1 204 No Content\r\ncontent-length: 6\r\n\r\n" + SECOND,
    "a body on 304": b"HTTP/1.1 304 Not Modified\r\ncontent-length: 6\r\n\r\n" + SECOND,
    "a bare CR in a value": OK + b"x-a: 1\rx-poison: 1\r\ncontent-length: 2\r\n\r\nok",
    "a bare LF in a value": OK + b"x-a: 1\nx-poison: 1\r\ncontent-length: 2\r\n\r\nok",
    "a NUL in a value": OK + b"x-a: 1\x00x-poison: 1\r\ncontent-length: 2\r\n\r\nok",
    "a control character in a value": OK + b"x-a: 1\x0bx\r\ncontent-length: 2\r\n\r\nok",
    "a name with parentheses": OK + b"x(a): 1\r\ncontent-length: 2\r\n\r\nok",
    "a folded value": OK + b"x-a: 1\r\n x-poison: 1\r\ncontent-length: 2\r\n\r\nok",
    "a name with a space": OK + b"x a: 1\r\ncontent-length: 2\r\n\r\nok",
    "a name that is a line": OK + b"x-a\r\ncontent-length: 2\r\n\r\nok",
    "a reason with a CR": b"HTTP/1.1 200 OK\rx-poison: 1\r\ncontent-length: 2\r\n\r\nok",
    "trailers": OK + b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx-poison: 1\r\n\r\n",
    "a switch of protocols": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n" + SECOND,
    "a header as large as memory": OK + b"x-a: " + b"a" * 200_000 + b"\r\ncontent-length: 2\r\n\r\nok",
    "headers of ours": OK
    + b"x-admission-tier: critical\r\nconnection: x-admission-tier\r\ncontent-length: 2\r\n\r\nok",
    "an early response that goes on": b"HTTP/1.1 100 Continue\r\n\r\n" * 3 + OK + b"content-length: 2\r\n\r\nok",
    "HTTP/0.9": b"poison",
    "a negative length": OK + b"content-length: -1\r\n\r\nok",
}


@each("answer", ANSWERS.values(), ids=ANSWERS.keys())
async def test_whatever_it_answers_a_client_reads_one_response_and_the_next_one_its_own(answer: bytes) -> None:
    async def script(connection: Connection) -> None:
        while True:
            request = await connection.request()
            is_first = b"x-first" in request.head
            await connection.send(answer if is_first else OK + b"content-length: 4\r\n\r\nnext")
            if is_first:
                await asyncio.sleep(0.01)
                return

    async with (
        raw_engine(script) as engine,
        guarding(ReverseProxy(engine.url), policy(), http=Served) as sidecar,
        connected(sidecar.port) as (reader, writer),
    ):
        writer.write(post(CHAT, SMALL, key("acme"), "x-first: 1", close=False))
        writer.write(get("/next"))
        first, *others = responses(await asyncio.wait_for(reader.read(), 60))
    if first.status == 502:
        assert b'"code":"engine_unreachable"' in first.body
    else:
        assert first.status == int(answer.rpartition(b"HTTP/1.1 100 Continue")[2].partition(b"HTTP/1.1 ")[2][:3])
        assert first.all(b"x-admission-tier")[-1] == b"normal"
    # The next request's own answer, alone; where the first broke off the connection ended with it.
    assert [(other.status, other.body, other.is_whole) for other in others] == [(200, b"next", True)] * first.is_whole


async def test_the_sidecars_own_word_on_the_tier_is_the_last() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(OK + b"x-admission-tier: critical\r\ncontent-length: 2\r\n\r\nok")

    async with raw_engine(script) as engine, guarding(ReverseProxy(engine.url), policy(), http=Served) as sidecar:
        answer = await sidecar.ask(None, key("nightly"))
    assert answer.headers["x-admission-tier"] == "batch"
