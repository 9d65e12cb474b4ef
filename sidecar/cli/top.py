"""Watch the pool: what each tier holds, what waits and starves, which tier overtook which, and what was refused.

The command reads the admin port of a running sidecar (`sidecar serve`, or SIDECAR_ADMIN_PORT where it is mounted), and
sends the token in SIDECAR_ADMIN_TOKEN or SIDECAR_ADMIN_TOKEN_FILE along. On a terminal it draws until q or Ctrl-C.
Elsewhere, and with --once, it prints one plain picture. NO_COLOR turns colors off.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.text import Text

from sidecar.cli.admin_client import CannotSee, add_admin, read_page
from sidecar.cli.arguments import duration_s
from sidecar.cli.drawing import Fitted, draw
from sidecar.cli.output import STANDARD_OUTPUT, write_json
from sidecar.cluster.document import Overview
from sidecar.telemetry.logs.formats import one_line

EXAMPLE = """  sidecar top
  sidecar top --admin http://10.0.0.7:9464 --interval 5s
  sidecar top --once --json overview.json"""

_SHORTEST_S, _LONGEST_S = 0.2, 3600.0
_PLAIN_WIDTH = 110
_NARROWEST = 40
_GLANCE_S = 0.2
"""How late a window's new size is noticed."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    add = parser.add_argument
    add("--once", action="store_true", help="print one picture and end")
    add("--interval", type=_seconds, default=1.0, metavar="TIME", help="between two pictures (default 1s)")
    add_admin(parser, "write the overview once as JSON, - for standard output, and end")


def run(args: argparse.Namespace) -> int:
    """Draws until a key ends it. Returns 1 where the admin port does not answer at the start."""
    overview = _overview(args.admin)
    if args.once or args.json is not None or not _can_watch():
        if args.json != STANDARD_OUTPUT:
            console = _console(shutil.get_terminal_size((_PLAIN_WIDTH, 40)).columns)
            console.print(draw(overview, console))
        return 0 if write_json(args.json, overview) else 1
    try:
        _watch(overview, args)
    except KeyboardInterrupt:  # the terminal is as before: no further line
        return 128 + signal.SIGINT
    return 0


def _console(width: int) -> Console:
    """Standard output: in colors only on a terminal whose user did not forbid them."""
    is_terminal = sys.stdout.isatty()
    are_colored = is_terminal and not os.environ.get("NO_COLOR")  # rich's `no_color` would keep bold, and its codes
    return Console(
        width=max(_NARROWEST, width),
        force_terminal=is_terminal,
        color_system="auto" if are_colored else None,
        legacy_windows=False,
    )


def _can_watch() -> bool:
    """True if standard output is a terminal that can be drawn on, and standard input its keys."""
    has_keys = sys.stdin.isatty() and sys.platform != "win32"
    return has_keys and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _watch(overview: Overview, args: argparse.Namespace) -> None:
    trouble: list[str] = []
    console = _console(shutil.get_terminal_size().columns)
    with _pressed_keys() as wait, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            console.size = ConsoleDimensions(*(size := shutil.get_terminal_size()))
            notes = [Text(one_line(f"trying again: {one}"), "reverse") for one in trouble]
            live.update(Fitted(Group(*notes, draw(overview, console))), refresh=True)
            if wait(args.interval, size) in ("q", "Q", "\x03", "\x04"):
                return
            try:
                overview, trouble = _overview(args.admin), []
            except CannotSee as problem:
                trouble = [str(problem)]


@contextlib.contextmanager
def _pressed_keys() -> Iterator[Callable[[float, os.terminal_size], str]]:
    """A function that waits: it returns the key that was pressed, or an empty string.

    The string is empty when the time is over, or the window has another size than was given. The terminal sends each
    key at once, and is as before however the program ends; SIGTERM and SIGHUP end it by SystemExit.
    """
    import termios
    import tty

    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    handlers = {number: signal.signal(number, _end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        tty.setcbreak(keys)
        yield _wait
    finally:
        with contextlib.suppress(termios.error):  # the terminal itself may be gone
            termios.tcsetattr(keys, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait(for_s: float, size: os.terminal_size) -> str:
    end_s = time.monotonic() + for_s
    while (left_s := end_s - time.monotonic()) > 0 and shutil.get_terminal_size() == size:
        readable, _, _ = select.select([sys.stdin], [], [], min(left_s, _GLANCE_S))
        if readable:
            return os.read(sys.stdin.fileno(), 1).decode("ascii", "replace") or "q"  # end of input
    return ""


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _overview(admin: str) -> Overview:
    """Asks the admin port. Raises CannotSee."""
    return read_page(admin, "/overview", Overview)


def _seconds(text: str) -> float:
    seconds = duration_s(text)
    if not _SHORTEST_S <= seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no time between two pictures; write one from 200ms to 1h")
    return seconds
