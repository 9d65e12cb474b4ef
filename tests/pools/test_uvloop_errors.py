"""uvloop's error for a connection that is closed: it is the store that is lost, and no defect in the sidecar."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from sidecar.pools.redis.connection import is_foreign


async def written_after_the_close() -> None:
    """Writes to a connection after it was closed, as redis-py does after the server has reset one."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    try:
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, host, port)
        transport.abort()
        await asyncio.sleep(0.05)
        transport.write(b"PING")
        transport.writelines([b"PING"])
    finally:
        server.close()


def run(make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    loop = make_loop()
    try:
        loop.run_until_complete(written_after_the_close())
    finally:
        loop.close()


def test_uvloop_still_raises_a_plain_runtime_error_and_it_is_taken_for_a_lost_store() -> None:
    """Where this fails, uvloop is mended: `is_foreign` then needs no exception for it."""
    with pytest.raises(RuntimeError, match="unable to perform operation on") as raised:
        run(uvloop.new_event_loop)
    assert type(raised.value) is RuntimeError
    assert is_foreign(raised.value)


def test_asyncio_raises_none_and_other_runtime_errors_are_defects() -> None:
    run(asyncio.new_event_loop)
    assert not is_foreign(RuntimeError("a lease is requeued once"))
    assert is_foreign(ConnectionResetError())
