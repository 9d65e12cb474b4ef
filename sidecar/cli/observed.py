"""Report what enforcing the policy would have done to the requests that passed in `mode: observe`.

The command reads the admin port of a running sidecar (`sidecar serve`, or SIDECAR_ADMIN_PORT where it is mounted), and
sends the token in SIDECAR_ADMIN_TOKEN or SIDECAR_ADMIN_TOKEN_FILE along. No request was held or refused: the figures
say what would have been. Counting begins with `mode: observe`, and again with every change of the policy. A report that
is not to be trusted at this load says so, and why.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from time import gmtime, strftime

from sidecar.cli.admin_client import add_admin, read_page
from sidecar.cli.output import require_writable, show
from sidecar.cluster.dry_run import ObservedReport, ObservedRow, ObservedSlo
from sidecar.cluster.phrases import count
from sidecar.durations import short_duration
from sidecar.tools.text import table, wrapped

EXAMPLE = """  sidecar observed
  sidecar observed --admin http://10.0.0.7:9464 --json observed.json"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    add_admin(parser, "write the same figures as JSON as well, - for standard output alone")


def run(args: argparse.Namespace) -> int:
    """Prints the report. Returns 1 where the admin port does not answer, or the figures cannot be written."""
    require_writable(args.json)
    report = read_page(args.admin, "/observed", ObservedReport)
    return show(args.json, report, lambda: lines(report))


_NOT_KNOWN = "(not known)"
"""Of a request that would have been refused before its tier, or its tenant, was known."""
_COLUMNS: Sequence[tuple[str, Callable[[ObservedRow], str]]] = (
    ("REQUESTS", lambda row: f"{row.requests:,}"),
    ("WAITED", lambda row: f"{row.waited:,}"),
    ("P50", lambda row: _time(row.wait_p50_s, is_least=row.wait_p50_is_least)),
    ("P99", lambda row: _time(row.wait_p99_s, is_least=row.wait_p99_is_least)),
    ("LONGEST", lambda row: _time(row.wait_max_s, is_least=row.wait_max_is_least)),
    ("STARVED", lambda row: f"{row.starved:,}"),
    ("LONGEST", lambda row: _time(row.starvation_max_s)),
    ("LEFT", lambda row: f"{row.abandoned:,}"),
    ("REFUSED", lambda row: f"{sum(row.refused.values()):,}"),
    ("WAITING", lambda row: f"{row.waiting:,}"),
)


def lines(report: ObservedReport) -> list[str]:
    """All lines."""
    lines = [*wrapped(_what(report)), *_left_out(report), ""]
    if report.until_s is not None:
        lines += [*wrapped(_OVER), ""]
    for doubt in report.doubts:
        lines += [*wrapped(f"NOT TO BE TRUSTED at this load: {doubt.reason} {doubt.advice}"), ""]
    lines += wrapped(report.conclusion)
    if not report.total.requests and not report.total.waiting:
        return lines
    lines += ["", "If the policy had been enforced:", "", *_rows("TIER", report.tiers)]
    lines += ["", *_rows("TENANT", report.tenants)]
    for slo in report.slo:
        lines += ["", *wrapped(_slo(slo))]
    lines += ["", *_details(report), *wrapped(_LEGEND)]
    if report.doubts:
        lines += wrapped(_MARKED)
    return lines


_OVER = "Observing is over: these figures are those of the last period, and the policy is enforced since."
_LEGEND = (
    "WAITED: for 10 ms or more, and then admitted. P50, P99: the wait of all that were admitted, to 5%. STARVED: "
    "overtaken by one that came later for 10 ms or more, admitted or not. LEFT: the client disconnected before it "
    "would have been admitted. WAITING: would still be waiting; >: at least so long, as these wait on."
)
_MARKED = "!: not to be trusted at this load, see above."


def _what(report: ObservedReport) -> str:
    facts = [f"mode: {report.mode}", f"policy {report.generation}"]
    if report.since_s is not None:
        end_s = report.at_s if report.until_s is None else report.until_s
        until = "" if report.until_s is None else f" until {_moment(report.until_s)}"
        facts.append(f"observed since {_moment(report.since_s)}{until} ({short_duration(end_s - report.since_s)})")
        facts.append(_replicas(len(report.replicas), "observed" if until else None))
    return ", ".join(facts)


def _moment(at_s: float) -> str:
    return strftime("%Y-%m-%d %H:%M:%S UTC", gmtime(at_s))


def _replicas(number: int, verb: str | None = None) -> str:
    """The number of replicas with its noun, and the verb that agrees with it."""
    if number == 1:
        return f"1 replica {verb or 'observes'}"
    return f"{number} replicas {verb or 'observe'}"


_SUMS = "the sums are in the metrics: sum by (admission_tier, admission_decision) (admission_observed_total)."


def _left_out(report: ObservedReport) -> list[str]:
    if not report.left_out:
        return []
    names = ", ".join(report.left_out)
    many = f"{_replicas(len(report.left_out))}, too ({names})"
    return wrapped(f"not counted: {many}. Each has a report of its own; {_SUMS}")


def _rows(heading: str, rows: Sequence[ObservedRow]) -> list[str]:
    cells = [[heading, *(name for name, _ in _COLUMNS)]]
    return table(
        cells + [[_name(row) + ("" if row.is_trusted else " !"), *(cell(row) for _, cell in _COLUMNS)] for row in rows]
    )


def _slo(slo: ObservedSlo) -> str:
    """Sentences about a tier that would be held to its SLO."""
    marked = "" if slo.is_trusted else " !"
    share = "" if slo.share is None else f" Less important requests would fill the pool to {slo.share:.0%} now."
    return (
        f"SLO of {slo.tier}{marked}: {_part(slo.met, slo.missed)} streams met it as they passed; by estimate "
        f"{_part(slo.would_meet, slo.would_miss)} would have, of {100 * slo.hold:.4g}% promised.{share}"
    )


def _part(met: int, missed: int) -> str:
    return f"{100 * met / (met + missed):.1f}% of {met + missed:,}" if met + missed else "none"


def _details(report: ObservedReport) -> list[str]:
    named = [*(("tier", row) for row in report.tiers), *(("tenant", row) for row in report.tenants)]
    lines = [f"refused of {kind} {_name(row)}: {_counted(row.refused)}" for kind, row in named if row.refused]
    lines += [
        f"clamped to what {kind} {_name(row)} may have: {number:,} that asked for {tier}"
        for kind, row in named
        for tier, number in row.clamped.items()
    ]
    for row in report.tiers:
        if row.served_ahead:
            tokens = ", ".join(f"{count(tokens)} of {tier}" for tier, tokens in row.served_ahead.items())
            lines.append(f"tokens that went ahead while {_name(row)} waited: {tokens}")
    if report.total.unknown:
        lines.append(f"not known what would have become of: {_counted(report.total.unknown)}")
    return lines + ([""] if lines else [])


def _time(seconds: float, *, is_least: bool = False) -> str:
    return f"{'> ' if is_least else ''}{short_duration(seconds)}" if seconds else "-"


def _counted(by_code: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {code}" for code, number in by_code.items())


def _name(row: ObservedRow) -> str:
    return row.name or _NOT_KNOWN
