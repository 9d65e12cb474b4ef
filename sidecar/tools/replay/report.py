"""Replay report as one page: its settings, the table and plots in SVG. It needs no network and no script.

The page's Content-Security-Policy forbids it to load anything, so that a name from a trace or an engine could do
nothing there even if it were not escaped. All of them are escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import accumulate

from sidecar.tools.loadgen import Distribution, Seen
from sidecar.tools.replay.comparison import Comparison, verdict
from sidecar.tools.replay.figures import RunFigures, TierFigures
from sidecar.tools.replay.objectives import lines as objective_lines
from sidecar.tools.replay.run import Played
from sidecar.tools.replay.table import SIDE_BY_SIDE, basis, errors, meaning, of_all, totals

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
_LABELS = tuple(
    f"{group} {column}".strip()
    for group, column in zip((group for group, columns in _GROUPS for _ in range(columns)), _COLUMNS, strict=True)
)
"""Of the cells, where a narrow screen shows each row as a list."""
_HEAD = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
    'img-src data:">'
    '<link rel="icon" href="data:,">'
)
TOGGLE = '<input type="checkbox" id="toggle" class="toggle" checked><label for="toggle"> show the control</label>'


def report(
    title: str,
    heading: Sequence[str],
    tiers: Sequence[str],
    played: Sequence[Played],
    compared: Comparison | None = None,
) -> str:
    """The page. `title` and `heading` say what was run; `tiers` is the ladder, most important first."""
    used = [tier for tier in tiers if any(tier in one.figures.tiers for one in played)]
    style = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    body = [
        element("h1", escape(title)),
        *(element("p", escape(line), _class="soft") for line in heading),
        *([TOGGLE] if len(played) > 1 else []),
        *(_found(one.figures) for one in played),
        _table([one.figures for one in played]),
        *([] if compared is None else _side_by_side(compared)),
        *_plots(used, played),
    ]
    head = f"{_HEAD}<title>{escape(title)}</title><style>{style}</style></head>"
    return f"{head}\n<body>{chr(10).join(body)}</body></html>\n"


def _found(run: RunFigures) -> str:
    lines = [element("strong", escape(run.title)), escape(meaning(run)), escape(totals(run))]
    lines += map(escape, (*errors(run), *basis(run), *objective_lines(run.objectives)))
    return element("div", "<br>".join(lines), _class="found" if run.name != "control" else "found control")


def _table(runs: Sequence[RunFigures]) -> str:
    groups = "".join(element("th", escape(name), colspan=columns, scope="colgroup") for name, columns in _GROUPS)
    columns = "".join(element("th", escape(name), scope="col") for name in _COLUMNS)
    rows = [element("tr", groups, _class="heads groups"), element("tr", columns, _class="heads")]
    for run in runs:
        kind = "run control" if run.name == "control" else "run"
        rows.append(element("tr", element("td", escape(run.title), colspan=len(_COLUMNS)), _class=kind))
        for tier, figures in run.tiers.items():
            named = zip(_LABELS, (tier, *_cells(figures)), strict=True)
            cells = "".join(element("td", escape(cell), data_label=label) for label, cell in named)
            rows.append(element("tr", cells, _class="control" if run.name == "control" else "of-run"))
    return element("table", "".join(rows))


_COMPARED_GROUPS = (("", 1), ("", 1), ("failed", 2), ("TTFT in the replay, s", 3), ("TTFT in the control, s", 3))
_COMPARED_COLUMNS = ("", "requests", "replay", "control", "p50", "p95", "p99", "p50", "p95", "p99")
_COMPARED_LABELS = (
    "", "requests", "failed, replay", "failed, control",
    *(f"{run} TTFT {part}, s" for run in ("replay", "control") for part in ("p50", "p95", "p99")),
)  # fmt: skip


def _side_by_side(compared: Comparison) -> Sequence[str]:
    """Both runs over all requests. It stays where the control is hidden: it is what the control is for."""
    groups = "".join(
        element("th", escape(name), colspan=columns, scope="colgroup") for name, columns in _COMPARED_GROUPS
    )
    columns = "".join(element("th", escape(name), scope="col") for name in _COMPARED_COLUMNS)
    rows = [element("tr", groups, _class="heads groups"), element("tr", columns, _class="heads")]
    for tier, found in compared.tiers.items():
        counts = map(str, (found.requests, found.failed_in_replay, found.failed_in_control))
        named = zip(
            _COMPARED_LABELS,
            (tier, *counts, *of_all(found.replay_ttft_s), *of_all(found.control_ttft_s)),
            strict=True,
        )
        rows.append(element("tr", "".join(element("td", escape(cell), data_label=label) for label, cell in named)))
    return [
        element("h2", escape(SIDE_BY_SIDE.rstrip(":"))),
        element("table", "".join(rows)),
        *(element("p", escape(line)) for line in verdict(compared)),
    ]


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
    waiting, running = (max(most_at_once(seen, end_s, waiting=w) for _, seen in runs) for w in (True, False))
    dashed = "; the control is dashed" if len(played) > 1 else ""
    parts = [
        _key(tiers),
        element("h2", "How long until the first token"),
        _figure(cdf(runs, tiers), f"Share of all requests with their first token within a time{dashed}."),
        _grid([_figure(scatter(one.seen, tiers, max(ttfts, default=0.0)), _dots(one), one) for one in played]),
        element("h2", "Who waited, and who ran"),
        element("p", "As clients see it: waiting until the first token, running from then on.", _class="soft"),
    ]
    for one in played:
        kinds = (("Waiting", waiting, True), ("Running", running, False))
        pair = [
            _figure(timeline(one.seen, tiers, end_s, most, waiting=w), f"{name}: {one.figures.title}.", one)
            for name, most, w in kinds
        ]
        parts.append(_grid(pair))
    return parts


def _key(tiers: Sequence[str]) -> str:
    items = [
        element("li", element("svg", sample(level), viewBox="0 0 22 14", aria_hidden="true") + escape(tier))
        for level, tier in enumerate(tiers)
    ]
    return element("ul", "".join(items), _class="key")


def _dots(one: Played) -> str:
    drawn = shown(len(one.seen))
    part = "" if drawn == len(one.seen) else f", {drawn} of {len(one.seen)} requests drawn"
    return f"TTFT of each request: {one.figures.title}{part}."


def _figure(svg: str, caption: str, one: Played | None = None) -> str:
    kind = "control" if one is not None and one.figures.name == "control" else "of-run"
    return element("figure", svg + element("figcaption", escape(caption)), _class=kind)


def _grid(figures: Sequence[str]) -> str:
    return element("div", "".join(figures), _class="grid2")


BINS = 200
MOST_DOTS = 2000
"""Drawn of one run: more would be a block of color, and a file of megabytes."""
BURST_WITHIN_S = 1.0
"""Requests that were all sent within this time have no arrival times worth drawing."""
COLORS = 6
Span = tuple[float, float]


def color(level: int) -> str:
    """The class that gives a tier its color; the page says which that is, in the light and in the dark."""
    return f"t{level % COLORS}"


def cdf(runs: Sequence[tuple[str, Sequence[Seen]]], tiers: Sequence[str]) -> str:
    """The share of requests that had their first token within a time: the first run solid, the second dashed.

    It is the share of all requests: the line of a tier with failures ends below 100%.
    """
    found = [(run, tier, _ttfts(seen, tier), _failures(seen, tier)) for run, seen in runs for tier in tiers]
    x, y = axes(max((values[-1] for _, _, values, _ in found if values), default=0.0), 1.0)
    drawn = []
    for run, tier, values, failed in found:
        if not values:
            continue
        count = len(values) + failed
        steps = [(x(0.0), y(0.0))]
        for index, value in enumerate(values):
            steps += [(x(value), y(index / count)), (x(value), y((index + 1) / count))]
        middle = count // 2
        median = (
            f"half of {count} within {values[middle]:.3g} s" if middle < len(values) else f"{failed} of {count} failed"
        )
        title = f"{tier}, {run}: {median}"
        kind = f"line {color(tiers.index(tier))}{' control' if run != runs[0][0] else ''}"
        drawn.append(element("polyline", title=title, points=points(_thinned(steps)), _class=kind))
    return frame(
        x, y, drawn, x_name="time to first token, s", y_name="requests", name="TTFT by tier, cumulative", percent=True
    )


def scatter(seen: Sequence[Seen], tiers: Sequence[str], most_ttft_s: float) -> str:
    """The TTFT of each request over the time it was sent; a cross at the foot stands for one that failed.

    Those of a burst stand in the order in which they were sent.
    """
    is_burst = max(one.sent_s for one in seen) - min(one.sent_s for one in seen) < BURST_WITHIN_S
    ordered = sorted(seen, key=lambda one: one.sent_s)
    places = [float(index + 1) if is_burst else one.sent_s for index, one in enumerate(ordered)]
    x, y = axes(places[-1], most_ttft_s)
    drawn = []
    every = _every(len(ordered))
    for one, place in zip(ordered[::every], places[::every], strict=True):
        level = tiers.index(one.planned.label)
        if one.is_complete and one.ttft_s is not None:
            title = f"{one.planned.label}: sent at {one.sent_s:.3f} s, first token after {one.ttft_s:.3f} s"
            drawn.append(_mark(level, x(place), y(one.ttft_s), title))
        elif not one.is_complete:
            title = f"{one.planned.label}: sent at {one.sent_s:.3f} s, {one.error}"
            drawn.append(_cross(level, x(place), y(0.0), title))
    x_name = "sent as number" if is_burst else "sent at, s"
    return frame(x, y, drawn, x_name=x_name, y_name="TTFT, s", name="TTFT of each request")


def timeline(seen: Sequence[Seen], tiers: Sequence[str], end_s: float, most: float, *, waiting: bool) -> str:
    """How many requests of each tier waited for their first token, or were having theirs, stacked over time."""
    x, y = axes(end_s, most)
    layers = [occupancy(_spans(seen, tier, waiting=waiting), end_s) for tier in tiers]
    middles = [x((index + 0.5) * end_s / BINS) for index in range(BINS)]
    base = [0.0] * BINS
    drawn = []
    for level, (tier, layer) in enumerate(zip(tiers, layers, strict=True)):
        top = [below + own for below, own in zip(base, layer, strict=True)]
        if any(layer):
            upper = list(zip(middles, map(y, top), strict=True))
            lower = list(zip(middles, map(y, base), strict=True))
            title = f"{tier}: at most {max(layer):.0f} at once"
            outline = points(upper + lower[::-1])
            drawn.append(element("polygon", title=title, points=outline, _class=f"area {color(level)}"))
        base = top
    name = "waiting" if waiting else "running"
    return frame(x, y, drawn, x_name="time, s", y_name=f"requests {name}", name=f"Requests {name} over time")


def most_at_once(seen: Sequence[Seen], end_s: float, *, waiting: bool) -> float:
    """The height of a timeline."""
    return max(occupancy(_spans(seen, None, waiting=waiting), end_s), default=0.0)


def occupancy(spans: Sequence[Span], end_s: float) -> Sequence[float]:
    """How many of the spans are open in each part of the time up to `end_s`, on average over that part."""
    width = end_s / BINS
    if width <= 0:
        return [0.0] * BINS
    changes = [0.0] * (BINS + 1)
    partial = [0.0] * BINS
    for start_s, stop_s in spans:
        first, last = (min(BINS - 1, max(0, int(moment / width))) for moment in (start_s, stop_s))
        if first == last:
            partial[first] += (stop_s - start_s) / width
            continue
        partial[first] += first + 1 - start_s / width
        partial[last] += stop_s / width - last
        changes[first + 1] += 1
        changes[last] -= 1
    return [max(0.0, whole + part) for whole, part in zip(accumulate(changes[:BINS]), partial, strict=True)]


def _spans(seen: Sequence[Seen], tier: str | None, *, waiting: bool) -> list[Span]:
    """Waiting ends with the first token or, where none came, with the end; running goes from there to the end."""
    mine = [one for one in seen if tier is None or one.planned.label == tier]
    if waiting:
        return [(one.sent_s, one.end_s if one.first_token_s is None else one.first_token_s) for one in mine]
    return [(one.first_token_s, one.end_s) for one in mine if one.first_token_s is not None]


def _ttfts(seen: Sequence[Seen], tier: str) -> list[float]:
    mine = (one for one in seen if one.planned.label == tier and one.is_complete)
    return sorted(one.ttft_s for one in mine if one.ttft_s is not None)


def _failures(seen: Sequence[Seen], tier: str) -> int:
    return sum(one.planned.label == tier and not one.is_complete for one in seen)


def _thinned(steps: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Leaves out steps that are too small to see: those less than a fifth of a unit away."""
    last: tuple[float, float] | None = None
    for index, step in enumerate(steps):
        if last is None or index == len(steps) - 1 or abs(step[0] - last[0]) + abs(step[1] - last[1]) > 0.2:
            last = step
            yield step


def shown(count: int) -> int:
    """How many requests a scatter draws of so many: all, or every n-th where that would be too many."""
    return -(-count // _every(count))


def sample(level: int) -> str:
    """A tier's mark on a piece of its line, for the key of a report."""
    line = element("line", x1=1, x2=21, y1=7, y2=7, _class=f"line {color(level)}")
    return line + _mark(level, 11.0, 7.0, None)


def _every(count: int) -> int:
    return max(1, -(-count // MOST_DOTS))


def _mark(level: int, x: float, y: float, title: str | None) -> str:
    """A shape for each tier too, for readers who cannot distinguish the colors."""
    kind = f"dot {color(level)}"
    shape = level % 4
    if shape == 0:
        return element("circle", title=title, cx=x, cy=y, r=3, _class=kind)
    if shape == 1:
        return element("rect", title=title, x=x - 2.6, y=y - 2.6, width=5.2, height=5.2, _class=kind)
    outline = [(x, y - 3.6), (x + 3.4, y + 2.6), (x - 3.4, y + 2.6)]
    if shape == 3:
        outline = [(x, y - 3.9), (x + 3.9, y), (x, y + 3.9), (x - 3.9, y)]
    return element("polygon", title=title, points=points(outline), _class=kind)


def _cross(level: int, x: float, y: float, title: str) -> str:
    path = f"M{x - 4:.1f} {y - 8:.1f}l8 8m0 -8l-8 8"
    return element("path", title=title, d=path, _class=f"line failed {color(level)}")


WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 42
"""Of a plot in its own units. A phone shows it at about two thirds, which leaves its text readable."""


def element(name: str, content: str = "", title: str | None = None, **attributes: object) -> str:
    """One element. `content` is markup, `title` text for a tooltip; `_` in a name stands for a hyphen."""
    written = "".join(f' {key.strip("_").replace("_", "-")}="{_value(value)}"' for key, value in attributes.items())
    tooltip = "" if title is None else f"<title>{escape(title)}</title>"
    return f"<{name}{written}>{tooltip}{content}</{name}>"


def text(content: str, x: float, y: float, **attributes: object) -> str:
    """A line of text."""
    return element("text", escape(content), None, x=x, y=y, **attributes)


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from 0 to `most`, drawn from `start` to `end`. `unit` stands after the last tick."""

    most: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Where a value is drawn; one beyond the axis is drawn at its end."""
        return self.start + (self.end - self.start) * min(1.0, value / self.most)

    def ticks(self, count: int = 5) -> Sequence[float]:
        """Round numbers along the axis, about `count` of them."""
        rough = self.most / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * times for times in (1, 2, 2.5, 5, 10) if power * times >= rough * 0.999)
        return [index * step for index in range(int(self.most / step + 1e-6) + 1)]


def frame(x: Axis, y: Axis, drawn: Iterable[str], *, x_name: str, y_name: str, name: str, percent: bool = False) -> str:
    """A whole plot: grid, numbers and names of the axes, and on top of them what is drawn. `name` says what it is."""
    parts: list[str] = []
    for tick in y.ticks(4):
        label = f"{tick:.0%}" if percent else _number(tick)
        parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(tick), y2=y(tick), _class="grid"))
        parts.append(text(label, LEFT - 6, y(tick) + 4, text_anchor="end"))
    for tick in x.ticks(5):
        parts.append(element("line", x1=x(tick), x2=x(tick), y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM + 4, _class="axis"))
        parts.append(text(_number(tick), x(tick), HEIGHT - BOTTOM + 17, text_anchor="middle"))
    parts += drawn
    parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(0), y2=y(0), _class="axis"))
    parts.append(text(x_name, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, text_anchor="middle", _class="name"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f"rotate(-90 14 {middle:g})"
    parts.append(text(y_name, 14, middle, text_anchor="middle", transform=turned, _class="name"))
    return element("svg", "".join(parts), viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=name)


def axes(most_x: float, most_y: float) -> tuple[Axis, Axis]:
    """The two axes of a plot, with some room above the largest value; never empty."""
    return (
        Axis(most_x or 1.0, LEFT, WIDTH - RIGHT),
        Axis(most_y or 1.0, HEIGHT - BOTTOM, TOP),
    )


def points(pairs: Iterable[tuple[float, float]]) -> str:
    """The `points` of a polyline or a polygon."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)


def _number(value: float) -> str:
    return f"{value:g}" if value < 1e5 else f"{value:.0e}"


def _value(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else escape(str(value))
