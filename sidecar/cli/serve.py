"""Runs the door as a process of its own: a reverse proxy that admits requests to the engine by the policy.

Prints one line per address once it answers. SIGTERM refuses new requests with a 503, lets the running ones finish
for as long as --grace, and exits with 0; a second signal ends at once.
"""

from __future__ import annotations

import argparse
import sys

from sidecar.policy import units

EXAMPLE = "  sidecar serve --upstream http://127.0.0.1:8000 --policy policies/ --port 8080"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    parser.add_argument("--upstream", required=True, metavar="URL", help="the engine, e.g. http://127.0.0.1:8000")
    parser.add_argument("--policy", required=True, metavar="PATH", help="policy.yaml, or the folder it is in")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve clients on (default %(default)s)")
    parser.add_argument("--port", type=_port, default=8080, help="port for clients, 0 for any (default %(default)s)")
    parser.add_argument("--admin-host", default="127.0.0.1", help="address of /healthz, /readyz, /state (%(default)s)")
    parser.add_argument("--admin-port", type=_port, default=9464, help="their port, 0 for any (default %(default)s)")
    # Kubernetes kills a pod 30 s after it asked it to end; this must be over before that.
    parser.add_argument("--grace", type=_seconds, default=25.0, metavar="TIME", help="for running requests, e.g. 25s")


def run(args: argparse.Namespace) -> int:
    """Serves until a signal. Returns 1 where it could not begin, with one line that says why."""
    from sidecar.asgi import server
    from sidecar.asgi.admin import admin_app
    from sidecar.asgi.proxy import ReverseProxy
    from sidecar.composition import AdmissionMiddleware
    from sidecar.policy.loading import load_files
    from sidecar.policy.warnings import warnings
    from sidecar.telemetry.setup import TelemetryError, configure_from_environment

    try:
        end_telemetry = configure_from_environment()
        loaded = load_files(args.policy)
        for warning in warnings(loaded.policy, loaded.place):
            print(f"sidecar: warning: {warning}", file=sys.stderr, flush=True)
        door = AdmissionMiddleware(ReverseProxy(args.upstream), loaded.policy)
        server.run(
            server.serve(
                door,
                host=args.host,
                port=args.port,
                admin=admin_app(state=door.state, readiness=door.readiness, notices=door.notices),
                admin_host=args.admin_host,
                admin_port=args.admin_port,
                drain=door.drain,
                drained=door.drained,
                grace_s=args.grace,
                announce=_announce,
            )
        )
    except (server.CannotServe, TelemetryError, ValueError) as error:
        print(f"sidecar: {error}", file=sys.stderr)
        return 1
    end_telemetry()
    return 0


def _announce(line: str) -> None:
    # Flushed: whoever started us may be waiting for it on a pipe.
    print(line, flush=True)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; write a number from 0 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        return float(units.duration_s(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
