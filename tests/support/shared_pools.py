"""Pools that replicas share through a store, as the app makes them."""

from __future__ import annotations

from sidecar.policy.model import Policy
from sidecar.policy.store import store_address
from sidecar.pools import Pool
from sidecar.pools.redis import RedisLink, ledger_connector
from sidecar.pools.redis.link import RoundTripObserver
from tests.support.redis_servers import RedisServer


def shared_pool(policy: Policy, server: RedisServer, took: RoundTripObserver | None = None) -> Pool:
    """One replica's pool, with its ledger in this server. `took`: told how long each call takes."""
    connect = ledger_connector(store_address(server.url), policy.pool)
    return Pool(policy, link=RedisLink(connect, policy.pool, took=took))
