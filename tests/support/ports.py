"""Ports for servers that a test starts."""

from __future__ import annotations

import socket

from tests.support.redis_servers import HOST, free_port


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on."""
    for _ in range(100):
        first = free_port()
        if all(_is_free(first + more) for more in range(1, count)):
            return first
    raise AssertionError(f"no {count} free ports in a row")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
