"""Puts the parts together: the only place that knows them all, telemetry included."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

from sidecar.asgi.failed_start import FailedStart
from sidecar.asgi.lifespan import PoolLifespan
from sidecar.asgi.middleware import Admission
from sidecar.asgi.types import ASGIApp
from sidecar.engines import dialect_of
from sidecar.policy.loading import load
from sidecar.policy.policy import Policy
from sidecar.policy.store import store_address
from sidecar.pools import LocalPool, Pool
from sidecar.telemetry import SpanObserver, StoreMetrics
from sidecar.tokens import Estimator, TokenizerCounter

POLICY_VARIABLE = "SIDECAR_POLICY"
STORE_VARIABLE = "SIDECAR_STORE"


class AdmissionMiddleware(Admission):
    """Admission control around an ASGI app, in one line: `app.add_middleware(AdmissionMiddleware, policy="policies/")`.

    `policy` is a file, a folder with `policy.yaml` in it, or a loaded `Policy`; without one the environment variable
    `SIDECAR_POLICY` says where it is, so that a server which constructs its middleware with `app` alone can use this
    class too. `SIDECAR_STORE` goes before the policy's own `store`. Raises `PolicyError` with every mistake of the
    files, and ValueError where there are none; a server that makes its middleware only when it starts is told that the
    start failed instead.
    """

    def __init__(self, app: ASGIApp, policy: str | Path | Policy | None = None) -> None:
        try:
            loaded = policy if isinstance(policy, Policy) else load(policy or _policy_path(os.environ))
            pool = _pool(loaded, os.environ)
            estimator = Estimator(None if loaded.tokenizer is None else TokenizerCounter(loaded.tokenizer))
        except ValueError as mistake:
            if not _is_in_event_loop():
                raise
            self.app, self.endpoints = FailedStart(mistake), {}
            return
        super().__init__(
            app if isinstance(pool, LocalPool) else PoolLifespan(app, pool),
            policy=loaded,
            pool=pool,
            dialect=dialect_of(loaded.engine, loaded.carrier),
            estimator=estimator,
            observer=SpanObserver(),
        )


def _pool(policy: Policy, environment: Mapping[str, str]) -> Pool:
    """Where the leases live. Raises ValueError for a store's address that cannot be read."""
    written = environment.get(STORE_VARIABLE)
    try:
        store = store_address(written) if written else policy.store
    except ValueError as mistake:
        raise ValueError(f"{STORE_VARIABLE}: {mistake}") from None
    if store is None:
        return LocalPool(policy)
    from sidecar.pools.redis import RedisPool, connector

    return RedisPool(policy, connector(store, policy.pool), observer=StoreMetrics(policy.pool))


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _policy_path(environment: Mapping[str, str]) -> str:
    path = environment.get(POLICY_VARIABLE)
    if not path:
        raise ValueError(f"no policy: pass `policy=` or set {POLICY_VARIABLE} to a policy file or its folder")
    return path
