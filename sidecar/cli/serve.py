"""Run the proxy: a reverse proxy that admits requests to the engine by the policy.

It prints one line per address once it answers. SIGTERM refuses new requests with a 503, lets the running ones finish
for at most --grace, and exits with 0; a second signal ends at once. The process follows the policy's files while it
runs: a change replaces the running policy, at once on SIGHUP.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from sidecar.cli.arguments import CLIENTS_PORT, NoPolicy, OneEngine, duration_s, policy_path, port, server_url
from sidecar.policy import POLICY_VARIABLE
from sidecar.telemetry.logs.setup import FORMATTERS, LEVELS, log_settings, own_logging

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.types import ASGIApp

    from sidecar.middleware.controller import AdmissionController
    from sidecar.policy.model import Policy

_log = logging.getLogger("sidecar.serve")

_OBSERVING = "mode: observe: every request passes; `sidecar observed` reports what enforcing would have done"

EXAMPLE = "  sidecar serve --upstream http://127.0.0.1:8000 --policy policies/ --port 8080"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    parser.add_argument(
        "--upstream",
        type=server_url,
        action=OneEngine,
        metavar="URL",
        help="the engine, e.g. http://127.0.0.1:8000; a policy with `engines:` names its own",
    )
    policy_help = f"policy.yaml, or the folder it is in (default {POLICY_VARIABLE})"
    parser.add_argument("--policy", metavar="PATH", help=policy_help)
    parser.add_argument("--host", default="127.0.0.1", help="address to serve clients on (default %(default)s)")
    parser.add_argument(
        "--port", type=port, default=CLIENTS_PORT, help="port for clients, 0 for any (default %(default)s)"
    )
    parser.add_argument(
        "--admin-host",
        default="127.0.0.1",
        metavar="HOST",
        help="address of the live page, /metrics, ... (default %(default)s)",
    )
    parser.add_argument("--admin-port", type=port, default=9464, help="their port, 0 for any (default %(default)s)")
    add = parser.add_argument
    add("--log-level", choices=LEVELS, help="default info; also by SIDECAR_LOG_LEVEL")
    usual = "text where standard error is a terminal, else json"
    add("--log-format", choices=FORMATTERS, help=f"default {usual}; also by SIDECAR_LOG_FORMAT")
    add(
        "--take-over-pool",
        action="store_true",
        help="make a shared pool anew that has other tiers than the policy; replicas with those admit nothing more. "
        "Use it for one start: docs/many-replicas.md",
    )
    # Kubernetes kills a pod 30 s after it asked it to end; this must be over before that.
    parser.add_argument("--grace", type=duration_s, default=25.0, metavar="TIME", help="for running requests, e.g. 25s")


def run(args: argparse.Namespace) -> int:
    """Serves until a signal. Returns 1 where it could not begin, 2 without a policy, with one line that says why."""
    try:
        args.policy = policy_path(args.policy, "--policy PATH")
    except NoPolicy as missing:
        print(f"sidecar serve: {missing}", file=sys.stderr)
        return 2
    try:
        settings = log_settings(os.environ, args.log_level, args.log_format)
    except ValueError as mistake:
        print(f"sidecar: {mistake}", file=sys.stderr)
        return 1
    with own_logging(settings):
        failure = _serve(args, announces_twice=settings.format == "json")
    if failure is not None:  # after the last line of the log, which has a thread of its own
        print(f"sidecar: {failure}", file=sys.stderr)
    return 0 if failure is None else 1


def _serve(args: argparse.Namespace, *, announces_twice: bool) -> Exception | None:
    """Serves. Returns why it could not begin. `announces_twice`: a machine reads the log, and wants to know, too."""
    from sidecar.admin.app import admin_app
    from sidecar.admin.auth import AdminGuard, access_of, open_port
    from sidecar.app import AdmissionMiddleware
    from sidecar.policy.compiler import load_files
    from sidecar.policy.model import Mode
    from sidecar.policy.reload import PolicyFiles
    from sidecar.policy.warnings import warnings
    from sidecar.server import server
    from sidecar.telemetry.setup import TelemetryError, configure_from_environment

    try:
        loaded = load_files(args.policy)
        for warning in warnings(loaded.policy, loaded.place):
            _log.warning("%s", warning, extra={"event": "policy_warning"})
        if loaded.policy.mode is Mode.OBSERVE:
            _log.info("%s", _OBSERVING, extra={"event": "observing"})
        access = access_of(os.environ, args.admin_host)
        if access.is_open:
            _log.warning("%s", open_port(args.admin_host), extra={"event": "admin_port_open"})
        files = PolicyFiles(args.policy)
        middleware = AdmissionMiddleware(
            _app(args.upstream, loaded.policy),
            loaded.policy,
            files=files,
            is_shown=True,
            takes_over_pool=args.take_over_pool,
        )
        controller = middleware.controller
        end_telemetry = configure_from_environment(scrape=middleware.observability.scrape)
        pages = admin_app(
            state=controller.state,
            readiness=controller.readiness,
            notices=controller.notices,
            routes=middleware.observability.routes,
        )
        server.run(
            server.serve(
                middleware,
                host=args.host,
                port=args.port,
                admin=AdminGuard(pages, access),
                admin_host=args.admin_host,
                admin_port=args.admin_port,
                drain=lambda: _drain(controller, args.grace),
                drained=controller.drained,
                reload=middleware.observability.reload,
                upstreams=_upstreams(args.upstream, loaded.policy),
                grace_s=args.grace,
                announce=_announce_and_log if announces_twice else _announce,
            )
        )
    except (server.CannotServe, TelemetryError, ValueError) as error:
        return error
    _end(end_telemetry)
    return None


def _app(upstream: str | None, policy: Policy) -> ASGIApp | None:
    """The proxy to the engine; None where the policy names its engines. Raises ValueError."""
    from sidecar.proxy.proxy import ReverseProxy

    if policy.engines is None and upstream is None:
        raise ValueError(
            "there is no engine to send requests to: give --upstream URL, or write `engines:` in the policy "
            "(docs/several-engines.md)"
        )
    if policy.engines is not None and policy.engines.mounted:
        raise ValueError(
            "the policy's engines are mounted (`engines: {mounted: true}`): start the app that mounts the middleware "
            "(docs/mounting.md), or write static, file or dns for engines behind this proxy"
        )
    if policy.engines is not None and upstream is not None:
        raise ValueError("the policy names its engines (`engines:`): leave out --upstream, or remove `engines:`")
    return None if upstream is None else ReverseProxy(upstream)


def _upstreams(upstream: str | None, policy: Policy) -> Sequence[str]:
    listed = () if policy.engines is None else policy.engines.static
    return [engine.url for engine in listed] if upstream is None else [upstream]


def _end(end_telemetry: Callable[[], None]) -> None:
    # The next Ctrl-C ends the process as SIGTERM does: at once, without the traceback of a KeyboardInterrupt.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_telemetry()
    _log.info("stopped", extra={"event": "stopped"})


def _drain(controller: AdmissionController, grace_s: float) -> None:
    controller.drain(within_s=grace_s)
    new_ones = "pass until the port closes" if controller.is_observing else "are refused"
    _log.info("%d requests are under way, new ones %s", controller.under_way, new_ones, extra={"event": "draining"})


def _announce(line: str) -> None:
    # Flushed: the process that started us may be waiting for it on a pipe.
    print(line, flush=True)


def _announce_and_log(line: str) -> None:
    _announce(line)
    _log.info("%s", line.removeprefix("sidecar: "), extra={"event": "started"})
