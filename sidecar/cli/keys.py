"""Make an API key, or hash one for a tenant's file.

`new` prints a key once: give it to the client, and keep only its hash. `hash` reads a key that you already have, from a
prompt or from standard input, because every user of the machine can see a command's arguments.
"""

from __future__ import annotations

import argparse
import getpass
import sys

from sidecar.cli.output import CommandFailed
from sidecar.policy.keys import PREFIX, hash_line, new_key

EXAMPLE = """  sidecar keys new
  sidecar keys hash                  asks for the key, and does not show it
  sidecar keys hash < key.txt"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds `new` and `hash`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="new | hash")
    actions.add_parser("new", help="print a new key, once, and its hash")
    actions.add_parser("hash", help="print the hash of a key, read from standard input")


def run(args: argparse.Namespace) -> int:
    """Prints the hash on standard output; with `new` the key too. Returns 1 where no key was given."""
    return _new() if args.action == "new" else _hash()


def _new() -> int:
    key = new_key()
    print(f"key   {key}")
    print("      for the client; shown this once, and stored nowhere")
    print(f'hash  "{hash_line(key)}"')
    print("      for the tenant's file: one more entry under `keys:`")
    return 0


def _hash() -> int:
    try:
        if sys.stdin.isatty():
            key = getpass.getpass("key: ")
        else:
            key = sys.stdin.read(_MOST + 2).removesuffix("\n").removesuffix("\r")  # the end that an editor leaves
    except (EOFError, UnicodeDecodeError):
        key = ""
    refused = _refusal(key)
    if refused:
        raise CommandFailed(refused)
    print(f'"{hash_line(key)}"')
    return 0


SHORTEST = 16
"""Bytes. One round of SHA-256 guards a key that cannot be guessed: a shorter one is found from its hash."""
_MOST = 4096
"""More than any header's key has: what is longer is a file given by mistake."""
_NEW = "`sidecar keys new` prints a key that will do"


def _refusal(key: str) -> str | None:
    """Why this text cannot be a key, and what would be right. Never repeats it."""
    if not key.strip():
        return "no key was given; type it at the prompt, or pipe it in: sidecar keys hash < key.txt"
    if key.startswith(PREFIX):
        return "that is a hash already; put it into the tenant's file as it is"
    if len(key) > _MOST:
        return f"that is longer than {_MOST} bytes, and no key; pipe in the key alone"
    if "\n" in key or "\r" in key:
        return "that has more than one line; pipe in the key alone, on one line"
    if any(character.isspace() for character in key):
        return (
            "that has a space in it, and no client can send it as a key; pipe in the key alone, without quotes or names"
        )
    if not key.isascii() or not key.isprintable():
        return f"that has a character that no client can send in a header; a key is printable ASCII; {_NEW}"
    if len(key) < SHORTEST:
        return (
            f"that has {len(key)} bytes, and a key needs {SHORTEST}: a shorter one can be found from its hash; {_NEW}"
        )
    return None
