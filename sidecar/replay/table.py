"""A replay's result as a person reads it: a table by tier, totals, and what the correlation means in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.load import Correlation, Distribution
from sidecar.replay.figures import RunFigures, TierFigures

SHOWN_ERRORS = 5
_HEAD = (
    f"{'':14} {'requests':>8} {'failed':>6}  {'TTFT p50/p95/p99 s':>21}  {'TPOT p50 ms':>11}  "
    f"{'queue wait p50/p95 s':>20}  {'starvation p50/p95 s':>20}  {'tokens/s':>8}"
)


def table(runs: Sequence[RunFigures]) -> str:
    """Every run and tier, a line each."""
    lines = [_HEAD]
    for run in runs:
        lines += ["", run.title, *(_line(tier, figures) for tier, figures in run.tiers.items()), f"  {totals(run)}"]
        lines += [f"  {line}" for line in errors(run)]
        lines.append(f"  {meaning(run)}")
    return "\n".join(lines)


def meaning(run: RunFigures) -> str:
    """What importance has to do with the time to first token, in a sentence."""
    found = run.correlation
    if len(run.tiers) < 2:
        return "One tier alone: there is nothing to put in order."
    if found is None:
        return "Too few answers for a correlation of importance and TTFT."
    figures = f"Spearman of importance and TTFT: {interval(found)}"
    if found.high < 0:
        return f"{figures}: the more important a request, the sooner its first token."
    if found.low > 0:
        return f"{figures}: the wrong way round, the more important a request, the LATER its first token."
    return f"{figures}: importance made no difference that these requests can show."


def interval(found: Correlation) -> str:
    """A correlation with its confidence interval and how many requests it is of."""
    return f"{found.value:+.2f} (95% between {found.low:+.2f} and {found.high:+.2f}, n={found.n})"


def _line(tier: str, figures: TierFigures) -> str:
    tpot = "-" if figures.tpot_s is None else f"{figures.tpot_s.p50 * 1000:.1f}"
    waits = f"{_cell(figures.queue_wait_s):>20}  {_cell(figures.starvation_s):>20}"
    return (
        f"  {tier[:12]:12} {figures.requests:>8} {figures.failed:>6}  {_cell(figures.ttft_s, tail=True):>21}  "
        f"{tpot:>11}  {waits}  {figures.output_tokens_per_s:>8.0f}"
    )


def _cell(found: Distribution | None, *, tail: bool = False) -> str:
    if found is None:
        return "-"
    values = [found.p50, found.p95, *([found.p99] if tail else [])]
    return " / ".join(f"{value:.2f}" if value < 100 else f"{value:.0f}" for value in values)


def totals(run: RunFigures) -> str:
    """A run as a whole, in a line."""
    return (
        f"{run.requests} requests in {run.duration_s:.1f} s, {run.requests_per_s:.1f} answered per second, "
        f"{run.output_tokens_per_s:.0f} output tokens per second, {run.failed} failed"
    )


def errors(run: RunFigures) -> Sequence[str]:
    """What went wrong and how often, a line each, most frequent first."""
    shown = list(run.errors.items())[:SHOWN_ERRORS]
    more = len(run.errors) - len(shown)
    return [*(f"{count} x {error}" for error, count in shown), *([f"and {more} other errors"] if more > 0 else [])]
