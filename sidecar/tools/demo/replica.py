"""One of several sidecar replicas in front of the same engine: a process that runs what `sidecar serve` runs.

`python -m sidecar.tools.demo.replica page|admission POLICY POOL ENGINE` connects to the store in `SIDECAR_STORE`, and
prints the two ports it listens on, or one line that says why the store cannot hold the pool `POOL`. With `page` the
second port has the live page. No argument holds the store's address: it may contain a password, and every user of the
machine can read arguments.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from dataclasses import replace

from sidecar.app import AdmissionMiddleware
from sidecar.events import StoreState
from sidecar.policy.compiler import load
from sidecar.policy.store import STORE_VARIABLE, store_address
from sidecar.pools import Pool
from sidecar.proxy.proxy import ReverseProxy
from sidecar.server import server
from sidecar.tools.demo.server import admin_pages, end_with_parent, say, serve

STORE_WITHIN_S = 2.0
"""Some attempts to reach the store: where many processes start at once, the first may be too slow."""


def main(kind: str, policy_path: str, pool: str, engine: str) -> None:
    """Serves until it is terminated."""
    end_with_parent()
    has_page = kind == "page"
    policy = replace(load(policy_path), pool=pool, usage_days=0)  # the store keeps nothing of the demo
    server.run(_serve(AdmissionMiddleware(ReverseProxy(engine), policy, is_shown=has_page), has_page=has_page))


async def _serve(middleware: AdmissionMiddleware, *, has_page: bool) -> None:
    controller = middleware.controller
    if reason := await _why_not_shared(controller.pool):
        say(f"the store {store_address(os.environ[STORE_VARIABLE])} cannot be used: {reason}")
        await controller.pool.close()
        return
    await serve(middleware, admin_pages(middleware, has_page=has_page), middleware)


async def _why_not_shared(pool: Pool) -> str | None:
    """Connects. None when the store has answered, otherwise what it is that does not work, in one line."""
    assert isinstance(pool, Pool)
    logging.disable(logging.WARNING)  # every replica would say it; the demo does so once
    deadline_s = time.monotonic() + STORE_WITHIN_S
    await pool.open()
    while pool.status.state is not StoreState.SHARED:
        if time.monotonic() > deadline_s:
            return pool.status.reason
        await asyncio.sleep(0.1)
    logging.disable(logging.NOTSET)
    return None


if __name__ == "__main__":
    main(*sys.argv[1:5])
