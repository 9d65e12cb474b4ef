"""Targets of `order: gain`, each reached or missed by so much, on the means of the seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from benchmarks.gain.runs import GAIN, LEVEL, PAPER, THREE, Measured
from sidecar.tools.simulate.comparison import interval

JUDGED = ("4:2:1", "2:1")
OVERLOADED = ("heavy", "moderate")
JUDGED_AT_LOW = (GAIN, LEVEL, "engine-priority")
LOW_POINTS, RIVAL_POINTS = 0.5, 2.0
RELATIVE = (
    (PAPER, "engine-priority", 25.0, 52.0),
    (THREE, "engine-priority", 5.0, 20.0),
    (THREE, LEVEL, 25.0, 60.0),
)
"""The tiers, the rival, and by how many percent TDG and SLO are to be above the rival's in heavy overload."""

Cell = tuple[str, str, str, str, str]
"""The tiers, the trace, what gets a tier, the load, and the weights."""


@dataclass(frozen=True, slots=True)
class Target:
    """One figure and the least that it is to be. `half` is that of its 95% confidence interval, None without one."""

    what: str
    where: str
    value: float
    half: float | None
    least: float
    unit: str

    @property
    def is_reached(self) -> bool:
        """Whether the mean is enough."""
        return self.value >= self.least

    def row(self) -> list[str]:
        """The cells of its line."""
        said = "reached" if self.is_reached else f"missed by {self.least - self.value:.1f}"
        figure = f"{self.value:+.1f}{'' if self.half is None else f' ±{self.half:.1f}'} {self.unit}"
        return [self.what, self.where, figure, f"{self.least:+g}", said]


def cells(found: Sequence[Measured]) -> dict[Cell, dict[str, list[Measured]]]:
    """The runs of every cell by candidate, in the order of their seeds."""
    made: dict[Cell, dict[str, list[Measured]]] = {}
    for one in sorted(found, key=lambda run: run.seed):
        place = one.tiers, one.trace, one.by, one.load, one.weights
        made.setdefault(place, {}).setdefault(one.candidate, []).append(one)
    return made


def targets(found: Sequence[Measured]) -> Iterator[Target]:
    """All of them. The load with clients that leave has none."""
    each = cells(found)
    for tiers, rival, *percents in RELATIVE:
        for name, percent in zip(("tdg", "slo"), percents, strict=True):
            of_paper = ", the paper's tiers" if tiers == PAPER else ""
            what = f"{name.upper()} above that of {rival}{of_paper}"
            yield from _each(each, (tiers, "heavy"), rival, Figure(what, "%", percent, partial(_percent, name)))
    for rival in ("density", "sjf"):
        points = Figure(f"TDG against {rival}", "points", -RIVAL_POINTS, partial(_points, "tdg"))
        yield from _each(each, (THREE, "heavy"), rival, points)
        wait = Figure(f"longest wait of the top tier, below that of {rival}", "s", 0.0, _shorter)
        yield from _each(each, (THREE, "heavy"), rival, wait)
    for rival in JUDGED_AT_LOW[1:]:
        for name in ("tdg", "slo"):
            what = f"{name.upper()} at low load against {rival}"
            yield from _each(each, (THREE, "low"), rival, Figure(what, "points", -LOW_POINTS, partial(_points, name)))
    for trace in dict.fromkeys(one.trace for one in found):
        runs = [one for one in found if (one.trace, one.candidate) == (trace, GAIN) and one.load in OVERLOADED]
        kept = 100 * sum(one.kept for one in runs) / len(runs)
        yield Target("every floor kept, of the runs in overload", trace, kept, None, 100.0, "%")


@dataclass(frozen=True, slots=True)
class Figure:
    """What is compared of a run of ours and one of a rival's on the same window, and the least that it is to be."""

    what: str
    unit: str
    least: float
    of: Callable[[Measured, Measured], float]


def _each(
    each: Mapping[Cell, Mapping[str, Sequence[Measured]]], kind: tuple[str, str], rival: str, figure: Figure
) -> Iterator[Target]:
    """A line for each trace and way to assign tiers."""
    for (tiers, trace, by, load, weights), runs in each.items():
        if (tiers, load) == kind and weights in JUDGED:
            pairs = zip(runs[GAIN], runs[rival], strict=True)
            found = interval([figure.of(one, other) for one, other in pairs])
            assert found is not None
            yield Target(figure.what, f"{trace}, by {by}", *found, figure.least, figure.unit)


def _percent(name: str, one: Measured, other: Measured) -> float:
    base = float(getattr(other, name))
    return 100 * (float(getattr(one, name)) / base - 1) if base else inf


def _points(name: str, one: Measured, other: Measured) -> float:
    return 100 * float(getattr(one, name) - getattr(other, name))


def _shorter(one: Measured, other: Measured) -> float:
    return other.top_wait_s - one.top_wait_s
