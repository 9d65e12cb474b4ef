"""A replica in a process of its own, to be killed: it holds leases, and many requests wait in it.

`python -m tests.pools.crowded URL POOL LEASES WAITING` prints `waiting`, and then waits to be killed.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

from sidecar.policy.store import store_address
from sidecar.pools.redis import RedisPool, connector
from tests.pools.harness import ask, simple
from tests.pools.replica import say


async def main(url: str, name: str, leases: int, waiting: int) -> None:
    policy = replace(simple(tokens=100), pool=name)
    pool = RedisPool(policy, connector(store_address(url), name))
    await pool.open()
    held = [await pool.enter(ask(tokens=1)) for _ in range(leases)]
    behind = await asyncio.gather(*(pool.enter(ask(tier=1, tokens=100)) for _ in range(waiting)))
    assert all(lease.grant for lease in held)
    assert not any(lease.grant for lease in behind)
    say("waiting")
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
