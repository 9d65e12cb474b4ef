"""One connection to the engine, from both ends: what is sent, what is read, when it is used again and when it ends."""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sidecar.errors import InvalidHeader
from sidecar.proxy import connection as connections
from sidecar.proxy.connection import MOST_HEAD_BYTES, ConnectionBroke, NotHttp, Response
from sidecar.proxy.upstream import Upstream
from tests.support.certificates import needs_openssl, self_signed
from tests.support.engine import OK, Connection, RawEngine, Script, answering, raw_engine

pytestmark = pytest.mark.anyio

STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
WITHIN_S = 60.0


@asynccontextmanager
async def asking(script: Script, *, keepalive_s: float = 4.0) -> AsyncIterator[tuple[RawEngine, Upstream]]:
    async with raw_engine(script) as engine:
        upstream = Upstream(engine.url, connect_timeout_s=5.0, keepalive_s=keepalive_s)
        try:
            yield engine, upstream
        finally:
            await asyncio.wait_for(upstream.close(), WITHIN_S)


async def ask(upstream: Upstream, method: str = "POST", body: bytes = b"{}") -> Response:
    return await asyncio.wait_for(upstream.request(method, b"/", [], body, len(body)), WITHIN_S)


async def whole(response: Response, sent: Callable[[bytes], Awaitable[object] | None] = lambda _: None) -> list[bytes]:
    """The parts of a body, as they were read. `sent` may return an awaitable, as a slow client's `send` does."""
    parts: list[bytes] = []
    while not response.is_complete or response.parts or not parts:
        parts.append(await asyncio.wait_for(response.read(), WITHIN_S))
        if (waiting := sent(parts[-1])) is not None:
            await waiting
    return [*parts, b"<end>"]


def once(*pieces: bytes, pause_s: float = 0.01) -> Script:
    """An engine that answers one request with these writes, and stays."""

    async def script(connection: Connection) -> None:
        await connection.request()
        for piece in pieces:
            await connection.send(piece)
            await asyncio.sleep(pause_s)
        await connection.hung_up()

    return script


def in_step(parts: list[bytes], slow: asyncio.Event) -> Script:
    """An engine that sends 0, 1 and 2 one after the other was read, 3 to 7 at once, and then sets `slow`."""

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM)
        for number in range(8):
            await connection.send(b"1\r\n%d\r\n" % number)
            while number < 3 and parts[-1:] != [b"%d" % number]:  # noqa: ASYNC110  # no event says so
                await asyncio.sleep(0.001)
        await connection.send(b"0\r\n\r\n")
        await asyncio.sleep(0.1)  # all of it is held back by now
        slow.set()
        await connection.hung_up()

    return script


# What is read


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64])
async def test_a_response_may_come_in_any_pieces(step: int) -> None:
    raw = STREAM + b"4;a=b\r\nfour\r\n3\r\nabc\r\n0\r\nx-trailer: 1\r\n\r\n"
    pieces = [raw[at : at + step] for at in range(0, len(raw), step)]
    async with asking(once(*pieces, pause_s=0)) as (_, upstream):
        response = await ask(upstream)
        assert b"".join(await whole(response)) == b"fourabc<end>"
    assert (response.status, response.headers) == (200, [(b"transfer-encoding", b"chunked")])


async def test_parts_that_came_together_are_read_together_and_others_alone() -> None:
    together = b"".join(b"1\r\n%d\r\n" % number for number in range(8))
    async with asking(once(STREAM, together, b"1\r\nx\r\n", b"1\r\ny\r\n", b"0\r\n\r\n", pause_s=0.03)) as (
        _,
        upstream,
    ):
        assert await whole(await ask(upstream)) == [b"01234567", b"x", b"y", b"", b"<end>"]


async def test_parts_that_come_while_one_is_sent_are_read_together_after_it_in_their_order() -> None:
    slow = asyncio.Event()
    parts: list[bytes] = []

    def wait(body: bytes) -> Awaitable[object] | None:
        parts.append(body)
        return slow.wait() if body == b"2" else None

    async with asking(in_step(parts, slow)) as (_, upstream):
        parts = await whole(await ask(upstream), wait)
    assert parts == [b"0", b"1", b"2", b"34567", b"<end>"]


async def test_early_responses_are_passed_over_however_many_there_are() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + b"HTTP/1.1 100 Continue\r\n\r\n"
    async with asking(once(early, early, OK)) as (_, upstream):
        response = await ask(upstream)
        assert (response.status, response.headers) == (200, [(b"content-length", b"2")])
        assert await whole(response) == [b"ok", b"<end>"]


@pytest.mark.parametrize(
    ("head", "parts"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", [b"half"]),
        (b"HTTP/1.0 200 OK\r\n\r\n", [b"half"]),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n", [b"half"]),
    ],
)
async def test_a_body_of_no_length_ends_with_its_connection(head: bytes, parts: list[bytes]) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(head + b"half")

    async with asking(script) as (_, upstream):
        assert b"".join(await whole(await ask(upstream))) == b"".join([*parts, b"<end>"])


@pytest.mark.parametrize(
    "beginning",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",
        STREAM + b"4\r\nhalf\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n4\r\nhalf\r\n",
    ],
)
@pytest.mark.parametrize("is_reset", [False, True])
async def test_what_came_of_a_response_that_breaks_off_is_passed_on_and_then_it_is_an_error(
    beginning: bytes, is_reset: bool
) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(beginning)
        await asyncio.sleep(0.05)
        if is_reset:
            connection.reset()

    seen: list[bytes] = []
    async with asking(script) as (_, upstream):
        with pytest.raises(ConnectionBroke):
            await whole(await ask(upstream), seen.append)
    assert seen == [b"half"]


async def test_a_body_of_no_length_whose_connection_is_reset_is_not_whole() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\n\r\nhalf")
        await asyncio.sleep(0.05)
        connection.reset()

    async with asking(script) as (_, upstream):
        with pytest.raises(ConnectionBroke):
            await whole(await ask(upstream))


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: +2\r\n\r\nok",
        b"HTTP/1.1 200 OK\nx: 1\n\n",
        b"HTTP/1.1 200 OK\r\nx: 1\x00\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * MOST_HEAD_BYTES + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: 1\r\n" * (MOST_HEAD_BYTES // 6 + 1),
        b"HTTP/1.1 100 Continue\r\n\r\n" * (MOST_HEAD_BYTES // 25 + 1),
    ],
    ids=range(9),
)
async def test_bytes_that_are_no_response_end_the_connection(answer: bytes) -> None:
    async with asking(once(answer)) as (engine, upstream):
        with pytest.raises(NotHttp):
            await ask(upstream)
        with pytest.raises(NotHttp):
            await ask(upstream)
    assert engine.connections == 2


@pytest.mark.parametrize(
    "framing",
    [
        b"not-a-size\r\n",
        b"-1\r\n",
        b"fffffffffffffffff\r\n",
        b"3\r\nabcd\r\n",
        b"3;" + b"a" * 2 * MOST_HEAD_BYTES,
        b"0\r\n" + b"x-trailer: 1\r\n" * (MOST_HEAD_BYTES // 7),
    ],
    ids=range(6),
)
async def test_framing_that_is_broken_or_has_no_end_ends_the_response(framing: bytes) -> None:
    async with asking(once(STREAM + b"4\r\nhalf\r\n", framing)) as (_, upstream):
        response = await ask(upstream)
        with pytest.raises(NotHttp):
            await whole(response)


async def test_a_status_that_is_no_number_of_http_does_not_wait() -> None:
    async with asking(once(b"HTTP/1.1 000 Zero\r\ncontent-length: 0\r\n\r\n")) as (_, upstream):
        assert (await ask(upstream)).status == 0


async def test_a_switch_of_protocols_is_a_status_like_another_and_the_connection_ends() -> None:
    raw = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n" + OK
    async with asking(once(raw)) as (engine, upstream):
        assert (await ask(upstream)).status == 101
        assert (await ask(upstream)).status == 101
    assert engine.connections == 2


# When a connection is used again


@pytest.mark.parametrize(
    ("answer", "method", "is_kept"),
    [
        (OK, "POST", True),
        (STREAM + b"2\r\nok\r\n0\r\n\r\n", "POST", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n", "HEAD", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "POST", True),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok", "POST", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", "POST", False),
        (OK + b"HTTP/1.1 200 OK\r\n", "POST", False),
        (OK + OK, "POST", False),
        (OK + b"x", "POST", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", "HEAD", False),
    ],
)
async def test_a_connection_is_used_again_only_after_a_whole_response_and_nothing_else(
    answer: bytes, method: str, is_kept: bool
) -> None:
    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            await connection.send(answer)

    async with asking(script) as (engine, upstream):
        for _ in range(3):
            response = await ask(upstream, method, b"" if method == "HEAD" else b"{}")
            assert b"poison" not in b"".join(await whole(response))
            await asyncio.sleep(0.01)
    assert engine.connections == (1 if is_kept else 3)


async def test_bytes_that_come_between_two_requests_end_the_connection_and_reach_no_one() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(OK)
        await asyncio.sleep(0.03)
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\npoison")
        await connection.hung_up()

    async with asking(script) as (engine, upstream):
        for _ in range(3):
            assert await whole(await ask(upstream)) == [b"ok", b"<end>"]
            await asyncio.sleep(0.08)
    assert engine.connections == 3


async def test_an_engine_that_ends_a_kept_connection_is_asked_on_another() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(OK)

    async with asking(script) as (engine, upstream):
        for _ in range(3):
            assert await whole(await ask(upstream)) == [b"ok", b"<end>"]
            await asyncio.sleep(0.03)
    assert engine.connections == 3


async def test_connections_that_are_not_used_are_closed_in_time_and_used_ones_stay() -> None:
    hung_up_s: list[float] = []
    loop = asyncio.get_running_loop()

    async def script(connection: Connection) -> None:
        try:
            while True:
                await connection.request()
                await asyncio.sleep(0.02)
                await connection.send(OK)
        finally:
            hung_up_s.append(loop.time())

    async with asking(script, keepalive_s=0.3) as (engine, upstream):
        await asyncio.gather(*(ask(upstream) for _ in range(8)))
        began_s = loop.time()
        while loop.time() < began_s + 0.7:
            await whole(await ask(upstream))
            await asyncio.sleep(0.02)
        assert len(hung_up_s) == 7
        assert max(hung_up_s) - began_s < 0.7
    assert engine.connections == 8


# What is sent


async def test_a_request_is_one_head_and_its_body() -> None:
    async with asking(answering()) as (engine, upstream):
        await upstream.request("POST", b"/v1/x?a=%20", [(b"x-a", b"1"), (b"x-a", b"caf\xc3\xa9")], b"{}", 2)
    head = (
        b"POST /v1/x?a=%%20 HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nx-a: 1\r\nx-a: caf\xc3\xa9\r\ncontent-length: 2\r\n\r\n"
    )
    assert engine.requests[0].head == head % engine.port
    assert engine.requests[0].body == b"{}"


@pytest.mark.parametrize(
    "header",
    [
        (b"x-a", b"1\r\nx-b: 2"),
        (b"x-a", b"1\nx-b: 2"),
        (b"x-a", b"\x00"),
        (b"x-a\r\nx-b", b"1"),
        (b"x a", b"1"),
        (b"x:a", b"1"),
        (b"", b"1"),
        (b"caf\xc3\xa9", b"1"),
    ],
)
async def test_a_header_that_would_be_another_is_refused_before_anything_is_sent(header: tuple[bytes, bytes]) -> None:
    async with asking(answering()) as (engine, upstream):
        with pytest.raises(InvalidHeader):
            await upstream.request("POST", b"/", [header], b"", 0)
    assert engine.connections == 0


@pytest.mark.parametrize("target", [b"/ HTTP/1.1\r\nx: 1", b"/a b", b"/\x00", b"/caf\xc3\xa9", b"/\x7f"])
async def test_a_target_that_would_be_more_is_refused(target: bytes) -> None:
    async with asking(answering()) as (engine, upstream):
        with pytest.raises(InvalidHeader):
            await upstream.request("POST", target, [], b"", 0)
    assert engine.connections == 0


async def _parts(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        await asyncio.sleep(0)
        yield part


@pytest.mark.parametrize("parts", [(b"four", b"more"), (b"fo",), (b"fours",)])
async def test_a_body_of_another_length_than_declared_never_ends_as_a_request(parts: tuple[bytes, ...]) -> None:
    seen = bytearray()

    async def script(connection: Connection) -> None:
        await connection.head()
        while True:
            seen.extend(await connection.read(1))

    async with asking(script) as (_, upstream):
        with pytest.raises(ConnectionBroke, match="than declared"):
            await asyncio.wait_for(upstream.request("POST", b"/", [], _parts(*parts), 4), WITHIN_S)
        await asyncio.sleep(0.01)
    assert len(seen) <= 4


async def test_a_body_that_fails_fails_the_request_and_ends_the_connection() -> None:
    async def failing() -> AsyncIterator[bytes]:
        yield b"one"
        raise KeyError("the client's side")

    ended = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.head()
        await connection.hung_up()
        ended.set()

    async with asking(script) as (_, upstream):
        with pytest.raises(ConnectionBroke):
            await asyncio.wait_for(upstream.request("POST", b"/", [], failing(), None), WITHIN_S)
        await asyncio.wait_for(ended.wait(), 60)


async def test_an_answer_before_the_body_is_through_stops_the_body_and_the_connection_is_not_used_again() -> None:
    stopped = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 1000
                await asyncio.sleep(0.001)
        finally:
            stopped.set()

    async def script(connection: Connection) -> None:
        await connection.head()
        await connection.chunk()
        await connection.send(OK)
        await connection.hung_up()

    async with asking(script) as (engine, upstream):
        response = await asyncio.wait_for(upstream.request("POST", b"/", [], endless(), None), WITHIN_S)
        assert await whole(response) == [b"ok", b"<end>"]
        await asyncio.wait_for(stopped.wait(), 60)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(upstream.request("POST", b"/", [], b"", 0), 0.05)
    assert engine.connections == 2


async def test_an_engine_that_does_not_read_holds_the_body_up() -> None:
    sent_bytes = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent_bytes
        while True:
            sent_bytes += 65536
            yield b"x" * 65536

    async def script(connection: Connection) -> None:
        await connection.head()
        await asyncio.sleep(60)

    async with asking(script) as (_, upstream):
        asked = asyncio.ensure_future(upstream.request("POST", b"/", [], endless(), None))
        before = -1
        while before != sent_bytes:
            before = sent_bytes
            await asyncio.sleep(0.1)
        assert 0 < sent_bytes < 24 * 2**20
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked


# Slow engines and slow clients


async def test_no_more_is_read_ahead_of_a_slow_client_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "READ_AHEAD_BYTES", 4096)
    pieces = [b"%x\r\n%b\r\n" % (1000, b"x" * 1000) for _ in range(2000)]
    slow = asyncio.Event()
    async with asking(once(STREAM, *pieces, b"0\r\n\r\n", pause_s=0)) as (_, upstream):
        response = await ask(upstream)
        passing = asyncio.ensure_future(whole(response, lambda _: slow.wait()))
        await asyncio.sleep(0.3)
        assert response.unread_bytes < 4096 + 300_000  # one read of the event loop beyond it
        slow.set()
        parts = await asyncio.wait_for(passing, WITHIN_S)
    assert len(b"".join(parts)) == 2_000_000 + len(b"<end>")


async def test_parts_larger_than_the_limit_pass_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "READ_AHEAD_BYTES", 10)
    pieces = [b"%x\r\n%b\r\n" % (1000, b"x" * 1000) for _ in range(20)]
    async with asking(once(STREAM, *pieces, b"0\r\n\r\n", pause_s=0.002)) as (_, upstream):
        parts = await whole(await ask(upstream))
    assert len(b"".join(parts)) == 20_000 + len(b"<end>")


# Connecting


async def test_an_engine_that_speaks_first_is_none() -> None:
    async def script(connection: Connection) -> None:
        await connection.send(b"220 mail\r\n")
        await connection.request()
        await connection.hung_up()

    async with asking(script) as (_, upstream):
        with pytest.raises(Exception, match=r"spoke first|Expected HTTP|no one"):
            await ask(upstream)


@needs_openssl
@pytest.mark.parametrize("loop", ["asyncio", pytest.param("uvloop", marks=pytest.mark.long)])
async def test_a_certificate_is_checked_against_those_that_the_system_trusts(tmp_path: Path, loop: str) -> None:
    files = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(STREAM + b"2\r\nok\r\n0\r\n\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    program = (
        f"import asyncio, sys, {loop}\n"
        "from sidecar.proxy.upstream import Upstream\n"
        "async def main():\n"
        "    upstream = Upstream(sys.argv[1], connect_timeout_s=5, keepalive_s=4)\n"
        "    for _ in range(2):\n"
        "        response = await upstream.request('GET', b'/', [], b'', 0)\n"
        "        print(await response.read(), flush=True)\n"
        "    await upstream.close()\n"
        f"{loop}.run(main())\n"
    )
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for trusted, expected in ((files.certificate, (0, "b'ok'\nb'ok'\n")), (None, (1, ""))):
        environment = {**os.environ, **({} if trusted is None else {"SSL_CERT_FILE": str(trusted)})}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, url, env=environment,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, said = await asyncio.wait_for(process.communicate(), 60)
        assert (process.returncode, out.decode()) == expected, said.decode()
        assert trusted is not None or b"CERTIFICATE_VERIFY_FAILED" in said
    server.close()
