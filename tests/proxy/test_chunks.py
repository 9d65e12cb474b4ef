"""The short way of a chunk, `write`: what is written at once is what would have been read, in its order."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.proxy.connection import EngineConnection
from tests.proxy.test_connection import STREAM, WITHIN_S, ask, asking, in_step, once

pytestmark = pytest.mark.anyio


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
    """What was passed on, what of it was written, and how the response ended."""

    body: bytes = b""
    written: list[bytes] = field(default_factory=list)
    error: str | None = None
    is_complete: bool = False


async def passed(reads: list[bytes], takes: list[bool]) -> Passed:
    """Feeds a connection with these reads of a response's body. `takes` says which parts `write` takes, in turns."""
    found, turns = Passed(), itertools.cycle(takes or [False])
    connection = EngineConnection(asyncio.get_running_loop(), Socket(), on_free=lambda _: None, on_lost=lambda _: None)
    response = connection.send(b"", b"", 0, is_head=False)
    connection.data_received(STREAM)

    def write(part: bytes) -> bool:
        if is_taken := next(turns):
            found.body += part
            found.written.append(part)
        return is_taken

    async def pass_on() -> None:
        while not found.is_complete:
            part = await response.read(write)
            found.body += part
            found.is_complete = response.is_complete

    passing = asyncio.ensure_future(pass_on())
    await asyncio.sleep(0)
    for number, read in enumerate(reads):
        connection.data_received(read)
        if number % 3:
            await asyncio.sleep(0)
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


FORMS = st.sampled_from(["%x", "%X", "0%x", "%x;a=b", "%x ", "0x%x", "-%x", "+%x", "%x_", "%xg", " %x", "zz%x"])
BODIES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"\r\n", b"5\r\nabcde\r\n", b"0\r\n\r\n", b"x" * 15, b"x" * 16, b"x" * 255, b"x" * 256]),
)
CHUNKS = st.lists(
    st.builds(
        lambda body, form, after: form.encode() % len(body) + b"\r\n" + body + after,
        BODIES,
        st.one_of(st.sampled_from(["%x", "%X"]), FORMS),
        st.one_of(st.just(b"\r\n"), st.sampled_from([b"\n\r", b"\rx", b"x\n", b"\n"])),
    ),
    max_size=6,
)


@given(
    chunks=CHUNKS,
    end=st.sampled_from([b"0\r\n\r\n", b"0\r\nx-trailer: 1\r\n\r\n", b"\r\n", b"5\r\n", b"", b"4\r\nfour\r", b"x"]),
    cuts=st.lists(st.integers(0, 3000), max_size=8),
    takes=st.lists(st.booleans(), max_size=5),
)
@example(chunks=[b"3\r\nabc\r\n"] * 5, end=b"0\r\n\r\n", cuts=[], takes=[True])
@example(chunks=[b"3\r\nabc\r\n"] * 5, end=b"x", cuts=[7, 8, 9, 10, 11], takes=[True, True])
@example(chunks=[b"5\r\nabc\r\n\r\n"], end=b"0\r\n\r\n", cuts=[], takes=[True])  # its last bytes are its body's
@example(chunks=[b"3\r\nabc\r\n", b"0\r\n", b"5\r\nabcde\r\n"], end=b"\r\n", cuts=[], takes=[True])  # no trailer
@example(chunks=[b"3\r\nabc\r\n", b"0\r\nx: 1\r\n", b"5\r\nabcde\r\n"], end=b"\r\n", cuts=[], takes=[True])
@example(chunks=[b"3\r\nabc\r\n", b"3;a=b\r\n", b"5\r\nabcde\r\n"], end=b"\r\n", cuts=[], takes=[True])
@example(chunks=[b"3\r\nabc\r\n", b"0\r\n\r\n", b"5\r\nabcde\r\n"], end=b"", cuts=[], takes=[True])
@example(chunks=[b"3\r\nabc\r\n", b"3\r\nabc\rx"], end=b"", cuts=[], takes=[True])
@example(chunks=[b"3\r\nabc\r\n", b"4\r\nabc\r\n"], end=b"", cuts=[], takes=[True])  # one byte less than it says
def test_what_is_written_and_read_is_what_would_be_read_alone(
    chunks: list[bytes], end: bytes, cuts: list[int], takes: list[bool]
) -> None:
    raw = b"".join([*chunks, end])
    reads = split(raw, cuts) if cuts else [*chunks, end]
    both, alone = asyncio.run(passed(reads, takes)), asyncio.run(passed(reads, []))
    assert (both.body, both.error, both.is_complete) == (alone.body, alone.error, alone.is_complete)
    assert b"" not in both.written


async def test_while_a_slow_client_is_waited_for_nothing_is_written_and_then_all_is_read_together() -> None:
    slow, parts = asyncio.Event(), []

    def write(part: bytes) -> bool:
        if part != b"2":
            parts.append(part)
        return part != b"2"

    async with asking(in_step(parts, slow)) as (_, upstream):
        response = await ask(upstream)
        while not response.is_complete or response.parts:
            parts.append(await asyncio.wait_for(response.read(write), WITHIN_S))
            if parts[-1] == b"2":
                await asyncio.wait_for(slow.wait(), WITHIN_S)
    assert parts == [b"0", b"1", b"2", b"34567"]


async def test_after_what_was_not_taken_nothing_is_written_before_it_was_read() -> None:
    asked: list[bytes] = []

    def write(part: bytes) -> bool:
        asked.append(part)
        return False

    async with asking(once(STREAM)) as (_, upstream):
        response = await ask(upstream)
        reading = asyncio.ensure_future(response.read(write))
        await asyncio.sleep(0)
        for part in (b"1\r\nx\r\n", b"1\r\ny\r\n"):  # two reads in one round of the event loop
            response._connection.data_received(part)
        assert await asyncio.wait_for(reading, WITHIN_S) == b"xy"
        response.close()
    assert asked == [b"x"]
