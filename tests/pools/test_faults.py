"""Faults on purpose, on real servers. In every one: nothing leaks, no one waits forever, and the pool's limit holds."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.policy.choices import StoreLoss
from sidecar.policy.model import Policy
from sidecar.pools import Pool
from sidecar.pools.base import monotonic_us
from sidecar.pools.redis import RedisLink, link
from tests.pools.conftest import BINARIES, FIRST, OTHERS, SERVERS, Servers
from tests.pools.harness import ask, simple
from tests.pools.load import Load, nothing_left, recovered, replicas, store_of
from tests.pools.store_harness import patient_library
from tests.support.certificates import needs_openssl, started_with_tls
from tests.support.fault_proxy import FaultProxy
from tests.support.redis_servers import RedisServer, first_binary
from tests.support.redis_topologies import cluster, sentinel
from tests.support.shared_pools import begun
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
CAPACITY = 120


def policy() -> Policy:
    return simple(tokens=CAPACITY)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Servers of these tests' own: no one else should find them killed."""
    started = Servers(tmp_path_factory.mktemp("faults"))
    yield started
    for server in started.values():
        server.stop()


@pytest.fixture(params=[FIRST, *(pytest.param(name, marks=pytest.mark.soak) for name in OTHERS)])
def server(request: pytest.FixtureRequest, servers: Servers) -> RedisServer:
    """Whatever a test before did to it. Faults take their time: one kind of server now, the others in the long run."""
    return healthy(servers[request.param])


def healthy(server: RedisServer) -> RedisServer:
    if not server.is_running:
        server.start()
    server.command("FLUSHALL")
    return begun(server, "faults")


async def do(server: RedisServer, *words: str | int) -> None:
    """A command on the server itself, off the event loop."""
    await asyncio.get_running_loop().run_in_executor(None, lambda: server.command(*map(str, words)))


def check(load: Load, pools: list[Pool], *, at_least: int = 100, limit: int = CAPACITY) -> None:
    assert load.admitted > at_least
    assert load.peak <= limit
    assert set(load.refused) <= {"store_unavailable"}
    assert all(load.by_pool[index] for index in range(len(pools)))


# -- replicas that die or hang


@pytest.mark.long
@pytest.mark.parametrize("more_s", [0, pytest.param(30, marks=pytest.mark.soak)])
async def test_a_stopped_replica_loses_its_leases_within_twelve_seconds_and_registers_them_again(
    server: RedisServer, more_s: float
) -> None:
    command = ["-m", "tests.pools.replica", server.url, "faults", "2", "30"]
    async with child(*command) as process, replicas(simple(tokens=100), [server.url]) as (pool,):
        assert await line(process) == "holding"
        process.send_signal(signal.SIGSTOP)  # as a killed one: it says nothing more
        stopped_s = time.monotonic()
        waiting = await pool.enter(ask(tokens=100))
        assert waiting.grant is None
        await asyncio.wait_for(waiting.wait(), 12)
        assert 8 < time.monotonic() - stopped_s < 12
        await asyncio.sleep(more_s)
        process.send_signal(signal.SIGCONT)
        await until(lambda: held(pool) == 160, 60, "the two leases are registered again")
        behind = await pool.enter(ask(tokens=50))
        waiting.settle()
        await until(lambda: held(pool) == 60, 60)
        assert behind.grant is None  # 60 are held, and 50 do not fit beside them
        for left in (1, 0):
            await settle_one(process)
            assert await line(process) == f"settled, shared, own {left}"
        await asyncio.wait_for(behind.wait(), 60)
        behind.settle()
        await nothing_left([pool])


# -- a store that loses what it had


async def test_a_flushed_store_is_right_again_within_a_heartbeat(server: RedisServer) -> None:
    async with replicas(policy(), [server.url] * 3) as pools:
        idle = await pools[2].enter(ask(tokens=40))
        load = Load(pools[:2])
        async with load.going_on(30):
            await asyncio.sleep(0.5)
            await do(server, "FLUSHALL")
            flushed_s = time.monotonic()
            await until(lambda: store_of(pools[0])["replicas"] == 3, 60, "three replicas")
            assert time.monotonic() - flushed_s < 3  # the idle one came with its heartbeat
            before = load.admitted
            await until(lambda: load.admitted > before + 100, 60, "admits again")
        check(load, pools[:2], limit=CAPACITY - 40)
        assert idle.settle()
        await nothing_left(pools)


async def test_forgotten_scripts_are_loaded_again(server: RedisServer) -> None:
    async with replicas(policy(), [server.url] * 2) as pools:
        load = Load(pools)
        async with load.going_on(30):
            for _ in range(5):
                await asyncio.sleep(0.1)
                await do(server, "FUNCTION", "FLUSH")
        check(load, pools)
        assert load.refused == {}
        await nothing_left(pools)


async def test_a_restarted_server_that_is_empty(server: RedisServer) -> None:
    async with replicas(policy(), [server.url] * 3) as pools:
        load = Load(pools)
        async with load.going_on(30):
            await asyncio.sleep(0.5)
            server.restart()
            await recovered(pools)
            await asyncio.sleep(1)
        check(load, pools)
        await nothing_left(pools)


# -- a store that is away


@pytest.mark.hasty
@pytest.mark.long
async def test_a_paused_store_divides_the_pool_and_never_exceeds_it(server: RedisServer) -> None:
    """Three busy replicas, of which one asks for most: it holds more than its part when the store falls silent."""
    async with replicas(policy(), [server.url] * 3) as pools:
        load = Load([pools[0], pools[1], pools[2], pools[0], pools[0]])
        async with load.going_on(50):
            await until(lambda: load.admitted > 100)
            server.pause()
            await until(lambda: all(pool.status.state.value == "divided" for pool in pools), 60, "divided")
            before = load.admitted
            await until(lambda: load.admitted > before + 200, 60, "goes on without the store")
            assert all(pool.readiness() == () and "its part of the pool is" in pool.notices()[0] for pool in pools)
            server.resume()
            await recovered(pools)
            before = load.admitted
            await until(lambda: load.admitted > before + 100, 60, "and with it")
        check(load, pools)
        assert load.refused == {}
        await nothing_left(pools)


async def test_the_log_says_once_that_the_store_is_lost_and_once_that_it_is_back(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with replicas(policy(), [server.url]) as (pool,):
        with caplog.at_level(logging.INFO, "sidecar.store"):
            server.kill()
            await until(lambda: pool.status.state.value == "divided", 60)
            await asyncio.sleep(1.5)  # several attempts
            server.restart()
            await recovered([pool])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "store lost, pool faults is divided" in lines[0]
    assert "store is back after" in lines[1]


# -- a network that plays tricks


@pytest.mark.hasty
@pytest.mark.parametrize("fault", ["drop", "cut", "delay", "swallow"])
async def test_a_bad_network(server: RedisServer, fault: str) -> None:
    async with FaultProxy(server.host, server.port) as proxy, replicas(policy(), [proxy.url(), server.url]) as pools:
        load = Load(pools)
        async with load.going_on(30):
            for turn in range(6):
                await asyncio.sleep(0.15)
                spoil(proxy, fault, turn)
            await asyncio.sleep(1)
            proxy.delay_s, proxy.swallow_replies = 0, False
            await recovered(pools)
            await asyncio.sleep(0.3)
        check(load, pools)
        await nothing_left(pools)


def spoil(proxy: FaultProxy, fault: str, turn: int) -> None:
    if fault == "drop":
        proxy.drop_connections()
    elif fault == "cut":
        proxy.cut_reply_after(3 + 7 * turn)
    elif fault == "delay":
        proxy.delay_s = 0.1 * turn  # up to half a second: longer than a call may take
    else:
        proxy.swallow_replies = turn % 2 == 0


@pytest.mark.long
async def test_a_subscription_that_died_silently_costs_at_most_a_heartbeat(server: RedisServer) -> None:
    async with FaultProxy(server.host, server.port) as proxy, replicas(policy(), [proxy.url(), server.url]) as pools:
        await asyncio.sleep(0.1)
        proxy.only_subscribers, proxy.swallow_replies = True, True
        running = await pools[1].enter(ask(tokens=CAPACITY))
        waiting = await pools[0].enter(ask(tokens=CAPACITY))
        running.settle()
        settled_s = time.monotonic()
        await asyncio.wait_for(waiting.wait(), 2.5)
        assert time.monotonic() - settled_s > 0.2  # it was not heard at once
        # And it is noticed: the pool subscribes anew.
        proxy.swallow_replies = False
        proxy.drop_connections()
        waiting.settle()
        await nothing_left(pools)


async def test_grants_for_another_replica_are_heard_at_once(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a heartbeat, which would tell of them too."""
    monkeypatch.setattr(RedisLink, "heartbeat_us", 600_000_000)
    monkeypatch.setattr(link, "ledger_library", patient_library)
    monkeypatch.setattr(link, "SILENT_SUBSCRIPTION_S", 600.0)  # else it listens anew, and misses a grant
    async with replicas(policy(), [server.url] * 2) as pools:
        await until(lambda: len(server.command("PUBSUB", "CHANNELS", "*")) == 3, what="each listens")
        for _ in range(5):
            running = await pools[1].enter(ask(tokens=CAPACITY))
            waiting = await pools[0].enter(ask(tokens=CAPACITY))
            await asyncio.wait_for(running.wait(), 60)  # for the one before, which is told with the next call
            assert running.settle()
            await asyncio.wait_for(waiting.wait(), 60)
            assert waiting.settle()
        await nothing_left(pools)


async def test_a_replica_whose_clock_is_ahead_sees_no_difference(server: RedisServer) -> None:
    ahead = lambda: monotonic_us() + 5_000_000  # noqa: E731
    async with replicas(policy(), [server.url] * 2, clocks=[monotonic_us, ahead]) as pools:
        load = Load(pools, held_s=(0.01, 0.01))
        async with load.going_on(40):
            await asyncio.sleep(1.5)
            running = [await pool.enter(ask(tokens=10)) for pool in pools]
            for lease in running:
                grant = await asyncio.wait_for(lease.wait(), 60)
                assert grant.queue_wait_us < 4_000_000, "not what the clocks differ by"
                lease.settle()
        check(load, pools)
        assert 0.8 < load.by_pool[0] / load.by_pool[1] < 1.25
        await nothing_left(pools)


# -- other ways to run a store


@pytest.mark.long
async def test_a_replica_that_is_promoted_under_load(tmp_path: Path) -> None:
    with sentinel(first_binary(), tmp_path) as group:
        async with replicas(policy(), [group.url] * 2) as pools:
            load = Load(pools)
            async with load.going_on(30):
                await asyncio.sleep(0.5)
                group.master.kill()
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(None, group.wait_master_is_not, group.master.port)
                await recovered(pools)
                before = load.admitted
                await until(lambda: load.admitted > before + 50, 60, "admits again")
            check(load, pools)
            await nothing_left(pools)


@pytest.mark.long
async def test_a_cluster_of_three_masters(tmp_path: Path) -> None:
    with cluster(first_binary(), tmp_path) as nodes:
        async with replicas(policy(), [nodes.url] * 2) as pools:
            load = Load(pools)
            async with load.going_on(30):
                await asyncio.sleep(1)
            check(load, pools)
            assert load.refused == {}
            await nothing_left(pools)


async def test_a_socket_and_a_password(tmp_path: Path) -> None:
    with RedisServer(first_binary(), tmp_path, password="s3cr3t/:@", unix=True) as server:
        urls = [f"redis://:s3cr3t%2F%3A%40@127.0.0.1:{server.port}/0", f"unix://:s3cr3t%2F%3A%40@{server.socket_path}"]
        async with replicas(policy(), urls) as pools:
            load = Load(pools)
            async with load.going_on(20):
                await asyncio.sleep(0.3)
            check(load, pools, at_least=20)
            await nothing_left(pools)


@needs_openssl
@pytest.mark.parametrize("kind", SERVERS)
async def test_a_server_that_speaks_tls(kind: str, tmp_path: Path) -> None:
    server = started_with_tls(BINARIES.get(kind) or first_binary(), tmp_path)
    try:
        trusted = f"?ssl_ca_certs={tmp_path / 'certificate.pem'}"
        async with replicas(policy(), [f"rediss://127.0.0.1:{server.port}/0{trusted}"] * 2) as pools:
            load = Load(pools)
            async with load.going_on(20):
                await asyncio.sleep(0.3)
            check(load, pools, at_least=20)
            await nothing_left(pools)
        async with replicas(policy(), [f"rediss://127.0.0.1:{server.port}/0"]) as (pool,):
            assert "certificate" in pool.readiness()[0].lower()  # no one vouches for it
    finally:
        server.kill()


async def test_a_wrong_password_is_said_without_showing_it(tmp_path: Path) -> None:
    with RedisServer(first_binary(), tmp_path, password="right") as server:
        wrong = f"redis://:wrongpassword@127.0.0.1:{server.port}/0"
        async with replicas(policy(), [wrong], on_loss=StoreLoss.CLOSED) as (pool,):
            (reason,) = pool.readiness()
            assert "wrongpassword" not in reason
            assert "WRONGPASS" in reason or "Authentication" in reason


# -- helpers


class child:  # noqa: N801 - reads like the function it stands for
    """A replica in a process of its own, killed at the end."""

    def __init__(self, *arguments: str) -> None:
        self.arguments = arguments

    async def __aenter__(self) -> asyncio.subprocess.Process:
        import sys

        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(sys.executable, *self.arguments, stdin=pipe, stdout=pipe)
        return self.process

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()


async def settle_one(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    await process.stdin.drain()


def held(pool: Pool) -> int:
    """What the whole pool holds, as this replica last heard."""
    state: Any = pool.state()
    return sum(int(tier["held"]["tokens"]) for tier in state["tiers"])
