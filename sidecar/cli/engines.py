"""List the engines of a pool, drain one before it is stopped, or let it take requests again.

The command asks the admin port of a running sidecar (`sidecar serve` with `engines:` in its policy), and sends the
token in SIDECAR_ADMIN_TOKEN or SIDECAR_ADMIN_TOKEN_FILE along. A draining engine gets no new requests, and serves those
that it has. With --wait the command returns when it is empty: as the preStop hook of a rolling update.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from urllib.parse import quote

from sidecar.admin.engine_routes import Drained, Engines
from sidecar.cli.admin_client import PATIENCE_S, add_admin, read_page
from sidecar.cli.arguments import duration_s
from sidecar.cli.output import CommandFailed, require_writable, show
from sidecar.cluster.document import EngineRow
from sidecar.cluster.phrases import count
from sidecar.durations import short_duration
from sidecar.engines.view import EngineDocument
from sidecar.tools.text import table

EXAMPLE = """  sidecar engines list
  sidecar engines drain a --wait --timeout 5m
  sidecar engines resume a"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    add = parser.add_argument
    actions = ("list", "drain", "resume")
    add("action", choices=actions, metavar=" | ".join(actions), help="what to do")
    add("name", nargs="?", metavar="NAME", help="the engine, as `list` names it")
    add("--wait", action="store_true", help="drain: return when the engine is empty")
    add(
        "--timeout", type=duration_s, metavar="TIME", help="drain: wait no longer (default: the policy's drain_timeout)"
    )
    add_admin(parser, "write the answer as JSON as well, - for standard output alone")


def run(args: argparse.Namespace) -> int:
    """Returns 0 where it was done: with --wait, where the engine is empty. 1 where not, 2 for a wrong command line."""
    if (mistake := _mistake(args)) is not None:
        raise CommandFailed(mistake, 2)
    require_writable(args.json)
    if args.action == "list":
        engines = read_page(args.admin, "/engines", Engines)
        return show(args.json, engines, lambda: lines(engines.engines))
    change = _change(args)
    return show(args.json, change, lambda: [_drain_sentence(change, args)])


def _mistake(args: argparse.Namespace) -> str | None:
    if args.action == "list":
        if args.name is not None or args.wait or args.timeout is not None:
            return "list takes no engine, no --wait and no --timeout"
        return None
    if args.name is None:
        return f"{args.action} needs the engine's name: `sidecar engines list` shows the names"
    if args.action == "resume" and (args.wait or args.timeout is not None):
        return "resume takes no --wait and no --timeout: it is done at once"
    return "--timeout is for --wait" if args.timeout is not None and not args.wait else None


def _change(args: argparse.Namespace) -> Drained:
    path = f"/engines/{quote(args.name, safe='')}/{args.action}"
    patience_s: float | None = PATIENCE_S
    if args.wait:
        within = "" if args.timeout is None else f"&timeout={args.timeout:.3f}s"
        path = f"{path}?wait=true{within}"
        patience_s = None if args.timeout is None else args.timeout + PATIENCE_S
    return read_page(args.admin, path, Drained, method="POST", patience_s=patience_s)


def _drain_sentence(answer: Drained, args: argparse.Namespace) -> str:
    engine = answer.engine
    if args.action == "resume":
        return f"engine {engine.name} takes requests again; it is {engine.state}"
    if answer.drained:
        return f"engine {engine.name} is empty, and gets no new requests"
    held = f"{engine.held.requests} requests ({count(engine.held.tokens or 0)} tokens)"
    return f"engine {engine.name} gets no new requests; it holds {held} now"


def hit_rate(row: EngineDocument | EngineRow) -> str:
    """The part of its prompts that an engine had cached lately; with `~` where that is only predicted."""
    return "-" if row.hit_rate is None else f"{'' if row.is_measured else '~'}{row.hit_rate:.0%}"


def held_part(row: EngineDocument | EngineRow, name: str) -> str:
    """The part of its capacity that an engine holds, in `tokens` or `requests`."""
    held = count(getattr(row.held, name) or 0)
    most = None if row.capacity is None else getattr(row.capacity, name)
    return held if most is None else f"{held} of {count(most)}"


COLUMNS: Sequence[tuple[str, Callable[[EngineDocument | EngineRow], str]]] = (
    ("STATE", lambda row: row.state),
    ("TOKENS", lambda row: held_part(row, "tokens")),
    ("REQUESTS", lambda row: held_part(row, "requests")),
    ("UN-PREFILLED", lambda row: count(row.unprefilled_tokens)),
    ("CLAIMS", lambda row: count(row.claims)),
    ("IN FLIGHT", lambda row: count(row.in_flight)),
    ("HITS", hit_rate),
)
"""Names and cells of an engine, here and in `sidecar top`."""


def lines(engines: Sequence[EngineDocument]) -> list[str]:
    """The engines as a table, and under it why some get no requests."""
    heads = ["ENGINE", *(name for name, _ in COLUMNS)]
    rows = [[row.id, *(cell(row) for _, cell in COLUMNS)] for row in engines]
    return [*table([heads, *rows]), *(_why(row) for row in engines if row.reason is not None)]


def _why(row: EngineDocument) -> str:
    lasts = "" if row.for_s is None else f" (for {short_duration(row.for_s)})"
    return f"{row.id} gets no requests: {row.reason}{lasts}"
