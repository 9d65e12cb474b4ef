"""Services that run beside an app as long as its server does: its pool and its watches, and mounted also logs,
telemetry and admin pages, by the environment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from starlette.types import ASGIApp, Receive, Scope, Send

from sidecar.admin import PORT_VARIABLE
from sidecar.admission.controller import AdmissionController
from sidecar.composition.observability import Observability
from sidecar.engines.watch import ENGINE_CHECK_VARIABLE, EngineState
from sidecar.server import CannotServe
from sidecar.server.mounted import Lifespan, Services, Step, report_own_limit
from sidecar.server.workers import ServerProcesses, check_processes
from sidecar.telemetry.logs.setup import mounted_logging
from sidecar.telemetry.setup import TelemetryError, flush_providers, prepare_from_environment

_log = logging.getLogger("sidecar.app")


def has_admin_port(environment: Mapping[str, str]) -> bool:
    """True if the environment asks for the admin pages."""
    return bool(environment.get(PORT_VARIABLE, "").strip())


class MountedTelemetry:
    """Telemetry by `OTEL_*` in a process that is not ours; a process that has an SDK of its own keeps it.

    It begins after the app, whose owner may install an SDK while it starts: what we install has a resource of ours,
    which the host's spans must not have. By name, a mistake fails the start before the app, whose engine takes minutes.
    With a policy it begins only where `SIDECAR_ADMIN_PORT` asks for metrics, and a mistake is logged. A provider is
    never shut down: another lifespan of the process may follow, and OpenTelemetry takes no second one.
    """

    def __init__(self, observability: Observability, environment: Mapping[str, str], *, is_by_name: bool) -> None:
        self._scrape = observability.scrape if has_admin_port(environment) else None
        self._is_by_name = is_by_name
        self._install: Callable[[], object] | None = None

    def prepare_before_app(self) -> None:
        """Looks for mistakes where the middleware was constructed by name. Raises TelemetryError."""
        if self._is_by_name:
            self._install = prepare_from_environment(scrape=self._scrape)

    async def begin_after_app(self) -> None:
        """Begins where the environment asks for it."""
        try:
            if self._install is None and self._scrape is not None:
                self._install = prepare_from_environment(scrape=self._scrape)
        except TelemetryError as mistake:
            assert self._scrape is not None
            self._scrape.close(str(mistake))
            _log.warning("%s", mistake, extra={"event": "telemetry_missing"})
        if self._install is not None:
            self._install()

    async def flush_hosts(self) -> None:
        """Sends what the host's own providers hold of the last requests, before the host ends them."""
        await asyncio.to_thread(flush_providers, are_ours=False)

    async def end(self) -> None:
        """Sends the rest."""
        await asyncio.to_thread(flush_providers, are_ours=True)


@asynccontextmanager
async def mounted_services(
    controller: AdmissionController,
    telemetry: MountedTelemetry,
    environment: Mapping[str, str],
    scope: Scope,
    *,
    is_shared: bool,
) -> AsyncIterator[None]:
    """Logs, telemetry and admin pages by the environment, while the block runs. `scope` is the server's lifespan's.

    Raises CannotServe and ValueError, also for a server of several processes without a store (`is_shared`).
    """
    is_engine = controller.policy.engines is not None
    processes = check_processes(scope, environment, is_shared=is_shared, is_engine=is_engine)
    with mounted_logging(environment):
        telemetry.prepare_before_app()
        try:
            async with _pages(controller, environment, processes):
                report_own_limit()
                yield
        finally:
            await telemetry.end()


def _pages(
    controller: AdmissionController, environment: Mapping[str, str], processes: ServerProcesses
) -> AbstractAsyncContextManager[None]:
    """The admin pages, where the environment asks for them."""
    if not has_admin_port(environment):
        return nullcontext()
    from sidecar.admin.app import admin_app
    from sidecar.admin.port import admin_pages

    routes = controller.monitor.routes
    pages = admin_app(state=controller.state, readiness=controller.readiness, notices=controller.notices, routes=routes)
    return admin_pages(pages, environment, processes, pool=controller.policy.pool)


def with_lifespan(
    controllers: Sequence[AdmissionController],
    services: Services = lambda _: nullcontext(),
    *,
    is_shared: bool,
    started: Sequence[Step] = (),
    ended: Sequence[Step] = (),
) -> ASGIApp:
    """The app, with `services` and the steps of the server's start and end. A process has one controller, or the front
    of several models and then one for each. `started` are further steps after the app's own start, `ended` after all
    others of the end.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await controllers[0].app(scope, receive, send)  # another, once several middlewares share it

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

    monitors = [controller.monitor for controller in controllers]
    open_pools, ask = [one.pool.open for one in controllers], [one.dialect.ask for one in controllers]
    open_pages = [one.open for one in monitors]
    # What the pools say last is logged.
    closing = [end_leases, *(one.close for one in monitors), *(one.pool.close for one in controllers), *ended]
    if controllers[0].policy.engine_capacity is not None:
        asking = [*started, look_at_engines, *open_pools, *ask]
        return Lifespan(app, services, opening=open_pages, asking=asking, closing=closing)
    asking = [*started, look_at_engines, *ask]
    return Lifespan(app, services, opening=[*open_pools, *open_pages], asking=asking, closing=closing)
