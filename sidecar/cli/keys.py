"""Make, list and revoke API keys, or hash one for a tenant's file.

`new` prints a key once: give it to the client. With a tenant it is in force within a second, and without one its hash
is for the tenant's file. The tenant is one of the policy's files, or with --admin one in the store of a running
sidecar. `revoke` takes a key's name, or 8 digits or more with which its hash begins. `hash` reads a key that you
already have, from a prompt or from standard input, because every user of the machine can see a command's arguments.
"""

from __future__ import annotations

import argparse
import getpass
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec

from sidecar.admin.tenant_routes import Tenants
from sidecar.cli.admin_client import admin_url, read_page
from sidecar.cli.arguments import ADMIN, policy_path
from sidecar.cli.output import CommandFailed, say
from sidecar.policy.compiler import Loaded, load_files
from sidecar.policy.declared import Context
from sidecar.policy.problems import PolicyError, dotted
from sidecar.policy.tenant_keys import PREFIX, TenantKey, hash_line, new_key
from sidecar.policy.validate import read_record
from sidecar.tenants.registry import KeyRow, key_rows
from sidecar.tools.text import table

EXAMPLE = f"""  sidecar keys new                   prints a key, and its hash for a tenant's file
  sidecar keys new acme --policy policies/ --name ci --expires 2027-01-31 --tier batch
  sidecar keys list acme --admin {ADMIN}
  sidecar keys revoke acme ci --policy policies/
  sidecar keys hash                  asks for the key, and does not show it
  sidecar keys hash < key.txt"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the four actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="new | list | revoke | hash")
    new = actions.add_parser("new", help="print a new key, once; with TENANT it is one of its keys at once")
    new.add_argument(
        "tenant", nargs="?", metavar="TENANT", help="whose key it becomes; without it, its hash is printed"
    )
    new.add_argument("--name", metavar="NAME", help="its name in the log, in spans and in the list")
    new.add_argument("--expires", metavar="DAY", help="its last day, in UTC, or the time of its end with a zone")
    new.add_argument("--tier", metavar="TIER", help="the tier of its requests that name none (default: the tenant's)")
    listing = actions.add_parser("list", help="list a tenant's keys, by their names and ends")
    revoke = actions.add_parser("revoke", help="remove a key of a tenant: it gets a 401 within a second")
    for one in (listing, revoke):
        one.add_argument("tenant", metavar="TENANT", help="whose key it is")
    revoke.add_argument("key", metavar="KEY", help="its name, or at least 8 digits with which its hash begins")
    for one in (new, listing, revoke):
        place = one.add_mutually_exclusive_group()
        place.add_argument(
            "--policy", metavar="POLICY", help="the policy with the tenant's file (default SIDECAR_POLICY)"
        )
        place.add_argument(
            "--admin", type=admin_url, metavar="URL", help="a sidecar's admin port, for one in the store"
        )
    actions.add_parser("hash", help="print the hash of a key, read from standard input")


def run(args: argparse.Namespace) -> int:
    """Does it. Returns 1 where it could not be done, 2 for a wrong command line."""
    try:
        return _ACTIONS[args.action](args)
    except PolicyError as refused:
        raise CommandFailed(str(refused)) from None


def _new(args: argparse.Namespace) -> int:
    key = new_key()
    given = {"name": args.name, "expires": args.expires, "tier": args.tier}
    more = {name: value for name, value in given.items() if value is not None}
    if args.tenant is None and more:
        raise CommandFailed(f"--{next(iter(more))} is about the key of a tenant: name the tenant, too", 2)
    entry = {"hash": hash_line(key), **more}
    place = None if args.tenant is None else _change(args, _checked(args, entry))
    print(f"key   {key}")
    print("      for the client; shown this once, and stored nowhere")
    if place is None:
        print(f'hash  "{hash_line(key)}"')
        print("      for the tenant's file: one more entry under `keys:`")
    else:
        say(f"      a key of {args.tenant}, in {place[0]}; in force within a second")
    return 0


def _checked(args: argparse.Namespace, entry: Mapping[str, str]) -> Mapping[str, str]:
    """The entry of a key, whose parts are options. Raises CommandFailed."""
    tiers = () if args.admin else tuple(tier.name for tier in _loaded(args).policy.tiers)
    key, mistakes = read_record(TenantKey, entry, Context(tiers, Path()))
    if key is None:
        raise CommandFailed("\n".join(f"--{dotted(path)}: {message}" for path, message in mistakes), 2)
    if key.is_expired(time.time()):
        raise CommandFailed(f"--expires: {key.last} is over; write a later day", 2)
    return entry


def _list(args: argparse.Namespace) -> int:
    rows = _rows(args, "GET")
    ends = [f"{row.expires or 'never'}{' (expired)' if row.is_expired else ''}" for row in rows]
    cells = [(row.name or "-", row.hash, row.tier, end) for row, end in zip(rows, ends, strict=True)]
    say("\n".join(table([("NAME", "HASH BEGINS", "TIER", "EXPIRES"), *cells]) if rows else ["no key"]))
    return 0


def _revoke(args: argparse.Namespace) -> int:
    place, left = _change(args, args.key)
    say(f"key {args.key} of {args.tenant} is revoked in {place}, and gets a 401 within a second; {left or 'none'} left")
    return 0


def _change(args: argparse.Namespace, change: Mapping[str, str] | str) -> tuple[object, int]:
    """Adds an entry to the keys of a tenant, or removes one. Returns the place, and how many there are then."""
    if args.admin and isinstance(change, str):
        return "the store", len(_rows(args, "DELETE", f"/keys/{quote(change, safe='')}"))
    if args.admin:
        return "the store", len(_rows(args, "POST", "/keys", msgspec.json.encode(change)))
    from sidecar.cli.key_files import change_keys

    return change_keys(_loaded(args), args.tenant, change)


def _rows(args: argparse.Namespace, method: str, below: str = "", body: bytes | None = None) -> Sequence[KeyRow]:
    """The keys of a tenant, after a change that the store makes. Raises CommandFailed."""
    if not args.admin:
        policy = _loaded(args).policy
        return key_rows(policy.named[args.tenant], policy)
    path = f"/tenants/{quote(args.tenant, safe='')}{below}"
    answer = read_page(args.admin, path, Tenants, method=method, body=body, patience_s=_PATIENCE_S)
    return next((row.listed or () for row in answer.tenants if row.unused is None), ())


def _loaded(args: argparse.Namespace) -> Loaded:
    """The policy's files, of which one has the tenant. Raises CommandFailed."""
    loaded = load_files(policy_path(args.policy, "--policy"))
    if args.tenant not in loaded.tenants:
        raise CommandFailed(f"no file of this policy has tenant {args.tenant}; one in the store needs --admin URL")
    return loaded


def _hash(_: argparse.Namespace) -> int:
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


_ACTIONS = {"new": _new, "list": _list, "revoke": _revoke, "hash": _hash}
_PATIENCE_S = 10.0
"""As of `sidecar tenants`: a change waits for the store."""
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
