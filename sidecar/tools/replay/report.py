"""Replay report as one page: its settings, the table and the plots. It needs no network and no script.

The page's Content-Security-Policy forbids it to load anything, so that a name from a trace or an engine could do
nothing there even if it were not escaped. All of them are escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from sidecar.tools.loadgen import Distribution
from sidecar.tools.replay import plots
from sidecar.tools.replay.figures import RunFigures, TierFigures
from sidecar.tools.replay.plots import element
from sidecar.tools.replay.run import Played
from sidecar.tools.replay.table import errors, meaning, totals

_GROUPS = (
    ("", 1),
    ("", 1),
    ("", 1),
    ("TTFT, s", 3),
    ("TPOT, ms", 1),
    ("queue wait, s", 2),
    ("starvation, s", 2),
    ("", 1),
)
_COLUMNS = ("", "requests", "failed", "p50", "p95", "p99", "p50", "p50", "p95", "p50", "p95", "tokens/s")
_HEAD = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
    'img-src data:">'
    '<link rel="icon" href="data:,">'
)
TOGGLE = '<input type="checkbox" id="toggle" class="toggle" checked><label for="toggle"> show the control</label>'


def report(title: str, heading: Sequence[str], tiers: Sequence[str], played: Sequence[Played]) -> str:
    """The page. `title` and `heading` say what was run; `tiers` is the ladder, most important first."""
    used = [tier for tier in tiers if any(tier in one.figures.tiers for one in played)]
    style = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    body = [
        element("h1", escape(title)),
        *(element("p", escape(line), _class="soft") for line in heading),
        *([TOGGLE] if len(played) > 1 else []),
        *(_found(one.figures) for one in played),
        _table([one.figures for one in played]),
        *_plots(used, played),
    ]
    head = f"{_HEAD}<title>{escape(title)}</title><style>{style}</style></head>"
    return f"{head}\n<body>{chr(10).join(body)}</body></html>\n"


def _found(run: RunFigures) -> str:
    lines = [element("strong", escape(run.title)), escape(meaning(run)), escape(totals(run)), *map(escape, errors(run))]
    return element("div", "<br>".join(lines), _class="found" if run.name != "control" else "found control")


def _table(runs: Sequence[RunFigures]) -> str:
    groups = "".join(element("th", escape(name), colspan=columns, scope="colgroup") for name, columns in _GROUPS)
    columns = "".join(element("th", escape(name), scope="col") for name in _COLUMNS)
    rows = [element("tr", groups, _class="groups"), element("tr", columns)]
    for run in runs:
        kind = "run control" if run.name == "control" else "run"
        rows.append(element("tr", element("td", escape(run.title), colspan=len(_COLUMNS)), _class=kind))
        for tier, figures in run.tiers.items():
            cells = "".join(element("td", escape(cell)) for cell in (tier, *_cells(figures)))
            rows.append(element("tr", cells, _class="control" if run.name == "control" else "of-run"))
    return element("div", element("table", "".join(rows)), _class="wide")


def _cells(figures: TierFigures) -> Sequence[str]:
    def both(found: Distribution | None) -> Sequence[str]:
        return ("-", "-") if found is None else (f"{found.p50:.2f}", f"{found.p95:.2f}")

    ttft, tpot = figures.ttft_s, figures.tpot_s
    return (
        str(figures.requests),
        str(figures.failed),
        *both(ttft),
        "-" if ttft is None else f"{ttft.p99:.2f}",
        "-" if tpot is None else f"{tpot.p50 * 1000:.1f}",
        *both(figures.queue_wait_s),
        *both(figures.starvation_s),
        f"{figures.output_tokens_per_s:.0f}",
    )


def _plots(tiers: Sequence[str], played: Sequence[Played]) -> Sequence[str]:
    runs = [(one.figures.name, one.seen) for one in played]
    end_s = max(seen.end_s for one in played for seen in one.seen)
    ttfts = [seen.ttft_s for one in played for seen in one.seen if seen.ttft_s is not None and seen.is_complete]
    waiting, running = (max(plots.most_at_once(seen, end_s, waiting=w) for _, seen in runs) for w in (True, False))
    dashed = "; the control is dashed" if len(played) > 1 else ""
    parts = [
        _key(tiers),
        element("h2", "How long until the first token"),
        _figure(plots.cdf(runs, tiers), f"Share of requests with their first token within a time{dashed}."),
        _grid([_figure(plots.scatter(one.seen, tiers, max(ttfts, default=0.0)), _dots(one), one) for one in played]),
        element("h2", "Who waited, and who ran"),
        element("p", "As clients see it: waiting until the first token, running from then on.", _class="soft"),
    ]
    for one in played:
        kinds = (("Waiting", waiting, True), ("Running", running, False))
        pair = [
            _figure(plots.timeline(one.seen, tiers, end_s, most, waiting=w), f"{name}: {one.figures.title}.", one)
            for name, most, w in kinds
        ]
        parts.append(_grid(pair))
    return parts


def _key(tiers: Sequence[str]) -> str:
    items = [
        element("li", element("svg", plots.sample(level), viewBox="0 0 22 14", aria_hidden="true") + escape(tier))
        for level, tier in enumerate(tiers)
    ]
    return element("ul", "".join(items), _class="key")


def _dots(one: Played) -> str:
    shown = plots.shown(len(one.seen))
    part = "" if shown == len(one.seen) else f", {shown} of {len(one.seen)} requests drawn"
    return f"TTFT of each request: {one.figures.title}{part}."


def _figure(svg: str, caption: str, one: Played | None = None) -> str:
    kind = "control" if one is not None and one.figures.name == "control" else "of-run"
    return element("figure", svg + element("figcaption", escape(caption)), _class=kind)


def _grid(figures: Sequence[str]) -> str:
    return element("div", "".join(figures), _class="grid2")
