"""The wire of a connection to the store: answers that come in pieces, late, twice or never, on every kind of line."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import hiredis
import pytest
import uvloop

from sidecar.policy.store import store_address
from sidecar.pools.redis import connection as store_connection
from sidecar.pools.redis.connection import Script, StoreConnection, StoreError, connector, store_error
from sidecar.pools.redis.script import source
from sidecar.pools.redis.session import StoreSession
from tests.support.certificates import needs_openssl, self_signed

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
KINDS = ["tcp", "unix", pytest.param("tls", marks=needs_openssl)]
ANSWER = b"*2\r\n$2\r\nok\r\n*2\r\n:1\r\n$5\r\nhello\r\n"
READ = [b"ok", [1, b"hello"]]
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER on, for 0 s: a close sends RST."""

Does = Callable[["Caller", list[bytes]], Awaitable[None]]


class Caller:
    """A client of the stand-in, as that sees it."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer

    async def say(self, *pieces: bytes) -> None:
        """Sends bytes, each piece by itself."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0.002)

    def reset(self) -> None:
        """Ends the connection with RST."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.writer.transport.abort()


class StandIn:
    """A server that greets as Redis does, and does with all other commands what a test says."""

    def __init__(self, does: Does) -> None:
        self.does = does
        self.commands: list[bytes] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def close(self) -> None:
        """Ends all connections."""
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        parser, caller = hiredis.Reader(), Caller(writer)
        with contextlib.suppress(OSError, ssl.SSLError):
            while data := await reader.read(65_536):
                parser.feed(data)
                while (command := parser.gets()) is not False:
                    if command[0] in (b"CLIENT", b"SELECT", b"AUTH", b"PING"):
                        await caller.say(b"+OK\r\n")
                    else:
                        self.commands.append(command[0])
                        await self.does(caller, command)
        writer.close()


@contextlib.asynccontextmanager
async def connected(kind: str, folder: Path, does: Does) -> AsyncIterator[tuple[StoreConnection, StandIn]]:
    """A connection to such a server."""
    stand_in = StandIn(does)
    if kind == "unix":
        server = await asyncio.start_unix_server(stand_in.serve, folder / "socket")
        url = f"unix://{folder / 'socket'}"
    else:
        context = None
        url = "redis://127.0.0.1:{}"
        if kind == "tls":
            files = self_signed(folder)
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(files.certificate, files.key)
            url = f"rediss://127.0.0.1:{{}}?ssl_ca_certs={files.authority}"
        server = await asyncio.start_server(stand_in.serve, "127.0.0.1", 0, ssl=context)
        url = url.format(server.sockets[0].getsockname()[1])
    with patch.object(store_connection, "GREETING_WITHIN_S", 5):  # a busy machine takes long for TLS
        connection = await connector(store_address(url), "wire")()
    try:
        yield connection, stand_in
    finally:
        with patch.object(store_connection, "GREETING_WITHIN_S", 30):  # a close that waits in vain is found
            await asyncio.wait_for(connection.close(), 5)
        server.close()
        await stand_in.close()


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Runs a test on a loop of some kind."""

    def run_on(test: Coroutine[Any, Any, None]) -> None:
        loop = LOOPS[request.param]()
        try:
            loop.run_until_complete(asyncio.wait_for(test, 10))
        finally:
            loop.close()

    return run_on


Run = Callable[[Coroutine[Any, Any, None]], None]


def quickly(connection: StoreConnection) -> asyncio.Future[Any]:
    """A call by `send`: what comes."""
    came: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    assert connection.sends
    connection.send([b"call"], came.set_result)
    return came


async def fails(connection: StoreConnection, words: str, within_s: float = 8.0) -> None:
    """Calls in vain, and then once more: the connection has ended."""
    began_s = time.monotonic()
    with pytest.raises(StoreError, match=words):
        await connection.call([b"call"], within_s)
    assert time.monotonic() - began_s < 7.0
    await is_of_no_use(connection)


async def is_of_no_use(connection: StoreConnection) -> None:
    for _ in range(2):
        with pytest.raises(StoreError):
            await connection.call([b"call"])
        assert isinstance(store_error(await quickly(connection)), StoreError)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_may_come_in_any_pieces(run: Run, tmp_path: Path, kind: str) -> None:
    async def test() -> None:
        cuts = [*range(1, len(ANSWER)), *[len(ANSWER)] * 3]

        async def does(caller: Caller, _: list[bytes]) -> None:
            cut = cuts.pop()
            await caller.say(*filter(None, (ANSWER[:cut], ANSWER[cut:])))

        async with connected(kind, tmp_path, does) as (connection, _):
            while cuts:
                assert await connection.call([b"call"]) == READ
                assert not cuts or await quickly(connection) == READ

    run(test())


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_command_and_a_large_answer_arrive_whole(run: Run, tmp_path: Path, kind: str) -> None:
    async def test() -> None:
        async def does(caller: Caller, command: list[bytes]) -> None:
            text = command[-1]
            caller.writer.write(b"*1\r\n$%d\r\n%b\r\n" % (len(text), text))

        async with connected(kind, tmp_path, does) as (connection, _):
            for size in (3_000_000, 1, 700_000):
                assert await connection.call([b"x" * size], 5) == [b"x" * size]

    run(test())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sent", [b"", ANSWER[:9]], ids=["before its answer", "in the middle of it"])
def test_a_connection_that_the_server_ends_is_noticed_at_once(run: Run, tmp_path: Path, kind: str, sent: bytes) -> None:
    async def test() -> None:
        async def does(caller: Caller, _: list[bytes]) -> None:
            await caller.say(sent)
            caller.writer.close()

        async with connected(kind, tmp_path, does) as (connection, _):
            await fails(connection, "ConnectionError: Connection closed by server")

    run(test())


def test_a_connection_that_is_reset_is_noticed_at_once(run: Run, tmp_path: Path) -> None:
    async def test() -> None:
        async def does(caller: Caller, _: list[bytes]) -> None:
            caller.reset()

        async with connected("tcp", tmp_path, does) as (connection, _):
            await fails(connection, "Connection")

    run(test())


def test_a_connection_that_ended_between_two_calls_fails_the_next(run: Run, tmp_path: Path) -> None:
    async def test() -> None:
        async def does(caller: Caller, _: list[bytes]) -> None:
            await caller.say(ANSWER)
            caller.reset()

        async with connected("tcp", tmp_path, does) as (connection, stand_in):
            assert await connection.call([b"call"]) == READ
            await asyncio.sleep(0.05)
            await is_of_no_use(connection)
            assert stand_in.commands == [b"EVALSHA"]

    run(test())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sent", [b"", ANSWER[:9]], ids=["nothing", "a part"])
def test_an_answer_that_is_late_is_not_waited_for_nor_taken_for_the_next(
    run: Run, tmp_path: Path, kind: str, sent: bytes
) -> None:
    async def test() -> None:
        async def does(caller: Caller, _: list[bytes]) -> None:
            await caller.say(sent)
            await asyncio.sleep(0.3)
            await caller.say(ANSWER[len(sent) :])

        async with connected(kind, tmp_path, does) as (connection, stand_in):
            await fails(connection, "no answer in time", within_s=0.1)
            await asyncio.sleep(0.4)
            assert stand_in.commands == [b"EVALSHA"]

    run(test())


def test_the_limit_of_a_call_counts_from_when_it_is_sent(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One timer serves many calls: it must neither end a later one early, nor forget it."""
    monkeypatch.setattr("sidecar.pools.redis.connection.ANSWER_WITHIN_S", 1.0)

    async def test() -> None:
        delays_s = [0.0, 0.4, 0.0, 0.4, 0.4, 0.0, 20.0]

        async def does(caller: Caller, _: list[bytes]) -> None:
            await asyncio.sleep(delays_s.pop(0))
            await caller.say(ANSWER)

        async with connected("tcp", tmp_path, does) as (connection, _):
            while len(delays_s) > 1:
                assert await quickly(connection) == READ
            began_s = time.monotonic()
            assert isinstance(await quickly(connection), asyncio.TimeoutError)
            assert 0.95 < time.monotonic() - began_s < 8.0

    run(test())


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_is_canceled_in_the_middle_of_its_answer_ends_the_connection(
    run: Run, tmp_path: Path, kind: str
) -> None:
    async def test() -> None:
        goes_on = asyncio.Event()

        async def does(caller: Caller, _: list[bytes]) -> None:
            await caller.say(ANSWER[:9])
            goes_on.set()
            await caller.say(ANSWER[9:])

        async with connected(kind, tmp_path, does) as (connection, stand_in):
            calling = asyncio.ensure_future(connection.call([b"call"]))
            await goes_on.wait()
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            await is_of_no_use(connection)
            assert stand_in.commands == [b"EVALSHA"]

    run(test())


def test_nothing_is_said_to_a_caller_whose_connection_is_closed(run: Run, tmp_path: Path) -> None:
    async def test() -> None:
        async def does(caller: Caller, _: list[bytes]) -> None:
            await caller.say(ANSWER[:9])

        async with connected("tcp", tmp_path, does) as (connection, _):
            came = quickly(connection)
            await asyncio.sleep(0.05)
            await connection.close()
            await asyncio.sleep(0.05)
            assert not came.done()

    run(test())


@pytest.mark.parametrize("sent", [ANSWER + ANSWER, ANSWER + b"*", b"?nonsense\r\n"])
def test_what_no_one_asked_for_ends_the_connection(run: Run, tmp_path: Path, sent: bytes) -> None:
    async def test() -> None:
        async def does(caller: Caller, _: list[bytes]) -> None:
            caller.writer.write(sent)

        async with connected("tcp", tmp_path, does) as (connection, _):
            await fails(connection, "an answer that nothing had asked for|InvalidResponse")

    run(test())


def test_an_answer_between_two_calls_ends_the_connection(run: Run, tmp_path: Path) -> None:
    async def test() -> None:
        async def does(caller: Caller, _: list[bytes]) -> None:
            await caller.say(ANSWER, ANSWER)

        async with connected("tcp", tmp_path, does) as (connection, _):
            assert await connection.call([b"call"]) == READ
            await asyncio.sleep(0.05)
            await is_of_no_use(connection)

    run(test())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (b"-MOVED 1234 127.0.0.1:7001\r\n", "(MovedError|MOVED).*127.0.0.1:7001"),
        (b"-ASK 1234 127.0.0.1:7001\r\n", "(AskError|ASK).*127.0.0.1:7001"),
        (b"-READONLY You can't write against a read only replica.\r\n", "ReadOnlyError: You can't write"),
        (b"-LOADING Redis is loading the dataset in memory\r\n", "BusyLoadingError: Redis is loading"),
        (b"-NOAUTH Authentication required.\r\n", "Authentication required"),
        (b"-ERR oops\r\n", "ResponseError: oops"),
    ],
)
def test_an_error_of_the_server_is_one_of_the_store(run: Run, tmp_path: Path, error: bytes, words: str) -> None:
    async def test() -> None:
        async def does(caller: Caller, _: list[bytes]) -> None:
            await caller.say(error)

        async with connected("tcp", tmp_path, does) as (connection, _):
            with pytest.raises(StoreError, match=words):
                await connection.call([b"call"])
            assert isinstance(store_error(await quickly(connection)), StoreError)

    run(test())


@pytest.mark.parametrize("answer", [b"+OK\r\n", b":1\r\n", b"$-1\r\n", b"$3\r\nabc\r\n"])
def test_an_answer_that_no_script_gives_is_an_error_of_the_store(run: Run, tmp_path: Path, answer: bytes) -> None:
    async def test() -> None:
        async def does(caller: Caller, _: list[bytes]) -> None:
            await caller.say(answer)

        async with connected("tcp", tmp_path, does) as (connection, _):
            with pytest.raises(StoreError, match="an answer that is none of the script's"):
                await connection.run(Script.of("return 1"), [])
            with pytest.raises(StoreError, match="an answer that is none of the script's"):
                StoreSession._read(Mock(), await connection.call([b"call"]))

    run(test())


def test_a_script_that_the_server_does_not_know_is_loaded(run: Run, tmp_path: Path) -> None:
    async def test() -> None:
        loaded: list[bytes] = []

        async def does(caller: Caller, command: list[bytes]) -> None:
            if command[0] == b"SCRIPT":
                loaded.append(command[2])
                await caller.say(b"$2\r\nok\r\n")
            else:
                await caller.say(ANSWER if loaded else b"-NOSCRIPT No matching script.\r\n")

        async with connected("tcp", tmp_path, does) as (connection, stand_in):
            assert await connection.call([b"call"]) == READ
            assert loaded == [source().encode()]
            assert stand_in.commands == [b"EVALSHA", b"SCRIPT", b"EVALSHA"]

    run(test())
