"""Draws pool.svg, beside itself: the shipped policy's pool in one moment. `python docs/pictures/pool.py`.

Floors and limits are those that the policy gives; what is held is made up. Every tier lends all of its idle reserve, so
nothing of the pool is free.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sidecar.policy.compiler import load, shipped_policies
from sidecar.policy.rules import PoolRules, TierRules

WRITTEN = Path(__file__).with_name("pool.svg")
HELD_PERCENT = {"critical": 0, "high": 8, "normal": 30, "low": 2, "batch": 60}

LEFT, TOP, SCALE, BAR, ROW = 92, 56, 6.0, 26, 46
WIDTH, HEIGHT = 770, 420
OWN, BORROWED, LENT = "#1f5f9e", "#8dbbe6", "url(#lent)"
LEGEND = (
    (OWN, "held, within its reserve"),
    (BORROWED, "held beyond its reserve"),
    (LENT, "its reserve, lent to others"),
)
HEAD = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"
 font-family="system-ui, sans-serif" font-size="13">
<title>A pool in one moment: what each tier holds, lends and borrows</title>
<defs>
<pattern id="lent" width="6" height="6" patternUnits="userSpaceOnUse">
<rect width="6" height="6" fill="#f3f3f3"/><circle cx="3" cy="3" r="1.3" fill="#777"/></pattern>
</defs>
<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>"""


def at(percent: float) -> float:
    """The place of a percentage, from the left."""
    return LEFT + SCALE * percent


def box(percent: float, width: float, top: float, fill: str) -> str:
    """A part of a bar."""
    return (
        f'<rect x="{at(percent):g}" y="{top:g}" width="{SCALE * width:g}" height="{BAR}" fill="{fill}" stroke="#555" '
        'stroke-width="0.5"/>'
    )


def words(x: float, y: float, text: str, more: str = "") -> str:
    """A line of text."""
    return f'<text x="{x:g}" y="{y:g}" fill="#222"{more}>{text}</text>'


def parts(tier: TierRules, capacity: int) -> Iterator[tuple[float, str]]:
    """What a tier holds and lends, each in percent of the pool with its fill, from the left."""
    held = HELD_PERCENT[tier.name]
    reserve = 100 * tier.reserve[0] / capacity
    own = min(held, reserve)
    yield own, OWN
    yield held - own, BORROWED
    yield reserve - own, LENT


def row(tier: TierRules, capacity: int) -> Iterator[str]:
    """One tier's line: its bar, the mark of its reserve, the mark of its limit."""
    top = TOP + ROW * tier.level
    yield words(12, top + 18, tier.name, ' font-weight="600"')
    yield f'<rect x="{LEFT}" y="{top}" width="{SCALE * 100:g}" height="{BAR}" fill="#fafafa" stroke="#ccc"/>'
    begin = 0.0
    for width, fill in parts(tier, capacity):
        if width > 0:
            yield box(begin, width, top, fill)
            begin += width
    for amount, color, name in (
        (tier.reserve[0], "#000", "reserve"),
        (tier.limit[0] if tier.limited else 0, "#b3261e", "limit"),
    ):
        if amount:
            x = at(100 * amount / capacity)
            yield f'<path d="M{x:g} {top - 4}v{BAR + 8}" stroke="{color}" stroke-width="2.5"/>'
            text = f"{name} {amount / capacity:.0%}"
            yield words(x + 4, top - 5, text, f' font-size="11" style="fill:{color}"')


def whole(rules: PoolRules) -> Iterator[str]:
    """The pool, filled tier by tier."""
    top = TOP + ROW * len(rules.tiers) + 18
    yield words(12, top + 18, "the pool", ' font-weight="600"')
    begin = 0.0
    for tier in rules.tiers:
        for width, fill in parts(tier, rules.tokens):
            if width > 0 and fill != LENT:
                yield box(begin, width, top, fill)
                begin += width
    if round(begin, 6) != 100:
        raise ValueError(f"the picture's moment holds {begin:g}% of the pool; change HELD_PERCENT to 100%")
    yield words(LEFT, top + BAR + 17, "0%", ' font-size="11"')
    yield words(at(100), top + BAR + 17, "100%", ' font-size="11" text-anchor="end"')
    for place, (fill, text) in enumerate(LEGEND):
        x, y = LEFT + 300 * (place % 2), top + BAR + 30 + 24 * (place // 2)
        yield f'<rect x="{x}" y="{y}" width="16" height="14" fill="{fill}" stroke="#555" stroke-width="0.5"/>'
        yield words(x + 24, y + 12, text)


def text() -> str:
    """What pool.svg must be."""
    rules = load(shipped_policies()).rules
    lines = [HEAD, words(12, 26, "One moment in the pool of policies/policy.yaml", ' font-size="15" font-weight="600"')]
    for tier in rules.tiers:
        lines += row(tier, rules.tokens)
    return "\n".join([*lines, *whole(rules), "</svg>", ""])


if __name__ == "__main__":
    WRITTEN.write_text(text(), encoding="utf-8")
