"""Promises of the real servers and the faulty network that the tests which use them would not see broken."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tests.support import redis_servers
from tests.support.fault_proxy import FaultProxy
from tests.support.redis_servers import Binary, RedisServer, binaries, first_binary, until

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[1]
PROGRAMS: list[Binary | None] = [*binaries()] or [None]


@pytest.fixture(params=PROGRAMS, ids=lambda found: found.name if found else "missing")
def binary(request: pytest.FixtureRequest) -> Binary:
    return request.param or first_binary()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(first_binary(), tmp_path) as running:
        yield running


@pytest.fixture
async def proxy(server: RedisServer) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(server.host, server.port) as running:
        yield running


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """A client that tries once, waits as long as a busy machine may take, and has its connection."""
    retry = Retry(NoBackoff(), 0)
    client = redis.asyncio.Redis.from_url(url, retry=retry, socket_timeout=60, socket_connect_timeout=60)
    async with client:
        assert await client.ping()
        yield client
    await client.connection_pool.disconnect()


def test_a_chosen_program_that_is_not_there_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR_TEST_REDIS", "no-such-program")
    with pytest.raises(AssertionError, match="SIDECAR_TEST_REDIS"):
        binaries()


def test_a_server_looks_for_another_port_where_somebody_is_faster(
    server: RedisServer, binary: Binary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = iter([server.port, redis_servers.free_port()])
    monkeypatch.setattr(redis_servers, "free_port", lambda: next(ports))
    with RedisServer(binary, tmp_path) as second:
        assert second.port != server.port
        assert second.command("SET", "key", "value") == "OK"
    assert server.command("GET", "key") is None


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process cannot ask to end with its parent")
def test_a_server_does_not_outlive_a_test_process_that_is_killed(tmp_path: Path) -> None:
    program = """if True:
        import pathlib, sys, time
        from tests.support.redis_servers import RedisServer, first_binary
        with RedisServer(first_binary(), pathlib.Path(sys.argv[1])) as server:
            print(server.pid, flush=True)
            time.sleep(60)
    """
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert "redis" in _command_of(pid) or "valkey" in _command_of(pid)
        parent.send_signal(signal.SIGKILL)
    until(lambda: _command_of(pid) == "", "the server is gone")


def _command_of(pid: int) -> str:
    """Empty where there is no such process any more, or only its exit status."""
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize(("swallowed", "done"), [("swallow_replies", "value"), ("swallow_requests", None)])
async def test_what_is_swallowed_leaves_the_client_waiting_with_the_work_done_or_undone(
    server: RedisServer, proxy: FaultProxy, swallowed: str, done: str | None
) -> None:
    async with connected(proxy.url()) as client:
        setattr(proxy, swallowed, True)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.set("key", "value"), 0.3)
    assert server.command("GET", "key") == done


async def test_of_a_connection_that_died_silently_the_end_is_not_seen_either(
    server: RedisServer, proxy: FaultProxy
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"PING\r\n")
    assert await reader.readline() == b"+PONG\r\n"
    proxy.swallow_replies = True
    server.kill()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(reader.read(), 0.1)
    writer.close()
