"""Report of a simulation as one page: the figures of every policy, and what differs; `simulate.html` draws it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sidecar.templates import render
from sidecar.tools.replay.report import COLORS
from sidecar.tools.simulate.comparison import ComparedPolicy, Rate, by_policy, interval, seconds, shown
from sidecar.tools.simulate.figures import RunResult, TierResult
from sidecar.tools.simulate.guarded import GuardResult

POINTS = 0.01
"""A smaller difference of a share is none: with few seeds it is chance."""


def report(
    heading: Sequence[str], candidates: Sequence[ComparedPolicy], results: Sequence[RunResult], rates: Sequence[Rate]
) -> str:
    """The page."""
    runs = by_policy(results)
    return render(
        "simulate.html",
        title="Simulation of a trace",
        heading=heading,
        differences=differences(runs),
        policies=policies(runs),
        bars=list(_bars(runs, [tier.name for tier in candidates[0].policy.tiers])),
        tiers=tiers(runs),
        guarded=guarded(runs),
        rates=highest_rates(rates),
    )


Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Names of the columns, and rows."""


def differences(runs: Sequence[Sequence[RunResult]]) -> Iterator[str]:
    """Differences from the first policy, in sentences."""
    first = runs[0]
    for other in runs[1:]:
        parts = list(_differing(first, other))
        changes = "; ".join(parts) if parts else "nothing by more than a point"
        yield f"{other[0].policy} against {first[0].policy}: {changes}."


def _differing(first: Sequence[RunResult], other: Sequence[RunResult]) -> Iterator[str]:
    both = [("TDG", _mean(first, lambda one: one.tdg), _mean(other, lambda one: one.tdg))]
    both.append(("SLO", _mean(first, lambda one: one.slo), _mean(other, lambda one: one.slo)))
    for tier in first[0].tiers:
        before, after = (_mean(runs, lambda one, tier=tier: _slo(one, tier)) for runs in (first, other))  # type: ignore[misc]
        both.append((f"SLO of {tier}", before, after))
    for name, before, after in both:
        if before is not None and after is not None and abs(after - before) >= POINTS:
            yield f"{name} {before:.1%} to {after:.1%}"


def _slo(one: RunResult, tier: str) -> float | None:
    found = one.tiers.get(tier)
    return None if found is None else found.slo


def _mean(runs: Sequence[RunResult], figure: Callable[[RunResult], float | None]) -> float | None:
    found = interval([figure(one) for one in runs])
    return None if found is None else found[0]


def policies(runs: Sequence[Sequence[RunResult]]) -> Table:
    """The means over the seeds, with their 95% confidence intervals."""
    columns = ("policy", "order", "TDG", "SLO", "weighted SLO", "KV", "tokens/s", "preempted")
    rows = [
        (
            one[0].policy,
            one[0].order,
            *(shown([getattr(run, name) for run in one]) for name in ("tdg", "slo", "weighted_slo")),
            f"{_mean(one, lambda run: run.utilization):.1%}",
            f"{_mean(one, lambda run: run.tokens_per_s):.0f}",
            f"{_mean(one, lambda run: run.preemptions):.0f}",
        )
        for one in runs
    ]
    return columns, rows


def _bars(runs: Sequence[Sequence[RunResult]], tiers: Sequence[str]) -> Iterator[tuple[str, str, str, float]]:
    """Tier, policy, the class of the tier's color, and the part of its requests that met the objective."""
    for level, tier in enumerate(tiers):
        for one in runs:
            slo = _mean(one, lambda run, tier=tier: _slo(run, tier))  # type: ignore[misc]
            if slo is not None:
                yield tier, one[0].policy, f"t{level % COLORS}", slo


def tiers(runs: Sequence[Sequence[RunResult]]) -> Table:
    """Table by tier; requests, refused and abandoned are those of a run."""
    columns = (
        "policy", "tier", "requests", "SLO", "TDG", "TTFT p50, s", "TTFT p99, s", "longest wait, s", "refused",
        "abandoned", "of the tokens",
    )  # fmt: skip
    return columns, [_tier(one, tier) for one in runs for tier in one[0].tiers]


def _tier(runs: Sequence[RunResult], name: str) -> Sequence[str]:
    tiers: list[TierResult] = [one.tiers[name] for one in runs if name in one.tiers]
    tokens = sum(tier.tokens for one in runs for tier in one.tiers.values())
    return (
        runs[0].policy,
        name,
        str(sum(one.requests for one in tiers) // len(tiers)),
        shown([one.slo for one in tiers]),
        shown([one.tdg for one in tiers]),
        seconds([one.ttft_s.p50 for one in tiers]),
        seconds([one.ttft_s.p99 for one in tiers]),
        seconds([one.queue_wait_s.max for one in tiers]),
        str(sum(one.refused for one in tiers) // len(tiers)),
        str(sum(one.abandoned for one in tiers) // len(tiers)),
        f"{sum(one.tokens for one in tiers) / tokens:.1%}" if tokens else "-",
    )


def guarded(runs: Sequence[Sequence[RunResult]]) -> Table:
    """Table of the tiers whose SLO is held. `in vain`: runs in which it was missed for other reasons."""
    columns = (
        "policy", "held to its SLO", "hold", "met", "others fill", "at least", "at the end", "their tokens", "in vain",
    )  # fmt: skip
    return columns, [_guarded(one, tier) for one in runs for tier in one[0].guarded]


def _guarded(runs: Sequence[RunResult], name: str) -> Sequence[str]:
    found: list[GuardResult] = [one.guarded[name] for one in runs]
    return (
        runs[0].policy,
        name,
        f"{found[0].hold:.1%}",
        shown([one.met for one in found]),
        shown([one.share_mean for one in found]),
        shown([one.share_least for one in found]),
        shown([one.share_end for one in found]),
        str(sum(one.tokens_below for one in found) // len(found)),
        f"{sum(one.is_in_vain for one in found)} of {len(found)}",
    )


def highest_rates(rates: Sequence[Rate]) -> Table:
    """The highest rate at which every tier meets its objective."""
    rows = [
        (
            one.policy,
            f"{one.target:.0%}",
            "none" if one.scale is None else f"{'at least ' * one.is_bound}{one.scale:.2f}",
            "-" if one.requests_per_s is None else f"{one.requests_per_s:.1f}",
        )
        for one in rates
    ]
    return ("highest rate", "met by", "scale", "requests/s"), rows
