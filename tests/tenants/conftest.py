"""The servers of the pools' tests."""

from tests.pools.conftest import redis_server, servers

__all__ = ["redis_server", "servers"]
