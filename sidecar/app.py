"""Puts the parts together: the only place that knows them all, telemetry included."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from sidecar.admin.port import PORT_VARIABLE
from sidecar.asgi.failed_start import FailedStart
from sidecar.asgi.lifespan import Lifespan, Step
from sidecar.asgi.middleware import Admission
from sidecar.asgi.mounted import Mounted
from sidecar.asgi.pages import AppPages
from sidecar.asgi.proxy import ReverseProxy
from sidecar.asgi.types import ASGIApp
from sidecar.engines import Dialect, dialect_of
from sidecar.engines.cautious import CautiousTensorRtLlm
from sidecar.engines.reading import Pages
from sidecar.observability import Observability
from sidecar.policy.compiler import load
from sidecar.policy.model import EngineName, Policy, Unguarded
from sidecar.policy.reload import PolicyFiles
from sidecar.policy.store import StoreAddress, store_address
from sidecar.pools import EngineSizedPool, LocalPool, Pool
from sidecar.secrets import secret, secret_for_header
from sidecar.telemetry import StoreMetrics
from sidecar.telemetry.logs.setup import mounted_logging
from sidecar.telemetry.setup import configure_from_environment
from sidecar.tokens import Estimator, TokenizerCounter

POLICY_VARIABLE = "SIDECAR_POLICY"
STORE_VARIABLE = "SIDECAR_STORE"
TAKE_OVER_VARIABLE = "SIDECAR_TAKE_OVER_POOL"
"""`1`: a shared pool that has other tiers than the policy is made anew with the policy's. See docs/many-replicas.md."""
ENGINE_KEY_VARIABLE = "SIDECAR_ENGINE_KEY"
"""The engine's own API key: for its pages, which `capacity: {from: engine}` reads, and for every admitted request."""

_OPEN_ENGINE = (
    f"the engine's key ({ENGINE_KEY_VARIABLE}) is shown for requests without any key, too, which the policy's "
    "`anonymous` lets in; write anonymous: deny where the engine is not for everybody"
)
_log = logging.getLogger("sidecar.app")


class AdmissionMiddleware(Admission):
    """Admission control around an ASGI app, in one line: `app.add_middleware(AdmissionMiddleware, policy="policies/")`.

    `policy` is a file, a folder with `policy.yaml` in it, or a loaded `Policy`; without one the environment variable
    `SIDECAR_POLICY` says where it is, so that a server which constructs its middleware with `app` alone can use this
    class too. Such a server gets the rest from the environment as well: admin pages on `SIDECAR_ADMIN_PORT`, and
    telemetry by `OTEL_*`. `SIDECAR_STORE` goes before the policy's own `store`. `dialect` is how the app's engine hears
    a priority, where that is not as the policy's `engine` says; `files` are where a loaded policy came from: what
    changes there replaces it while the server runs. `is_shown` says that `observability.routes` are served, `is_launched`
    that the app is an engine's own server, started by one of our launchers; `takes_over_pool`, or
    `SIDECAR_TAKE_OVER_POOL=1`, that a shared pool with other tiers is made anew. Raises `PolicyError` with every
    mistake of the files, and ValueError where there are none; a server that makes its middleware only when it starts
    is told that the start failed instead.
    """

    def __init__(
        self,
        app: ASGIApp,
        policy: str | Path | Policy | None = None,
        *,
        dialect: Dialect | None = None,
        files: PolicyFiles | None = None,
        is_shown: bool = False,
        takes_over_pool: bool = False,
        is_launched: bool = False,
    ) -> None:
        try:
            if isinstance(policy, Policy):
                loaded = policy
            else:
                path = policy or _policy_path(os.environ)
                loaded = load(path)
                files = PolicyFiles(path)
            engine_key = secret_for_header(os.environ, ENGINE_KEY_VARIABLE)
            if engine_key is not None and loaded.anonymous is not None and not loaded.forward_key:
                _log.warning("%s", _OPEN_ENGINE, extra={"event": "engine_open"})
            pages = AppPages(app, engine_key)
            pool = _pool(loaded, os.environ, pages, takes_over=takes_over_pool)
            estimator = Estimator(None if loaded.tokenizer is None else TokenizerCounter(loaded.tokenizer))
            is_shared = self._is_shared = store_of(loaded, os.environ) is not None
            is_shown = is_shown or (policy is None and _has_admin_port(os.environ))
            self.observability = Observability(
                self, loaded, pool, files, os.environ, is_shared=is_shared, is_shown=is_shown
            )
        except ValueError as mistake:
            if not _is_in_event_loop():
                raise
            self.app, self.endpoints, self.has_failed = FailedStart(mistake), {}, True
            return
        dialect = _dialect(loaded, pages) if dialect is None else dialect
        inner = _with_lifespan(pages, pool, dialect, self.observability, self._end_leases)
        if policy is None:
            inner = Mounted(
                inner,
                self,
                routes=self.observability.routes,
                is_shared=is_shared,
                environment=os.environ,
                telemetry=partial(_mounted_telemetry, self.observability, os.environ),
            )
        super().__init__(
            inner,
            policy=loaded,
            pool=pool,
            dialect=dialect,
            estimator=estimator,
            observer=self.observability.observer,
            observed=self.observability.observed,
            is_proxied=isinstance(app, ReverseProxy),
            engine_key=engine_key,
            unguarded=_unguarded(app, is_launched=is_launched, is_mounted_by_name=policy is None),
            unguarded_observer=self.observability.unguarded,
        )
        if isinstance(pool, EngineSizedPool):
            pool.on_unfinished = self.pending_aborts.seen

    async def _end_leases(self) -> None:
        await self.followed.close()
        await self.shadows.close()
        # Other replicas of a shared pool would fill the room before the engine has it.
        await self.pending_aborts.close(waits=self._is_shared)

    def change_policy(self, policy: Policy) -> None:
        """See `Door.change_policy`."""
        super().change_policy(policy)
        self.observability.change_policy(policy)

    def state(self) -> Mapping[str, object]:
        """See `Door.state`; in a shared pool also which replicas run which policy."""
        state = super().state()
        generations = self.observability.generations()
        return {**state, "generations": generations} if generations else state

    def notices(self) -> Sequence[str]:
        """See `Door.notices`."""
        return [*super().notices(), *self.observability.notices()]


def _unguarded(app: ASGIApp, *, is_launched: bool, is_mounted_by_name: bool) -> Unguarded | None:
    """What applies to paths that are not guarded where the policy does not say; None where only the app can tell."""
    if is_launched or isinstance(app, ReverseProxy):
        return Unguarded.DENY
    return None if is_mounted_by_name else Unguarded.GENERATING


def _pool(policy: Policy, environment: Mapping[str, str], pages: Pages, *, takes_over: bool) -> Pool:
    """Where the leases live, and who says how many. Raises ValueError for an address or a switch that is none."""
    store = store_of(policy, environment)
    takes_over = _takes_over(environment) or takes_over
    if takes_over and store is None:
        raise ValueError(
            f"there is no shared pool to take over: the policy has no store, and {STORE_VARIABLE} is not set"
        )
    pool = LocalPool(policy) if store is None else _shared_pool(policy, store, takes_over=takes_over)
    return pool if policy.engine_capacity is None else EngineSizedPool(policy, pool, pages)


def _takes_over(environment: Mapping[str, str]) -> bool:
    written = environment.get(TAKE_OVER_VARIABLE, "")
    if written not in ("", "0", "1"):
        raise ValueError(f"{TAKE_OVER_VARIABLE}: {written!r} is neither 1 nor 0")
    return written == "1"


def _shared_pool(policy: Policy, store: StoreAddress, *, takes_over: bool) -> Pool:
    from sidecar.pools.redis import RedisPool, connector

    metrics = StoreMetrics(policy.pool)
    connect = connector(store, policy.pool)
    return RedisPool(policy, connect, observer=metrics, took=metrics.round_trip, takes_over=takes_over)


def store_of(policy: Policy, environment: Mapping[str, str]) -> StoreAddress | None:
    """Where the pool is kept, None for this process. Raises ValueError for an address that is none."""
    written = secret(environment, STORE_VARIABLE)
    try:
        return store_address(written) if written else policy.store
    except ValueError as mistake:
        raise ValueError(f"{STORE_VARIABLE}: {mistake}") from None


def _dialect(policy: Policy, pages: Pages) -> Dialect:
    """How the engine hears a priority. Older builds of TensorRT-LLM refuse to: they are asked first."""
    if policy.engine is EngineName.TENSORRT_LLM:
        return CautiousTensorRtLlm(pages)
    return dialect_of(policy.engine, policy.carrier)


def _with_lifespan(
    pages: AppPages, pool: Pool, dialect: Dialect, observability: Observability, end_leases: Step
) -> ASGIApp:
    """The app, with a start and an end for what has one."""
    asking = [dialect.ask] if isinstance(dialect, CautiousTensorRtLlm) else []
    closing = [end_leases, observability.close, pool.close]  # what they say last is logged
    if isinstance(pool, EngineSizedPool):
        return Lifespan(pages, opening=[observability.open], asking=[pool.open, *asking], closing=closing)
    return Lifespan(pages, opening=[pool.open, observability.open], asking=asking, closing=closing)


@contextmanager
def _mounted_telemetry(observability: Observability, environment: Mapping[str, str]) -> Iterator[Callable[[], None]]:
    """Logs and telemetry by the environment while the block runs; what it gives sends what telemetry still holds."""
    scrape = observability.scrape if _has_admin_port(environment) else None
    with mounted_logging(environment):
        yield configure_from_environment(scrape=scrape)


def _has_admin_port(environment: Mapping[str, str]) -> bool:
    return bool(environment.get(PORT_VARIABLE, "").strip())


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
