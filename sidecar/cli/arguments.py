"""Values of arguments, read for several commands."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from sidecar.cli.output import CommandFailed
from sidecar.policy import POLICY_VARIABLE, units
from sidecar.policy.secrets import FILE_SUFFIX, key_in_file, secret_for_header
from sidecar.server.unix_address import SCHEME, socket_path

CLIENTS_PORT = 8080
"""The port for clients of `sidecar serve`. Engines use 8000 (vLLM, TensorRT-LLM, Dynamo) and 30000 (SGLang)."""

ADMIN_PORT = 9464
ADMIN = f"http://127.0.0.1:{ADMIN_PORT}"
"""The admin port of `sidecar serve`."""


LONGEST_S = 24 * 3600.0
"""More than any answer, or any run, takes: a longer time was meant in milliseconds."""
_LEAST = 1e-6


def whole_number(what: str, least: int, most: int) -> Callable[[str], int]:
    """A reader of whole numbers. It raises ArgumentTypeError for a text that is no `what`."""

    def read(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or len(text) > 12 or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no {what}; write a number from {least:,} to {most:,}")
        return int(text)

    return read


def number(what: str, most: float = LONGEST_S, *, may_be_zero: bool = False) -> Callable[[str], float]:
    """A reader of numbers. It raises ArgumentTypeError for a text that is no `what`."""
    least = 0.0 if may_be_zero else _LEAST

    def read(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not least <= found <= most:
            bound = "a number from 0 on" if may_be_zero else "a number that is more than 0"
            raise argparse.ArgumentTypeError(f"{text!r} is no {what}; write {bound}, up to {most:,.0f}")
        return found

    return read


def port(text: str) -> int:
    """A port. Raises ArgumentTypeError for what is none."""
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; write a number from 0 to 65535")
    return int(text)


MOST_WORKERS = 64
"""More than the processors of most machines, and more than one store has work for."""


class NoPolicy(CommandFailed):
    """No policy was named, neither on the command line nor in the environment."""


def add_policy(group: argparse._ActionsContainer) -> None:
    """Adds the positional argument POLICY."""
    policy_help = f"a policy file, or a folder with policy.yaml in it (default {POLICY_VARIABLE})"
    group.add_argument("policy", nargs="?", metavar="POLICY", help=policy_help)


def policy_path(given: str | None, way: str = "POLICY") -> str:
    """The policy's path: the one of the command line, else the one of the environment. Raises NoPolicy."""
    path = os.environ.get(POLICY_VARIABLE) if given is None else given
    if not path:
        raise NoPolicy(
            f"no policy: give {way} or set {POLICY_VARIABLE}; `sidecar init` writes a policy for an engine", 2
        )
    return path


class OneEngine(argparse.Action):
    """The address of one engine. A second one is refused: argparse itself would keep the last, without a word."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: object, option: str | None = None
    ) -> None:
        """Stores the address. Ends the command where there is one already."""
        if getattr(namespace, self.dest) is not None:
            parser.error(
                f"{option} is given twice; several engines belong in the policy, under `engines:`: "
                "`sidecar init --upstream A --upstream B` writes such a policy, and --policy names it"
            )
        setattr(namespace, self.dest, value)


_LIKE = "write one like http://127.0.0.1:8000"
_V1 = "/v1"
_LEFT_OUT = f"sidecar: the {_V1} at the end of the server's address is left out, because every path begins with it"


def duration_s(text: str) -> float:
    """A time such as 90s, in seconds. Raises ArgumentTypeError for what is none."""
    try:
        return float(units.duration_s(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def engine_address(text: str) -> str:
    """An engine's address: a Unix socket's, or else a `server_url`. Raises ArgumentTypeError for what is none."""
    try:
        is_socket = socket_path(text) is not None
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text if is_socket else server_url(text)


def socket_address(text: str) -> str:
    """A Unix socket's address. Raises ArgumentTypeError for what is none."""
    if engine_address(text) != text or socket_path(text) is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no Unix socket's address; write unix:/run/sidecar.sock, or --host and --port"
        )
    return text


def server_url(text: str) -> str:
    """A server's address, with a base path or without. Raises ArgumentTypeError for what is none.

    The `/v1` that OpenAI clients want at its end is left out, with a line on standard error.
    """
    from sidecar.tools.loadgen.connection import Target

    if text.lower().startswith(SCHEME):
        raise argparse.ArgumentTypeError(
            f"{text!r} is a Unix socket's address, which `sidecar serve` alone can use; {_LIKE}"
        )
    url = (text.strip() if "://" in text else f"http://{text.strip()}").rstrip("/")
    try:
        Target.of(url)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not urlsplit(url).path.endswith(_V1):
        return url
    print(_LEFT_OUT, file=sys.stderr)  # without the address, which may hold a password
    return url.removesuffix(_V1).rstrip("/")


# -- API key of a command: from a file, from the environment, or from the command line.
#
# Every user of a machine can see a command's arguments, and the shell's history keeps them.

KEY_VARIABLE = "SIDECAR_API_KEY"


def add_key(
    group: argparse._ActionsContainer,
    whose: str,
    variables: Sequence[str] = (KEY_VARIABLE,),
    prefix: str = "--",
    metavar: str = "KEY",
) -> None:
    """Adds `--key` and `--key-file`, with another prefix where `--key` has another meaning."""
    named = " or ".join(variables)
    one = group.add_mutually_exclusive_group().add_argument
    help_key = f"{whose}; other users of this machine can see it, so better:"
    one(f"{prefix}key", type=_printable, metavar=metavar, help=help_key)
    help_file = f"a file that holds it; or set {named}, or one of them with {FILE_SUFFIX} at its end to the file's name"
    if len(variables) == 1:
        help_file = f"a file that holds it; or set {named}, or {named}{FILE_SUFFIX} to the file's name"
    one(f"{prefix}key-file", metavar="FILE", help=help_file)


def _printable(key: str) -> str:
    if not key or not key.isprintable():
        raise argparse.ArgumentTypeError("the key has a character that no header can hold")  # and is not shown
    return key


def key_given(
    key: str | None, file: str | None, option: str = "--key-file", variables: Sequence[str] = (KEY_VARIABLE,)
) -> tuple[str | None, str]:
    """The key, and the option or variable that it came from: what is on the command line goes first. None, "" for none.

    Raises ValueError for a file or a variable that holds no key; the message never repeats it.
    """
    if key is not None:
        return key, option.removesuffix("-file")
    if file is not None:
        return key_in_file(file, option), option
    for name in variables:
        if found := secret_for_header(os.environ, name):
            return found, name
    return None, ""
