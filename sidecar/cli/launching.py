"""Shared part of the commands that run an engine's own server with the middleware mounted in it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the one argument that is ours; every other is the real server's."""
    parser.add_argument("--policy", metavar="PATH", help="policy.yaml, or the folder it is in (default SIDECAR_POLICY)")


def launch(server: Callable[[str | None, Sequence[str]], None], args: argparse.Namespace) -> int:
    """Runs the real server until it ends. Returns 1 where it was not started, with one line that says why."""
    from sidecar.launchers.checks import CannotLaunch
    from sidecar.policy.problems import PolicyError

    try:
        server(args.policy, args.passed_on)
    except (CannotLaunch, PolicyError) as error:
        print(f"sidecar: {error}", file=sys.stderr)
        return 1
    return 0
