"""Replay report as one page: its settings, the table and plots in SVG, drawn by the template `replay.html`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sidecar.templates import render
from sidecar.tools.loadgen import Seen
from sidecar.tools.replay.run import ReplayedTrace
from sidecar.tools.replay.table import (
    COLUMNS,
    COMPARED_COLUMNS,
    COMPARED_GROUPS,
    GROUPS,
    SIDE_BY_SIDE,
    Comparison,
    cells,
    compared_cells,
    labels,
    sentences,
    verdict,
)

BINS = 200
MOST_DOTS = 2000
"""Drawn of one run: more would be a block of color, and a file of megabytes."""
BURST_WITHIN_S = 1.0
"""Requests that were all sent within this time have no arrival times worth drawing."""
COLORS = 6
Span = tuple[float, float]


def report(
    title: str,
    heading: Sequence[str],
    tiers: Sequence[str],
    played: Sequence[ReplayedTrace],
    compared: Comparison | None = None,
) -> str:
    """The page. `title` and `heading` say what was run; `tiers` is the ladder, most important first."""
    used = [tier for tier in tiers if any(tier in one.figures.tiers for one in played)]
    return render(
        "replay.html",
        title=title,
        heading=heading,
        groups=GROUPS,
        columns=COLUMNS,
        labels=labels(GROUPS, COLUMNS),
        key=[(tier, _mark(level, 11.0, 7.0, "")) for level, tier in enumerate(used)],
        cdf=cdf([(one.figures.name, one.seen) for one in played], used),
        runs=_runs(used, played),
        compared=None if compared is None else _side_by_side(compared),
    )


def _runs(tiers: Sequence[str], played: Sequence[ReplayedTrace]) -> Sequence[Mapping[str, object]]:
    """All runs, with the same axes."""
    end_s = max(seen.end_s for one in played for seen in one.seen)
    ttfts = [seen.ttft_s for one in played for seen in one.seen if seen.ttft_s is not None and seen.is_complete]
    waiting, running = (max(most_at_once(one.seen, end_s, waiting=w) for one in played) for w in (True, False))
    return [
        {
            "title": one.figures.title,
            "kind": "control" if one.figures.name == "control" else "",
            "lines": sentences(one.figures),
            "rows": [(tier, *cells(figures)) for tier, figures in one.figures.tiers.items()],
            "scatter": scatter(one.seen, tiers, max(ttfts, default=0.0)),
            "drawn": _drawn(len(one.seen)),
            "waiting": timeline(one.seen, tiers, end_s, waiting, waiting=True),
            "running": timeline(one.seen, tiers, end_s, running, waiting=False),
        }
        for one in played
    ]


def _side_by_side(compared: Comparison) -> Mapping[str, object]:
    """Both runs over all requests. It stays where the control is hidden: it is what the control is for."""
    return {
        "title": SIDE_BY_SIDE.rstrip(":"),
        "groups": COMPARED_GROUPS,
        "columns": COMPARED_COLUMNS,
        "labels": labels(COMPARED_GROUPS, COMPARED_COLUMNS),
        "rows": [(tier, *compared_cells(found)) for tier, found in compared.tiers.items()],
        "verdict": verdict(compared),
    }


def _drawn(count: int) -> str:
    return "" if shown(count) == count else f", {shown(count)} of {count} requests drawn"


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from 0 to `most`, drawn from `start` to `end`."""

    most: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Where a value is drawn; one beyond the axis is drawn at its end."""
        return round(self.start + (self.end - self.start) * min(1.0, value / self.most), 1)

    def ticks(self, count: int = 5) -> Sequence[float]:
        """Round numbers along the axis, about `count` of them."""
        rough = self.most / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * times for times in (1, 2, 2.5, 5, 10) if power * times >= rough * 0.999)
        return [index * step for index in range(int(self.most / step + 1e-6) + 1)]


@dataclass(frozen=True, slots=True)
class Shape:
    """One SVG element of a plot: its classes in `kind`, and `title` for a tooltip."""

    tag: str
    kind: str
    title: str
    attributes: Mapping[str, object]

    @property
    def color(self) -> str:
        """The class that gives it its color."""
        return self.kind.split()[-1]


class Plot:
    """One plot in its own units. A phone shows it at about two thirds, which leaves its text readable.

    The axes have some room around them for their numbers and names, and are never empty.
    """

    width, height = 520, 300

    def __init__(self, name: str, x: tuple[str, float], y: tuple[str, float], *, is_percent: bool = False) -> None:
        self.name = name
        (self.x_name, most_x), (self.y_name, most_y) = x, y
        self.x, self.y = Axis(most_x or 1.0, 62, self.width - 12), Axis(most_y or 1.0, self.height - 42, 12)
        self.is_percent = is_percent
        self.shapes: list[Shape] = []

    def add(self, tag: str, kind: str, title: str, **attributes: object) -> None:
        """Draws over what was drawn before."""
        self.shapes.append(Shape(tag, kind, title, attributes))

    def label(self, value: float) -> str:
        """The number at a tick of the vertical axis."""
        return f"{value:.0%}" if self.is_percent else f"{value:g}"


def _color(level: int) -> str:
    """The class that gives a tier its color; the page says which that is, in the light and in the dark."""
    return f"t{level % COLORS}"


def cdf(runs: Sequence[tuple[str, Sequence[Seen]]], tiers: Sequence[str]) -> Plot:
    """The share of requests that had their first token within a time: the first run solid, the second dashed.

    It is the share of all requests: the line of a tier with failures ends below 100%.
    """
    found = [(run, tier, _ttfts(seen, tier), _failures(seen, tier)) for run, seen in runs for tier in tiers]
    most = max((values[-1] for _, _, values, _ in found if values), default=0.0)
    plot = Plot("TTFT by tier, cumulative", ("time to first token, s", most), ("requests", 1.0), is_percent=True)
    for run, tier, values, failed in found:
        if not values:
            continue
        count = len(values) + failed
        steps = [(plot.x(0.0), plot.y(0.0))]
        for index, value in enumerate(values):
            steps += [(plot.x(value), plot.y(index / count)), (plot.x(value), plot.y((index + 1) / count))]
        middle = count // 2
        median = (
            f"half of {count} within {values[middle]:.3g} s" if middle < len(values) else f"{failed} of {count} failed"
        )
        kind = f"line {_color(tiers.index(tier))}{' control' if run != runs[0][0] else ''}"
        plot.add("polyline", kind, f"{tier}, {run}: {median}", points=_points(_thin_out(steps)))
    return plot


def scatter(seen: Sequence[Seen], tiers: Sequence[str], most_ttft_s: float) -> Plot:
    """The TTFT of each request over the time it was sent; a cross at the foot stands for one that failed.

    Those of a burst stand in the order in which they were sent.
    """
    is_burst = max(one.sent_s for one in seen) - min(one.sent_s for one in seen) < BURST_WITHIN_S
    ordered = sorted(seen, key=lambda one: one.sent_s)
    places = [float(index + 1) if is_burst else one.sent_s for index, one in enumerate(ordered)]
    x_name = "sent as number" if is_burst else "sent at, s"
    plot = Plot("TTFT of each request", (x_name, places[-1]), ("TTFT, s", most_ttft_s))
    every = _every(len(ordered))
    for one, place in zip(ordered[::every], places[::every], strict=True):
        level, x = tiers.index(one.planned.label), plot.x(place)
        title = f"{one.planned.label}: sent at {one.sent_s:.3f} s, "
        if one.is_complete and one.ttft_s is not None:
            plot.shapes.append(_mark(level, x, plot.y(one.ttft_s), f"{title}first token after {one.ttft_s:.3f} s"))
        elif not one.is_complete:
            cross = f"M{x - 4:.1f} {plot.y(0.0) - 8:.1f}l8 8m0 -8l-8 8"
            plot.add("path", f"line failed {_color(level)}", f"{title}{one.error}", d=cross)
    return plot


def timeline(seen: Sequence[Seen], tiers: Sequence[str], end_s: float, most: float, *, waiting: bool) -> Plot:
    """How many requests of each tier waited for their first token, or were having theirs, stacked over time."""
    name = "waiting" if waiting else "running"
    plot = Plot(f"Requests {name} over time", ("time, s", end_s), (f"requests {name}", most))
    layers = [occupancy(_spans(seen, tier, waiting=waiting), end_s) for tier in tiers]
    middles = [plot.x((index + 0.5) * end_s / BINS) for index in range(BINS)]
    base = [0.0] * BINS
    for level, (tier, layer) in enumerate(zip(tiers, layers, strict=True)):
        top = [below + own for below, own in zip(base, layer, strict=True)]
        if any(layer):
            upper = list(zip(middles, map(plot.y, top), strict=True))
            lower = list(zip(middles, map(plot.y, base), strict=True))
            title = f"{tier}: at most {max(layer):.0f} at once"
            plot.add("polygon", f"area {_color(level)}", title, points=_points(upper + lower[::-1]))
        base = top
    return plot


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


def _thin_out(steps: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Leaves out steps that are too small to see: those less than a fifth of a unit away."""
    last: tuple[float, float] | None = None
    for index, step in enumerate(steps):
        if last is None or index == len(steps) - 1 or abs(step[0] - last[0]) + abs(step[1] - last[1]) > 0.2:
            last = step
            yield step


def shown(count: int) -> int:
    """How many requests a scatter draws of so many: all, or every n-th where that would be too many."""
    return -(-count // _every(count))


def _every(count: int) -> int:
    return max(1, -(-count // MOST_DOTS))


def _mark(level: int, x: float, y: float, title: str) -> Shape:
    """A shape for each tier too, for readers who cannot distinguish the colors."""
    kind = f"dot {_color(level)}"
    shape = level % 4
    if shape == 0:
        return Shape("circle", kind, title, {"cx": x, "cy": y, "r": 3})
    if shape == 1:
        place = {"x": round(x - 2.6, 1), "y": round(y - 2.6, 1)}
        return Shape("rect", kind, title, {**place, "width": 5.2, "height": 5.2})
    outline = [(x, y - 3.6), (x + 3.4, y + 2.6), (x - 3.4, y + 2.6)]
    if shape == 3:
        outline = [(x, y - 3.9), (x + 3.9, y), (x, y + 3.9), (x - 3.9, y)]
    return Shape("polygon", kind, title, {"points": _points(outline)})


def _points(pairs: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)
