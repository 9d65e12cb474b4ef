"""Make, list and revoke API keys, or hash one for a tenant's file.

`new` prints a key once: give it to the client. With a tenant it is in force within a second, and without one its hash
is for the tenant's file. The tenant is one of the policy's files, or with --admin one in the store of a running
sidecar. `revoke` takes a key's name, or 8 digits or more with which its hash begins. `hash` reads a key that you
already have, from a prompt or from standard input, because every user of the machine can see a command's arguments.
"""

from __future__ import annotations

import argparse
import fcntl
import getpass
import json
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import yaml
from yaml.nodes import MappingNode, Node, SequenceNode

from sidecar.admin.tenant_routes import Tenants
from sidecar.cli.admin_client import admin_url, read_page
from sidecar.cli.arguments import ADMIN, policy_path
from sidecar.cli.output import CommandFailed, say
from sidecar.policy.compiler import Loaded, load_files
from sidecar.policy.declared import Context
from sidecar.policy.problems import PolicyError, dotted
from sidecar.policy.source import LARGEST_FILE_BYTES, LOADER, read
from sidecar.policy.stored_tenants import InvalidTenant, read_tenant
from sidecar.policy.tenant_keys import PREFIX, TenantKey, UnknownKey, find_key, hash_line, new_key
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


# -- Keys of a tenant's file: one more or one less, with everything else in the file as it was.
#
# The text is edited where YAML's parser finds the list. The new text is read before it is used, and must say exactly
# what was meant. It replaces the file as a whole, with its mode and owner, unless that has changed meanwhile.


def change_keys(loaded: Loaded, tenant: str, change: Mapping[str, str] | str) -> tuple[Path, int]:
    """Adds an entry to the keys of a tenant's file, or removes the one that `find_key` finds. Raises CommandFailed.

    Returns the file, and how many keys it has then.
    """
    path = Path(os.path.realpath(loaded.tenants[tenant].file))
    try:
        with _alone_in(path.parent):
            before = read(path)
            data: dict[str, Any] = dict(before.data or {})
            keys, entries = read_tenant(data, loaded.policy).keys or (), [*data.get("keys", ())]
            text = before.content.decode()
            if isinstance(change, str):
                place = keys.index(find_key(keys, change))
                text = _without_entry(text, place)
                del entries[place]
            else:
                text = _with_entry(text, _entry(change))
                entries.append(dict(change) if len(change) > 1 else change["hash"])
            data["keys"] = entries
            read_tenant(data, loaded.policy)
            if len(text.encode()) > LARGEST_FILE_BYTES:
                raise CommandFailed(f"{path}: would be larger than 1 MiB, which cannot be read; revoke old keys first")
            with _written_beside(path, text.encode()) as new:
                if read(new).data != data:
                    raise CommandFailed(f"{path}: its `keys` are written in a way that only an editor can change")
                if read(path).content != before.content:
                    raise CommandFailed(f"{path} has changed meanwhile, and was left as it is; run the command again")
                new.replace(path)
    except (UnknownKey, InvalidTenant) as refused:
        raise CommandFailed(f"tenant {tenant}: {refused}") from None
    except OSError as error:
        raise CommandFailed(f"{path}: cannot be written ({error.strerror}); it is as it was") from None
    return path, len(entries)


def _entry(change: Mapping[str, str]) -> str:
    """An entry as it is written: its hash alone, where there is no more about it."""
    members = ", ".join(f"{name}: {json.dumps(value)}" for name, value in change.items())
    return "{" + members + "}" if len(change) > 1 else json.dumps(change["hash"])


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """No other such command changes a file of the folder meanwhile."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


@contextmanager
def _written_beside(file: Path, content: bytes) -> Iterator[Path]:
    """A new file with the mode and the owner of another, which no pattern of tenants' files finds. Gone at the end."""
    new, status = file.with_name(f".{file.name}.new"), file.stat()
    try:
        with new.open("wb") as stream:
            os.fchown(stream.fileno(), status.st_uid, status.st_gid)
            os.fchmod(stream.fileno(), stat.S_IMODE(status.st_mode))
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        yield new
    finally:
        new.unlink(missing_ok=True)


def _with_entry(text: str, entry: str) -> str:
    """The text with one more entry at the end of `keys`."""
    end = "\r\n" if "\r\n" in text else "\n"
    if text and not text.endswith("\n"):
        text += end
    keys = _keys(text)
    if keys is None:
        return f"{text}keys:{end}  - {entry}{end}"
    if keys.flow_style:
        at = _end(keys.value[-1]) if keys.value else keys.end_mark.index - 1
        return f"{text[:at]}{', ' if keys.value else ''}{entry}{text[at:]}"
    at = text.find("\n", _end(keys)) + 1 or len(text)
    return f"{text[:at]}{' ' * keys.start_mark.column}- {entry}{end}{text[at:]}"


def _without_entry(text: str, place: int) -> str:
    """The text without one entry of `keys`."""
    keys = _keys(text)
    assert keys is not None
    item = keys.value[place]
    start, stop = item.start_mark.index, _end(item)
    if len(keys.value) == 1:
        begin = keys.start_mark.index
        return text[:begin] + ("" if keys.start_mark.column else "  ") + "[]" + text[_end(keys) :]
    if not keys.flow_style:
        return text[: text.rindex("\n", 0, start) + 1] + text[text.find("\n", stop) + 1 or len(text) :]
    if place + 1 < len(keys.value):
        stop = keys.value[place + 1].start_mark.index
    elif text[_end(keys.value[place - 1]) : start].strip() == ",":
        start = _end(keys.value[place - 1])
    return text[:start] + text[stop:]


def _keys(text: str) -> SequenceNode | None:
    """The list `keys` in a file's text, with its places there; None where there is none."""
    root = yaml.compose(text, Loader=LOADER)
    pairs = root.value if isinstance(root, MappingNode) else []
    return next((value for name, value in pairs if name.value == "keys" and isinstance(value, SequenceNode)), None)


def _end(node: Node) -> int:
    """The place where a node's own text ends. That of a list or mapping in lines of its own goes on to what follows."""
    while node.value and isinstance(node, SequenceNode | MappingNode) and not node.flow_style:
        node = node.value[-1] if isinstance(node, SequenceNode) else node.value[-1][1]
    return int(node.end_mark.index)
