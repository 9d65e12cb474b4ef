"""What replicas tell each other through their pool: the contract on every pool, and what goes wrong in a store."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sidecar.events import StoreState
from sidecar.pools import Merge, PeerReport, PeerReports, Pool, StoreError
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


async def joined(reports: Mapping[str, PeerReport]) -> bytes:
    """The merged text of these tests: all reports, one after the other."""
    return b" ".join(sorted(one.report for one in reports.values()))


async def reports(pool: Pool, own: bytes = b"own") -> list[bytes]:
    return sorted(shared.report for shared in (await pool.share(own, joined)).each.values())


async def test_a_pool_tells_no_replica_of_itself(harness: Harness) -> None:
    pool = await harness.pool(simple())
    assert await reports(pool) == []
    assert await reports(pool) == []


async def test_replicas_of_one_pool_hear_each_other(harness: Harness) -> None:
    first, second = await harness.pool(simple()), await harness.pool(simple())
    anything = bytes(range(256)) * 4
    await first.share(anything, joined)
    if not first._link.is_shared:  # type: ignore[attr-defined]
        assert await reports(second) == []  # two pools, not one
        return
    ((name, heard),) = (await second.share(b"", joined)).each.items()
    assert (name, heard.report) == (first.name, anything)  # type: ignore[attr-defined]
    assert 0 <= heard.age_s < 5
    assert await reports(first) == [b""]
    await first.share(b"newer", joined)
    assert await reports(second) == [b"newer"]


@in_a_store
async def test_a_replica_that_ends_takes_its_report_with_it(harness: Harness) -> None:
    first, second = await harness.pool(simple()), await harness.pool(simple())
    await first.share(b"first", joined)
    await first.close()
    assert await reports(second) == []


@in_a_store
async def test_a_report_that_is_too_long_is_refused_and_the_pool_goes_on(harness: Harness) -> None:
    pool = await harness.pool(simple())
    with pytest.raises(StoreError, match="more than"):
        await pool.share(bytes(MOST_REPORT_BYTES + 1), joined)
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
    await pool.share(b"own", joined)
    long_ago = int(store.command("TIME")[0]) * 1_000_000 - 10_500_000
    just_now = long_ago + 1_500_000
    store.command("HSET", key, "dead", f"{long_ago} dead", "slow", f"{just_now} slow", "broken", "no time at all")
    store.command("HSET", key, "long", f"{just_now} {'x' * (MOST_REPORT_BYTES + 1)}")
    others = (await pool.share(b"own", joined)).each
    assert {who: shared.report for who, shared in others.items()} == {"slow": b"slow"}
    assert 9 <= others["slow"].age_s < 10
    assert sorted(store.command("HKEYS", key)) == sorted([pool.name, "slow"])
    assert 5_000 < store.command("PTTL", key) <= 10_000
    await pool.close()


async def test_a_lost_store_is_said_and_admission_goes_on(spare: RedisServer) -> None:
    pool, other = replica(begun(spare, "lost"), "lost"), replica(spare, "lost")
    with pytest.raises(StoreError, match="no attempt has ended yet"):
        await pool.share(b"own", joined)
    await pool.open()
    await other.open()
    await until(lambda: pool.status.state is other.status.state is StoreState.SHARED, 60)
    await heard_of_each_other([pool, other])
    await other.share(b"other", joined)
    assert await reports(pool) == [b"other"]
    spare.kill()
    with pytest.raises(StoreError):
        await pool.share(b"own", joined)
    beat(other)
    assert (await pool.enter(ask())).grant is not None
    await until(lambda: pool.status.state is other.status.state is StoreState.DIVIDED, 60)
    with pytest.raises(StoreError, match="store is divided"):
        await pool.share(b"own", joined)
    spare.restart()
    await until(lambda: pool.status.state is other.status.state is StoreState.SHARED, 60)
    await other.share(b"back", joined)
    assert await reports(pool) == [b"back"]
    await pool.close()
    await other.close()


async def test_a_store_that_hangs_while_a_report_is_on_its_way_loses_no_admission(store: RedisServer) -> None:
    """The report has a connection of its own: what waits there, waits there."""
    name = f"hangs-{next(_names)}"
    pool = replica(begun(store, name), name)
    await pool.open()
    await until(lambda: pool.status.state is StoreState.SHARED, 60)
    await pool.share(b"own", joined)
    sharing = asyncio.ensure_future(pool.share(b"x", joined))
    await asyncio.sleep(0)
    sharing.cancel()
    await asyncio.wait((sharing,))
    lease = await pool.enter(ask())
    await asyncio.wait_for(lease.wait(), 60)
    assert pool.status.state.value == "shared"
    assert await reports(pool) == []
    await pool.close()


# -- many replicas: one merges for all

FEW = 8
"""Replicas up to which each reads all others' reports: see `sidecar.pools.redis.gossip`."""
LEASE_S = 4.0


@asynccontextmanager
async def opened(store: RedisServer, count: int) -> AsyncIterator[list[Pool]]:
    name = f"many-{next(_names)}"
    begun(store, name)
    pools = [replica(store, name) for _ in range(count)]
    try:
        await asyncio.gather(*(pool.open() for pool in pools))
        # On a busy machine some try again.
        await until(lambda: all(pool.status.state is StoreState.SHARED for pool in pools), 60)
        yield pools
    finally:
        await asyncio.gather(*(pool.close() for pool in pools))


async def round_of(pools: list[Pool], report: bytes = b"own") -> list[PeerReports]:
    return [await pool.share(report, joined) for pool in pools]


def merger_of(store: RedisServer, pool: Pool) -> str:
    return str(store.command("GET", f"{ledger_key(pool._sizes.policy.pool)}:merger") or "")


async def test_up_to_eight_replicas_read_each_other_and_one_more_has_one_of_them_merge(store: RedisServer) -> None:
    async with opened(store, FEW + 1) as pools:
        await round_of(pools[:FEW])
        heard = await round_of(pools[:FEW])
        assert [(len(one.each), one.merged) for one in heard] == [(FEW - 1, None)] * FEW
        await pools[FEW].share(b"newcomer", joined)  # the first that finds too many of them
        heard = await round_of(pools)
        assert [len(one.each) for one in heard] == [0] * FEW + [FEW]
        assert [one.merged.report for one in heard[:FEW] if one.merged] == [b"newcomer" + b" own" * FEW] * FEW
        assert all(0 <= one.merged.age_s < 5 for one in heard if one.merged)
        await pools[FEW].close()  # it takes the lease with it, and all are few again
        heard = await round_of(pools[:FEW])
        assert [(len(one.each), one.merged) for one in heard] == [(FEW - 1, None)] * FEW


@in_a_store
async def test_a_merger_that_ends_is_replaced_at_once(harness: Harness) -> None:
    pools = [await harness.pool(simple()) for _ in range(FEW + 3)]
    for pool in pools:
        await pool.share(b"own", joined)
    heard = [await pool.share(b"own", joined) for pool in pools]
    (merging,) = [pool for pool, one in zip(pools, heard, strict=True) if one.each]
    await merging.close()
    left = [pool for pool in pools if pool is not merging]
    heard = [await pool.share(b"new", joined) for pool in left]
    assert [len(one.each) for one in heard] == [FEW + 1, *[0] * (FEW + 1)]
    assert heard[-1].merged is not None
    assert heard[-1].merged.report == b"new" + b" own" * (FEW + 1)


MERGING = """
import asyncio, sys
from tests.pools.test_gossip import joined, replica_at

async def main():
    pool = replica_at(*sys.argv[1:])
    await pool.open()
    while True:
        heard = await pool.share(b"own", joined)
        print(len(heard.each), flush=True)
        await asyncio.sleep(0.2)

asyncio.run(main())
"""


@pytest.mark.long
async def test_a_merger_that_is_killed_is_replaced_when_its_lease_ends(store: RedisServer) -> None:
    async with opened(store, FEW + 1) as pools:
        await round_of(pools[:FEW])
        command = (sys.executable, "-c", MERGING, store.url, pools[0]._sizes.policy.pool)
        merging = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert merging.stdout is not None
        assert await merging.stdout.readline() == b"%d\n" % FEW  # the ninth
        await round_of(pools)
        before = merger_of(store, pools[0])
        assert before not in {pool.name for pool in pools}
        merging.kill()
        await merging.wait()
        killed_s, gaps = asyncio.get_running_loop().time(), 0
        while merger_of(store, pools[0]) in (before, ""):
            heard = await round_of(pools)
            gaps += sum(not one.each and one.merged is None for one in heard)
            waited_s = asyncio.get_running_loop().time() - killed_s
            assert waited_s < LEASE_S + 1
            await asyncio.sleep(0.1)
        assert waited_s > LEASE_S - 1
        assert merger_of(store, pools[0]) in {pool.name for pool in pools}
        assert gaps == 0  # its last text stays until there is another


@pytest.mark.long
async def test_a_merger_that_reads_and_cannot_merge_loses_its_lease(store: RedisServer) -> None:
    async def fails(_: Mapping[str, PeerReport]) -> bytes:
        raise ZeroDivisionError

    async def is_too_long(_: Mapping[str, PeerReport]) -> bytes:
        return bytes(MOST_REPORT_BYTES + 1)

    async with opened(store, FEW + 3) as pools:
        await round_of(pools)
        failures: list[tuple[type[Exception], Merge]] = [(ZeroDivisionError, fails), (StoreError, is_too_long)]
        for error, merge in failures:
            merging = next(pool for pool in pools if pool.name == merger_of(store, pool))
            for _ in range(2):
                with pytest.raises(error):
                    await merging.share(b"own", merge)
            lease_ms = store.command("PTTL", f"{ledger_key(merging._sizes.policy.pool)}:merger")
            assert lease_ms < LEASE_S * 1000
            await asyncio.sleep(lease_ms / 1000 + 0.05)
            heard = await round_of([pool for pool in pools if pool is not merging])
            assert len(heard[0].each) == FEW + 2
            assert merger_of(store, merging) != merging.name


async def test_a_merger_that_was_replaced_writes_nothing(store: RedisServer) -> None:
    async with opened(store, FEW + 1) as pools:
        *others, merging = pools
        await round_of(others)

        async def takes_too_long(_: Mapping[str, PeerReport]) -> bytes:
            store.command("SET", f"{ledger_key(merging._sizes.policy.pool)}:merger", others[0].name)
            return b"late"

        await merging.share(b"own", takes_too_long)
        assert (await merging.share(b"own", joined)).merged is None
        await others[0].share(b"own", joined)
        heard = await merging.share(b"own", joined)
        assert heard.merged is not None
        assert heard.merged.report != b"late"


async def test_a_text_that_is_too_long_or_too_old_is_read_by_none(store: RedisServer) -> None:
    async with opened(store, FEW + 1) as pools:
        await round_of(pools)
        key = f"{ledger_key(pools[0]._sizes.policy.pool)}:merged"
        now_us = int(store.command("TIME")[0]) * 1_000_000
        texts = ("x", "", f"{now_us} {'x' * (MOST_REPORT_BYTES + 1)}", f"{now_us - 11_000_000} old")
        for text in texts:
            store.command("SET", key, text)
            assert await pools[0].share(b"own", joined) == PeerReports({}), text[:20]
        store.command("SET", key, f"{now_us} {'x' * MOST_REPORT_BYTES}")  # the control
        assert (await pools[0].share(b"own", joined)).merged is not None


async def test_a_flush_of_the_store_costs_a_round(store: RedisServer) -> None:
    async with opened(store, FEW + 4) as pools:
        await round_of(pools)
        store.command("FLUSHALL")
        await round_of(pools)
        heard = await round_of(pools)
        (merging,) = [one for one in heard if one.each]
        assert len(merging.each) == FEW + 3
        assert all(one.merged is not None for one in heard if one is not merging)


async def test_what_replicas_read_grows_with_their_number_and_not_with_its_square(spare: RedisServer) -> None:
    """Bytes per replica and round, each with a report of 4,000 bytes and a merged text of 16,000."""
    own, text = b"x" * 4_000, b"y" * 16_000

    async def merge(_: Mapping[str, PeerReport]) -> bytes:
        return text

    def sent() -> int:
        lines = spare.command("INFO", "stats").splitlines()
        return next(int(line.split(":")[1]) for line in lines if line.startswith("total_net_output_bytes:"))

    read = {}
    for count in (5, 20, 80):
        async with opened(spare, count) as pools:
            for _ in range(2):
                for pool in pools:
                    await pool.share(own, merge)
            before = sent()
            for pool in pools:
                await pool.share(own, merge)
            read[count] = (sent() - before) / count
    bound = len(own) + len(text) + 2_000  # one of them reads all reports, the others the text; and their heartbeats
    assert all(bytes_read <= bound for bytes_read in read.values()), read
    assert read[80] <= 1.1 * read[20], read
    assert read[80] < 80 * len(own) / 10, read  # where each reads all: 316,000
