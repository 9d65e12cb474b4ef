"""What replicas tell each other through their pool: the contract on every pool, and what goes wrong in a store."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.events import StoreState
from sidecar.pools import Pool, StoreError
from sidecar.pools.base import MOST_REPORT_BYTES
from sidecar.pools.redis.connection import ledger_key
from tests.pools.harness import Harness, ask, simple
from tests.pools.load import beat, heard_of_each_other
from tests.pools.load import replica as pool_at
from tests.support.redis_servers import RedisServer, first_binary
from tests.support.shared_pools import begun
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
_names = itertools.count(1)
in_a_store = pytest.mark.parametrize("harness", ["shared"], indirect=True)
"""One process has no others."""


async def reports(pool: Pool, own: bytes = b"own") -> list[bytes]:
    return sorted(shared.report for shared in (await pool.share(own)).values())


async def test_a_pool_tells_no_replica_of_itself(harness: Harness) -> None:
    pool = await harness.pool(simple())
    assert await reports(pool) == []
    assert await reports(pool) == []


async def test_replicas_of_one_pool_hear_each_other(harness: Harness) -> None:
    first, second = await harness.pool(simple()), await harness.pool(simple())
    anything = bytes(range(256)) * 4
    await first.share(anything)
    if not first._link.is_shared:  # type: ignore[attr-defined]
        assert await reports(second) == []  # two pools, not one
        return
    ((name, heard),) = (await second.share(b"")).items()
    assert (name, heard.report) == (first.name, anything)  # type: ignore[attr-defined]
    assert 0 <= heard.age_s < 5
    assert await reports(first) == [b""]
    await first.share(b"newer")
    assert await reports(second) == [b"newer"]


@in_a_store
async def test_a_replica_that_ends_takes_its_report_with_it(harness: Harness) -> None:
    first, second = await harness.pool(simple()), await harness.pool(simple())
    await first.share(b"first")
    await first.close()
    assert await reports(second) == []


@in_a_store
async def test_a_report_that_is_too_long_is_refused_and_the_pool_goes_on(harness: Harness) -> None:
    pool = await harness.pool(simple())
    with pytest.raises(StoreError, match="more than"):
        await pool.share(bytes(MOST_REPORT_BYTES + 1))
    assert (await pool.enter(ask())).grant is not None
    assert await reports(pool) == []


# -- in a real store


@pytest.fixture
def store(servers: dict[str, RedisServer]) -> RedisServer:
    return servers[first_binary().name]


@pytest.fixture
def spare(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(first_binary(), tmp_path) as server:
        yield server


def replica(server: RedisServer, name: str) -> Pool:
    return replica_at(server.url, name)


def replica_at(url: str, name: str) -> Pool:
    return pool_at(url, simple(), name=name)


async def test_a_silent_replica_is_left_out_and_nothing_stays(store: RedisServer) -> None:
    name = f"silent-{next(_names)}"
    pool, key = replica(begun(store, name), name), f"{ledger_key(name)}:reports"
    await pool.open()
    await until(lambda: pool.status.state is StoreState.SHARED, 60)
    await pool.share(b"own")
    long_ago = int(store.command("TIME")[0]) * 1_000_000 - 10_500_000
    just_now = long_ago + 1_500_000
    store.command("HSET", key, "dead", f"{long_ago} dead", "slow", f"{just_now} slow", "broken", "no time at all")
    store.command("HSET", key, "long", f"{just_now} {'x' * (MOST_REPORT_BYTES + 1)}")
    others = await pool.share(b"own")
    assert {who: shared.report for who, shared in others.items()} == {"slow": b"slow"}
    assert 9 <= others["slow"].age_s < 10
    assert sorted(store.command("HKEYS", key)) == sorted([pool.name, "slow"])
    assert 5_000 < store.command("PTTL", key) <= 10_000
    await pool.close()


async def test_a_lost_store_is_said_and_admission_goes_on(spare: RedisServer) -> None:
    pool, other = replica(begun(spare, "lost"), "lost"), replica(spare, "lost")
    with pytest.raises(StoreError, match="no attempt has ended yet"):
        await pool.share(b"own")
    await pool.open()
    await other.open()
    await until(lambda: pool.status.state is other.status.state is StoreState.SHARED, 60)
    await heard_of_each_other([pool, other])
    await other.share(b"other")
    assert await reports(pool) == [b"other"]
    spare.kill()
    with pytest.raises(StoreError):
        await pool.share(b"own")
    beat(other)
    assert (await pool.enter(ask())).grant is not None
    await until(lambda: pool.status.state is other.status.state is StoreState.DIVIDED, 60)
    with pytest.raises(StoreError, match="store is divided"):
        await pool.share(b"own")
    spare.restart()
    await until(lambda: pool.status.state is other.status.state is StoreState.SHARED, 60)
    await other.share(b"back")
    assert await reports(pool) == [b"back"]
    await pool.close()
    await other.close()


async def test_a_store_that_hangs_while_a_report_is_on_its_way_loses_no_admission(store: RedisServer) -> None:
    """The report has a connection of its own: what waits there, waits there."""
    name = f"hangs-{next(_names)}"
    pool = replica(begun(store, name), name)
    await pool.open()
    await until(lambda: pool.status.state is StoreState.SHARED, 60)
    await pool.share(b"own")
    sharing = asyncio.ensure_future(pool.share(b"x"))
    await asyncio.sleep(0)
    sharing.cancel()
    await asyncio.wait((sharing,))
    lease = await pool.enter(ask())
    await asyncio.wait_for(lease.wait(), 60)
    assert pool.status.state.value == "shared"
    assert await reports(pool) == []
    await pool.close()
