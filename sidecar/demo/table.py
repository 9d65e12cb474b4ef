"""The demo's result as a person reads it: one table, and one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.demo.measuring import Distribution, RunFigures

TITLES = {
    "control": "control: equal priority",
    "engine": "engine priority only",
    "admission": "admission",
}
_HEAD = f"{'':24} {'requests':>8} {'share':>6}  {'TTFT p50/p95/p99 s':>20}  {'queue wait s':>20}  {'starvation s':>20}"


def table(runs: Sequence[RunFigures]) -> str:
    """Every run and tier, a line each."""
    lines = [_HEAD]
    for run in runs:
        failed = f", {run.failed} failed" if run.failed else ""
        lines.append(f"{TITLES[run.name]}  (utilization {run.utilization:.0%}{failed})")
        for tier, figures in run.tiers.items():
            waits = "  ".join(
                f"{_cell(values):>20}" for values in (figures.ttft_s, figures.queue_wait_s, figures.starvation_s)
            )
            lines.append(f"  {tier:22} {figures.requests:>8} {figures.share:>6.0%}  {waits}")
    return "\n".join(lines)


def sentence(runs: Sequence[RunFigures]) -> str:
    """What it shows, with the figures of this very run."""
    control, engine, admission = ({run.name: run for run in runs}[name] for name in TITLES)
    first, last = next(iter(admission.tiers)), list(admission.tiers)[-1]

    def p50(run: RunFigures, tier: str) -> float:
        return run.tiers[tier].ttft_s["p50"]

    return (
        f"At equal priority a {first} request waits {p50(control, first):.2f} s for its first token at the median, as "
        f"long as everybody; admission serves it in {p50(admission, first):.2f} s, "
        f"{p50(admission, last) / p50(admission, first):.0f}x before {last}, at {admission.utilization:.0%} utilization "
        f"({control.utilization:.0%} without); and {last}, which got {engine.tiers[last].share:.0%} of the tokens and "
        f"waited up to {engine.tiers[last].queue_wait_s['p99']:.1f} s where the engine alone decided, keeps "
        f"{admission.tiers[last].share:.0%} while the others are busy."
    )


def _cell(values: Distribution) -> str:
    return " / ".join(f"{value:.2f}" for value in values.values())
