"""The parts of `sidecar serve` in one process: the proxy with its admission, its admin pages, and its telemetry."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping, Sequence

import msgspec
from starlette.types import ASGIApp

from sidecar.admin.app import admin_app
from sidecar.admin.auth import Access, AdminGuard
from sidecar.app import AdmissionMiddleware
from sidecar.policy.choices import Mode
from sidecar.policy.model import Policy
from sidecar.policy.passing import load_or_pass
from sidecar.policy.reload import files_for
from sidecar.policy.warnings import warnings
from sidecar.proxy.proxy import ReverseProxy
from sidecar.server.server import Served
from sidecar.telemetry.logs.request_log import ACCESS_VARIABLE
from sidecar.telemetry.setup import configure_from_environment

_OBSERVING = "mode: observe: every request passes; `sidecar observed` reports what enforcing would have done"

_STARTING = "this process is starting: clients are not served yet"

_log = logging.getLogger("sidecar.serve")


class ServeSettings(msgspec.Struct, frozen=True):
    """Settings of the command line. `policy` is a path; `upstream` is None where the policy names its engines.

    `access_log` is None where the environment says it.
    `host` may be a Unix socket's address; `port` says nothing then. The files of a certificate are None without TLS.
    """

    upstream: str | None
    policy: str
    host: str
    port: int
    admin_host: str
    admin_port: int
    grace_s: float
    takes_over_pool: bool = False
    access_log: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None


def load_policy(path: str) -> Policy:
    """The policy, with its warnings in the log. Raises PolicyError."""
    loaded = load_or_pass(path, os.environ)
    for warning in () if loaded.policy.is_bare else warnings(loaded.policy, loaded.place):
        _log.warning("%s", warning, extra={"event": "policy_warning"})
    if loaded.policy.mode is Mode.OBSERVE:
        _log.info("%s", _OBSERVING, extra={"event": "observing"})
    return loaded.policy


class Serving:
    """One process's parts: what is `served`, and whether it is ready. `access` guards the admin pages.

    Raises ValueError for a policy or an environment that cannot be, and TelemetryError.
    """

    def __init__(self, settings: ServeSettings, policy: Policy, access: Access | None = None) -> None:
        self._grace_s, self._is_open = settings.grace_s, False
        self.middleware = AdmissionMiddleware(
            new_proxy(settings.upstream, policy),
            policy,
            files=files_for(settings.policy, os.environ),
            is_shown=True,
            takes_over_pool=settings.takes_over_pool,
            environment=_environment(settings),
        )
        self._controller, observability = self.middleware.controller, self.middleware.observability
        self._end_telemetry = configure_from_environment(scrape=observability.scrape)
        self.readiness = self._controller.readiness
        pages = admin_app(
            state=self._controller.state,
            readiness=self._reasons,
            notices=self._controller.notices,
            routes=observability.routes,
        )
        self.served = Served(
            self.middleware,
            pages if access is None else AdminGuard(pages, access),
            opened=self._note_opened,
            drain=self._drain,
            drained=self._controller.drained,
            reload=observability.reload,
        )

    def _note_opened(self) -> None:
        self._is_open = True

    def _reasons(self) -> Sequence[str]:
        return self.readiness() or (() if self._is_open else (_STARTING,))

    def _drain(self) -> None:
        controller = self._controller
        controller.drain(within_s=self._grace_s)
        new_ones = "pass until the port closes" if controller.passes_all else "are refused"
        _log.info("%d requests are under way, new ones %s", controller.under_way, new_ones, extra={"event": "draining"})

    def end(self) -> None:
        """Sends the last telemetry, after the servers have ended."""
        # The next Ctrl-C ends the process as SIGTERM does: at once, without the traceback of a KeyboardInterrupt.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._end_telemetry()
        _log.info("stopped", extra={"event": "stopped"})


def _environment(settings: ServeSettings) -> Mapping[str, str]:
    return os.environ if settings.access_log is None else {**os.environ, ACCESS_VARIABLE: settings.access_log}


def new_proxy(upstream: str | None, policy: Policy) -> ASGIApp | None:
    """The proxy to the engine; None where the policy names its engines. Raises ValueError."""
    if policy.engines is None and upstream is None:
        raise ValueError(
            "there is no engine to send requests to: give --upstream URL, or write `engines:` in the policy "
            "(docs/tutorial-engines.md)"
        )
    if policy.engines is not None and policy.engines.mounted:
        raise ValueError(
            "the policy's engines are mounted (`engines: {mounted: true}`): start the app that mounts the middleware "
            "(docs/tutorial-fastapi.md), or write static, file or dns for engines behind this proxy"
        )
    if policy.engines is not None and upstream is not None:
        raise ValueError("the policy names its engines (`engines:`): leave out --upstream, or remove `engines:`")
    return None if upstream is None else ReverseProxy(upstream)


def upstreams(upstream: str | None, policy: Policy) -> Sequence[str]:
    """The addresses that requests are sent to, as far as they are known at the start."""
    listed = () if policy.engines is None else policy.engines.static
    return [engine.url for engine in listed] if upstream is None else [upstream]
