"""Pools that replicas share through a store, as the app makes them, and stores in which a pool has begun."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from sidecar.policy.compiler import load, shipped_policies
from sidecar.policy.model import Policy
from sidecar.policy.store import store_address
from sidecar.pools import Pool
from sidecar.pools.redis import RedisLink, ledger_connector, script
from sidecar.pools.redis.connection import ledger_key
from sidecar.pools.redis.link import RoundTripObserver
from sidecar.pools.redis.script import Library
from tests.support.redis_servers import RedisServer, first_binary


def shared_pool(policy: Policy, server: RedisServer, took: RoundTripObserver | None = None) -> Pool:
    """One replica's pool, with its ledger in this server. `took`: told how long each call takes."""
    connect = ledger_connector(store_address(server.url), policy.pool)
    return Pool(policy, link=RedisLink(connect, policy.pool, took=took))


@cache
def patient_library() -> Library:
    """The ledger where a test's clock leaps: silence is nothing, nobody dies, and no epoch begins on hold."""
    texts = script.texts()
    for name, value in {"LOST_US": 10**15, "DEAD_US": 10**15, "HOLD_US": 0}.items():
        texts["state"], found = re.subn(rf"(local {name} = )\d+", rf"\g<1>{value}", texts["state"])
        assert found == 1
    return script.library(texts)


def begun(server: RedisServer, pool: str = "default") -> RedisServer:
    """The server, after a replica of this pool has been there and has left.

    The first one in an empty store is on hold for `HOLD_US`, as others may have been there before: 2.2 s, which a test
    of something else need not wait for. Where the pool is there already, nothing is done.
    """
    if server.command("EXISTS", ledger_key(pool)):
        return server

    async def come_and_go() -> None:
        connect = ledger_connector(store_address(server.url), pool)
        first = Pool(load(shipped_policies()), link=RedisLink(connect, pool, library=patient_library()))
        await first.open()
        await first.close()

    with ThreadPoolExecutor(1) as threads:  # the caller may be in an event loop
        threads.submit(asyncio.run, come_and_go()).result()
    return server


@contextmanager
def begun_store(folder: Path, pool: str = "default") -> Iterator[RedisServer]:
    """A store of the test's own, in which this pool has begun."""
    with RedisServer(first_binary(), folder) as server:
        yield begun(server, pool)
