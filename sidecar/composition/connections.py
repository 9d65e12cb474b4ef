"""Membership in a shared pool, for any process: a Celery or Ray worker, a gRPC server, a batch driver.

The process becomes a replica of the pool, as a server with the middleware is one, without serving anything. So all that
holds for replicas holds for it: its part of the pool while the store is lost, changes of the policy's files, `sidecar
top`, traces and metrics where the process has set them up.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from starlette.types import ASGIApp

from sidecar.app import AdmissionMiddleware
from sidecar.composition.one_pool import load_given
from sidecar.composition.stores import find_store
from sidecar.leases import Admission, ThreadAdmission
from sidecar.leases.lease_request import NoEngineHere
from sidecar.leases.threads import LoopThread
from sidecar.policy.model import Policy
from sidecar.policy.store import STORE_VARIABLE, store_address
from sidecar.proxy.proxy import ReverseProxy
from sidecar.server import CannotServe
from sidecar.server.app_lifespan import AppLifespan


@asynccontextmanager
async def connect(
    store: str | None = None, *, policy: str | Path | Policy | None = None, engine: str | None = None
) -> AsyncIterator[Admission]:
    """Joins the pool of a policy: `async with sidecar.connect("redis://host", policy="policies/") as admission`.

    `store` is an address as in the policy; without it SIDECAR_STORE or the policy's own `store` counts, as for
    a server. `policy` is a file, a folder with `policy.yaml` in it, or a loaded `Policy`; without it SIDECAR_POLICY
    says where it is. `engine` is the engine's address, where its state should count here, too: nothing is admitted
    while it is down. A policy whose capacity comes from the engine needs it. Where the policy names its engines, each
    lease has an `engine_url`.

    At the end of the block all leases are given back. Raises ValueError (PolicyError among them) for a policy or an
    address that cannot be used. A store that cannot be reached does not raise: `on_store_loss` says what holds then.
    """
    # Outside of the loop: there a mistake is raised, and no file is read in between.
    middleware = await asyncio.to_thread(_middleware, store, policy, engine)
    lifespan = AppLifespan(middleware)
    try:
        try:
            await lifespan.start()
        except CannotServe as failure:
            raise ValueError(str(failure)) from None
        yield middleware.admission
    finally:
        if lifespan.is_running:
            middleware.controller.drain()
            middleware.controller.watchdog.give_up()
        ending = asyncio.ensure_future(lifespan.end())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending  # once more would cut it off
            raise


def connect_threads(
    store: str | None = None, *, policy: str | Path | Policy | None = None, engine: str | None = None
) -> ThreadAdmission:
    """`connect` for plain threads. Ends with the `with` block that it is used in, or with `close`.

    Connect in each process, after a fork. Where the process ends without either, the pool is informed at its end.
    """
    thread, connection = LoopThread(), connect(store, policy=policy, engine=engine)
    try:
        admission = thread.call(connection.__aenter__)
    except BaseException:
        thread.stop()
        raise
    return ThreadAdmission(admission, thread, partial(connection.__aexit__, None, None, None))


def _middleware(store: str | None, given: str | Path | Policy | None, engine: str | None) -> AdmissionMiddleware:
    """The middleware of a process that serves nothing. Raises ValueError."""
    policy, files = load_given(given)
    if store is not None:
        policy = replace(policy, store=store_address(store))
        if find_store(policy, os.environ) != policy.store:
            raise ValueError(f"{STORE_VARIABLE} names another store than the call of `connect`: leave one of them out")
    elif find_store(policy, os.environ) is None:
        raise ValueError(
            "there is no pool to join, as the policy has no store: give its address, such as redis://HOST:6379/0, to "
            f"`connect`, in {STORE_VARIABLE}, or as the policy's `store`; code in the server's own process takes its "
            "leases from the middleware's `admission`"
        )
    return AdmissionMiddleware(_app(policy, engine), policy, files=files, is_shown=True, retry_handlers=True)


def _app(policy: Policy, engine: str | None) -> ASGIApp | None:
    if policy.engines is None:
        if engine is None and policy.engine_capacity is not None:
            raise ValueError(
                "the policy's capacity comes from the engine, which this process must read, too: give its address as "
                "`engine=`"
            )
        return NoEngineHere() if engine is None else ReverseProxy(engine)
    if policy.engines.mounted:
        raise ValueError(
            "the policy's engines are mounted (`engines: {mounted: true}`): only a process that is one of them takes "
            "leases, from its middleware's `admission`"
        )
    if engine is not None:
        raise ValueError("the policy names its engines (`engines:`): leave out `engine=`")
    return None
