"""Ports for servers that a test starts."""

from __future__ import annotations

from tests.support.redis_servers import free_port, is_free


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that no one listens on."""
    for _ in range(100):
        first = free_port()
        if all(is_free(first + more) for more in range(1, count)):
            return first
    raise AssertionError(f"no {count} free ports in a row")
