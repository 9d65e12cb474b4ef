"""Report what each tenant used: requests and tokens by day, tenant, tier and model, of all replicas of a pool.

The command asks the admin port of any sidecar whose pool is in a store, and sends the token in SIDECAR_ADMIN_TOKEN or
SIDECAR_ADMIN_TOKEN_FILE along. Days begin at midnight in UTC. A request counts in the day in which it ends, within a
second. --csv has a row for each day, tenant, tier and model, for a spreadsheet or a bill.
"""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Iterator, Sequence
from datetime import date
from urllib.parse import urlencode

from sidecar.admin.operations import MOST_DAYS
from sidecar.admin.tenant_routes import Usage, UsageRow
from sidecar.cli.admin_client import CannotSee, add_admin, read_page
from sidecar.cli.arguments import whole_number
from sidecar.cli.output import STANDARD_OUTPUT, CommandFailed, require_writable, show, write_json
from sidecar.policy.fields import MOST_USAGE_DAYS
from sidecar.tools.text import table

EXAMPLE = """  sidecar usage
  sidecar usage --days 31 --by tenant
  sidecar usage --from 2026-11-01 --to 2026-11-30 --csv > november.csv"""

_NAMES = ("day", "tenant", "tier", "model")
_FIGURES = ("requests", "input_tokens", "output_tokens")
_PATIENCE_S = 60.0
_MOST_BYTES = 2**30
"""10,000 tenants with one model each have 50 MB in a month."""
_FORMULA = ("=", "+", "-", "@", "\t")
"""What a spreadsheet takes for a formula at the beginning of a cell. A model's name is the client's."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    add = parser.add_argument
    days = whole_number("number of days", 1, MOST_USAGE_DAYS)
    add("--days", type=days, default=1, metavar="N", help="the last N days, today among them (default: today)")
    add("--from", dest="first", type=_date, metavar="DATE", help="the first day, such as 2026-11-01")
    add("--to", dest="last", type=_date, metavar="DATE", help="the last day (default: today)")
    add("--tenant", metavar="NAME", help="this tenant alone")
    add("--by", type=_names, default=("day", "tenant", "tier"), metavar="NAMES", help=_BY)
    add("--csv", action="store_true", help="as CSV, with a row for each day, tenant, tier and model")
    add_admin(parser, "write the rows as JSON as well, - for standard output alone")


_BY = "what the table sums by: some of day,tenant,tier,model (default: day,tenant,tier)"


def run(args: argparse.Namespace) -> int:
    """Returns 0 where the report was printed, 1 where the sidecar does not answer, 2 for a wrong command line."""
    if args.first is not None and args.last is not None and args.first > args.last:
        raise CommandFailed(f"--from {args.first} is after --to {args.last}", 2)
    require_writable(args.json)
    report = _report(args)
    if args.csv and args.json != STANDARD_OUTPUT:
        print("\n".join(csv_lines(report.rows)))
        return 0 if write_json(args.json, report) else 1
    return show(args.json, report, lambda: lines(report.rows, args.by))


def _report(args: argparse.Namespace) -> Usage:
    last = date.fromisoformat(args.last or _page(args, None, None).today)
    first = date.fromordinal(max(1, last.toordinal() - args.days + 1))
    first = first if args.first is None else date.fromisoformat(args.first)
    days = (last - first).days + 1
    if days < 1:
        raise CannotSee(f"--from {first} is after today, {last}")
    if days > MOST_USAGE_DAYS:
        raise CannotSee(f"--from {first} is {days:,} days ago; use is kept for {MOST_USAGE_DAYS} days at most")
    rows: list[UsageRow] = []
    today = last.isoformat()
    for begin, end in _parts(first, last):
        page = _page(args, begin.isoformat(), end.isoformat())
        rows += page.rows
        today = page.today
    return Usage(rows, today)


def _parts(first: date, last: date) -> Iterator[tuple[date, date]]:
    """The days in parts that the admin port answers at once."""
    for begin in range(first.toordinal(), last.toordinal() + 1, MOST_DAYS):
        yield date.fromordinal(begin), date.fromordinal(min(last.toordinal(), begin + MOST_DAYS - 1))


def _page(args: argparse.Namespace, first: str | None, last: str | None) -> Usage:
    asked = {"from": first, "to": last, "tenant": args.tenant}
    query = urlencode({name: value for name, value in asked.items() if value is not None})
    return read_page(args.admin, f"/usage?{query}", Usage, patience_s=_PATIENCE_S, most_bytes=_MOST_BYTES)


def lines(rows: Sequence[UsageRow], by: Sequence[str]) -> list[str]:
    """The sums by some names, and the sum of all."""
    if not rows:
        return ["nothing was used"]
    sums: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        figures = sums.setdefault(tuple(getattr(row, name) for name in by), [0] * len(_FIGURES))
        for at, name in enumerate(_FIGURES):
            figures[at] += getattr(row, name)
    cells = [[*(name.upper() for name in by), "REQUESTS", "INPUT", "OUTPUT", "TOKENS"]]
    cells += [[*(name or "-" for name in names), *_counts(figures)] for names, figures in sorted(sums.items())]
    whole = [sum(column) for column in zip(*sums.values(), strict=True)]
    return [*table(cells), "", f"all: {whole[0]:,} requests, {whole[1]:,} + {whole[2]:,} = {sum(whole[1:]):,} tokens"]


def _counts(figures: Sequence[int]) -> list[str]:
    return [f"{figure:,}" for figure in (*figures, sum(figures[1:]))]


def csv_lines(rows: Sequence[UsageRow]) -> list[str]:
    """The rows as CSV (RFC 4180), with a header. A name that a spreadsheet would take for a formula begins with '."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow([*_NAMES, *_FIGURES])
    for row in rows:
        names = (getattr(row, name) for name in _NAMES)
        safe = [f"'{name}" if name.startswith(_FORMULA) else name for name in names]
        writer.writerow([*safe, *(getattr(row, name) for name in _FIGURES)])
    return written.getvalue().rstrip("\n").split("\n")


def _date(text: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no date; write one such as 2026-11-01") from None


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not {*names} <= {*_NAMES} or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names other than {','.join(_NAMES)}, or one twice")
    return names
