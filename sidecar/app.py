"""Composition root: the only module that knows all parts."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from sidecar.admin.app import admin_app
from sidecar.admin.port import PORT_VARIABLE, admin_pages
from sidecar.engines.base import Engine
from sidecar.engines.pages import Pages
from sidecar.middleware.controller import AdmissionController
from sidecar.middleware.engine_pages import EnginePages
from sidecar.middleware.engine_watch import EngineCheck, EngineState, EngineWatch
from sidecar.middleware.middleware import serve_scope
from sidecar.observability import Observability
from sidecar.policy import POLICY_VARIABLE
from sidecar.policy.compiler import load
from sidecar.policy.model import Policy, Unguarded
from sidecar.policy.reload import PolicyFiles
from sidecar.policy.store import StoreAddress, store_address
from sidecar.pools import EngineSizedPool, LocalPool, Pool
from sidecar.proxy.proxy import ReverseProxy
from sidecar.secrets import ENGINE_KEY_VARIABLE, secret, secret_for_header
from sidecar.server.mounted import FailedStart, Lifespan, MountedLifespan, Step, check_processes
from sidecar.server.server import CannotServe
from sidecar.server.workers import ServerProcesses
from sidecar.telemetry import StoreMetrics
from sidecar.telemetry.logs.setup import mounted_logging
from sidecar.telemetry.setup import TelemetryError, configure_from_environment
from sidecar.tokens import Estimator, TokenizerCounter

STORE_VARIABLE = "SIDECAR_STORE"
TAKE_OVER_VARIABLE = "SIDECAR_TAKE_OVER_POOL"
"""`1`: a shared pool that has other tiers than the policy is made anew with the policy's. See docs/many-replicas.md."""
ENGINE_CHECK_VARIABLE = "SIDECAR_ENGINE_CHECK"
"""`on`, `alive` (any engine may answer) or `off` (the engine is not asked at all). See docs/how-it-works.md."""

_OPEN_ENGINE = (
    f"the engine's key ({ENGINE_KEY_VARIABLE}) is shown for requests without any key, too, which the policy's "
    "`anonymous` lets in; write anonymous: deny where the engine is not public"
)
_NO_LIFESPAN = (
    f"{PORT_VARIABLE} is set, and there are no admin pages: no lifespan reaches the middleware, with which they start. "
    "Run the server with its lifespan on, and wrap the outermost app: an app that is mounted in another gets none"
)
_log = logging.getLogger("sidecar.app")


class AdmissionMiddleware:
    """Admission control around an ASGI app, in one line: `app.add_middleware(AdmissionMiddleware, policy="policies/")`.

    `policy` is a file, a folder with `policy.yaml` in it, or a loaded `Policy`; without one the environment variable
    `SIDECAR_POLICY` says where it is, so that a server which constructs its middleware with `app` alone can use this
    class too. The rest is in the environment: admin pages on `SIDECAR_ADMIN_PORT`, log lines by `SIDECAR_LOG_*`, and
    telemetry by `OTEL_*`, which with `policy` needs the admin port. `SIDECAR_STORE` goes before the policy's own
    `store`; without a store, a server with several processes does not start. `dialect` is how the app's engine hears a
    priority, where that is not as the policy's `engine` says; `files` are where a loaded policy came from: what changes
    there replaces it while the server runs. `is_shown` says that the caller serves `observability.routes` and sets up
    logs and telemetry, so that the environment does not; `is_launched` that the app is an engine's own server, started
    by one of our launchers; `takes_over_pool`, or `SIDECAR_TAKE_OVER_POOL=1`, that a shared pool with other tiers is
    made anew. Raises `PolicyError` with every mistake of the files, and ValueError where there are none. In an event
    loop it does not raise: the server reports a failed start, and the middleware has neither a `controller` nor an
    `observability`.
    """

    controller: AdmissionController
    observability: Observability

    def __init__(
        self,
        app: ASGIApp,
        policy: str | Path | Policy | None = None,
        *,
        dialect: Engine | None = None,
        files: PolicyFiles | None = None,
        is_shown: bool = False,
        takes_over_pool: bool = False,
        is_launched: bool = False,
    ) -> None:
        try:
            loaded, files = (policy, files) if isinstance(policy, Policy) else _load(policy, os.environ)
            self.controller, self.observability = _composed(
                app,
                loaded,
                files,
                dialect,
                is_by_name=policy is None,
                is_shown=is_shown,
                is_launched=is_launched,
                takes_over=takes_over_pool,
            )
        except ValueError as mistake:
            if not _is_in_event_loop():
                raise
            self._serve: ASGIApp = FailedStart(mistake)
        else:
            self._serve = partial(serve_scope, self.controller) if is_shown else self._serve_first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope."""
        await self._serve(scope, receive, send)

    async def _serve_first(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The first scope of a mounted middleware: a lifespan's, unless the server or an outer app has none for it."""
        self._serve = partial(serve_scope, self.controller)
        if scope["type"] != "lifespan":
            try:
                check_processes(scope, os.environ, is_shared=store_of(self.controller.policy, os.environ) is not None)
            except ValueError as mistake:
                self._serve = FailedStart(mistake)
            else:
                if _has_admin_port(os.environ):
                    _log.warning("%s", _NO_LIFESPAN, extra={"event": "no_lifespan"})
        await self._serve(scope, receive, send)


def _load(path: str | Path | None, environment: Mapping[str, str]) -> tuple[Policy, PolicyFiles]:
    path = path or environment.get(POLICY_VARIABLE)
    if not path:
        raise ValueError(f"no policy: pass `policy=` or set {POLICY_VARIABLE} to a policy file or its folder")
    return load(path), PolicyFiles(path)


def _composed(
    app: ASGIApp,
    policy: Policy,
    files: PolicyFiles | None,
    dialect: Engine | None,
    *,
    is_by_name: bool,
    is_shown: bool,
    is_launched: bool,
    takes_over: bool,
) -> tuple[AdmissionController, Observability]:
    """A controller and its monitor. `is_by_name` says that a server constructs the middleware with its app alone."""
    environment = os.environ
    engine_key = secret_for_header(environment, ENGINE_KEY_VARIABLE)
    if engine_key is not None and policy.anonymous is not None and not policy.forward_key:
        _log.warning("%s", _OPEN_ENGINE, extra={"event": "engine_open"})
    pages = EnginePages(app, engine_key)
    expected = policy.engine if dialect is None else type(dialect)
    engine_watch = _engine_watch(app, pages, expected, files, environment)
    pool = _pool(policy, environment, pages, takes_over=takes_over)
    is_shared = store_of(policy, environment) is not None
    controller = AdmissionController(
        pages,
        policy=policy,
        pool=pool,
        dialect=policy.engine.connected(policy.carrier, pages) if dialect is None else dialect,
        estimator=Estimator(None if policy.tokenizer is None else TokenizerCounter(policy.tokenizer)),
        observer=None,
        is_proxied=isinstance(app, ReverseProxy),
        engine_key=engine_key,
        unguarded=_unguarded(app, is_launched=is_launched, is_by_name=is_by_name),
        engine_watch=engine_watch,
    )
    observability = Observability(
        controller,
        policy,
        pool,
        files,
        environment,
        is_shared=is_shared,
        is_shown=is_shown or _has_admin_port(environment),
    )
    controller.monitor = observability
    controller.observer, controller.observed = observability.observer, observability.observed
    controller.unguarded_observer = observability.unguarded
    if isinstance(pool, EngineSizedPool):
        pool.on_unfinished = controller.pending_aborts.seen
    if is_shown:
        controller.lifespan = _with_lifespan(controller, observability, pages, is_shared=is_shared)
    else:
        telemetry = _MountedTelemetry(observability, environment, is_by_name=is_by_name)
        started = [telemetry.begin_after_app]
        inner = _with_lifespan(controller, observability, pages, is_shared=is_shared, started=started)
        services = partial(_mounted_services, controller, observability, telemetry, environment)
        controller.lifespan = MountedLifespan(inner, services, is_shared=is_shared, environment=environment)
    return controller, observability


def _engine_watch(
    app: ASGIApp,
    pages: EnginePages,
    expected: type[Engine],
    files: PolicyFiles | None,
    environment: Mapping[str, str],
) -> EngineWatch:
    """The engine's watch. Raises ValueError for a switch that is none."""
    check, place = _engine_check(environment), (lambda: "") if files is None else files.engine_place
    if not isinstance(app, ReverseProxy):
        return EngineWatch(pages, expected, check=check, place=place)
    flowed, address = app.traffic.has_flowed, app.upstream.url
    watch = EngineWatch(pages, expected, address=address, has_flowed=flowed, check=check, place=place)
    app.on_failure = watch.request_failed
    return watch


def _engine_check(environment: Mapping[str, str]) -> EngineCheck:
    written = environment.get(ENGINE_CHECK_VARIABLE, "") or EngineCheck.ON.value
    try:
        return EngineCheck(written)
    except ValueError:
        raise ValueError(f"{ENGINE_CHECK_VARIABLE}: {written!r} is none of on, alive, off") from None


def _unguarded(app: ASGIApp, *, is_launched: bool, is_by_name: bool) -> Unguarded | None:
    """Treatment of unguarded paths where the policy does not say; None where only the app can say."""
    if is_launched or isinstance(app, ReverseProxy):
        return Unguarded.DENY
    return None if is_by_name else Unguarded.GENERATING


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


class _MountedTelemetry:
    """Telemetry by `OTEL_*` in a process that is not ours; a process that has an SDK of its own keeps it.

    By name, it begins before the app, whose engine takes minutes: a mistake fails the start. With a policy, the app's
    owner may install an SDK while the app starts, so that ours begins after that, and only where `SIDECAR_ADMIN_PORT`
    asks for metrics; a mistake is logged.
    """

    def __init__(self, observability: Observability, environment: Mapping[str, str], *, is_by_name: bool) -> None:
        self._scrape = observability.scrape if _has_admin_port(environment) else None
        self._is_by_name = is_by_name
        self._send_the_rest: Callable[[], None] | None = None

    def begin_before_app(self) -> None:
        """Raises TelemetryError."""
        if self._is_by_name:
            self._begin()

    async def begin_after_app(self) -> None:
        if self._scrape is None or self._send_the_rest is not None:
            return
        try:
            self._begin()
        except TelemetryError as mistake:
            self._scrape.close(str(mistake))
            _log.warning("%s", mistake, extra={"event": "telemetry_missing"})

    async def end(self) -> None:
        if self._send_the_rest is not None:
            await asyncio.to_thread(self._send_the_rest)

    def _begin(self) -> None:
        self._send_the_rest = configure_from_environment(scrape=self._scrape)


def _with_lifespan(
    controller: AdmissionController,
    observability: Observability,
    app: ASGIApp,
    *,
    is_shared: bool,
    started: Sequence[Step] = (),
) -> ASGIApp:
    """The app, with the steps of the server's start and end. `started` are further ones after the app's own start."""
    watch = controller.engine_watch

    async def look_at_engine() -> None:
        await watch.open()
        if watch.state is EngineState.MISMATCH and not controller.is_observing:
            raise CannotServe(f"{watch.reason} ({ENGINE_CHECK_VARIABLE}=alive starts all the same)")

    async def end_leases() -> None:
        await watch.close()
        await controller.background.close()
        await controller.shadows.close()
        # Other replicas of a shared pool would fill the room before the engine has it.
        await controller.pending_aborts.close(waits=is_shared)

    pool, dialect = controller.pool, controller.dialect
    closing = [end_leases, observability.close, pool.close]  # what they say last is logged
    if isinstance(pool, EngineSizedPool):
        asking = [*started, look_at_engine, pool.open, dialect.ask]
        return Lifespan(app, opening=[observability.open], asking=asking, closing=closing)
    asking = [*started, look_at_engine, dialect.ask]
    return Lifespan(app, opening=[pool.open, observability.open], asking=asking, closing=closing)


@asynccontextmanager
async def _mounted_services(
    controller: AdmissionController,
    observability: Observability,
    telemetry: _MountedTelemetry,
    environment: Mapping[str, str],
    processes: ServerProcesses,
) -> AsyncIterator[None]:
    """Logs, telemetry and admin pages by the environment, while the block runs."""
    pages = admin_app(
        state=controller.state, readiness=controller.readiness, notices=controller.notices, routes=observability.routes
    )
    with mounted_logging(environment):
        telemetry.begin_before_app()
        try:
            async with admin_pages(pages, environment, processes, pool=controller.policy.pool):
                yield
        finally:
            await telemetry.end()


def _has_admin_port(environment: Mapping[str, str]) -> bool:
    return bool(environment.get(PORT_VARIABLE, "").strip())


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
