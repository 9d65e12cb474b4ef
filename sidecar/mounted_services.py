"""What runs beside a mounted app as long as its server does: logs, telemetry and admin pages, by the environment."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from sidecar.admin import PORT_VARIABLE
from sidecar.middleware.controller import AdmissionController
from sidecar.observability import Observability
from sidecar.server.workers import ServerProcesses
from sidecar.telemetry.logs.setup import mounted_logging
from sidecar.telemetry.setup import TelemetryError, configure_from_environment

_log = logging.getLogger("sidecar.app")


def has_admin_port(environment: Mapping[str, str]) -> bool:
    """Whether the environment asks for the admin pages."""
    return bool(environment.get(PORT_VARIABLE, "").strip())


class MountedTelemetry:
    """Telemetry by `OTEL_*` in a process that is not ours; a process that has an SDK of its own keeps it.

    By name, it begins before the app, whose engine takes minutes: a mistake fails the start. With a policy, the app's
    owner may install an SDK while the app starts, so that ours begins after that, and only where `SIDECAR_ADMIN_PORT`
    asks for metrics; a mistake is logged.
    """

    def __init__(self, observability: Observability, environment: Mapping[str, str], *, is_by_name: bool) -> None:
        self._scrape = observability.scrape if has_admin_port(environment) else None
        self._is_by_name = is_by_name
        self._send_the_rest: Callable[[], None] | None = None

    def begin_before_app(self) -> None:
        """Begins where the middleware was constructed by name. Raises TelemetryError."""
        if self._is_by_name:
            self._begin()

    async def begin_after_app(self) -> None:
        """Begins where the environment asks for metrics, and nothing has begun."""
        if self._scrape is None or self._send_the_rest is not None:
            return
        try:
            self._begin()
        except TelemetryError as mistake:
            self._scrape.close(str(mistake))
            _log.warning("%s", mistake, extra={"event": "telemetry_missing"})

    async def end(self) -> None:
        """Sends the rest."""
        if self._send_the_rest is not None:
            await asyncio.to_thread(self._send_the_rest)

    def _begin(self) -> None:
        self._send_the_rest = configure_from_environment(scrape=self._scrape)


@asynccontextmanager
async def mounted_services(
    controller: AdmissionController,
    observability: Observability,
    telemetry: MountedTelemetry,
    environment: Mapping[str, str],
    processes: ServerProcesses,
) -> AsyncIterator[None]:
    """Logs, telemetry and admin pages by the environment, while the block runs."""
    with mounted_logging(environment):
        telemetry.begin_before_app()
        try:
            async with _pages(controller, observability, environment, processes):
                yield
        finally:
            await telemetry.end()


def _pages(
    controller: AdmissionController,
    observability: Observability,
    environment: Mapping[str, str],
    processes: ServerProcesses,
) -> AbstractAsyncContextManager[None]:
    """The admin pages, where the environment asks for them."""
    if not has_admin_port(environment):
        return nullcontext()
    from sidecar.admin.app import admin_app
    from sidecar.admin.port import admin_pages

    pages = admin_app(
        state=controller.state, readiness=controller.readiness, notices=controller.notices, routes=observability.routes
    )
    return admin_pages(pages, environment, processes, pool=controller.policy.pool)
