"""API key of a command: from a file, from the environment, or from the command line.

Every user of a machine can see a command's arguments, and the shell's history keeps them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from sidecar.policy.secrets import FILE_SUFFIX, key_in_file, secret_for_header

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
