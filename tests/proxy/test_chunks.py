"""The short way of a chunk: what is known without the parser is the same as what the parser finds."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.proxy import connection as connections
from sidecar.proxy.connection import EngineConnection, NotHttp
from sidecar.sending import SENT
from tests.proxy.test_connection import STREAM, WITHIN_S, ask, asking, in_step, once

pytestmark = pytest.mark.anyio

LONGEST = connections.LONGEST_KNOWN_CHUNK


class Socket(asyncio.Transport):
    """A transport that notes whether it was ended."""

    is_ended = False

    def writelines(self, list_of_data: object) -> None:
        """Takes the request."""

    def is_closing(self) -> bool:
        """See `asyncio.Transport`."""
        return self.is_ended

    def abort(self) -> None:
        """See `asyncio.Transport`."""
        self.is_ended = True


@dataclass
class Passed:
    """What was passed on, and how the response ended."""

    body: bytes = b""
    framed: list[tuple[bytes, bytes]] = field(default_factory=list)
    error: str | None = None
    is_complete: bool = False

    def message(self, body: bytes, is_last: bool) -> Awaitable[None]:
        """The long way."""
        self.body += body
        self.is_complete |= is_last
        return SENT

    def chunk(self, body: bytes, framed: bytes) -> Awaitable[None]:
        """The short way."""
        self.body += body
        self.framed.append((body, framed))
        return SENT


async def passed(reads: list[bytes], *, is_short: bool = True) -> Passed:
    """Feeds a connection with these reads of a response's body."""
    found = Passed()
    connection = EngineConnection(asyncio.get_running_loop(), Socket(), on_free=lambda _: None, on_lost=lambda _: None)
    response = connection.send(b"", b"", 0, is_head=False)
    connection.data_received(STREAM)
    passing = asyncio.ensure_future(response.pass_on(found.message, lambda: found.chunk if is_short else None))
    await asyncio.sleep(0)
    for read in reads:
        connection.data_received(read)
    if not response.is_complete:
        connection.connection_lost(None)
    try:
        await passing
    except Exception as error:
        found.error = f"{type(error).__name__}: {error}"
    return found


def split(raw: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    return [raw[begin:end] for begin, end in itertools.pairwise(at)]


def chunk(body: bytes, form: str, after: bytes = b"\r\n") -> bytes:
    return form.encode() % len(body) + b"\r\n" + body + after


FORMS = st.sampled_from(["%x", "%X", "0%x", "%x;a=b", "%x ", "0x%x", "-%x", "+%x", "%x_", "%xg", " %x", "zz%x"])
BODIES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"\r\n", b"5\r\nabcde\r\n", b"0\r\n\r\n", b"x" * 15, b"x" * 16, b"x" * 255, b"x" * 256]),
    st.integers(0, LONGEST + 20).map(lambda size: b"y" * size),
)
CHUNKS = st.lists(
    st.builds(
        chunk,
        BODIES,
        st.one_of(st.sampled_from(["%x", "%X"]), FORMS),
        st.one_of(st.just(b"\r\n"), st.sampled_from([b"\n\r", b"\rx", b"x\n", b"\n"])),
    ),
    max_size=6,
)


@given(
    chunks=CHUNKS,
    end=st.sampled_from([b"0\r\n\r\n", b"0\r\nx-trailer: 1\r\n\r\n", b"\r\n", b"5\r\n", b"", b"4\r\nfour\r", b"x"]),
    cuts=st.lists(st.integers(0, 3 * LONGEST), max_size=6),
    is_by_chunk=st.booleans(),
)
@example(chunks=[b"5\r\nabc\r\n\r\n"], end=b"0\r\n\r\n", cuts=[], is_by_chunk=True)  # its last bytes are its body's
@example(chunks=[b"3\r\nabc\r\n", b"0\r\n", b"5\r\nabcde\r\n"], end=b"\r\n", cuts=[], is_by_chunk=True)  # no trailer
@example(chunks=[b"3\r\nabc\r\n", b"0\r\nx: 1\r\n", b"5\r\nabcde\r\n"], end=b"\r\n", cuts=[], is_by_chunk=True)
@example(chunks=[b"3\r\nabc\r\n", b"3;a=b\r\n", b"5\r\nabcde\r\n"], end=b"\r\n", cuts=[], is_by_chunk=True)
@example(chunks=[b"3\r\nabc\r\n", b"0\r\n\r\n", b"5\r\nabcde\r\n"], end=b"", cuts=[], is_by_chunk=True)
@example(chunks=[b"3\r\nabc\r\n", b"3\r\nabc\rx"], end=b"", cuts=[], is_by_chunk=True)
@example(chunks=[b"3\r\nabc\r\n", b"3\r\nabcx\n"], end=b"", cuts=[], is_by_chunk=True)
@example(chunks=[b"3\r\nabc\r\n", b"4\r\nabc\r\n"], end=b"", cuts=[], is_by_chunk=True)  # one byte less than it says
def test_the_short_way_gives_what_the_parser_alone_gives(
    chunks: list[bytes], end: bytes, cuts: list[int], is_by_chunk: bool
) -> None:
    raw = b"".join([*chunks, end])
    reads = [*chunks, end] if is_by_chunk else split(raw, cuts)
    short, long = asyncio.run(passed(reads)), asyncio.run(passed(reads, is_short=False))
    assert (short.body, short.error, short.is_complete) == (long.body, long.error, long.is_complete)
    for body, framed in short.framed:
        assert body
        assert framed in {b"%x\r\n%b\r\n" % (len(body), body), b"%X\r\n%b\r\n" % (len(body), body)}


@pytest.mark.parametrize("length", [1, 9, 10, 15, 16, 255, 256, LONGEST - 8])
async def test_one_chunk_in_one_read_goes_on_as_it_came_in_either_case(length: int) -> None:
    for form in ("%x", "%X"):
        came = chunk(b"z" * length, form)
        found = await passed([chunk(b"first", "%x"), came, b"0\r\n\r\n"])
        assert found.framed[1][1] is came
        assert found.is_complete


async def test_the_parser_is_not_asked_for_a_chunk_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    parse = EngineConnection._parse
    monkeypatch.setattr(
        EngineConnection, "_parse", lambda self, data, *rest: (parsed.append(data), parse(self, data, *rest))[1]
    )
    known = [chunk(b"one", "%x"), chunk(b"two", "%x")]
    odd = chunk(b"odd", "0%x")
    await passed([chunk(b"first", "%x"), *known, odd, *known, known[0] + known[1], known[0], b"0\r\n\r\n"])
    assert parsed == [STREAM, chunk(b"first", "%x"), odd, known[0] + known[1], b"0\r\n\r\n"]


async def test_a_slow_client_holds_chunks_back_and_they_go_on_together_in_their_order() -> None:
    slow, parts = asyncio.Event(), []

    async def wait() -> None:
        await slow.wait()

    def send_chunk(body: bytes, framed: bytes) -> Awaitable[None]:
        del framed
        parts.append(body)
        return wait() if body == b"2" else SENT

    def message(body: bytes, is_last: bool) -> Awaitable[None]:
        parts.extend([body, b"<end>"] if is_last else [body])
        return SENT

    async with asking(in_step(parts, slow)) as (_, upstream):
        response = await ask(upstream)
        await asyncio.wait_for(response.pass_on(message, lambda: send_chunk), WITHIN_S)
    assert parts == [b"0", b"1", b"2", b"34567", b"<end>"]


async def test_an_error_of_the_short_way_is_raised_where_the_response_is_passed_on() -> None:
    def fails(body: bytes, framed: bytes) -> Awaitable[None]:
        raise RuntimeError(f"{body!r} {framed!r}")

    async with asking(once(STREAM, chunk(b"x", "%x"), chunk(b"y", "%x"))) as (_, upstream):
        response = await ask(upstream)
        with pytest.raises(RuntimeError, match="b'x'"):
            await asyncio.wait_for(response.pass_on(lambda *_: SENT, lambda: fails), WITHIN_S)
        response.close()


async def test_bad_framing_after_known_chunks_is_refused() -> None:
    async with asking(once(STREAM, chunk(b"x", "%x"), chunk(b"y", "%x"), b"5\r\nshort\n\r")) as (_, upstream):
        response = await ask(upstream)
        with pytest.raises(NotHttp):
            await asyncio.wait_for(response.pass_on(lambda *_: SENT, lambda: lambda *_: SENT), WITHIN_S)
