"""The pool of many processes. Its state is in Redis (or Valkey), and its rules are one Lua script there."""

from sidecar.pools.redis.connection import Connect, connector, ledger_connector
from sidecar.pools.redis.fleet import RedisFleetPool
from sidecar.pools.redis.link import RedisLink
from sidecar.pools.redis.pool import RedisPool

__all__ = [
    "Connect",
    "RedisFleetPool",
    "RedisLink",
    "RedisPool",
    "connector",
    "ledger_connector",
]
