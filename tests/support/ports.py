"""Ports for servers that a test starts."""

from __future__ import annotations

import random

from tests.support.redis_servers import is_free


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that no one listens on.

    They are none of those that a system gives for port 0: another test would take them meanwhile.
    """
    for _ in range(100):
        first = random.randrange(10_240, 32_000)
        if all(is_free(first + more) for more in range(count)):
            return first
    raise AssertionError(f"no {count} free ports in a row")
