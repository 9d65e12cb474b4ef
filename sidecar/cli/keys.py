"""Make an API key, or hash one for a tenant's file.

`new` prints a key once: give it to the client, and keep only its hash. `hash` reads a key that you already have, from a
prompt or from standard input, because every user of the machine can see a command's arguments.
"""

from __future__ import annotations

import argparse
import getpass
import sys

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
        key = (getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline()).strip()
    except (EOFError, UnicodeDecodeError):
        key = ""
    refused = _refusal(key)
    if refused:
        print(refused, file=sys.stderr)
        return 1
    print(f'"{hash_line(key)}"')
    return 0


def _refusal(key: str) -> str | None:
    """Why this text cannot be a key. Never repeats it."""
    if not key:
        return "no key was given; type it at the prompt, or pipe it in: sidecar keys hash < key.txt"
    if key.startswith(PREFIX):
        return "that is a hash already; put it into the tenant's file as it is"
    if not key.isascii() or not key.isprintable() or " " in key:
        return "that cannot be sent as an API key; use printable ASCII without spaces"
    return None
