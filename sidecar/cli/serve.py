"""Run the proxy: a reverse proxy that admits requests to the engine by the policy.

It prints one line per address once it answers. SIGTERM refuses new requests with a 503, lets the running ones finish
for at most --grace, and exits with 0; a second signal ends at once. The process follows the policy's files while it
runs: a change replaces the running policy, at once on SIGHUP. With --workers several processes do all this together.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import TYPE_CHECKING

from sidecar.cli.arguments import (
    ADMIN_PORT,
    CLIENTS_PORT,
    MOST_WORKERS,
    NoPolicy,
    OneEngine,
    duration_s,
    engine_address,
    policy_path,
    port,
    socket_address,
    whole_number,
)
from sidecar.policy import POLICY_VARIABLE
from sidecar.telemetry.logs.request_log import AccessLog
from sidecar.telemetry.logs.setup import FORMATTERS, LEVELS, LogSettings, log_settings, own_logging

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.admin.auth import Access
    from sidecar.composition.serving import ServeSettings
    from sidecar.policy.model import Policy

_log = logging.getLogger("sidecar.serve")

_WORKERS = (
    "processes that serve the port together, for more requests than one processor can take (default %(default)s). They "
    "share one pool: in the policy's store, else in a Valkey that this command starts, from the extra workers or the "
    "PATH. Linux only"
)
EXAMPLE = """\
  sidecar serve --upstream http://127.0.0.1:8000 --policy policies/ --port 8080
  sidecar serve --upstream http://127.0.0.1:8000 --policy policies/ --workers 4"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    parser.add_argument(
        "--upstream",
        type=engine_address,
        action=OneEngine,
        metavar="URL",
        help="the engine, e.g. http://127.0.0.1:8000 or unix:/run/vllm.sock; a policy with `engines:` names its own",
    )
    policy_help = f"policy.yaml, or the folder it is in (default {POLICY_VARIABLE})"
    parser.add_argument("--policy", metavar="PATH", help=policy_help)
    parser.add_argument("--host", default="127.0.0.1", help="address to serve clients on (default %(default)s)")
    parser.add_argument(
        "--port", type=port, default=CLIENTS_PORT, help="port for clients, 0 for any (default %(default)s)"
    )
    parser.add_argument(
        "--listen",
        type=socket_address,
        metavar="unix:PATH",
        help="serve clients on a Unix socket, in place of --host and --port",
    )
    parser.add_argument(
        "--tls-cert", metavar="FILE", help="serve clients by TLS: the certificate, then its issuers', PEM"
    )
    parser.add_argument("--tls-key", metavar="FILE", help="its private key (default: in the certificate's file)")
    parser.add_argument(
        "--admin-host",
        default="127.0.0.1",
        metavar="HOST",
        help="address of the live page, /metrics, ... (default %(default)s)",
    )
    parser.add_argument(
        "--admin-port", type=port, default=ADMIN_PORT, help="their port, 0 for any (default %(default)s)"
    )
    add = parser.add_argument
    add("--log-level", choices=LEVELS, help="default info; also by SIDECAR_LOG_LEVEL")
    usual = "text where standard error is a terminal, else json"
    add(
        "--access-log",
        choices=[*map(str.__str__, AccessLog)],
        help="requests with a line in the log: off, failures (default) or all; also by SIDECAR_ACCESS_LOG",
    )
    add("--log-format", choices=FORMATTERS, help=f"default {usual}; also by SIDECAR_LOG_FORMAT")
    add(
        "--take-over-pool",
        action="store_true",
        help="make a shared pool anew that has other tiers than the policy; replicas with those admit nothing more. "
        "Use it for one start: docs/many-replicas.md",
    )
    add("--no-check", action="store_true", help="begin at once, without a look at whether the engines fit the policy")
    add("--workers", type=whole_number("number of workers", 1, MOST_WORKERS), default=1, metavar="N", help=_WORKERS)
    # Kubernetes kills a pod 30 s after it asked it to end; this must be over before that.
    parser.add_argument("--grace", type=duration_s, default=25.0, metavar="TIME", help="for running requests, e.g. 25s")


def run(args: argparse.Namespace) -> int:
    """Serves until a signal. Returns 1 where it could not begin, 2 without a policy, with one line that says why."""
    try:
        args.policy = _policy_path(args.policy)
        log = log_settings(os.environ, args.log_level, args.log_format)
    except ValueError as mistake:
        print(f"sidecar: {mistake}", file=sys.stderr)
        return 1
    settings = _settings(args)
    with own_logging(log):
        _raise_open_files()
        announce = _announce_and_log if log.format == "json" else _announce  # a machine reads it, and wants to know
        failure = _serve(settings, args.workers, log, announce, is_checked=not args.no_check)
    if failure is not None:  # after the last line of the log, which has a thread of its own
        print(f"sidecar: {failure}", file=sys.stderr)
    return 0 if failure is None else 1


def _policy_path(given: str | None) -> str:
    """The policy's path, empty where none is needed. Raises NoPolicy, and ValueError for a mode that is none."""
    from sidecar.policy.model import is_forced

    try:
        return policy_path(given, "--policy PATH")
    except NoPolicy:
        if not is_forced(os.environ):
            raise
        return ""


def _raise_open_files() -> None:
    """Before the workers, which inherit the limit."""
    from sidecar.server.open_files import raise_limit

    if raised := raise_limit():
        _log.info("open files: the limit is raised from %d to %d", *raised, extra={"event": "open_files"})


def _settings(args: argparse.Namespace) -> ServeSettings:
    from sidecar.composition.serving import ServeSettings

    return ServeSettings(
        upstream=args.upstream,
        policy=args.policy,
        host=args.listen or args.host,
        port=args.port,
        admin_host=args.admin_host,
        admin_port=args.admin_port,
        grace_s=args.grace,
        takes_over_pool=args.take_over_pool,
        access_log=args.access_log,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
    )


def _serve(
    settings: ServeSettings, workers: int, log: LogSettings, announce: Callable[[str], None], *, is_checked: bool
) -> Exception | None:
    """Serves in this process, or by several `workers`. Returns why it could not begin, or go on."""
    from sidecar.composition.serving import Serving, load_policy, upstreams
    from sidecar.policy.choices import Mode
    from sidecar.server import CannotServe, server
    from sidecar.server.certificate import new_certificate

    try:
        policy = load_policy(settings.policy)
        if is_checked and policy.mode is not Mode.PASS:
            _check(policy, settings)
        if workers > 1:
            from sidecar.workers.supervisor import supervise

            access = _access(settings)
            server.run(supervise(settings, policy, workers, access=access, log=log, announce=announce))
            _log.info("stopped", extra={"event": "stopped"})
            return None
        certificate = new_certificate(settings.tls_cert, settings.tls_key)
        serving = Serving(settings, policy, _access(settings))
        server.run(
            server.serve(
                serving.served,
                address=(settings.host, settings.port),
                admin=(settings.admin_host, settings.admin_port),
                upstreams=upstreams(settings.upstream, policy),
                grace_s=settings.grace_s,
                announce=announce,
                certificate=certificate,
            )
        )
    except (CannotServe, ValueError) as error:
        return error
    serving.end()
    return None


def _check(policy: Policy, settings: ServeSettings) -> None:
    """Looks whether the engines fit the policy. Imported only here: it brings what the doctor needs."""
    from sidecar.cli.serve_check import check_engines

    check_engines(policy, settings.upstream)


def _access(settings: ServeSettings) -> Access:
    """How the admin port is guarded, with a warning where it is not. Raises ValueError."""
    from sidecar.admin.auth import open_port, read_access

    access = read_access(os.environ, settings.admin_host)
    if access.is_open:
        _log.warning("%s", open_port(settings.admin_host), extra={"event": "admin_port_open"})
    return access


def _announce(line: str) -> None:
    # Flushed: the process that started us may be waiting for it on a pipe.
    print(line, flush=True)


def _announce_and_log(line: str) -> None:
    _announce(line)
    _log.info("%s", line.removeprefix("sidecar: "), extra={"event": "started"})
