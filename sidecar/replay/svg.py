"""Inline SVG: elements with everything escaped, axes with round numbers, and the frame that every plot stands in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

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
    """Values from 0 to `most`, drawn from `start` to `end`. `unit` stands behind the last tick."""

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
