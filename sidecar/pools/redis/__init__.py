"""The pool's ledger in Redis or Valkey, for many replicas."""

from sidecar.pools.redis.connection import Connect, ledger_connector, reach_for
from sidecar.pools.redis.link import RedisLink

__all__ = ["Connect", "RedisLink", "ledger_connector", "reach_for"]
