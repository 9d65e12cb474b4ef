"""The client on real sockets: against every engine's emulator, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from sidecar.engines import Engine
from sidecar.tools.loadgen import Planned, Progress, Seen, play
from sidecar.tools.loadgen.connection import Target
from tests.tools.emulator.emulated import ENGINES, VLLM, emulated

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def chat(at_s: float = 0.0, max_tokens: int = 4, label: str = "", **members: Any) -> Planned:
    messages = [{"role": "user", "content": "hello engine"}]
    body = {"model": "m", "messages": messages, "max_tokens": max_tokens, "stream": True, **members}
    return Planned(at_s, PATH, {}, json.dumps({k: v for k, v in body.items() if v is not None}).encode(), label)


def started(playing: Coroutine[Any, Any, list[Seen]]) -> asyncio.Task[list[Seen]]:
    return asyncio.create_task(playing)


async def one(url: str, planned: Planned, timeout_s: float = 5.0) -> Seen:
    [seen] = await play([url], [planned], timeout_s=timeout_s)
    return seen


@asynccontextmanager
async def speaking(talk: Talk) -> AsyncIterator[str]:
    """A server that does whatever a test wants with each connection. Gives its address."""
    tasks: set[asyncio.Task[Any]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        tasks.add(task)
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def saying(*pieces: bytes | float) -> Talk:
    """Reads the request's head, then says the pieces; a number is a pause in seconds."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            if isinstance(piece, bytes):
                writer.write(piece)
                await writer.drain()
            else:
                await asyncio.sleep(piece)

    return talk


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
async def test_every_engine_is_understood(engine: type[Engine], path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    members = {"model": "m", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
    async with emulated(engine, step_s=0.01) as client:
        seen = await one(client.url, Planned(0.0, path, {}, json.dumps({**members, **prompt}).encode()))
        [line] = client.engine.log
    assert (seen.status, seen.error, seen.output_tokens, seen.prompt_tokens) == (200, None, 5, 1)
    assert seen.request_id.endswith(line.request_id)
    assert seen.ttft_s == pytest.approx(line.first_token_s - line.arrival_s, abs=0.05)
    assert seen.tpot_s == pytest.approx((line.end_s - line.first_token_s) / 4, abs=0.02)
    assert 0 <= seen.sent_s < seen.first_token_s < seen.end_s < 5


async def test_the_loop_is_open_no_one_waits_for_a_server_that_is_silent() -> None:
    async with speaking(saying(30.0)) as url:
        times = [0.0, 0.1, 0.1, 0.2, 0.3]
        seen = await play([url], [chat(at_s) for at_s in times], timeout_s=0.5)
    assert [one.sent_s for one in seen] == pytest.approx(times, abs=0.08)
    assert {one.error for one in seen} == {"no complete answer within 0.5 s"}
    assert [one.end_s - one.sent_s for one in seen] == pytest.approx([0.5] * 5, abs=0.1)


async def test_connecting_is_in_no_figure() -> None:
    """Connections are there before the clock starts, or half a second before a later request's time."""
    opened: list[float] = []
    asked: list[float] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(time.monotonic())
        await reader.readuntil(b"\r\n\r\n")
        asked.append(time.monotonic())
        writer.write(HEAD + b"connection: close\r\n\r\n" + TOKEN + DONE)

    async with speaking(talk) as url:
        seen = await play([url], [chat(at_s) for at_s in [0.0] * 40 + [0.9]], timeout_s=5)
    assert all(one.is_complete for one in seen)
    assert max(opened[:40]) <= min(asked[:40])
    assert max(asked[:40]) - min(asked[:40]) < 0.2
    assert asked[40] - opened[40] == pytest.approx(0.5, abs=0.2)


async def test_requests_of_one_time_leave_in_their_order_and_answers_come_in_that_of_the_requests() -> None:
    async with emulated(VLLM, slots=1, step_s=0.0005) as client:
        labels = [str(number) for number in range(30)]
        requests = [chat(0.1 if int(label) < 10 else 0.0, 1, label) for label in labels]
        seen = await play([client.url], requests, timeout_s=5)
        by_id = {(one.request_id or "").rpartition("-")[2]: one.planned.label for one in seen}
        served = [by_id[line.request_id] for line in sorted(client.engine.log, key=lambda line: line.arrival_s)]
    assert [one.planned.label for one in seen] == labels
    sent = sorted(seen, key=lambda one: one.sent_s)
    assert [one.planned.label for one in sent] == labels[10:] + labels[:10]
    assert Counter(served) == Counter(labels)


async def test_canceling_leaves_the_engine_no_work() -> None:
    async with emulated(VLLM, slots=2, step_s=0.002) as client:
        later = [chat(at_s, 100_000) for at_s in (0.3, 60.0)]
        task = started(play([client.url], [chat(0.0, 100_000) for _ in range(5)] + later, timeout_s=60))
        await client.until(lambda engine: engine.running == 2 and engine.waiting == 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.until(lambda engine: engine.running == 0 and engine.waiting == 0)
        await asyncio.sleep(0.4)
        assert len(client.engine.log) == 5, "a request that was still to come was sent"


async def test_canceling_while_connections_are_opened_leaves_none_open() -> None:
    open_now = 0
    is_one_open = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now
        open_now += 1
        is_one_open.set()
        try:
            await reader.read()
        finally:
            open_now -= 1

    async with speaking(talk) as url:
        task = started(play([url], [chat() for _ in range(100)], timeout_s=5))
        await is_one_open.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.05)
        assert open_now == 0


async def test_a_server_that_is_not_there_is_said_so() -> None:
    async with speaking(saying()) as url:
        pass
    seen = await one(url, chat())
    assert (seen.status, seen.ttft_s) == (None, None)
    assert (seen.error or "").startswith(f"cannot connect to {url.removeprefix('http://')}: ")


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([], "the connection was closed before an answer came"),
        ([b"SSH-2.0-nonsense\r\n\r\n"], "the answer is not HTTP: "),
        ([HEAD + b"content-length: 500\r\n\r\n" + TOKEN], "the connection was closed in the middle of the answer"),
        ([HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\ndata:"], "the connection was closed in the middle"),
        ([HEAD + b"\r\n" + TOKEN], "the stream ended before the answer was complete"),
        ([b"HTTP/1.1 302 Found\r\nlocation: /\r\ncontent-length: 0\r\n\r\n"], "HTTP 302"),
        ([HEAD + b"\r\n" + TOKEN, 30.0], "no complete answer within 0.5 s"),
    ],
)
async def test_what_goes_wrong_is_said_and_never_hangs(pieces: list[bytes | float], error: str) -> None:
    async with speaking(saying(*pieces)) as url:
        seen = await one(url, chat(), timeout_s=0.5)
    assert (seen.error or "").startswith(error)
    assert not seen.is_complete


async def test_an_interim_answer_a_body_without_a_length_and_bytes_one_by_one_are_fine() -> None:
    whole = b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"X-Admission-Wait-Ms: 12\r\n\r\n" + ROLE + TOKEN + DONE
    async with speaking(saying(*(whole[place : place + 1] for place in range(len(whole))))) as url:
        seen = await one(url, chat())
    assert (seen.error, seen.output_tokens, seen.headers["x-admission-wait-ms"]) == (None, 1, "12")


async def test_a_connection_that_the_server_gave_up_before_its_time_is_opened_anew() -> None:
    count = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        if count > 1:
            await saying(HEAD + b"\r\n" + TOKEN + DONE)(reader, writer)

    async with speaking(talk) as url:
        seen = await one(url, chat(0.3))
    assert (seen.error, count) == (None, 2)


async def test_turns_follow_each_other_with_what_was_answered() -> None:
    wrote: list[str] = []

    def write(text: str) -> bytes:
        wrote.append(text)
        return chat(max_tokens=3).body

    async with emulated(VLLM, step_s=0.01) as client:
        first = chat(0.0, 3)
        second = Planned(0.0, PATH, {}, b"", after=0, delay_s=0.2, write=write)
        third = Planned(0.6, PATH, {}, b"", after=1, write=write)
        seen = await play([client.url], [first, second, third], timeout_s=5)
    assert [one.error for one in seen] == [None] * 3
    assert seen[1].sent_s - seen[0].end_s == pytest.approx(0.2, abs=0.1)
    assert seen[2].sent_s == pytest.approx(0.6, abs=0.1)
    assert wrote == [" the quick brown"] * 2


async def test_a_turn_after_one_that_failed_is_sent_all_the_same() -> None:
    wrote: list[str] = []

    def write(text: str) -> bytes:
        wrote.append(text)
        return chat().body

    async with emulated(VLLM) as client:
        turns = [chat(max_tokens=-1), Planned(0.0, PATH, {}, b"", after=0, write=write)]
        seen = await play([client.url], turns, timeout_s=5)
    assert [one.is_complete for one in seen] == [False, True]
    assert wrote == [""]


@pytest.mark.parametrize("after", [0, 1, 7, -1])
async def test_a_turn_that_would_wait_forever_is_refused(after: int) -> None:
    with pytest.raises(ValueError, match="follows one that comes before it"):
        await play(["http://127.0.0.1:1"], [Planned(0.0, PATH, {}, b"", after=after)], timeout_s=1)


async def test_among_several_servers_the_chosen_one_is_known_and_the_choice_repeats() -> None:
    async with emulated(VLLM, slots=20) as left, emulated(VLLM, slots=20) as right:
        urls, requests = [left.url, right.url], [chat(max_tokens=1) for _ in range(40)]
        first = await play(urls, requests, timeout_s=5, pick=random.Random(3))
        assert (len(left.engine.log), len(right.engine.log)) == (
            sum(one.url_index == 0 for one in first),
            sum(one.url_index == 1 for one in first),
        )
        second = await play(urls, requests, timeout_s=5, pick=random.Random(3))
    assert [one.url_index for one in first] == [one.url_index for one in second]
    assert {0, 1} == {one.url_index for one in first}


async def test_the_report_ends_with_everything_counted() -> None:
    reported: list[tuple[float, int, int, int, bool]] = []

    def report(elapsed_s: float, progress: Progress) -> None:
        reported.append((elapsed_s, progress.sent, progress.answered, progress.failed, progress.is_over))

    async with emulated(VLLM) as client:
        requests = [chat(), chat(0.6), chat(0.6, max_tokens=-1)]
        await play([client.url], requests, timeout_s=5, report=report)
    assert all(earlier[0] <= later[0] for earlier, later in pairwise(reported))
    assert len(reported) >= 3
    assert reported[-1][1:] == (3, 2, 1, True)
    assert not any(over for *_, over in reported[:-1])


async def test_a_client_that_did_not_run_for_a_while_knows_it() -> None:
    stalls: list[float] = []

    def block(_: str) -> bytes:
        time.sleep(0.4)  # as a machine does that is too busy
        return chat().body

    async with emulated(VLLM) as client:
        for write in (block, None):
            later = Planned(0.7, PATH, {}, chat().body, write=write)
            await play([client.url], [chat(), later], timeout_s=5, report=lambda _, p: stalls.append(p.stalled_s))
            assert (stalls.pop() > 0.3) == (write is block)


async def test_nothing_to_send_is_no_trouble() -> None:
    assert await play(["http://127.0.0.1:1"], [], timeout_s=1) == []


async def test_a_body_is_written_when_it_is_needed_not_before() -> None:
    written: list[float] = []
    began = time.monotonic()

    def write(_: str) -> bytes:
        written.append(time.monotonic() - began)
        return chat().body

    async with emulated(VLLM) as client:
        await play([client.url], [Planned(at_s, PATH, {}, b"", write=write) for at_s in (0.0, 1.0)], timeout_s=5)
    assert written == pytest.approx([0.0, 0.5], abs=0.2)


@pytest.mark.parametrize("headers", [{"x-a": "1\r\nx-b: 2"}, {"x a\n": "1"}, {"": "1"}, {"x:y": "1"}])
async def test_a_header_that_would_be_two_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="is no header"):
        await play(["http://127.0.0.1:1"], [Planned(0.0, PATH, headers, b"")], timeout_s=1)


@pytest.mark.parametrize(
    ("url", "host", "port", "prefix"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, ""),
        ("https://engine.example/deep/", "engine.example", 443, "/deep"),
        ("http://user:secret@[::1]:80", "::1", 80, ""),
    ],
)
async def test_addresses(url: str, host: str, port: int, prefix: str) -> None:
    target = Target.of(url)
    assert (target.host, target.port, target.prefix) == (host, port, prefix)
    assert (target.tls is not None) == url.startswith("https")
    assert b"secret" not in target.head("/v1", {})


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:8000", "ftp://x", "http://", "http://x:port", "http://x:99999", "http://x/?a=1", "http://x y"],
)
def test_an_address_that_is_none_is_said_so(url: str) -> None:
    with pytest.raises(ValueError, match="write one like http://"):
        Target.of(url)


@pytest.mark.long
async def test_it_ends_when_it_is_canceled_at_any_moment_of_connecting() -> None:
    """Up to Python 3.11 `asyncio.wait_for` loses a cancellation that comes together with its result."""
    async with emulated(VLLM, slots=8) as client:
        for rounds in range(120):
            requests = [Planned(n * 0.0005, "/v1/chat/completions", {}, b"{}") for n in range(40)]
            playing = asyncio.ensure_future(play([client.url], requests, timeout_s=5))
            for _ in range(rounds):
                await asyncio.sleep(0)
            playing.cancel()
            ended, _ = await asyncio.wait([playing], timeout=3)
            assert ended, f"still running, canceled after {rounds} rounds of the event loop"
