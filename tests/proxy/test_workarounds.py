"""Defects of others that we work around. Each test shows one as it is: when it fails, the workaround can go."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp.client_proto import ResponseHandler

from tests.support.engine import Connection, raw_engine

pytestmark = pytest.mark.anyio


@pytest.mark.skipif(not hasattr(ResponseHandler, "closed"), reason="an older aiohttp; the workaround is for newer ones")
async def test_aiohttp_leaves_the_reader_of_broken_chunks_waiting() -> None:
    """`upstream._break_with_its_connection`. The Python parser's like defect is aio-libs/aiohttp#10596."""

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf")
        await asyncio.sleep(0.01)
        await connection.send(b"\r\nnot-a-size\r\n")
        await connection.hung_up()

    async with raw_engine(script) as engine, aiohttp.ClientSession() as session:
        response = await session.get(f"http://127.0.0.1:{engine.port}/")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(response.content.read(), 0.3)
        response.close()
