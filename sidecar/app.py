"""Composition root: the only module that knows all parts."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from sidecar.admin import PORT_VARIABLE
from sidecar.engines.base import Engine
from sidecar.engines.pages import Pages
from sidecar.leases import Admission
from sidecar.leases.no_engine import NoEngineHere
from sidecar.middleware.controller import AdmissionController
from sidecar.middleware.engine_pages import EnginePages
from sidecar.middleware.engine_watch import EngineCheck, EngineState, EngineWatch
from sidecar.middleware.middleware import serve_scope
from sidecar.middleware.models import ModelsController
from sidecar.middleware.request_path import at_own_root
from sidecar.middleware.tenant_usage import TenantUsage
from sidecar.mounted_services import MountedTelemetry, has_admin_port, mounted_services
from sidecar.observability import Observability
from sidecar.policy import POLICY_VARIABLE
from sidecar.policy.model import Mode, Policy, Unguarded, is_forced
from sidecar.policy.store import StoreAddress
from sidecar.pools import EngineSizedPool, LocalPool, Pool
from sidecar.pools.local import LimitsPool
from sidecar.proxy import EngineProxy
from sidecar.scheduling.rate_limit import RateLimiter
from sidecar.secrets import ENGINE_KEY_VARIABLE, secret_for_header
from sidecar.server import CannotServe
from sidecar.server.mounted import FailedStart, Lifespan, MountedLifespan, Step, check_processes
from sidecar.stores import records_of, refuse_uncounted_budgets, store_of, takes_over_a_store, usage_of
from sidecar.tokens import Estimator, TokenizerCounter

if TYPE_CHECKING:
    from sidecar.fleet.mounted_engine import MountedEngine
    from sidecar.fleet.mounted_routing import MountedRouting
    from sidecar.fleet.routing import FleetRouting
    from sidecar.policy.reload import PolicyFiles
    from sidecar.pools.fleet import FleetPool
    from sidecar.pools.redis import RedisFleetPool

STATE_KEY = "admission"
"""In the lifespan's state."""
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
_LIMITS_BY_MODEL = (
    "the tenants' limits count for each model apart, because each model's pool is in the store by itself: a tenant may "
    "use each limit once for each model"
)
_log = logging.getLogger("sidecar.app")


class AdmissionMiddleware:
    """Admission control around an ASGI app, in one line: `app.add_middleware(AdmissionMiddleware, policy="policies/")`.

    `app` is None where the policy names its engines (`engines:`), which the requests are forwarded to. `policy` is a
    file, a folder with `policy.yaml` in it, or a loaded `Policy`; without one the environment variable `SIDECAR_POLICY`
    says where it is, so that a server which constructs its middleware with `app` alone can use this class too. The rest
    is in the environment: admin pages on `SIDECAR_ADMIN_PORT`, log lines by `SIDECAR_LOG_*`, and telemetry by `OTEL_*`,
    which with `policy` needs the admin port. `SIDECAR_STORE` goes before the policy's own `store`; without a store, a
    server with several processes does not start. `dialect` is how the app's engine hears a priority, where that is not
    as the policy's `engine` says; `files` are where a loaded policy came from: what changes there replaces it while the
    server runs. `is_shown` says that the caller serves `observability.routes` and sets up logs and telemetry, so that
    the environment does not; `is_launched` that the app is an engine's own server, started by one of our launchers;
    `takes_over_pool`, or `SIDECAR_TAKE_OVER_POOL=1`, that a shared pool with other tiers is made anew. `environment` is
    the process's. Raises `PolicyError` with every mistake of the files, and ValueError where there are none. In an
    event loop it does not raise: the server reports a failed start, and the middleware has neither a `controller` nor
    an `observability`.
    """

    controller: AdmissionController
    observability: Observability

    def __init__(
        self,
        app: ASGIApp | None,
        policy: str | Path | Policy | None = None,
        *,
        dialect: Engine | None = None,
        files: PolicyFiles | None = None,
        is_shown: bool = False,
        takes_over_pool: bool = False,
        is_launched: bool = False,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._environment = environment
        compose = partial(
            _composed,
            app,
            dialect=dialect,
            is_by_name=policy is None,
            is_shown=is_shown,
            is_launched=is_launched,
            takes_over=takes_over_pool,
            environment=environment,
        )
        try:
            loaded, files = (policy, files) if isinstance(policy, Policy) else policy_of(policy)
            self.controller, self.observability = _passing_or(compose, loaded, files)
        except ValueError as mistake:
            if not _is_in_event_loop():
                raise
            self._serve: ASGIApp = FailedStart(mistake)
        else:
            self._is_shown = is_shown
            self._serve = self._serve_first

    @property
    def admission(self) -> Admission:
        """Leases for code of this process that calls the engine itself. Each handler finds it as
        `request.state.admission`, where the server has lifespan state (uvicorn and hypercorn have).
        """
        return Admission(self.controller)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope."""
        if scope["type"] == "lifespan" and "state" in scope and hasattr(self, "controller"):
            scope["state"][STATE_KEY] = self.admission
        await self._serve(scope, receive, send)

    def _serve_first(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """The first scope: a lifespan's, unless the server or an outer app has none for it."""
        self._begin_serving()
        self.controller.on_change.append(self._begin_serving)
        if self.controller.pages is not None:
            self.controller.pages.follow(scope)
        if scope["type"] != "lifespan" and not self._is_shown:
            try:
                policy = self.controller.policy
                environment = self._environment
                is_shared = policy.is_bare or store_of(policy, environment) is not None
                is_engine = policy.engines is not None
                check_processes(scope, environment, is_shared=is_shared, is_engine=is_engine)
            except ValueError as mistake:
                self._serve = FailedStart(mistake)
            else:
                if has_admin_port(self._environment):
                    _log.warning("%s", _NO_LIFESPAN, extra={"event": "no_lifespan"})
        return self._serve(scope, receive, send)

    def _begin_serving(self) -> None:
        """Serves as the policy says. Chosen once, so that a request pays nothing for what its policy has not."""
        cors, serve = self.controller.policy.cors, at_own_root(self.controller.app, _serving(self.controller))
        if cors is None:
            self._serve = serve
        else:
            from sidecar.middleware.cors import with_cors

            self._serve = with_cors(serve, cors)


def _serving(controller: AdmissionController) -> ASGIApp:
    if isinstance(controller, ModelsController):
        from sidecar.middleware.model_requests import serve_models

        return partial(serve_models, controller)
    return partial(serve_scope, controller)


def policy_of(given: str | Path | Policy | None) -> tuple[Policy, PolicyFiles | None]:
    """The policy, and its files where it was not loaded before. Without a path SIDECAR_POLICY says where it is.

    Raises ValueError where there is none, PolicyError for its mistakes.
    """
    if isinstance(given, Policy):
        return given, None
    from sidecar.policy.passing import load_or_pass
    from sidecar.policy.reload import files_of

    path = given or os.environ.get(POLICY_VARIABLE, "")
    if not path and not is_forced(os.environ):
        raise ValueError(f"no policy: pass `policy=` or set {POLICY_VARIABLE} to a policy file or its folder")
    return load_or_pass(path, os.environ).policy, files_of(path, os.environ)


Compose = Callable[[Policy, "PolicyFiles | None"], tuple[AdmissionController, Observability]]


def _passing_or(
    compose: Compose, policy: Policy, files: PolicyFiles | None
) -> tuple[AdmissionController, Observability]:
    """The parts of the policy. In `mode: pass`, where they cannot be had, those of a bare one."""
    try:
        controller, observability = compose(policy, files)
    except Exception as mistake:
        if policy.mode is not Mode.PASS or policy.is_bare or files is None:
            raise
        from sidecar.policy.passing import bare

        said = "what the policy asks for cannot be had, and is passed over: %s"
        _log.error(said, mistake, extra={"event": "policy_rejected"})
        controller, observability = compose(bare(files.path).policy, files)
    controller.report_passing(was_passing=False)
    return controller, observability


def _composed(
    given_app: ASGIApp | None,
    policy: Policy,
    files: PolicyFiles | None,
    *,
    dialect: Engine | None,
    is_by_name: bool,
    is_shown: bool,
    is_launched: bool,
    takes_over: bool,
    environment: Mapping[str, str],
) -> tuple[AdmissionController, Observability]:
    """A controller and its monitor. `is_by_name` says that a server constructs the middleware with its app alone."""
    engine_key = secret_for_header(environment, ENGINE_KEY_VARIABLE)
    if engine_key is not None and policy.anonymous is not None and not policy.forward_key:
        _log.warning("%s", _OPEN_ENGINE, extra={"event": "engine_open"})
    is_shared = store_of(policy, environment) is not None
    refuse_uncounted_budgets(policy, environment)
    setup = _Setup(environment, files, engine_key, dialect, takes_over=takes_over)
    shows = partial(_observed, environment=environment, is_shared=is_shared, is_shown=is_shown)
    if given_app is None and policy.models:
        parts = _models_parts(policy, setup, shows)
    else:
        controller = _one_controller(given_app, policy, setup, is_by_name=is_by_name, is_launched=is_launched)
        parts = [_Part(controller, shows(controller, policy, files))]
    controller, observability = parts[0]
    if is_shown:
        controller.lifespan = _with_lifespan(parts, is_shared=is_shared)
    else:
        telemetry = MountedTelemetry(observability, environment, is_by_name=is_by_name)
        inner = _with_lifespan(parts, is_shared=is_shared, started=[telemetry.begin_after_app])
        services = partial(mounted_services, controller, observability, telemetry, environment)
        controller.lifespan = MountedLifespan(
            inner,
            services,
            is_shared=is_shared or policy.is_bare,
            environment=environment,
            is_engine=policy.engines is not None,
        )
    return controller, observability


class _Setup(NamedTuple):
    """What a process is made with besides its policy. `dialect` is None where the policy says it."""

    environment: Mapping[str, str]
    files: PolicyFiles | None
    engine_key: str | None
    dialect: Engine | None
    takes_over: bool


class _Part(NamedTuple):
    """A controller and its monitor. A process has one, or the front of several models and then one for each."""

    controller: AdmissionController
    observability: Observability


def _one_controller(
    given_app: ASGIApp | None, policy: Policy, setup: _Setup, *, is_by_name: bool, is_launched: bool
) -> AdmissionController:
    """The controller of one pool."""
    estimator = _estimator(policy)
    if given_app is None:
        return _fleet_controller(policy, _fleet_routing(policy, setup), setup, estimator)
    pages = EnginePages(given_app, setup.engine_key)
    expected = policy.engine if setup.dialect is None else type(setup.dialect)
    routing: MountedRouting | None = None
    watch: EngineWatch
    pool: Pool
    if policy.engines is None:
        pool = _pool(policy, setup.environment, pages, takes_over=setup.takes_over)
        watch = _engine_watch(given_app, pages, expected, setup.files, setup.environment)
    else:
        from sidecar.fleet.mounted_engine import MountedWatch
        from sidecar.fleet.mounted_routing import MountedRouting

        engine = _mounted_engine(given_app, policy, setup, pages)
        place, check = _place(setup.files), _engine_check(setup.environment)
        watch = MountedWatch(pages, expected, engine, check=check, place=place)
        pool, routing = engine.pool, MountedRouting(engine, watch)
    controller = AdmissionController(
        given_app,
        policy=policy,
        pool=pool,
        dialect=setup.dialect or policy.engine.connected(policy.carrier, pages),
        estimator=estimator,
        observer=None,
        is_proxied=isinstance(given_app, EngineProxy),
        engine_key=setup.engine_key,
        unguarded=_unguarded(given_app, is_launched=is_launched, is_by_name=is_by_name),
        engine_watch=watch,
        routing=routing,
    )
    sizes = controller.lease_sizes
    if isinstance(pool, EngineSizedPool):
        pool.on_unfinished = controller.pending_aborts.seen
        pool.on_preemptions = partial(sizes.preempted, None)
    controller.pages = pages
    if routing is not None:
        from sidecar.fleet.mounted_view import MountedView

        controller.engines = MountedView(routing.engine)
        preempted = partial(sizes.preempted, routing.engine.name)
        routing.engine.follow(lambda: controller.under_way, controller.pending_aborts.seen, preempted)
    return controller


def _fleet_controller(
    policy: Policy, routing: FleetRouting, setup: _Setup, estimator: Estimator
) -> AdmissionController:
    """The controller of a pool of several engines."""
    from sidecar.fleet.app import FleetApp
    from sidecar.fleet.health import FleetHealth
    from sidecar.fleet.view import FleetView

    app = FleetApp(routing.fleet)
    pages = EnginePages(app, setup.engine_key)
    controller = AdmissionController(
        app,
        policy=policy,
        pool=routing.pool,
        dialect=setup.dialect or policy.engine.connected(policy.carrier, pages),
        estimator=estimator,
        observer=None,
        is_proxied=True,
        engine_key=setup.engine_key,
        unguarded=Unguarded.DENY,
        engine_watch=FleetHealth(routing.fleet),
        routing=routing,
    )
    controller.engines = FleetView(routing)
    routing.fleet.on_preemptions = controller.lease_sizes.preempted
    return controller


def _models_parts(
    policy: Policy,
    setup: _Setup,
    shows: Callable[[AdmissionController, Policy, PolicyFiles | None], Observability],
) -> list[_Part]:
    """The front of the models' pools, and then each of them."""
    from sidecar.fleet.app import FleetApp, FleetsApp

    allowances, estimator = RateLimiter(), _estimator(policy)
    if len(policy.models) > 1 and store_of(policy, setup.environment) is not None:
        _log.warning("%s", _LIMITS_BY_MODEL, extra={"event": "limits_by_model"})
    policies = {name: policy.of_model(name) for name in policy.models}
    routings = {name: _fleet_routing(one, setup, model=name, allowances=allowances) for name, one in policies.items()}
    controllers = {name: _fleet_controller(one, routings[name], setup, estimator) for name, one in policies.items()}
    app = FleetsApp([FleetApp(routing.fleet) for routing in routings.values()])
    pages = EnginePages(app, setup.engine_key)
    front = ModelsController(
        app,
        controllers=controllers,
        policy=policy,
        pool=LimitsPool(policy, allowances),
        dialect=setup.dialect or policy.engine.connected(policy.carrier, pages),
        estimator=estimator,
        engine_key=setup.engine_key,
    )
    of_models = [_Part(one, shows(one, one.policy, None)) for one in controllers.values()]
    observability = shows(front, policy, setup.files)
    front.observe_requests(observability.observer)
    for one in controllers.values():
        one.usage = front.usage
    if not observability.routes:
        return [_Part(front, observability), *of_models]
    from sidecar.admin.model_routes import model_routes

    routes = {name: part.observability.routes for name, part in zip(controllers, of_models, strict=True)}

    def flush() -> None:
        for part in of_models:
            part.observability.observer.flush()

    observability.routes = model_routes(front, observability.routes, routes, flush)
    return [_Part(front, observability), *of_models]


def _observed(
    controller: AdmissionController,
    policy: Policy,
    files: PolicyFiles | None,
    *,
    environment: Mapping[str, str],
    is_shared: bool,
    is_shown: bool,
) -> Observability:
    """A controller's monitor, connected with it."""
    kept = usage_of(policy, environment)
    controller.usage = None if kept is None else TenantUsage(kept, lambda: controller.policy)
    observability = Observability(
        controller,
        policy,
        controller.pool,
        files,
        environment,
        is_shared=is_shared,
        is_shown=is_shown or has_admin_port(environment),
        records=records_of(policy, environment),
        usage=controller.usage,
    )
    controller.monitor = observability
    controller.observer, controller.observed = observability.observer, observability.observed
    controller.unguarded_observer = observability.unguarded
    return observability


def _estimator(policy: Policy) -> Estimator:
    return Estimator(None if policy.tokenizer is None else TokenizerCounter(policy.tokenizer))


def _engine_watch(
    app: ASGIApp,
    pages: EnginePages,
    expected: type[Engine],
    files: PolicyFiles | None,
    environment: Mapping[str, str],
) -> EngineWatch:
    """The engine's watch. Raises ValueError for a switch that is none."""
    check, place = _engine_check(environment), _place(files)
    if not isinstance(app, EngineProxy):
        check = EngineCheck.OFF if isinstance(app, NoEngineHere) else check
        return EngineWatch(pages, expected, check=check, place=place)
    flowed, address = app.traffic.has_flowed, app.upstream.url
    watch = EngineWatch(pages, expected, address=address, has_flowed=flowed, check=check, place=place)
    app.on_failure = watch.request_failed
    return watch


def _place(files: PolicyFiles | None) -> Callable[[], str]:
    """Where the policy names its engine."""
    return (lambda: "") if files is None else files.engine_place


def _engine_check(environment: Mapping[str, str]) -> EngineCheck:
    written = environment.get(ENGINE_CHECK_VARIABLE, "") or EngineCheck.ON.value
    try:
        return EngineCheck(written)
    except ValueError:
        raise ValueError(f"{ENGINE_CHECK_VARIABLE}: {written!r} is none of on, alive, off") from None


def _unguarded(app: ASGIApp, *, is_launched: bool, is_by_name: bool) -> Unguarded | None:
    """Treatment of unguarded paths where the policy does not say; None where only the app can say."""
    if is_launched or isinstance(app, EngineProxy):
        return Unguarded.DENY
    return None if is_by_name else Unguarded.GENERATING


def _pool(policy: Policy, environment: Mapping[str, str], pages: Pages, *, takes_over: bool) -> Pool:
    """Where the leases live, and who says how many. Raises ValueError for an address or a switch that is none."""
    store = store_of(policy, environment)
    takes_over = takes_over_a_store(environment, store, takes_over=takes_over)
    pool = LocalPool(policy) if store is None else _shared_pool(policy, store, takes_over=takes_over)
    return pool if policy.engine_capacity is None else EngineSizedPool(policy, pool, pages)


def _fleet_routing(
    policy: Policy, setup: _Setup, *, model: str | None = None, allowances: RateLimiter | None = None
) -> FleetRouting:
    """The engines that the policy names, or those of one model, with their pool. Raises ValueError as `_pool` does."""
    if policy.engines is None:
        raise ValueError("there is no engine to send requests to: give an app, or write `engines:` in the policy")
    if policy.engines.mounted:
        raise ValueError(
            "the policy's engines are mounted (`engines: {mounted: true}`): give the app that is the engine"
        )
    from sidecar.fleet.routing import FleetRouting
    from sidecar.fleet.setup import new_fleet
    from sidecar.pools.fleet import FleetPool

    pool = _engine_pool(policy, setup, allowances)
    check = _engine_check(setup.environment)
    fleet = new_fleet(policy, pool.now_us, engine_key=setup.engine_key, check=check, model=model)
    if not isinstance(pool, FleetPool):
        pool.on_incarnation, pool.on_drain = fleet.adopt, fleet.set_draining
        pool.on_reached_elsewhere = fleet.set_reached_elsewhere
    return FleetRouting(fleet, pool, policy, model)


def _engine_pool(policy: Policy, setup: _Setup, allowances: RateLimiter | None = None) -> FleetPool | RedisFleetPool:
    """The pool of a policy with engines. Raises ValueError as `_pool` does."""
    assert policy.engines is not None
    store, weight_percent = store_of(policy, setup.environment), policy.engines.affinity.weight_percent
    takes_over = takes_over_a_store(setup.environment, store, takes_over=setup.takes_over)
    if store is None:
        from sidecar.pools.fleet import FleetPool

        return FleetPool(policy, weight_percent=weight_percent, allowances=allowances)
    from sidecar.pools.redis import RedisFleetPool, connector
    from sidecar.telemetry.metrics.store import StoreMetrics

    metrics, is_by_gain = StoreMetrics(policy.pool), policy.rules.is_by_gain
    connect = connector(store, policy.pool, has_engines=True, is_by_gain=is_by_gain)
    return RedisFleetPool(
        policy,
        connect,
        observer=metrics,
        weight_percent=weight_percent,
        took=metrics.round_trip,
        takes_over=takes_over,
        is_sole_user=policy.engines.mounted,
    )


def _mounted_engine(app: ASGIApp, policy: Policy, setup: _Setup, pages: Pages) -> MountedEngine:
    """The engine of this process. Raises ValueError where the policy's engines are not mounted, or the app is none."""
    assert policy.engines is not None
    if not policy.engines.mounted:
        raise ValueError(
            f"the policy names engines by their addresses (`engines: {{{policy.engines.discovery.value}: ...}}`), and "
            "an app that mounts the middleware sends none of its requests there: run `sidecar serve`, or write "
            "`engines: {mounted: true}` where the app is the engine"
        )
    if isinstance(app, EngineProxy):
        raise ValueError("the policy's engines are mounted (`engines: {mounted: true}`), and a proxy is no engine")
    from sidecar.fleet.mounted_engine import MountedEngine, engine_of_process
    from sidecar.pools.fleet import FleetPool

    pool = _engine_pool(policy, setup)
    engine = MountedEngine(engine_of_process(setup.environment), policy, pool, pages)
    if not isinstance(pool, FleetPool):
        pool.on_incarnation = engine.adopt
    return engine


def _shared_pool(policy: Policy, store: StoreAddress, *, takes_over: bool) -> Pool:
    from sidecar.pools.redis import RedisPool, connector
    from sidecar.telemetry.metrics.store import StoreMetrics

    metrics = StoreMetrics(policy.pool)
    connect = connector(store, policy.pool, is_by_gain=policy.rules.is_by_gain)
    return RedisPool(policy, connect, observer=metrics, took=metrics.round_trip, takes_over=takes_over)


def _with_lifespan(parts: Sequence[_Part], *, is_shared: bool, started: Sequence[Step] = ()) -> ASGIApp:
    """The app, with the steps of the server's start and end. `started` are further ones after the app's own start."""
    controllers = [part.controller for part in parts]

    async def look_at_engines() -> None:
        await asyncio.gather(*(controller.engine_watch.open() for controller in controllers))
        for controller in controllers:
            watch = controller.engine_watch
            if watch.state is EngineState.MISMATCH and not controller.passes_all:
                raise CannotServe(f"{watch.reason} ({ENGINE_CHECK_VARIABLE}=alive starts all the same)")

    async def end_leases() -> None:
        for controller in controllers:
            await controller.engine_watch.close()
            await controller.background.close()
            await controller.shadows.close()
        # Other replicas of a shared pool would fill the room before the engine has it.
        await asyncio.gather(*(controller.pending_aborts.close(waits=is_shared) for controller in controllers))

    observing = [part.observability for part in parts]
    open_pools, ask = [one.pool.open for one in controllers], [one.dialect.ask for one in controllers]
    open_pages = [one.open for one in observing]
    # What the pools say last is logged.
    closing = [end_leases, *(one.close for one in observing), *(one.pool.close for one in controllers)]
    if isinstance(controllers[0].pool, EngineSizedPool):
        asking = [*started, look_at_engines, *open_pools, *ask]
        return Lifespan(controllers[0].app, opening=open_pages, asking=asking, closing=closing)
    asking = [*started, look_at_engines, *ask]
    return Lifespan(controllers[0].app, opening=[*open_pools, *open_pages], asking=asking, closing=closing)


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
