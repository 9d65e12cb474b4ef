"""Composition root: the only module that knows all parts."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from sidecar.admin import PORT_VARIABLE
from sidecar.admission.controller import AdmissionController, Services
from sidecar.admission.engine_pages import EnginePages
from sidecar.admission.request_path import at_own_root
from sidecar.admission.watchdog import Watchdog
from sidecar.composition.mounted_services import MountedTelemetry, has_admin_port, mounted_services, with_lifespan
from sidecar.composition.observability import Observability
from sidecar.composition.one_pool import Composed, OnePool, find_pool, load_given, new_source, pool_here
from sidecar.composition.stores import find_store, new_records, new_usage, refuse_uncounted_budgets, takes_over_a_store
from sidecar.engines.base import Engine
from sidecar.engines.pages import Pages
from sidecar.engines.watch import ENGINE_CHECK_VARIABLE, EngineCheck, EngineWatch
from sidecar.identity.tokens import Identities
from sidecar.leases import Admission
from sidecar.leases.lease_request import NoEngineHere
from sidecar.lengths.token_estimates import Estimator, TokenizerCounter
from sidecar.middleware import serve_scope
from sidecar.policy.choices import Unguarded
from sidecar.policy.model import Policy
from sidecar.policy.secrets import ENGINE_KEY_VARIABLE, secret_for_header
from sidecar.policy.store import StoreAddress
from sidecar.pools import EngineSize, Pool
from sidecar.proxy import EngineProxy
from sidecar.scheduling.rate_limit import RateLimiter
from sidecar.server.mounted import FailedStart
from sidecar.server.workers import check_processes
from sidecar.tasks import running_loop
from sidecar.tenants.tenant_usage import TenantUsage

if TYPE_CHECKING:
    from sidecar.admission.self_view import TenantOf
    from sidecar.fleet.mounted_engine import MountedEngine, MountedRouting, MountedView
    from sidecar.fleet.routing import FleetRouting
    from sidecar.policy.reload import PolicyFiles

STATE_KEY = "admission"
"""In the lifespan's state."""

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
    server with several processes does not start. `dialect` is how the app's engine reads a priority, where that is not
    as the policy's `engine` says; `files` are where a loaded policy came from: what changes there replaces it while the
    server runs. `is_shown` says that the caller serves `observability.routes` and sets up logs and telemetry, so that
    the environment does not; `is_launched` that the app is an engine's own server, started by one of our launchers;
    `retry_handlers` that a handler may run twice for one request, which was preempted; `tenant` names a request's
    tenant, by its scope (docs/tutorial-fastapi.md); `takes_over_pool`, or `SIDECAR_TAKE_OVER_POOL=1`, that a shared
    pool with other tiers is made anew. `environment` is the process's.

    One policy is one pool in a process. Middlewares of the same policy file, by whatever path, or of equal loaded
    policies share pool, monitor, admin port and background tasks: those that are constructed before the first of them
    serves, or in the event loop where it serves. The first of their lifespans opens what the last one closes, and a
    lifespan that begins when all have ended begins anew (`composition.one_pool`). Another policy has a pool of its own.

    Raises `PolicyError` with every mistake of the files, and ValueError where there are none. In an event loop it does
    not raise: the server reports a failed start, and the middleware has neither a `controller` nor an `observability`.
    """

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
        retry_handlers: bool = False,
        tenant: TenantOf | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._app = app
        self._environment = environment
        self._is_shown = is_shown
        self._is_serving = False
        self._failure: FailedStart | None = None
        self._given = policy, files
        self._compose = partial(
            _compose,
            app,
            dialect=dialect,
            is_by_name=policy is None,
            is_shown=is_shown,
            is_launched=is_launched,
            repeats=retry_handlers,
            takes_over=takes_over_pool,
            environment=environment,
        )
        options = (dialect, is_launched, retry_handlers, takes_over_pool, id(environment))
        self._source = new_source(policy, files, options)
        self._serve: ASGIApp = self._serve_first
        self._named: Callable[[AdmissionController, ASGIApp], ASGIApp] | None = None
        try:
            if tenant is not None:
                from sidecar.admission.self_view import naming

                self._named = naming(tenant)
            self._is_apart = is_shown or app is None or isinstance(app, EngineProxy)
            self._use((None if self._is_apart else find_pool(self._source)) or self._new_pool())
        except ValueError as mistake:
            if running_loop() is None:
                raise
            self._serve = FailedStart(mistake)

    @property
    def controller(self) -> AdmissionController:
        """The controller of the policy's pool. It is another in a lifespan that begins after one has ended."""
        return self._pool.controller

    @property
    def observability(self) -> Observability:
        """The controller's monitor."""
        return self._pool.observability

    @property
    def admission(self) -> Admission:
        """Leases for code of this process that calls the engine itself. Each handler finds it as
        `request.state.admission`, where the server has lifespan state (uvicorn and hypercorn have).
        """
        return Admission(self.controller)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope."""
        if scope["type"] == "lifespan" and hasattr(self, "_pool"):
            await self._serve_lifespan(scope, receive, send)
        else:
            await self._serve(scope, receive, send)

    def begin_anew(self) -> None:
        """See `Member`."""
        self._is_serving, self._serve = False, self._serve_first

    def follow(self) -> None:
        """See `Member`. Chosen once, so that a request pays nothing for what its policy has not."""
        if not self._is_serving:
            return
        self.controller.report_unpreempted()
        app = self.controller.app if self._app is None else self._app
        cors, serve = self.controller.policy.cors, _serving(self._pool)
        if self._named is not None:
            serve = self._named(self.controller, serve)
        if cors is not None:
            from sidecar.middleware import with_cors

            serve = with_cors(serve, cors)
        if self._pool.is_shared:
            serve = partial(self._pool.serve, serve, app)
        self._serve = at_own_root(app, serve)

    async def _serve_lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._choose_pool()
            self._pool.begin_lifespan()
        except ValueError as mistake:
            await self._failed(mistake)(scope, receive, send)
        try:
            if "state" in scope:
                scope["state"][STATE_KEY] = self.admission
            await self._serve(scope, receive, send)
        finally:
            self._pool.end_lifespan()

    def _serve_first(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """The first scope: a lifespan's, unless the server or an outer app has none for it."""
        try:
            self._choose_pool()
            self._pool.begin_serving()
        except ValueError as mistake:
            return self._failed(mistake)(scope, receive, send)
        if self.controller.pages is not None:
            self.controller.pages.follow(scope)
        self._is_serving = True
        self.follow()
        if scope["type"] != "lifespan" and not self._is_shown:
            try:
                policy = self.controller.policy
                environment = self._environment
                is_shared = policy.is_bare or find_store(policy, environment) is not None
                is_engine = policy.engines is not None
                check_processes(scope, environment, is_shared=is_shared, is_engine=is_engine)
            except ValueError as mistake:
                self._is_serving, self._serve = False, FailedStart(mistake)
            else:
                if has_admin_port(self._environment) and not self._pool.has_lifespan:
                    _log.warning("%s", _NO_LIFESPAN, extra={"event": "no_lifespan"})
        return self._serve(scope, receive, send)

    def _failed(self, mistake: Exception) -> FailedStart:
        """One object for as long as the mistake lasts: it is logged once."""
        if self._failure is None or str(self._failure.mistake) != str(mistake):
            self._failure = FailedStart(mistake)
        return self._failure

    def _choose_pool(self) -> None:
        """The pool that serves the policy in this event loop, of whichever thread the middleware was constructed in.

        Where only another event loop has one, this middleware has a pool of its own.
        """
        if self._is_serving:
            return
        here = None if self._is_apart else pool_here(self._source)
        if here is not self._pool and (here is not None or self._pool.is_elsewhere()):
            self._pool.leave(self)
            self._use(here or self._new_pool())

    def _use(self, pool: OnePool) -> None:
        self._pool = pool
        pool.join(self)

    def _new_pool(self) -> OnePool:
        """Raises ValueError for a policy that cannot be used."""
        given, files = self._given
        policy, files = (given, files) if isinstance(given, Policy) else load_given(given)
        return OnePool(self._source, self._app, self._compose, policy, files, is_kept=self._is_shown)


def _serving(pool: OnePool) -> ASGIApp:
    controller, lifespan = pool.controller, pool.lifespan
    serve: ASGIApp = partial(serve_scope, controller, lifespan)
    if controller.controllers:
        from sidecar.fleet.models import serve_models

        serve = partial(serve_models, controller, lifespan)
    if controller.snapshot.names.are_listed_here:
        from sidecar.fleet.models import serve_list

        return partial(serve_list, controller, serve)
    return serve


def _compose(
    given_app: ASGIApp | None,
    policy: Policy,
    files: PolicyFiles | None,
    *,
    dialect: Engine | None,
    is_by_name: bool,
    is_shown: bool,
    is_launched: bool,
    repeats: bool,
    takes_over: bool,
    environment: Mapping[str, str],
) -> Composed:
    """The parts of a policy. `is_by_name` says that a server constructs the middleware with its app alone."""
    engine_key = secret_for_header(environment, ENGINE_KEY_VARIABLE)
    if engine_key is not None and policy.anonymous is not None and not policy.forward_key:
        _log.warning("%s", _OPEN_ENGINE, extra={"event": "engine_open"})
    is_shared = find_store(policy, environment) is not None
    refuse_uncounted_budgets(policy, environment)
    setup = _Setup(environment, files, engine_key, dialect, takes_over=takes_over, repeats=repeats, is_shown=is_shown)
    if given_app is None and policy.models:
        controllers = _models_controllers(policy, setup)
    else:
        controllers = [_one_controller(given_app, policy, setup, is_by_name=is_by_name, is_launched=is_launched)]
    controller, observability = controllers[0], controllers[0].monitor
    assert isinstance(observability, Observability)
    if is_shown:
        return Composed(controller, observability, with_lifespan(controllers, is_shared=is_shared))
    telemetry = MountedTelemetry(observability, environment, is_by_name=is_by_name)
    started, ended = [telemetry.begin_after_app], [telemetry.flush_hosts]
    services = partial(mounted_services, controller, telemetry, environment, is_shared=is_shared or policy.is_bare)
    lifespan = with_lifespan(controllers, services, is_shared=is_shared, started=started, ended=ended)
    return Composed(controller, observability, lifespan)


class _Setup(NamedTuple):
    """Settings of a process besides its policy. `dialect` is None where the policy says it.

    `repeats` says that the app's handlers may run twice for one request, `is_shown` that the caller serves the pages.
    """

    environment: Mapping[str, str]
    files: PolicyFiles | None
    engine_key: str | None
    dialect: Engine | None
    takes_over: bool
    repeats: bool
    is_shown: bool


def _one_controller(
    given_app: ASGIApp | None, policy: Policy, setup: _Setup, *, is_by_name: bool, is_launched: bool
) -> AdmissionController:
    """The controller of one pool."""
    estimator = _estimator(policy)
    if given_app is None:
        of_fleet = _fleet_routing(policy, setup)
        services = _fleet_services(policy, of_fleet, setup, estimator)
        return _fleet_controller(of_fleet, replace(services, usage=_usage(policy, setup)), policy)
    pages = EnginePages(given_app, setup.engine_key)
    expected = policy.engine if setup.dialect is None else type(setup.dialect)
    routing: MountedRouting | None = None
    engines: MountedView | None = None
    watch: EngineWatch
    pool: Pool
    size = None if policy.engine_capacity is None else EngineSize(policy, pages)
    if policy.engines is None:
        pool = _pool(policy, setup.environment, size, takes_over=setup.takes_over)
        watch = _engine_watch(given_app, pages, expected, setup.files, setup.environment)
    else:
        from sidecar.fleet.mounted_engine import MountedRouting, MountedView, MountedWatch

        engine = _mounted_engine(given_app, policy, setup, pages)
        place, check = _place(setup.files), _engine_check(setup.environment)
        watch = MountedWatch(pages, expected, engine, check=check, place=place)
        pool, routing, engines = engine.pool, MountedRouting(engine, watch), MountedView(engine)
    services = Services(
        app=given_app,
        pool=pool,
        dialect=setup.dialect or policy.engine.connected(policy.carrier, pages),
        estimator=estimator,
        is_proxied=isinstance(given_app, EngineProxy),
        repeats=setup.repeats or is_launched or isinstance(given_app, EngineProxy),
        engine_key=setup.engine_key,
        unguarded=_unguarded(given_app, is_launched=is_launched, is_by_name=is_by_name),
        engine_watch=watch,
        routing=routing,
        engines=engines,
        pages=pages,
        usage=_usage(policy, setup),
        monitor=partial(_observability, setup, setup.files),
    )
    controller = AdmissionController(services, policy)
    sizes = controller.lease_sizes
    if size is not None:
        size.reader.on_unfinished = controller.pending_aborts.seen
        size.reader.on_preemptions = partial(sizes.preempted, None)
    if routing is not None:
        preempted = partial(sizes.preempted, routing.engine.name)
        routing.engine.follow(lambda: controller.under_way, controller.pending_aborts.seen, preempted)
    return controller


def _fleet_services(policy: Policy, routing: FleetRouting, setup: _Setup, estimator: Estimator) -> Services:
    """The services of a pool of several engines."""
    from sidecar.fleet.app import FleetApp, FleetHealth
    from sidecar.fleet.view import FleetView

    app = FleetApp(routing.fleet)
    pages = EnginePages(app, setup.engine_key)
    return Services(
        app=app,
        pool=routing.pool,
        dialect=setup.dialect or policy.engine.connected(policy.carrier, pages),
        estimator=estimator,
        is_proxied=True,
        engine_key=setup.engine_key,
        unguarded=Unguarded.DENY,
        engine_watch=FleetHealth(routing.fleet),
        routing=routing,
        engines=FleetView(routing),
        monitor=partial(_observability, setup, setup.files),
    )


def _fleet_controller(routing: FleetRouting, services: Services, policy: Policy) -> AdmissionController:
    controller = AdmissionController(services, policy)
    routing.fleet.on_preemptions = controller.lease_sizes.preempted
    return controller


def _models_controllers(policy: Policy, setup: _Setup) -> list[AdmissionController]:
    """The front of the models' pools, and then each of them."""
    from sidecar.fleet.app import FleetApp, FleetsApp
    from sidecar.fleet.models import ModelsController
    from sidecar.pools.limits_pool import LimitsPool

    allowances, estimator, usage = RateLimiter(), _estimator(policy), _usage(policy, setup)
    watchdog, identities = Watchdog(), Identities()
    counts_apart = find_store(policy, setup.environment) is not None
    if len(policy.models) > 1 and counts_apart:
        _log.warning("%s", _LIMITS_BY_MODEL, extra={"event": "limits_by_model"})
    policies = {name: policy.of_model(name) for name in policy.models}
    routings = {name: _fleet_routing(one, setup, model=name, allowances=allowances) for name, one in policies.items()}
    controllers = {}
    for name, one in policies.items():
        services = replace(
            _fleet_services(one, routings[name], setup, estimator),
            usage=usage,
            watchdog=watchdog,
            identities=identities,
            monitor=partial(_observability, setup, None),
        )
        controllers[name] = _fleet_controller(routings[name], services, one)
    app = FleetsApp([FleetApp(routing.fleet) for routing in routings.values()])
    pages = EnginePages(app, setup.engine_key)
    of_front = Services(
        app=app,
        pool=LimitsPool(policy, allowances),
        dialect=setup.dialect or policy.engine.connected(policy.carrier, pages),
        estimator=estimator,
        engine_key=setup.engine_key,
        usage=usage,
        watchdog=watchdog,
        identities=identities,
        monitor=partial(_observability, setup, setup.files),
    )
    front = ModelsController(of_front, policy, controllers=controllers, counts_apart=counts_apart)
    if front.monitor.routes:
        from sidecar.admin.engine_routes import model_routes

        of_models = {name: controller.monitor.routes for name, controller in controllers.items()}
        front.monitor.routes = model_routes(front, front.monitor.routes, of_models)
    return [front, *controllers.values()]


def _usage(policy: Policy, setup: _Setup) -> TenantUsage | None:
    """The count of what tenants use, None where it is not kept."""
    kept = new_usage(policy, setup.environment)
    return None if kept is None else TenantUsage(kept, policy)


def _observability(setup: _Setup, files: PolicyFiles | None, controller: AdmissionController) -> Observability:
    """The monitor of a controller. That of a model, whose policy counts no use, leaves the use to the front's."""
    policy, environment = controller.policy, setup.environment
    return Observability(
        controller,
        policy,
        controller.pool,
        files,
        environment,
        is_shared=find_store(policy, environment) is not None,
        is_shown=setup.is_shown or has_admin_port(environment),
        records=new_records(policy, environment),
        usage=controller.usage if policy.usage_days else None,
    )


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


def _pool(policy: Policy, environment: Mapping[str, str], size: EngineSize | None, *, takes_over: bool) -> Pool:
    """Where the leases live, and who says how many. Raises ValueError for an address or a switch that is none."""
    store = find_store(policy, environment)
    takes_over = takes_over_a_store(environment, store, takes_over=takes_over)
    if store is None:
        return Pool(policy, size=size)
    return _shared_pool(policy, store, takes_over=takes_over, size=size)


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

    pool = _engine_pool(policy, setup, allowances)
    check = _engine_check(setup.environment)
    fleet = new_fleet(policy, pool.now_us, engine_key=setup.engine_key, check=check, model=model)
    pool.elsewhere.on_incarnation, pool.elsewhere.on_drain = fleet.adopt, fleet.set_draining
    pool.elsewhere.on_reached = fleet.set_reached_elsewhere
    return FleetRouting(fleet, pool, policy, model)


def _engine_pool(policy: Policy, setup: _Setup, allowances: RateLimiter | None = None) -> Pool:
    """The pool of a policy with engines. Raises ValueError as `_pool` does."""
    assert policy.engines is not None
    store, weight_percent = find_store(policy, setup.environment), policy.engines.affinity.weight_percent
    takes_over = takes_over_a_store(setup.environment, store, takes_over=setup.takes_over)
    if store is None:
        return Pool(policy, weight_percent=weight_percent, allowances=allowances)
    return _shared_pool(policy, store, takes_over=takes_over, weight_percent=weight_percent)


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

    pool = _engine_pool(policy, setup)
    engine = MountedEngine(engine_of_process(setup.environment), policy, pool, pages)
    pool.elsewhere.on_incarnation = engine.adopt
    return engine


def _shared_pool(
    policy: Policy,
    store: StoreAddress,
    *,
    takes_over: bool,
    weight_percent: int | None = None,
    size: EngineSize | None = None,
) -> Pool:
    from sidecar.pools.redis import RedisLink, ledger_connector, reach_for
    from sidecar.telemetry.metrics.instruments import StoreMetrics

    metrics = StoreMetrics(policy.pool)
    return Pool(
        policy,
        link=RedisLink(
            ledger_connector(store, policy.pool), policy.pool, reach=reach_for(store), took=metrics.round_trip
        ),
        observer=metrics,
        takes_over=takes_over,
        is_sole_user=policy.engines is not None and policy.engines.mounted,
        weight_percent=weight_percent,
        size=size,
    )
