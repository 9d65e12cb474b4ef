"""The report of a door that observes, as a person reads it: what is counted, the conclusion, and two tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import gmtime, strftime

from sidecar.live.observed import ObservedReport, ObservedRow
from sidecar.live.terminal import printable, wrapped
from sidecar.live.words import count, duration

WIDTH = 110
_NOT_KNOWN = "(not known)"
"""Of a request that would have been refused before its tier, or its tenant, was known."""
_COLUMNS: Sequence[tuple[str, Callable[[ObservedRow], str]]] = (
    ("REQUESTS", lambda row: f"{row.requests:,}"),
    ("WAITED", lambda row: f"{row.waited:,}"),
    ("P50", lambda row: _time(row.wait_p50_s)),
    ("P99", lambda row: _time(row.wait_p99_s)),
    ("LONGEST", lambda row: _time(row.wait_max_s)),
    ("STARVED", lambda row: f"{row.starved:,}"),
    ("LONGEST", lambda row: _time(row.starvation_max_s)),
    ("LEFT", lambda row: f"{row.abandoned:,}"),
    ("REFUSED", lambda row: f"{sum(row.refused.values()):,}"),
)


def table(report: ObservedReport) -> list[str]:
    """All lines."""
    lines = [_what(report), *_left_out(report), "", *wrapped(report.conclusion, WIDTH)]
    if not report.total.requests:
        return lines
    lines += ["", "If the policy had been enforced:", "", *_rows("TIER", report.tiers)]
    lines += ["", *_rows("TENANT", report.tenants)]
    lines += ["", *_details(report), *wrapped(_LEGEND, WIDTH)]
    return lines


_LEGEND = (
    "WAITED: for 10 ms or more, and then admitted. P50, P99: the wait of all that were admitted, to 5%. STARVED: "
    "overtaken by one that came later for 10 ms or more, admitted or not. LEFT: the client hung up before it would "
    "have been admitted."
)


def _what(report: ObservedReport) -> str:
    replicas = len(report.replicas)
    facts = [f"mode: {report.mode}", f"policy {report.generation}"]
    if report.since_s is not None:
        began = strftime("%Y-%m-%d %H:%M:%S UTC", gmtime(report.since_s))
        facts.append(f"since {began} ({duration(report.at_s - report.since_s)})")
        facts.append("1 replica" if replicas == 1 else f"{replicas} replicas")
    return ", ".join(facts)


def _left_out(report: ObservedReport) -> list[str]:
    if not report.left_out:
        return []
    replicas = "1 replica" if len(report.left_out) == 1 else f"{len(report.left_out)} replicas"
    return [f"left out: {replicas} that observe by another policy ({', '.join(report.left_out)})"]


def _rows(heading: str, rows: Sequence[ObservedRow]) -> list[str]:
    cells = [[heading, *(name for name, _ in _COLUMNS)]]
    cells += [[_name(row), *(cell(row) for _, cell in _COLUMNS)] for row in rows]
    widths = [max(len(line[place]) for line in cells) for place in range(len(cells[0]))]
    return [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in cells
    ]


def _details(report: ObservedReport) -> list[str]:
    named = [*(("tier", row) for row in report.tiers), *(("tenant", row) for row in report.tenants)]
    lines = [f"refused of {kind} {_name(row)}: {_counted(row.refused)}" for kind, row in named if row.refused]
    lines += [
        f"tokens that went ahead while {_name(row)} waited: {_tokens(row.served_ahead)}"
        for row in report.tiers
        if row.served_ahead
    ]
    if report.total.unknown:
        lines.append(f"not known what would have become of: {_counted(report.total.unknown)}")
    return [printable(line) for line in lines] + ([""] if lines else [])


def _tokens(served_ahead: Mapping[str, int]) -> str:
    return ", ".join(f"{count(tokens)} of {tier}" for tier, tokens in served_ahead.items())


def _time(seconds: float) -> str:
    return duration(seconds) if seconds else "-"


def _counted(by_code: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {code}" for code, number in by_code.items())


def _name(row: ObservedRow) -> str:
    return printable(row.name) or _NOT_KNOWN
