"""List a pool's tenants, write one to the store, or remove one from there, while the sidecars run.

The command asks the admin port of a running sidecar whose policy says `stored_tenants: true`, and sends the token in
SIDECAR_ADMIN_TOKEN or SIDECAR_ADMIN_TOKEN_FILE along. A change is in force on every replica within a second. The
tenants of the policy's files are listed, too, and are changed there. `add` makes a key and prints it once, unless the
hashes of keys are given: no key is sent to the sidecar, and none is stored.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from sidecar.admin.tenant_routes import Removed, Tenants
from sidecar.cli.admin_client import add_admin, read_page
from sidecar.cli.output import CommandFailed, require_writable, show
from sidecar.policy.source import read
from sidecar.policy.tenant_keys import hash_line, new_key
from sidecar.policy.units import Ambiguous
from sidecar.tenants.registry import TenantRow
from sidecar.tools.text import table

EXAMPLE = """  sidecar tenants list
  sidecar tenants add acme --tier normal --max-tier high
  sidecar tenants add --file acme.yaml --replace
  sidecar tenants remove acme"""


_PATIENCE_S = 10.0
"""A change waits for the store, and the sidecar itself says when that does not answer: after 3 s at most."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    add = parser.add_argument
    actions = ("list", "show", "add", "remove")
    add("action", choices=actions, metavar=" | ".join(actions), help="what to do")
    add("name", nargs="?", metavar="NAME", help="the tenant")
    add("--tier", metavar="TIER", help="add: the tier of its requests that name none")
    add("--max-tier", metavar="TIER", help="add: the best tier that it may ask for (default: its tier)")
    add("--weight", type=int, metavar="N", help="add: its share against the other tenants of its tier (default: 1)")
    add(
        "--key-hash",
        action="append",
        metavar="HASH",
        help="add: the hash of a key; may be given again",
    )
    add("--no-key", action="store_true", help="add: without a key, for tenants that tokens or a gateway name")
    add("--file", metavar="FILE", help="add: a tenant's file with all of it, limits too; - for standard input")
    add("--replace", action="store_true", help="add: also over a tenant of this name that is in the store")
    add_admin(parser, "write the answer as JSON as well, - for standard output alone")


def run(args: argparse.Namespace) -> int:
    """Returns 0 where it was done, 1 where not, 2 for a wrong command line."""
    if (mistake := _mistake(args)) is not None:
        raise CommandFailed(mistake, 2)
    require_writable(args.json)
    answer, shown = _ACTIONS[args.action](args)
    return show(args.json, answer, lambda: shown)


_OF_ADD = ("tier", "max_tier", "weight", "key_hash", "file")


def _mistake(args: argparse.Namespace) -> str | None:
    given = [name for name in _OF_ADD if getattr(args, name) is not None]
    given += [name for name in ("no_key", "replace") if getattr(args, name)]
    if args.action != "add":
        if given:
            return f"--{given[0].replace('_', '-')} is for `add`"
        if args.action == "list":
            return None if args.name is None else "list takes no name; `show NAME` shows one tenant"
        return f"{args.action} needs the tenant's name" if args.name is None else None
    if args.file is not None:
        others = [name for name in given if name not in ("file", "replace")]
        return f"--{others[0].replace('_', '-')} belongs into the file" if others else None
    if args.name is None or args.tier is None:
        return "add needs a name and --tier, or --file with both"
    return "--no-key and --key-hash exclude each other" if args.no_key and args.key_hash else None


def _list(args: argparse.Namespace) -> tuple[Tenants, list[str]]:
    rows: list[TenantRow] = []
    after: str | None = ""
    while after is not None:
        page = read_page(args.admin, f"/tenants?after={quote(after, safe='')}", Tenants)
        rows += page.tenants
        after = page.next if page.next is not None and page.next > after else None
    return Tenants(rows, None, page.change), lines(rows)


def _show(args: argparse.Namespace) -> tuple[Tenants, list[str]]:
    found = read_page(args.admin, f"/tenants/{quote(args.name, safe='')}", Tenants)
    return found, lines(found.tenants)


def _add(args: argparse.Namespace) -> tuple[Tenants, list[str]]:
    record, key = _record(args), None
    if args.file is None and not args.no_key:
        hashes = args.key_hash
        if not hashes:
            key = new_key()
            hashes = [hash_line(key)]
        record["keys"] = hashes
    path = "/tenants?replace=true" if args.replace else "/tenants"
    answer = read_page(args.admin, path, Tenants, method="POST", body=_encode(record), patience_s=_PATIENCE_S)
    shown = lines(answer.tenants)
    if key is not None:
        shown += ["", f"key   {key}", "      for the client; shown this once, and stored nowhere"]
    return answer, shown


def _remove(args: argparse.Namespace) -> tuple[Removed, list[str]]:
    path = f"/tenants/{quote(args.name, safe='')}"
    answer = read_page(args.admin, path, Removed, method="DELETE", patience_s=_PATIENCE_S)
    return answer, [f"tenant {answer.removed} is removed: its keys stop on every replica within a second"]


_ACTIONS: Mapping[str, Callable[[argparse.Namespace], tuple[Tenants | Removed, list[str]]]] = {
    "list": _list,
    "show": _show,
    "add": _add,
    "remove": _remove,
}


def _record(args: argparse.Namespace) -> dict[str, Any]:
    """The tenant that the command line, or the file, describes. The sidecar says what is wrong in it."""
    if args.file is None:
        written = {"tenant": args.name, "tier": args.tier, "max_tier": args.max_tier, "weight": args.weight}
        return {key: value for key, value in written.items() if value is not None}
    document = read(Path("/dev/stdin" if args.file == "-" else args.file))
    if document.data is None or document.problems:
        raise CommandFailed("\n".join(map(str, document.problems)))
    if args.name is not None and document.data.get("tenant") != args.name:
        raise CommandFailed(f"{args.file} is not the file of {args.name}; leave the name out")
    return dict(document.data)


def _encode(record: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode({key: _plain(value) for key, value in record.items()})


def _plain(value: object) -> object:
    """The value for JSON: a word that YAML readers understand in different ways is the word."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Ambiguous) else value


_COLUMNS: Sequence[tuple[str, Callable[[TenantRow], str]]] = (
    ("FROM", lambda row: row.source),
    ("TIER", lambda row: str(row.record.get("tier", ""))),
    ("MAX TIER", lambda row: str(row.record.get("max_tier", row.record.get("tier", "")))),
    ("WEIGHT", lambda row: str(row.record.get("weight", 1))),
    ("KEYS", lambda row: f"{row.keys:,}"),
    ("LIMITS", lambda row: _limits(row.record.get("limits"))),
)


def lines(rows: Sequence[TenantRow]) -> list[str]:
    """The tenants as a table, and under it why some are not in force."""
    if not rows:
        return ["no tenant"]
    cells = [["TENANT", *(name for name, _ in _COLUMNS)]]
    cells += [[row.tenant, *(cell(row) for _, cell in _COLUMNS)] for row in rows]
    unused = [f"{row.tenant} of the store is not in force: {row.unused}" for row in rows if row.unused is not None]
    return [*table(cells), *unused]


def _limits(limits: object) -> str:
    return ", ".join(f"{name} {value}" for name, value in limits.items()) if isinstance(limits, dict) else "none"
