"""The pool of many processes: its state and its rules live in Redis (or Valkey), in one Lua script."""

from sidecar.pools.redis.connection import Connect, connector
from sidecar.pools.redis.pool import RedisPool

__all__ = ["Connect", "RedisPool", "connector"]
