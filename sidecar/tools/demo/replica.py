"""One of many sidecars before the same engine, a process of its own: what `sidecar serve` runs, on ports of its own.

`python -m sidecar.tools.demo.replica POLICY POOL ENGINE` connects to the store in `SIDECAR_STORE`, and prints the port on
which it listens, or else one line that says why the pool called `POOL` cannot be kept there. The store's address is in
no argument: it may hold a password, and everybody on the machine can read arguments.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from dataclasses import replace

from sidecar.admin.app import admin_app
from sidecar.app import STORE_VARIABLE, AdmissionMiddleware
from sidecar.events import StoreState
from sidecar.policy.compiler import load
from sidecar.policy.store import store_address
from sidecar.pools import Pool
from sidecar.pools.redis import RedisPool
from sidecar.proxy.proxy import ReverseProxy
from sidecar.server import server
from sidecar.tools.demo.server import end_with_parent

STORE_WITHIN_S = 2.0
"""Some attempts to reach the store: where many processes start at once, the first may be too slow."""
GRACE_S = 1.0
"""When a demo is over no request is under way; when it is broken off nobody waits for one."""


def main(policy_path: str, pool: str, engine: str) -> None:
    """Serves until it is terminated."""
    end_with_parent()
    door = AdmissionMiddleware(ReverseProxy(engine), replace(load(policy_path), pool=pool))
    server.run(_serve(door))


async def _serve(door: AdmissionMiddleware) -> None:
    if reason := await _why_not_shared(door.pool):
        _say(f"the store {store_address(os.environ[STORE_VARIABLE])} cannot be used: {reason}")
        await door.pool.close()
        return
    await server.serve(
        door,
        host="127.0.0.1",
        port=0,
        admin=admin_app(state=door.state, readiness=door.readiness, notices=door.notices),
        admin_host="127.0.0.1",
        admin_port=0,
        drain=door.drain,
        drained=door.drained,
        grace_s=GRACE_S,
        announce=lambda line: _say(line.rpartition(":")[2]),  # the door's port comes first
    )


async def _why_not_shared(pool: Pool) -> str | None:
    """Connects. None when the store has answered, otherwise what it is that does not work, in one line."""
    assert isinstance(pool, RedisPool)
    logging.disable(logging.WARNING)  # every replica would say it; the demo does so once
    deadline_s = time.monotonic() + STORE_WITHIN_S
    await pool.open()
    while pool.standing.state is not StoreState.SHARED:
        if time.monotonic() > deadline_s:
            return pool.standing.reason
        await asyncio.sleep(0.1)
    logging.disable(logging.NOTSET)
    return None


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:4])
