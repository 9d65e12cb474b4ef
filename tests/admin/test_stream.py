"""The overview as server-sent events, over real HTTP: one builder for all, viewers that stall or leave cost nothing."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from sidecar.admin.routes import MOST_VIEWERS, OverviewStream
from tests.support.serving import serving
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
EVERY_S = 0.02


class Made:
    """Makes documents, and counts them."""

    def __init__(self, size: int = 0) -> None:
        self.numbers = count(1)
        self.made = 0
        self.filling = "x" * size

    def __call__(self) -> bytes:
        self.made = next(self.numbers)
        return json.dumps({"n": self.made, "filling": self.filling}).encode()


@asynccontextmanager
async def streaming(made: Made, **settings: Any) -> AsyncIterator[tuple[OverviewStream, str, int]]:
    stream = OverviewStream(made, every_s=EVERY_S, **settings)
    async with serving(Starlette(routes=[Route("/s", stream, methods=["GET"])])) as served:
        yield stream, f"{served.url}/s", served.port


async def event(response: aiohttp.ClientResponse) -> Any:
    """The next event's data."""
    while line := await asyncio.wait_for(response.content.readline(), 60):
        if line.startswith(b"data: "):
            return json.loads(line[6:])
    return None


async def next_numbers(response: aiohttp.ClientResponse, count: int) -> list[int]:
    return [(await event(response))["n"] for _ in range(count)]


async def test_the_first_event_comes_at_once_and_then_one_each_time() -> None:
    made = Made()
    async with streaming(made) as (_, url, _), aiohttp.ClientSession() as client, client.get(url) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        numbers = await next_numbers(response, 4)
    assert numbers == [1, 2, 3, 4]


async def test_many_viewers_share_what_is_made_and_none_makes_nothing() -> None:
    made = Made()
    async with streaming(made) as (stream, url, _), aiohttp.ClientSession() as client:
        responses = [await client.get(url) for _ in range(10)]
        seen = [await next_numbers(response, 5) for response in responses]
        assert made.made < 10 + 10 * 5 / 2, "each viewer has a builder of its own"
        assert len({numbers[-1] for numbers in seen}) <= 10
        for response in responses:
            response.close()
        await until(lambda: stream.viewers == 0)
        before = made.made
        await asyncio.sleep(5 * EVERY_S)
        assert made.made == before


async def test_viewers_are_bounded_and_a_place_comes_free() -> None:
    async with streaming(Made()) as (stream, url, _):
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as client:
            responses = [await client.get(url) for _ in range(MOST_VIEWERS)]
            async with client.get(url) as refused:
                assert (refused.status, await refused.text()) == (503, "32 look at this already; try GET /overview\n")
            responses.pop().close()
            await until(lambda: stream.viewers < MOST_VIEWERS)
            async with client.get(url) as response:
                assert (await event(response))["n"]
            for response in responses:
                response.close()


async def test_a_viewer_that_takes_nothing_is_let_go_and_holds_up_no_one() -> None:
    made = Made(size=400_000)
    client = aiohttp.ClientSession(read_bufsize=1_000_000)  # a line may not be longer than twice this
    async with streaming(made, stalled_s=0.3) as (stream, url, port), client:
        with socket.create_connection(("127.0.0.1", port)) as stalled:
            stalled.sendall(b"GET /s HTTP/1.1\r\nhost: x\r\n\r\n")
            await until(lambda: stream.viewers == 1)
            async with client.get(url) as response:
                first = (await event(response))["n"]
                assert (await event(response))["n"] > first
            await until(lambda: stream.viewers == 0)


async def test_it_ends_when_it_is_closed_so_that_the_server_can() -> None:
    async with streaming(Made()) as (stream, url, _), aiohttp.ClientSession() as client:
        async with client.get(url) as response:
            await event(response)
            stream.close()
            await asyncio.wait_for(response.content.read(), 60)  # to its proper end
        await until(lambda: stream.viewers == 0)
        async with client.get(url) as refused:
            assert refused.status == 503


async def test_a_defect_of_one_second_does_not_end_the_stream() -> None:
    made = Made()
    numbers = count(1)

    def sometimes() -> bytes:
        if next(numbers) == 2:
            raise RuntimeError("a defect")
        return made()

    stream = OverviewStream(sometimes, every_s=EVERY_S)
    async with (
        serving(Starlette(routes=[Route("/s", stream, methods=["GET"])])) as served,
        aiohttp.ClientSession() as client,
        client.get(f"{served.url}/s") as response,
    ):
        assert [(await event(response))["n"] for _ in range(3)] == [1, 2, 3]
