"""The pool of many processes. Its state is in Redis (or Valkey), and its rules are one Lua script there."""

from sidecar.pools.redis.connection import Connect, connector, ledger_connector, tenants_connector, usage_connector
from sidecar.pools.redis.fleet import RedisFleetPool
from sidecar.pools.redis.link import RedisLink
from sidecar.pools.redis.pool import RedisPool
from sidecar.pools.redis.tenants import TenantRecords
from sidecar.pools.redis.usage import RedisUsage

__all__ = [
    "Connect",
    "RedisFleetPool",
    "RedisLink",
    "RedisPool",
    "RedisUsage",
    "TenantRecords",
    "connector",
    "ledger_connector",
    "tenants_connector",
    "usage_connector",
]
