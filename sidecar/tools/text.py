"""Text for people: the one way to align a table, and to keep what a client or an operator named from a terminal.

Tables are as wide as their cells. A report of usage has tens of thousands of rows, for which `rich` needs a second per
2,500 (rich 15.0): it draws `sidecar top` alone.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence

from sidecar.telemetry.logs.formats import one_line

WIDTH = 120
"""Of sentences. A table is as wide as it is."""


def table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,), indent: str = "") -> list[str]:
    """Rows as lines, the columns in `left` to the left, figures to the right. Control characters are shown as codes."""
    safe = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*safe, strict=True)]
    places = range(len(widths))
    return [
        indent
        + "  ".join(row[at].ljust(widths[at]) if at in left else row[at].rjust(widths[at]) for at in places).rstrip()
        for row in safe
    ]


def wrapped(text: str, width: int = WIDTH, head: str = "", below: str | None = None) -> list[str]:
    """Text in lines of at most that width, broken between words; a longer word has a line of its own.

    `head` comes before the first line, `below` before the others: by default as much space.
    """
    return textwrap.wrap(
        one_line(text),
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head) if below is None else below,
        break_on_hyphens=False,
        break_long_words=False,
    )
