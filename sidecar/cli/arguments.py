"""Values of arguments, read for several commands."""

from __future__ import annotations

import argparse
import os

from sidecar.policy import POLICY_VARIABLE, units


def port(text: str) -> int:
    """A port from 0 to 65535. Raises ArgumentTypeError for what is none."""
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; write a number from 0 to 65535")
    return int(text)


class NoPolicy(ValueError):
    """No policy was named, neither on the command line nor in the environment."""


def add_policy(group: argparse._ActionsContainer) -> None:
    """Adds the positional argument POLICY."""
    policy_help = f"a policy file, or a folder with policy.yaml in it (default {POLICY_VARIABLE})"
    group.add_argument("policy", nargs="?", metavar="POLICY", help=policy_help)


def policy_path(given: str | None, way: str = "POLICY") -> str:
    """The policy's path: the one of the command line, else the one of the environment. Raises NoPolicy."""
    path = os.environ.get(POLICY_VARIABLE) if given is None else given
    if not path:
        raise NoPolicy(f"no policy: give {way} or set {POLICY_VARIABLE}; `sidecar init` writes a policy for an engine")
    return path


def duration_s(text: str) -> float:
    """A time such as 90s, in seconds. Raises ArgumentTypeError for what is none."""
    try:
        return float(units.duration_s(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
