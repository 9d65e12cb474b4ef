"""Explanation of a request that was sent, read from a running sidecar's admin port, as text."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from sidecar.cli.admin_client import CannotSee, read_page
from sidecar.cli.output import CommandFailed, show
from sidecar.explain.document import Explanation, WaitDetails
from sidecar.explain.steps import (
    GROUP_HEADS,
    ONE_HEADS,
    admitted_meanwhile,
    group_rows,
    one_row,
    steps,
    unknown_lines,
)
from sidecar.telemetry.logs.formats import one_line
from sidecar.tools.text import table


def run(wanted: str, admins: Sequence[str], json_target: str | None) -> int:
    """Returns 0 where a sidecar knows the request, else 1, with a line for each that does not."""
    story, refusals = _ask(admins, wanted)
    if story is None:
        raise CommandFailed("\n".join(refusals))
    return show(json_target, story, lambda: [text(story)])


def _ask(admins: Sequence[str], wanted: str) -> tuple[Explanation | None, list[str]]:
    """The first explanation found, sidecar by sidecar, and the other answers before it."""
    refusals: list[str] = []
    for admin in admins:
        try:
            return read_page(admin, f"/requests/{quote(wanted, safe='')}", Explanation), refusals
        except CannotSee as refusal:  # noqa: PERF203  the next replica may have it
            reason = str(refusal)
            refusals.append(reason if admin in reason else f"{admin}: {reason}")
    return None, refusals


MOST_LISTED = 10
"""Requests ahead that are listed one by one; the table above them counts all."""
_LABEL = 12


def text(story: Explanation) -> str:
    """The whole story, lines for a terminal."""
    lines = [f"request {story.request_id}   {story.method} {story.path}   pool {story.pool}", "", story.conclusion, ""]
    if story.others:
        lines.insert(1, f"the newest of {story.others + 1} requests with this id")
    lines += [f"{step.label:<{_LABEL}} {step.text}" for step in steps(story)]
    if story.wait is not None:
        lines += _went_ahead(story, story.wait)
    return "\n".join(map(one_line, lines))


def _went_ahead(story: Explanation, wait: WaitDetails) -> list[str]:
    lines = ["", admitted_meanwhile(wait)]
    if wait.groups:
        lines += _table(GROUP_HEADS, group_rows(wait))
    lines += [f"  {line}" for line in unknown_lines(wait)]
    if wait.first:
        some = (
            "One by one" if sum(group.requests for group in wait.groups) <= MOST_LISTED else f"The first {MOST_LISTED}"
        )
        rows = [one_row(story, each) for each in wait.first[:MOST_LISTED]]
        lines += ["", f"{some}:", *_table(ONE_HEADS, rows)]
    return lines


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Figures to the right, all else to the left."""
    left = [at for at, head in enumerate(heads) if head not in {"requests", "tokens", "after"}]
    return table([heads, *rows], left, indent="  ")
