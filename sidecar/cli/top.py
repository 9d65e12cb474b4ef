"""Watch the pool: what each tier holds, what waits and starves, which tier overtook which, and what was refused.

The command reads the admin port of a running sidecar (`sidecar serve`, or SIDECAR_ADMIN_PORT where it is mounted), and
sends the token in SIDECAR_ADMIN_TOKEN or SIDECAR_ADMIN_TOKEN_FILE along. On a terminal it draws until q or Ctrl-C.
Elsewhere, and with --once, it prints one plain picture. NO_COLOR turns colors off.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys

from sidecar.cli.admin_client import CannotSee, admin_url, page_of
from sidecar.cli.arguments import ADMIN, duration_s
from sidecar.cli.drawing import TerminalStyle, draw
from sidecar.cli.output import STANDARD_OUTPUT, write_json
from sidecar.cli.terminal import can_draw, drawn_on
from sidecar.cluster.document import Overview

EXAMPLE = """  sidecar top
  sidecar top --admin http://10.0.0.7:9464 --interval 5s
  sidecar top --once --json overview.json"""

_SHORTEST_S, _LONGEST_S = 0.2, 3600.0
_PLAIN_WIDTH = 110


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    add = parser.add_argument
    add("--admin", type=admin_url, default=ADMIN, metavar="URL", help="the sidecar's admin port (default %(default)s)")
    add("--once", action="store_true", help="print one picture and end")
    add("--interval", type=_seconds, default=1.0, metavar="TIME", help="between two pictures (default 1s)")
    add("--json", metavar="FILE", help="write the overview once as JSON, - for standard output, and end")


def run(args: argparse.Namespace) -> int:
    """Draws until a key ends it. Returns 1 where the admin port does not answer at the start."""
    try:
        overview = _overview(args.admin)
        if args.once or args.json is not None or not can_draw():
            return _print(overview, args)
        _watch(overview, args)
    except KeyboardInterrupt:  # the terminal is as before: no further line
        return 128 + signal.SIGINT
    except CannotSee as problem:
        print(f"sidecar top: {problem}", file=sys.stderr)
        return 1
    return 0


def _print(overview: Overview, args: argparse.Namespace) -> int:
    if args.json != STANDARD_OUTPUT:
        print("\n".join(draw(overview, _look(shutil.get_terminal_size((_PLAIN_WIDTH, 40)).columns))).rstrip())
    return 0 if write_json(args.json, overview) else 1


def _watch(overview: Overview, args: argparse.Namespace) -> None:
    trouble = ""
    with drawn_on() as screen:
        while True:
            look = _look(screen.measure())
            said = [look.paint(look.cut(f"trying again: {trouble}", look.width), "7")] if trouble else []
            screen.show([*said, *draw(overview, look)])
            if screen.wait(args.interval) in ("q", "Q", "\x03", "\x04"):
                return
            try:
                overview, trouble = _overview(args.admin), ""
            except CannotSee as problem:
                trouble = str(problem)


def _look(width: int) -> TerminalStyle:
    """How the output can be written on: in colors only on a terminal whose user did not forbid them."""
    is_terminal = sys.stdout.isatty()
    colors = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    speaks_unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return TerminalStyle(width, colors, speaks_unicode)


def _overview(admin: str) -> Overview:
    """Asks the admin port. Raises CannotSee."""
    return page_of(admin, "/overview", Overview)


def _seconds(text: str) -> float:
    seconds = duration_s(text)
    if not _SHORTEST_S <= seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no time between two pictures; write one from 200ms to 1h")
    return seconds
