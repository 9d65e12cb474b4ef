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
from collections.abc import Callable, Collection, Iterator, Sequence
from time import localtime, strftime
from types import FrameType

from rich.console import Console, ConsoleDimensions, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from sidecar.cli.admin_client import CannotSee, add_admin, read_page
from sidecar.cli.arguments import duration_s
from sidecar.cli.engines import COLUMNS as ENGINE_COLUMNS
from sidecar.cli.output import STANDARD_OUTPUT, write_json
from sidecar.cluster.document import EngineRow, Overview, RefusalView, TierView
from sidecar.cluster.phrases import STARVES_FROM_S, as_promised, count, lease_sizes, preempted
from sidecar.durations import short_duration
from sidecar.events import StoreState
from sidecar.telemetry.logs.formats import one_line

# -- Terminal drawing of the overview with `rich`, the most important first, so that a short window cuts off the end.
#
# Every name and message is a `Text`, in which `rich` reads no markup, and shows control characters as codes.

_BAR, _SPARK = 60, 20
_SPARK_STEPS = " ▁▂▃▄▅▆▇█"
_FOLDED = 16
"""Width of a column of names that is always there; longer ones are folded where the window is narrow."""
_COLORS = ("blue", "yellow", "green", "cyan", "magenta", "white")
_ALARM = "bold red"
_UNUSABLE = frozenset(("suspect", "down", "unreachable"))

Cell = Text | str


def draw(overview: Overview, console: Console) -> Group:
    """The whole overview, as wide as the console."""
    return Group(
        *_head(overview),
        "",
        *_pool(overview, console.width),
        "",
        _tiers(overview, console),
        *_below((tier.tier, preempted(tier)) for tier in overview.tiers),
        *_below((tier.tier, tier.guarded) for tier in overview.tiers),
        *_own(overview),
        "",
        *_engines(overview.engines, console.width),
        *_sentences(overview),
        *_tenants_and_replicas(overview, console.width),
        *_refusals(overview.refusals),
    )


class Fitted:
    """A drawing in a window: what does not fit is reported in the last line."""

    def __init__(self, drawing: RenderableType) -> None:
        self._drawing = drawing

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines that fit."""
        lines = console.render_lines(self._drawing, options.update(height=None), pad=False)
        height = options.height or console.height
        if (more := len(lines) - height) > 0:
            note = Segment(f"({more + 1} more lines: a taller window shows them)")
            lines = [*lines[: height - 1], [note]]
        for line in lines:
            yield from line
            yield Segment.line()


def _text(text: str, style: str = "") -> Text:
    return Text(one_line(text), style, overflow="fold")


def _head(overview: Overview) -> Iterator[RenderableType]:
    where = "one process"
    if overview.store is not None:  # without its store, a replica shows itself alone: a notice gives the reason
        is_shared = overview.store["state"] == StoreState.SHARED.value
        where = "store shared" if is_shared else f"replica {overview.replica[:8]}"
    first = Table.grid(expand=True, padding=(0, 1, 0, 0))
    first.add_column(overflow="fold")
    first.add_column(justify="right", no_wrap=True)
    facts = f"admission  {overview.pool}  {overview.engine}  policy {overview.generation}  {where}"
    first.add_row(_text(facts, "dim"), _text(_clock(overview.at_s), "dim"))
    yield first
    yield _text(overview.headline, _ALARM if overview.starving or overview.lacks_engine else "bold green")
    for notice in overview.notices:  # of several mistakes each has a line
        yield from (_text(line, "yellow") for line in f"! {notice}".splitlines())


def _clock(at_s: float) -> str:
    return strftime("%H:%M:%S", localtime(at_s))


def _pool(overview: Overview, width: int) -> Iterator[Text]:
    """A bar for each dimension that is bounded.

    Each character is an equal part of the pool: a tier's first letter, or a dot where it is free.
    """
    for name in ("tokens", "requests"):
        whole, held = getattr(overview.capacity, name), getattr(overview.held, name)
        if whole is None:
            continue
        bar = Text(f"{name:<9}", overflow="fold")
        scale = min(_BAR, max(1, width - len(bar))) / max(whole, held, 1)
        ends = 0.0
        for tier in overview.tiers:
            starts, ends = ends, ends + getattr(tier.held, name)
            cells = round(ends * scale) - round(starts * scale)
            bar.append(one_line(tier.tier[:1])[:1] * cells, f"{_color(tier)} reverse")
        bar.append("." * (round(max(whole, held, 1) * scale) - round(ends * scale)), "dim")
        bar.append(f" {count(held)} of {count(whole)}, {count(getattr(overview.free, name))} free")
        yield bar


def _color(tier: TierView) -> str:
    return _COLORS[tier.level % len(_COLORS)]


def _table(
    heads: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    width: int,
    dropped: Sequence[str] = (),
    hidden: Collection[str] = (),
) -> Table:
    """A table whose first column is folded; the columns `dropped` go, the first of them first, until it fits."""
    columns = dict(zip(heads, zip(*rows, strict=True), strict=True))
    widths = {head: max(len(head), *map(len, cells)) for head, cells in columns.items()}
    for head in {heads[0], _OVERTAKEN} & {*heads}:
        widths[head] = min(widths[head], _FOLDED)  # at least; it gets what is left
    shown = [head for head in heads if head not in hidden]
    for head in dropped:
        if sum(widths[head] + 2 for head in shown) <= width + 2:
            break
        shown = [other for other in shown if other != head]
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for head in shown:
        is_text = head in (heads[0], _WAITS, _OVERTAKEN)
        is_whole = head not in (heads[0], _OVERTAKEN)
        table.add_column(_text(head), justify="left" if is_text else "right", no_wrap=is_whole, overflow="fold")
    for cells in zip(*(columns[head] for head in shown), strict=True):
        table.add_row(*(cell if isinstance(cell, Text) else _text(cell) for cell in cells))
    return table


def _below(named: Iterator[tuple[str, str]]) -> Iterator[RenderableType]:
    """A line for each row of the table above of which there is more to say."""
    for name, more in named:
        if more:
            yield Padding(_text(f"{name}: {more}"), (0, 0, 0, 4))


_HOLDS, _WAITS, _OVERTAKEN = "TOKENS / REQ", "WAITS, 5 MIN", "OVERTAKEN, 5 MIN"


def _tiers(overview: Overview, console: Console) -> Table:
    heads = ("TIER", _HOLDS, "QUEUED", "OLDEST", "STARVED", _WAITS, _OVERTAKEN)
    hidden = () if console.encoding.startswith("utf") else (_WAITS,)
    return _table(heads, [_tier(tier) for tier in overview.tiers], console.width, (_WAITS, _HOLDS), hidden)


def _tier(tier: TierView) -> Sequence[Cell]:
    oldest = tier.oldest
    starves = oldest is not None and oldest.starvation_s >= STARVES_FROM_S and not tier.is_at_limit
    return (
        _text(tier.tier, f"bold {_color(tier)}"),
        f"{count(tier.held.tokens or 0)} / {count(tier.held.requests or 0)}",
        count(tier.queued.requests or 0),
        "-" if oldest is None else short_duration(oldest.wait_s),
        _text(short_duration(oldest.starvation_s), _ALARM) if oldest is not None and starves else "-",
        _spark(tier),
        _overtaken(tier),
    )


def _spark(tier: TierView) -> Text:
    """The longest wait of every quarter of a minute; in red where most of it was starvation."""
    size = len(tier.recent) // _SPARK or 1
    parts = [tier.recent[start : start + size] for start in range(0, len(tier.recent), size)][-_SPARK:]
    waits = [max((bucket.wait_max_s for bucket in part), default=0.0) for part in parts]
    starved = [max((bucket.starvation_max_s for bucket in part), default=0.0) for part in parts]
    most = max(waits, default=0.0)
    drawn = Text()
    for wait_s, starved_s in zip(waits, starved, strict=True):
        step = _SPARK_STEPS[0 if most == 0 or wait_s == 0 else max(1, round(8 * wait_s / most))]
        drawn.append(step, "red" if starved_s > wait_s / 2 else "")
    return drawn


def _overtaken(tier: TierView) -> str:
    """The tiers that overtook a tier in the last five minutes, how often, by which rule."""
    parts = [
        f"{by} {count(counted.requests)}x ({', '.join(rule.replace('_', ' ') for rule in counted.rules)})"
        for by, counted in tier.overtaken_by.items()
    ]
    return ", ".join(parts) or "-"


def _own(overview: Overview) -> Iterator[RenderableType]:
    """Which figures are not the pool's, where it has several replicas."""
    if len(overview.replicas) > 1:
        yield _text("of this replica alone: the last 5 minutes, leases, tenants and refusals", "dim")


def _engines(engines: Sequence[EngineRow], width: int) -> Iterator[RenderableType]:
    """A line for each engine, and why it gets no requests; empty in a pool of one."""
    if not engines:
        return
    heads = ("ENGINE", *(name for name, _ in ENGINE_COLUMNS))
    rows: list[Sequence[Cell]] = [
        (_text(one.id, "red" if one.state in _UNUSABLE else ""), *(cell(one) for _, cell in ENGINE_COLUMNS))
        for one in engines
    ]
    dropped = ("UN-PREFILLED", "CLAIMS", "REQUESTS", "IN FLIGHT", "HITS", "TOKENS")
    yield _table(heads, rows, width, dropped)
    yield from _below((one.id, "; ".join(part for part in (one.reason, one.elsewhere) if part)) for one in engines)
    yield ""


def _sentences(overview: Overview) -> Iterator[RenderableType]:
    """Sentences on service gain, on lease sizes, and on each engine whose preemptions have raised the quantile."""
    if promised := as_promised(overview.tiers):
        yield _text(f"as promised, 5 min: {promised}")
        yield ""
    if sizes := lease_sizes(overview.lease_sizes):
        yield _text(f"leases {sizes}")
        raised = (row for row in overview.lease_sizes if row.is_raised)
        yield from _below((row.engine or overview.engine, row.reason) for row in raised)
        yield ""


def _tenants_and_replicas(overview: Overview, width: int) -> Iterator[RenderableType]:
    if overview.tenants:
        rows = [(one.tenant, count(one.tokens_held), count(one.leases), count(one.waiting)) for one in overview.tenants]
        yield _table(("TENANT", "TOKENS", "RUNNING", "WAITING"), rows, width)
        yield ""
    rows = []
    for one in overview.replicas:
        other = "" if one.generation in ("", overview.generation) else f" policy {one.generation}"
        lacks = f" engine {one.engine.state}" if one.engine is not None and one.engine.reason else ""
        seen = "now" if one.seen_s_ago < 0.1 else f"{one.seen_s_ago:.0f} s ago"
        rows.append((f"{one.host} {one.replica[:8]}{other}{lacks}", seen, count(one.leases), count(one.waiting)))
    if rows:
        yield _table(("REPLICA", "SEEN", "RUNNING", "WAITING"), rows, width)
        yield ""


def _refusals(refusals: Collection[RefusalView]) -> Iterator[RenderableType]:
    groups: dict[tuple[str | None, ...], list[RefusalView]] = {}
    for one in refusals:  # a flood of the same is one line, of its newest request
        groups.setdefault((one.tier, one.tenant, one.code, one.message), []).append(one)
    if groups:
        yield _text("LAST REFUSALS", "dim")
    for newest, *others in groups.values():
        waited = f" after {short_duration(newest.waited_s)}" if newest.waited_s else ""
        who = "not known" if newest.tier is None else f"{newest.tier}, {newest.tenant}"
        often = f" ({len(others) + 1}x)" if others else ""
        gave_way = f", preempted {newest.preempted}x" if newest.preempted else ""
        yield _text(f"{_clock(newest.at_s)}  {who}  {newest.code}{often}{waited}{gave_way}: {newest.message}")
        yield Padding(_text(newest.request_id, "dim"), (0, 0, 0, 10))


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
