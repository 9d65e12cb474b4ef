"""The reverse proxy, between a raw engine that says and sees every byte and clients on real sockets."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sidecar.admission.via import OWN_VIA
from sidecar.proxy import connection as connections
from sidecar.proxy.proxy import ReverseProxy
from sidecar.server.http_protocol import BoundedHttpProtocol
from tests.support.each import each
from tests.support.engine import OK, Connection, RawEngine, Script, answering, raw_engine
from tests.support.redis_servers import free_port
from tests.support.serving import Served, serving
from tests.support.wire import connected, exchange, get, post

pytestmark = pytest.mark.anyio

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture(autouse=True, params=["httptools", BoundedHttpProtocol], ids=["uvicorn's server", "our own"])
def _server(request: pytest.FixtureRequest) -> Iterator[None]:
    """The server in front of the proxy: our own has agreements with it (`sidecar.sending`), others have none."""
    _SERVERS.append(request.param)
    yield
    _SERVERS.clear()


_SERVERS: list[str | type[asyncio.Protocol]] = []


@asynccontextmanager
async def proxied(script: Script, base: str = "", **settings: float) -> AsyncIterator[tuple[RawEngine, Served]]:
    async with (
        raw_engine(script) as engine,
        serving(ReverseProxy(engine.url + base, **settings), http=_SERVERS[-1]) as sidecar,
    ):
        yield engine, sidecar


async def until_seen(reader: asyncio.StreamReader, wanted: bytes) -> bytes:
    return await asyncio.wait_for(reader.readuntil(wanted), 60)


# What passes


@pytest.mark.parametrize("target", ["/a%2Fb%2e?k=%7e", "//v1//x/../y", "/v1/models?a=1&a=2&b", "/%E2%82%AC;p=1?q=%20+"])
async def test_path_and_query_reach_the_engine_byte_for_byte(target: str) -> None:
    async with proxied(answering()) as (engine, sidecar):
        await exchange(sidecar.port, get(target))
    assert engine.requests[0].target == target.encode()


async def test_a_base_path_is_put_in_front() -> None:
    async with proxied(answering(), base="/base/") as (engine, sidecar):
        await exchange(sidecar.port, get("/v1/models"))
    assert engine.requests[0].target == b"/base/v1/models"


async def test_a_body_reaches_the_engine_byte_for_byte_with_its_length() -> None:
    body = b'{"a" : 1.0e400,\n "caf\xc3\xa9":"\\ud800"}'
    async with proxied(answering()) as (engine, sidecar):
        await exchange(sidecar.port, post(body=body))
    assert engine.requests[0].body == body
    assert engine.requests[0].all(b"content-length") == [b"%d" % len(body)]


async def test_no_header_is_added_but_the_forwarded_ones() -> None:
    async with proxied(answering()) as (engine, sidecar):
        await exchange(sidecar.port, get("/v1/models"))
    assert dict(engine.requests[0].headers) == {
        b"host": f"127.0.0.1:{engine.port}".encode(),
        b"via": OWN_VIA.encode(),
        b"x-forwarded-for": b"127.0.0.1",
        b"x-forwarded-proto": b"http",
        b"x-forwarded-host": b"sidecar",
    }


async def test_other_proxies_stay_in_via_and_another_sidecar_is_no_loop() -> None:
    other = "1.1 admission-sidecar-0123456789abcdef"
    async with proxied(answering()) as (engine, sidecar):
        await exchange(sidecar.port, get("/", "via: 1.0 one", f"via: {other}"))
    assert engine.requests[0].all(b"via") == [f"1.0 one, {other}, {OWN_VIA}".encode()]


@pytest.mark.parametrize(
    "request_",
    [get("/v1/models", f"via: {OWN_VIA}"), post("/v1/completions", b"{}", f"via: 1.1 a, {OWN_VIA}, 1.1 b")],
    ids=["alone", "among others"],  # the name is new in each process, and these must collect the same items
)
async def test_a_request_that_comes_back_is_refused(request_: bytes) -> None:
    async with proxied(answering()) as (engine, sidecar):
        answer = await exchange(sidecar.port, request_)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 508 ")
    assert b"x-should-retry: false" in head
    assert json.loads(body)["error"]["code"] == "loop_detected"
    assert engine.requests == []


async def test_who_was_forwarded_for_before_is_kept() -> None:
    async with proxied(answering()) as (engine, sidecar):
        await exchange(sidecar.port, get("/", "x-forwarded-for: 10.0.0.1", "x-forwarded-proto: https"))
    assert engine.requests[0].all(b"x-forwarded-for") == [b"10.0.0.1, 127.0.0.1"]
    assert engine.requests[0].all(b"x-forwarded-proto") == [b"https"]


async def test_hop_by_hop_headers_of_the_request_stay_here() -> None:
    sent = [
        "te: trailers",
        "keep-alive: 3",
        "proxy-authorization: x",
        "x-hop: 1",
        "upgrade: h2c",
        "x-stays: 1",
        "x-stays: 2",
    ]
    request = get("/", *sent).replace(b"connection: close", b"connection: close, X-Hop")
    async with proxied(answering()) as (engine, sidecar):
        await exchange(sidecar.port, request)
    names = {name for name, _ in engine.requests[0].headers}
    assert not names & {b"te", b"keep-alive", b"proxy-authorization", b"x-hop", b"upgrade", b"connection"}
    assert engine.requests[0].all(b"x-stays") == [b"1", b"2"]


async def test_response_headers_pass_with_their_duplicates_and_without_the_hop_by_hop_ones() -> None:
    response = (
        b"HTTP/1.1 200 OK\r\nSet-Cookie: a=1\r\nset-cookie: b=2\r\nX-Latin: caf\xe9\r\nContent-Encoding: gzip\r\n"
        b"Keep-Alive: timeout=5\r\nConnection: X-Hop\r\nX-Hop: 1\r\ncontent-length: 2\r\n\r\n\x1f\x8b"
    )
    async with proxied(answering(response)) as (_, sidecar):
        head, _, body = (await exchange(sidecar.port, get("/"))).partition(b"\r\n\r\n")
    assert head.split(b"\r\n") == [
        b"HTTP/1.1 200 OK",
        b"set-cookie: a=1",
        b"set-cookie: b=2",
        b"x-latin: caf\xe9",
        b"content-encoding: gzip",
        b"content-length: 2",
        f"via: {OWN_VIA}".encode(),
        b"connection: close",
    ]
    assert body == b"\x1f\x8b"


async def test_redirects_are_the_clients_to_follow_and_cookies_are_not_kept() -> None:
    response = b"HTTP/1.1 307 Temporary Redirect\r\nlocation: /x\r\nset-cookie: a=1\r\ncontent-length: 0\r\n\r\n"
    async with proxied(answering(response)) as (engine, sidecar):
        assert b"location: /x" in await exchange(sidecar.port, get("/"))
        await exchange(sidecar.port, get("/"))
    assert [request.all(b"cookie") for request in engine.requests] == [[], []]


@pytest.mark.parametrize(
    ("request_bytes", "response"),
    [
        (get("/").replace(b"GET", b"HEAD"), b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n"),
        (get("/"), b"HTTP/1.1 204 No Content\r\nx: 1\r\n\r\n"),
        (get("/"), b"HTTP/1.1 304 Not Modified\r\ncontent-length: 10\r\n\r\n"),
        (post(body=b""), b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"),
    ],
)
async def test_a_response_without_a_body_ends_with_its_head(request_bytes: bytes, response: bytes) -> None:
    async with proxied(answering(response)) as (engine, sidecar):
        answer = await exchange(sidecar.port, request_bytes)
        again = await exchange(sidecar.port, request_bytes)
    assert answer.startswith(response.split(b"\r\n")[0])
    assert answer.endswith(b"\r\n\r\n")
    assert b"transfer-encoding" not in answer
    assert (b"content-length: 10" in answer) == request_bytes.startswith(b"HEAD")
    assert again == answer
    assert engine.connections == 1


async def test_a_post_without_a_body_says_so() -> None:
    async with proxied(answering()) as (engine, sidecar):
        await exchange(sidecar.port, post(body=b""))
    assert engine.requests[0].all(b"content-length") == [b"0"]


async def test_a_hundred_streams_pass_every_chunk_on_its_own() -> None:
    seen = {b"/%d" % number: asyncio.Queue[None]() for number in range(100)}

    async def script(connection: Connection) -> None:
        request = await connection.request()
        await connection.send(STREAM)
        for number in range(8):
            await connection.send_chunk(b"data: %d\n\n" % number)
            # Not before its client has seen this one: a chunk that is held back ends here.
            await asyncio.wait_for(seen[request.target].get(), 60)
        await connection.send_chunk(b"")

    async def stream(path: bytes, port: int) -> bytes:
        async with connected(port) as (reader, writer):
            writer.write(post(path.decode()))
            await until_seen(reader, b"\r\n\r\n")
            for number in range(8):
                await until_seen(reader, b"data: %d\n\n\r\n" % number)
                seen[path].put_nowait(None)
            return await asyncio.wait_for(reader.read(), 60)

    async with proxied(script) as (engine, sidecar):
        ends = await asyncio.gather(*(stream(path, sidecar.port) for path in seen))
    assert set(ends) == {b"0\r\n\r\n"}
    assert engine.connections == 100


# Streaming up


async def test_a_chunked_request_body_streams_to_the_engine_while_it_comes_in() -> None:
    first_chunk = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.head()
        assert await connection.chunk() == b"one"
        first_chunk.set()
        assert await connection.chunk() == b"two"
        assert await connection.chunk() == b""
        await connection.send(OK)

    async with proxied(script) as (engine, sidecar), connected(sidecar.port) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: sidecar\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n")
        await asyncio.wait_for(first_chunk.wait(), 60)
        writer.write(b"3\r\ntwo\r\n0\r\n\r\n")
        assert b"200 OK" in await until_seen(reader, b"ok")
    assert engine.requests[0].all(b"transfer-encoding") == [b"chunked"]
    assert engine.requests[0].all(b"content-length") == []


async def test_a_long_request_body_streams_with_its_length() -> None:
    body = bytes(range(256)) * 4096
    async with proxied(answering()) as (engine, sidecar):
        assert (await exchange(sidecar.port, post(body=body))).endswith(b"ok")
    assert engine.requests[0].body == body
    assert engine.requests[0].all(b"content-length") == [b"%d" % len(body)]
    assert engine.requests[0].all(b"transfer-encoding") == []


# The client leaves


@pytest.mark.parametrize(
    ("sent", "is_uploading"),
    [(post(), False), (post(body=b"x" * 200_000), False), (post(body=b"x" * 90)[:-89], True)],
    ids=["before the headers", "behind a large body", "while it uploads"],
)
async def test_a_client_that_leaves_cancels_its_request_at_the_engine(sent: bytes, is_uploading: bool) -> None:
    arrived, left = asyncio.Event(), asyncio.Event()

    async def script(connection: Connection) -> None:
        await (connection.head() if is_uploading else connection.request())
        arrived.set()
        await connection.hung_up()
        left.set()

    async with proxied(script) as (_, sidecar):
        async with connected(sidecar.port) as (_, writer):
            writer.write(sent)
            await asyncio.wait_for(arrived.wait(), 60)
        await asyncio.wait_for(left.wait(), 60)


async def test_a_client_that_leaves_in_the_middle_of_a_stream_cancels_it_at_the_engine() -> None:
    left = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM)
        await connection.send_chunk(b"data: 1\n\n")
        await connection.hung_up()
        left.set()

    async with proxied(script) as (_, sidecar):
        async with connected(sidecar.port) as (reader, writer):
            writer.write(post())
            await until_seen(reader, b"data: 1\n\n")
        await asyncio.wait_for(left.wait(), 60)


async def test_a_client_that_leaves_leaves_nothing_running() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.hung_up()

    async with proxied(script) as (_, sidecar):
        for _ in range(20):
            async with connected(sidecar.port) as (_reader, writer):
                writer.write(post())
                await asyncio.sleep(0.002)
        await asyncio.wait_for(asyncio.gather(*sidecar.server.server_state.tasks), 60)
        await asyncio.sleep(0)
        assert not sidecar.server.server_state.tasks
        assert not [task for task in asyncio.all_tasks() if "_watch" in repr(task)]


async def test_a_slow_client_slows_the_engine_down() -> None:
    sent_bytes = 0

    async def script(connection: Connection) -> None:
        nonlocal sent_bytes
        await connection.request()
        await connection.send(STREAM)
        while True:
            await connection.send_chunk(b"x" * 65536)
            sent_bytes += 65536

    async with proxied(script) as (_, sidecar), connected(sidecar.port) as (reader, writer):
        writer.write(post())
        await until_seen(reader, b"\r\n\r\n")
        before = -1
        while before != sent_bytes:
            before = sent_bytes
            await asyncio.sleep(0.1)
        # What the sockets of both hops hold, which is a few MB on Linux; nowhere near what 0.1 s of loopback could be.
        assert 0 < sent_bytes < 24 * 2**20
        for _ in range(200):
            await reader.read(65536)
        await asyncio.sleep(0.05)
        assert sent_bytes > before


# The engine fails


async def test_an_engine_that_is_not_there_is_a_502_that_keeps_its_address_to_itself() -> None:
    async with serving(ReverseProxy(f"http://127.0.0.1:{free_port()}")) as sidecar:
        head, _, body = (await exchange(sidecar.port, post())).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 502")
    assert json.loads(body)["error"]["code"] == "engine_unreachable"
    assert b"127.0.0.1" not in body


async def test_an_engine_on_a_unix_socket_is_asked_there(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    proxy = ReverseProxy(f"unix:{path}")
    async with serving(proxy) as sidecar:
        assert b'"code":"engine_unreachable"' in await exchange(sidecar.port, post())
        async with raw_engine(answering(), path) as engine:
            for _ in range(2):
                assert (await exchange(sidecar.port, post())).endswith(b"ok")
        moved = b"HTTP/1.1 307 M\r\nlocation: http://localhost/v1/completions\r\ncontent-length: 0\r\n\r\n"
        path.unlink()
        async with raw_engine(answering(moved), path):
            assert b"\r\nlocation: /v1/completions\r\n" in await exchange(sidecar.port, post())
    assert engine.connections == 1
    assert (b"host", b"localhost") in engine.requests[0].headers


async def test_anthropic_clients_get_errors_in_their_own_shape() -> None:
    async with serving(ReverseProxy(f"http://127.0.0.1:{free_port()}")) as sidecar:
        _, _, body = (await exchange(sidecar.port, post("/v1/messages"))).partition(b"\r\n\r\n")
    assert json.loads(body)["type"] == "error"


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200", b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 101 S\r\n\r\n"])
async def test_an_engine_that_does_not_answer_in_http_is_a_502(answer: bytes) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(answer)

    async with proxied(script) as (_, sidecar):
        assert b"engine_unreachable" in await exchange(sidecar.port, post())


@pytest.mark.parametrize(
    "beginning",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",
        STREAM + b"4\r\nhalf\r\n",
        STREAM + b"4\r\nhalf\r\nnot-a-size\r\n",
    ],
)
async def test_a_response_that_breaks_off_never_looks_whole(beginning: bytes) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        head, _, body = beginning.partition(b"half")
        await connection.send(head + b"half")
        await asyncio.sleep(0.01)
        await connection.send(body)

    async with proxied(script) as (_, sidecar):
        answer = await asyncio.wait_for(exchange(sidecar.port, post(close=False)), 60)
    assert b"half" in answer
    assert not answer.endswith(b"0\r\n\r\n")


# Connections that the engine closed


def closing_at_second_request(partial: bytes = b"", after_s: float = 0.0, connections: int = 1) -> Script:
    """The first connections answer once and break when they are used again; later ones answer."""
    begun = 0
    all_there = asyncio.Event()

    async def script(connection: Connection) -> None:
        nonlocal begun
        begun += 1
        if begun > connections:
            await answering()(connection)
        await connection.request()
        if begun == connections:
            all_there.set()
        await all_there.wait()
        await connection.send(OK)
        await connection.head()
        await asyncio.sleep(after_s)
        await connection.send(partial)
        connection.close()

    return script


async def test_a_request_on_a_connection_that_was_just_closed_is_sent_once_more() -> None:
    async with proxied(closing_at_second_request()) as (engine, sidecar):
        await exchange(sidecar.port, post())
        assert (await exchange(sidecar.port, post(body=b'{"n": 2}'))).endswith(b"ok")
    assert engine.connections == 2
    assert engine.requests[-1].body == b'{"n": 2}'


async def test_it_is_sent_once_more_on_a_new_connection_since_the_engine_may_have_closed_all_that_were_kept() -> None:
    async with proxied(closing_at_second_request(connections=3)) as (engine, sidecar):
        await asyncio.gather(*(exchange(sidecar.port, post()) for _ in range(3)))
        assert (await exchange(sidecar.port, post(body=b'{"n": 2}'))).endswith(b"ok")
    assert (engine.connections, len(engine.requests)) == (4, 5)


async def test_a_request_is_not_repeated_after_the_first_byte_of_a_response() -> None:
    async with proxied(closing_at_second_request(partial=b"HTTP/1.1 2")) as (engine, sidecar):
        await exchange(sidecar.port, post())
        assert b"engine_unreachable" in await exchange(sidecar.port, post())
    assert len(engine.requests) == 2


async def test_a_request_is_not_repeated_when_the_engine_had_time_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALE_WITHIN_S", 0.01)
    async with proxied(closing_at_second_request(after_s=0.1)) as (engine, sidecar):
        await exchange(sidecar.port, post())
        assert b"engine_unreachable" in await exchange(sidecar.port, post())
    assert len(engine.requests) == 2


async def test_a_request_is_not_repeated_on_a_fresh_connection() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()

    async with proxied(script) as (engine, sidecar):
        assert b"engine_unreachable" in await exchange(sidecar.port, post())
    assert len(engine.requests) == 1


async def test_a_body_that_is_streamed_is_not_repeated_and_goes_on_a_connection_that_no_engine_has_closed() -> None:
    async with proxied(closing_at_second_request()) as (engine, sidecar):
        await exchange(sidecar.port, post())
        async with connected(sidecar.port) as (reader, writer):
            writer.write(
                b"POST / HTTP/1.1\r\nhost: sidecar\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n"
            )
            await asyncio.sleep(0.01)
            writer.write(b"0\r\n\r\n")
            assert (await reader.read()).endswith(b"ok")
    assert (engine.connections, len(engine.requests)) == (2, 2)


# What must not pass


async def test_two_lengths_that_a_lenient_server_let_through_are_a_400() -> None:
    sent: list[dict[str, object]] = []
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "raw_path": b"/",
        "headers": [(b"content-length", b"1"), (b"content-length", b"2")],
    }

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    await ReverseProxy("http://127.0.0.1:1")(scope, receive, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == 400


@pytest.mark.parametrize("target", [b"http://other/x", b"*", b"other:80"])
async def test_only_paths_are_asked_for(target: bytes) -> None:
    async with proxied(answering()) as (engine, sidecar):
        await exchange(sidecar.port, get("/").replace(b"GET /", b"OPTIONS " + target))
    assert all(request.target in {b"/x", b"/"} for request in engine.requests)
    assert all(request.all(b"host") == [f"127.0.0.1:{engine.port}".encode()] for request in engine.requests)


async def test_a_websocket_is_refused_with_a_reason() -> None:
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    await ReverseProxy("http://127.0.0.1:1")({"type": "websocket"}, receive, send)  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1011, "reason": "this proxy does not forward WebSockets"}]


@pytest.mark.parametrize(
    "upstream",
    [
        "127.0.0.1:8000",
        "localhost",
        "http://",
        "ftp://h",
        "http://h:99999",
        "http://u:p@h",
        "http://h?q",
        "http://h/#f",
    ],
)
def test_an_address_that_cannot_be_an_engine_is_refused_at_once(upstream: str) -> None:
    with pytest.raises(ValueError, match=r"upstream .*write it like http://127"):
        ReverseProxy(upstream)


# Its lifetime


async def test_a_proxy_that_was_closed_opens_again() -> None:
    async with raw_engine(answering()) as engine:
        proxy = ReverseProxy(engine.url)
        async with serving(proxy, lifespan="off") as sidecar:
            await exchange(sidecar.port, post())
            await proxy.close()
            assert (await exchange(sidecar.port, post())).endswith(b"ok")
            await proxy.close()
    assert engine.connections == 2


@pytest.mark.long
async def test_a_connection_that_is_reset_between_two_requests_is_no_error_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM)
        for part in (b"data: 1\n\n", b""):
            await asyncio.sleep(0.02)
            await connection.send_chunk(part)
        await asyncio.sleep(0.1)
        connection.reset()

    async with proxied(script) as (engine, sidecar):
        for _ in range(2):
            assert (await exchange(sidecar.port, post())).endswith(b"0\r\n\r\n")
            await asyncio.sleep(0.2)
            gc.collect()
    assert engine.connections == 2
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


# Addresses of the engine


ELSEWHERE = ["https://elsewhere.example/a", "//elsewhere/a", "http://{name}:1/a", "a/b", "?a=1", "mailto:a@b", ""]


async def relocated(location: str, base: str = "") -> bytes:
    """What a client gets of an engine's `Location`, in which {host} and {name} stand for the engine's own."""

    async def script(connection: Connection) -> None:
        host = (await connection.request()).all(b"host")[0].decode()
        where = location.replace("{host}", host).replace("{name}", host.partition(":")[0])
        await connection.send(
            b"HTTP/1.1 307 x\r\nLocation: %b\r\ncontent-location: %b\r\ncontent-length: 0\r\n\r\n"
            % (where.encode(), where.encode())
        )

    async with proxied(script, base=base) as (engine, sidecar):
        answer = await exchange(sidecar.port, get("/v1/models/"))
    found = [line.partition(b": ")[2] for line in answer.split(b"\r\n") if line.lower().find(b"location: ") >= 0]
    (seen,) = set(found)
    assert len(found) == 2
    return seen.replace(engine.url.removeprefix("http://").encode(), b"{host}")


@each(
    ("location", "seen"),
    [
        ("http://{host}/v1/models", "/v1/models"),
        ("HTTP://{host}/v1/models?a=http://{host}/#b", "/v1/models?a=http://{host}/#b"),
        ("https://{host}/v1/models", "/v1/models"),  # as `x-forwarded-proto` has it
        ("//{host}/v1/models", "/v1/models"),
        (" http://{host}", "/"),
        ("http://{host}?a=1", "/?a=1"),
        ("http://someone@{host}/a", "/a"),
        ("/v1/models", "/v1/models"),
        # A client that asked for //elsewhere/ is not led there.
        ("http://{host}//elsewhere/v1/models", "/elsewhere/v1/models"),
        ("http://{host}/\\elsewhere", "/elsewhere"),
    ],
)
async def test_a_redirect_to_the_engine_leads_to_the_sidecar(location: str, seen: str) -> None:
    assert await relocated(location) == seen.encode()


@each("location", ELSEWHERE)
async def test_a_redirect_to_elsewhere_stays(location: str) -> None:
    assert await relocated(location) == location.replace("{name}", "127.0.0.1").encode()


@each(
    ("location", "seen"),
    [
        ("http://{host}/base/v1/models", "/v1/models"),
        ("/base/v1/models", "/v1/models"),
        ("http://{host}/base", "/"),
        ("http://{host}/basement", "/basement"),
        ("http://{host}/base//elsewhere", "/elsewhere"),
    ],
)
async def test_a_redirect_below_a_base_path_loses_it(location: str, seen: str) -> None:
    assert await relocated(location, base="/base") == seen.encode()


@each(
    ("url", "location", "seen"),
    [
        ("http://engine", "https://ENGINE./a", "/a"),
        ("http://engine", "http://engine:80/a", "/a"),
        ("https://engine", "http://engine/a", "/a"),
        ("http://engine:8000", "http://engine/a", None),
        ("http://Engine.:8000", "http://engine:8000/a", "/a"),
        ("http://[::1]:8000", "http://[::1]:8000/a", "/a"),
        ("http://[::1]", "http://[::1]/a", "/a"),
        ("http://engine", "http://engine.example/a", None),
        ("http://engine", "http://engine:x/a", None),
    ],
)
def test_an_engine_is_known_however_it_spells_itself(url: str, location: str, seen: str | None) -> None:
    found = ReverseProxy(url).upstream.path_for(location.encode())
    assert found == (None if seen is None else seen.encode())
