"""Report of a simulation as one page: the figures of every policy, and what differs. No network, no script.

The page may load nothing, so that a name from a file could do nothing there even if it were not escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib.resources import files

from sidecar.tools.replay.report import element
from sidecar.tools.simulate.comparison import Candidate, Rate, by_policy, interval, seconds, shown
from sidecar.tools.simulate.figures import RunResult, TierResult

_HEAD = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
    'img-src data:"><link rel="icon" href="data:,">'
)
_BARS = """
.bars { width: auto; } .bars td { border: 0; padding: .1rem .6rem; } .bars svg { width: 16rem; height: .8rem; }
.bars td:nth-child(2) { text-align: left; } .bars rect { fill: currentColor; } .bars .rest { fill: var(--rule); }
@media (max-width: 60rem) { .bars tr { grid-template-columns: 1fr auto; } .bars svg { width: 10rem; } }
"""
POINTS = 0.01
"""A smaller difference of a share is none: with few seeds it is chance."""


def report(
    heading: Sequence[str], candidates: Sequence[Candidate], results: Sequence[RunResult], rates: Sequence[Rate]
) -> str:
    """The page."""
    title = "Simulation of a trace"
    runs = by_policy(results)
    tiers = [tier.name for tier in candidates[0].policy.tiers]
    style = files("sidecar.tools.replay").joinpath("report.css").read_text(encoding="utf-8") + _BARS
    body = [
        element("h1", escape(title)),
        *(element("p", escape(line), _class="soft") for line in heading),
        *(element("p", escape(line)) for line in differences(runs)),
        element("h2", "Gain and objectives"),
        _policies(runs),
        element("p", "TDG: the weight of tokens in time, of all tokens of all requests offered. SLO: the requests that "
                "met their tier's objective, of all offered. KV: the part of the KV caches in use.", _class="soft"),
        element("h2", "Objectives met, by tier"),
        _bars(runs, tiers),
        element("h2", "By tier"),
        _tiers(runs),
        *_rates(rates),
    ]  # fmt: skip
    head = f"{_HEAD}<title>{escape(title)}</title><style>{style}</style></head>"
    return f"{head}\n<body>{chr(10).join(body)}</body></html>\n"


def differences(runs: Sequence[Sequence[RunResult]]) -> Iterator[str]:
    """What differs from the first policy, in sentences."""
    first = runs[0]
    for other in runs[1:]:
        parts = list(_differing(first, other))
        said = "; ".join(parts) if parts else "nothing by more than a point"
        yield f"{other[0].policy} against {first[0].policy}: {said}."


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


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = element("tr", "".join(element("th", escape(name), scope="col") for name in columns), _class="heads")
    named = [zip(columns, row, strict=True) for row in rows]
    cells = ["".join(element("td", escape(cell), data_label=name) for name, cell in row) for row in named]
    return element("table", head + "".join(element("tr", row) for row in cells))


def _policies(runs: Sequence[Sequence[RunResult]]) -> str:
    columns = ("", "order", "TDG", "SLO", "weighted SLO", "KV", "tokens/s", "preempted")
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
    return _table(columns, rows)


def _bars(runs: Sequence[Sequence[RunResult]], tiers: Sequence[str]) -> str:
    rows = []
    for level, tier in enumerate(tiers):
        for one in runs:
            slo = _mean(one, lambda run, tier=tier: _slo(run, tier))  # type: ignore[misc]
            if slo is None:
                continue
            bar = f'<rect class="rest" width="100" height="10"/><rect width="{100 * slo:.2f}" height="10"/>'
            svg = element("svg", bar, viewBox="0 0 100 10", preserveAspectRatio="none", aria_hidden="true")
            cells = (element("td", escape(tier)), element("td", escape(one[0].policy)),
                     element("td", svg, _class=f"t{level % 6}"), element("td", f"{slo:.1%}"))  # fmt: skip
            rows.append(element("tr", "".join(cells)))
    return element("table", "".join(rows), _class="bars")


def _tiers(runs: Sequence[Sequence[RunResult]]) -> str:
    columns = (
        "", "tier", "requests", "SLO", "TDG", "TTFT p50, s", "TTFT p99, s", "longest wait, s", "refused",
        "abandoned", "of the tokens",
    )  # fmt: skip
    return _table(columns, [_tier(one, tier) for one in runs for tier in one[0].tiers])


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


def _rates(rates: Sequence[Rate]) -> Sequence[str]:
    if not rates:
        return []
    rows = [
        (
            one.policy,
            f"{one.target:.0%}",
            "none" if one.scale is None else f"{'at least ' * one.is_bound}{one.scale:.2f}",
            "-" if one.requests_per_s is None else f"{one.requests_per_s:.1f}",
        )
        for one in rates
    ]
    columns = ("", "met by", "scale", "requests/s")
    return [element("h2", "Highest rate at which every tier meets its objective"), _table(columns, rows)]
