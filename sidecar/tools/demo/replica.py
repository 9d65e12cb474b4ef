"""One of several sidecar replicas in front of the same engine: a process that runs what `sidecar serve` runs.

`python -m sidecar.tools.demo.replica POLICY POOL ENGINE` connects to the store in `SIDECAR_STORE`, and prints the port
it listens on, or one line that says why the store cannot hold the pool `POOL`. No argument holds the store's address:
it may contain a password, and every user of the machine can read arguments.
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
"""When a demo is over no request is under way; when it is broken off no client waits for one."""


def main(policy_path: str, pool: str, engine: str) -> None:
    """Serves until it is terminated."""
    end_with_parent()
    middleware = AdmissionMiddleware(ReverseProxy(engine), replace(load(policy_path), pool=pool), is_shown=True)
    server.run(_serve(middleware))


async def _serve(middleware: AdmissionMiddleware) -> None:
    controller = middleware.controller
    if reason := await _why_not_shared(controller.pool):
        _say(f"the store {store_address(os.environ[STORE_VARIABLE])} cannot be used: {reason}")
        await controller.pool.close()
        return
    await server.serve(
        middleware,
        host="127.0.0.1",
        port=0,
        admin=admin_app(state=controller.state, readiness=controller.readiness, notices=controller.notices),
        admin_host="127.0.0.1",
        admin_port=0,
        drain=controller.drain,
        drained=controller.drained,
        grace_s=GRACE_S,
        announce=lambda line: _say(line.rpartition(":")[2]),  # the sidecar's port comes first
    )


async def _why_not_shared(pool: Pool) -> str | None:
    """Connects. None when the store has answered, otherwise what it is that does not work, in one line."""
    assert isinstance(pool, RedisPool)
    logging.disable(logging.WARNING)  # every replica would say it; the demo does so once
    deadline_s = time.monotonic() + STORE_WITHIN_S
    await pool.open()
    while pool.status.state is not StoreState.SHARED:
        if time.monotonic() > deadline_s:
            return pool.status.reason
        await asyncio.sleep(0.1)
    logging.disable(logging.NOTSET)
    return None


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:4])
