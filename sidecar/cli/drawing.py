"""Terminal drawing of the overview: lines of text, as wide as the window, in color where the terminal has it.

A character in a name or a message that a terminal would take for a command is shown as `?`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import localtime, strftime
from typing import NamedTuple

from sidecar.cluster.document import EngineRow, Overview, RefusalView, ReplicaView, TenantView, TierView
from sidecar.cluster.phrases import STARVES_FROM_S, as_promised, count, lease_sizes, preempted
from sidecar.durations import short_duration
from sidecar.engines.view import EngineDocument
from sidecar.events import StoreState

NARROWEST = 40
_LABEL, _BAR_LEAST, _BAR_MOST = 9, 20, 60
_NAME_MOST, _SPARK, _OVERTAKEN_LEAST = 16, 20, 24
_STEPS = " ▁▂▃▄▅▆▇█"
_COLORS = ("34", "33", "32", "36", "35", "37")
_BOLD, _DIM, _RED, _GREEN = "1", "2", "31", "32"


@dataclass(frozen=True, slots=True)
class TerminalStyle:
    """How wide it is, whether in colors, and whether its characters go beyond ASCII."""

    width: int
    colors: bool = False
    unicode: bool = True

    def paint(self, text: str, *codes: str) -> str:
        """Text in a color, where there are any."""
        return f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if self.colors and text else text

    def cut(self, text: str, width: int) -> str:
        """Text that is safe to show and exactly so wide."""
        safe = printable(text)
        if len(safe) > width:
            safe = safe[: max(0, width - 1)] + ("…" if self.unicode else ".")
        return safe.ljust(width)


def printable(text: str) -> str:
    """Text without anything that a terminal obeys."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def draw(overview: Overview, look: TerminalStyle) -> list[str]:
    """All lines, the most important first, so that a short window cuts off the end."""
    look = TerminalStyle(max(NARROWEST, look.width), look.colors, look.unicode)
    return [
        *_head(overview, look),
        "",
        *_pool(overview, look),
        "",
        *_tiers(overview, look),
        "",
        *_engines(overview.engines, look),
        *_as_promised(overview, look),
        *_lease_sizes(overview, look),
        *_tenants(overview.tenants, look),
        *_replicas(overview.replicas, overview.generation, look),
        *_refusals(overview.refusals, look),
    ]


def _head(overview: Overview, look: TerminalStyle) -> list[str]:
    where = "one process" if overview.store is None else _store(overview, overview.store["state"])
    facts = f"{overview.pool}  {overview.engine}  policy {overview.generation}  {where}"
    clock = strftime("%H:%M:%S", localtime(overview.at_s))
    first = look.cut(f"admission  {facts}", look.width - len(clock) - 1) + f" {clock}"
    color = _RED if overview.starving or overview.lacks_engine else _GREEN
    lines = [look.paint(first, _DIM)]
    lines += [look.paint(line, _BOLD, color) for line in wrapped(overview.headline, look.width)]
    return lines + [look.paint(line, "33") for notice in overview.notices for line in _notice(notice, look)]


def _notice(notice: str, look: TerminalStyle) -> list[str]:
    """A notice of several mistakes has a line for each."""
    return [line for part in f"! {notice}".splitlines() for line in wrapped(part, look.width)]


def _store(overview: Overview, state: str) -> str:
    """Without its store, a replica shows itself alone: a notice says so, and why."""
    return "store shared" if state == StoreState.SHARED.value else f"replica {overview.replica[:8]}"


def wrapped(text: str, width: int) -> list[str]:
    """Text in lines of at most that width, broken between words where it can be."""
    lines = [""]
    for word in map(printable, text.split()):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".lstrip()
    return [line[start : start + width] for line in lines for start in range(0, max(1, len(line)), width)]


def _pool(overview: Overview, look: TerminalStyle) -> list[str]:
    return [
        line
        for name in ("tokens", "requests")
        if (whole := getattr(overview.capacity, name)) is not None
        for line in _bar(overview, look, name, whole)
    ]


def _bar(overview: Overview, look: TerminalStyle, name: str, whole: int) -> list[str]:
    """One character for each equal part of the pool: the tier's first letter, or a dot where it is free."""
    held = getattr(overview.held, name)
    said = f"{count(held)} of {count(whole)}, {count(getattr(overview.free, name))} free"
    fits = look.width >= _LABEL + _BAR_LEAST + 1 + len(said)
    width = min(_BAR_MOST, look.width - _LABEL - (1 + len(said) if fits else 0))
    scale = width / max(whole, held, 1)
    drawn, ends = "", 0.0
    for tier in overview.tiers:
        starts, ends = ends, ends + getattr(tier.held, name)
        cells = round(ends * scale) - round(starts * scale)
        drawn += look.paint(printable(tier.tier)[:1] * cells, _COLORS[tier.level % len(_COLORS)], "7")
    free = look.paint(("·" if look.unicode else ".") * (width - round(ends * scale)), _DIM)
    bar = f"{name:<{_LABEL}}{drawn}{free}"
    return [f"{bar} {said}"] if fits else [bar, " " * _LABEL + said]


def _tiers(overview: Overview, look: TerminalStyle) -> list[str]:
    columns = _Columns.fitting(overview, look)
    title = look.cut("TIER", columns.name)
    title += f"  {'TOKENS / REQ':>12}" if columns.holds else ""
    title += f"  {'QUEUED':>6}  {'OLDEST':>9}  {'STARVED':>9}"
    title += f"  {'WAITS, 5 MIN':<{_SPARK}}" if columns.spark else ""
    title += "  OVERTAKEN, 5 MIN" if columns.overtaken else ""
    lines = [look.paint(title, _DIM)]
    for tier in overview.tiers:
        lines += _tier(tier, columns, look)
    return lines


class _Columns(NamedTuple):
    """How wide the name and the last column are, 0 for one that has no room; which of the others are shown."""

    name: int
    holds: bool
    spark: bool
    overtaken: int

    @classmethod
    def fitting(cls, overview: Overview, look: TerminalStyle) -> _Columns:
        """As many as fit into the width, the most important first."""
        left = look.width - 30  # queued, oldest, starved
        name = min(left, _NAME_MOST, max(len(printable(tier.tier)) for tier in overview.tiers) + 1)
        name = max(4, name)
        holds = left >= name + 14
        left -= name + (14 if holds else 0)
        spark = holds and look.unicode and left >= _SPARK + 2
        left -= _SPARK + 2 if spark else 0
        return cls(name, holds, spark, left - 2 if left - 2 >= _OVERTAKEN_LEAST else 0)


def _tier(tier: TierView, columns: _Columns, look: TerminalStyle) -> list[str]:
    line = look.paint(look.cut(tier.tier, columns.name), _COLORS[tier.level % len(_COLORS)], _BOLD)
    line += f"  {count(tier.held.tokens or 0)} / {count(tier.held.requests or 0)}".rjust(14) if columns.holds else ""
    line += f"  {count(tier.queued.requests or 0):>6}  {_oldest(tier, look)}"
    line += f"  {spark(tier, look)}" if columns.spark else ""
    by, gave_way = overtaken(tier), preempted(tier)
    more = [f"    {part}" for part in wrapped(gave_way, look.width - 4) if part]
    if columns.overtaken:
        return [f"{line}  {look.cut(by, columns.overtaken).rstrip()}", *more]
    return [line, *(f"    {part}" for part in wrapped(f"overtaken by {by}", look.width - 4) if by != "-"), *more]


def _oldest(tier: TierView, look: TerminalStyle) -> str:
    if tier.oldest is None:
        return f"{'-':>9}  {'-':>9}"
    starves = tier.oldest.starvation_s >= STARVES_FROM_S and not tier.is_at_limit
    starved = f"{short_duration(tier.oldest.starvation_s) if starves else '-':>9}"
    return f"{short_duration(tier.oldest.wait_s):>9}  {look.paint(starved, _RED, _BOLD) if starves else starved}"


def spark(tier: TierView, look: TerminalStyle) -> str:
    """The longest wait of every quarter of a minute; in red where most of it was starvation."""
    size = len(tier.recent) // _SPARK or 1
    parts = [tier.recent[start : start + size] for start in range(0, len(tier.recent), size)][-_SPARK:]
    waits = [max((bucket.wait_max_s for bucket in part), default=0.0) for part in parts]
    starved = [max((bucket.starvation_max_s for bucket in part), default=0.0) for part in parts]
    most = max(waits, default=0.0)
    drawn = ""
    for wait_s, starved_s in zip(waits, starved, strict=True):
        step = _STEPS[0 if most == 0 or wait_s == 0 else max(1, round(8 * wait_s / most))]
        drawn += look.paint(step, _RED) if starved_s > wait_s / 2 else step
    return drawn + " " * (_SPARK - len(parts))


def overtaken(tier: TierView) -> str:
    """The tiers that overtook a tier in the last five minutes, how often, by which rule."""
    said = [
        f"{by} {count(counted.requests)}x ({', '.join(printable(rule).replace('_', ' ') for rule in counted.rules)})"
        for by, counted in tier.overtaken_by.items()
    ]
    return ", ".join(said) or "-"


def _as_promised(overview: Overview, look: TerminalStyle) -> list[str]:
    """Requests and tokens in time by tier; empty where no tier has an objective."""
    said = as_promised(overview.tiers)
    return [*wrapped(f"as promised, 5 min: {said}", look.width), ""] if said else []


def _lease_sizes(overview: Overview, look: TerminalStyle) -> list[str]:
    """What leases hold and use, and each engine whose preemptions have raised the quantile; empty without learning."""
    said = lease_sizes(overview.lease_sizes)
    if not said:
        return []
    lines = wrapped(f"leases {said}", look.width)
    for row in overview.lease_sizes:
        if row.is_raised:
            reason = f"{row.engine or overview.engine}: {row.reason}"
            lines += [look.paint(f"    {part}", "33") for part in wrapped(reason, look.width - 4)]
    return [*lines, ""]


def _engines(engines: Sequence[EngineRow], look: TerminalStyle) -> list[str]:
    """A line for each engine, and why it gets no requests; empty in a pool of one."""
    if not engines:
        return []
    heads = ("STATE", "TOKENS", "REQUESTS", "UN-PREFILLED", "CLAIMS", "IN FLIGHT", "HITS")
    rows = [_engine(one) for one in engines]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    kept = _fitting(widths, look.width)
    longest = max(len("ENGINE"), *(len(printable(one.id)) for one in engines))
    name = min(longest, look.width - sum(widths[at] + 2 for at in kept))
    lines = [look.paint("  ".join([f"{'ENGINE':<{name}}", *(f"{heads[at]:>{widths[at]}}" for at in kept)]), _DIM)]
    for one, row in zip(engines, rows, strict=True):
        line = "  ".join([look.cut(one.id, name), *(f"{row[at]:>{widths[at]}}" for at in kept)])
        lines.append(look.paint(line, _RED) if one.state in _UNUSABLE else line)
        said = "; ".join(part for part in (one.reason, one.elsewhere) if part)
        lines += [f"    {part}" for part in wrapped(said, look.width - 4) if part]
    return [*lines, ""]


_UNUSABLE = frozenset(("suspect", "down", "unreachable"))
_NARROW_NAME = 8


def _fitting(widths: Sequence[int], width: int) -> list[int]:
    """The columns that fit beside a short name."""
    kept = list(range(len(widths)))
    for column in (4, 5, 3, 2, 6, 1):
        if sum(widths[at] + 2 for at in kept) + _NARROW_NAME <= width:
            break
        kept.remove(column)
    return kept


def _engine(row: EngineRow) -> list[str]:
    return [
        printable(row.state),
        held_of(row, "tokens"),
        held_of(row, "requests"),
        count(row.unprefilled_tokens),
        count(row.claims),
        count(row.in_flight),
        hit_rate(row),
    ]


def _tenants(tenants: Sequence[TenantView], look: TerminalStyle) -> list[str]:
    if not tenants:
        return []
    width = look.width - 32
    lines = [look.paint(f"{'TENANT':<{width}}  {'TOKENS':>8}  {'RUNNING':>8}  {'WAITING':>8}", _DIM)]
    lines += [
        f"{look.cut(one.tenant, width)}  {count(one.tokens_held):>8}  {count(one.leases):>8}  {count(one.waiting):>8}"
        for one in tenants
    ]
    return [*lines, ""]


def _replicas(replicas: Sequence[ReplicaView], generation: str, look: TerminalStyle) -> list[str]:
    width = look.width - 32
    lines = [look.paint(f"{'REPLICA':<{width}}  {'SEEN':>8}  {'RUNNING':>8}  {'WAITING':>8}", _DIM)]
    for one in replicas:
        other = "" if one.generation in ("", generation) else f" policy {one.generation}"
        lacks = f" engine {one.engine.state}" if one.engine is not None and one.engine.reason else ""
        name = look.cut(f"{one.host} {one.replica[:8]}{other}{lacks}", width)
        seen = "now" if one.seen_s_ago < 0.1 else f"{one.seen_s_ago:.0f} s ago"
        lines.append(f"{name}  {seen:>8}  {count(one.leases):>8}  {count(one.waiting):>8}")
    return [*lines, ""]


def _refusals(refusals: Sequence[RefusalView], look: TerminalStyle) -> list[str]:
    if not refusals:
        return []
    groups: dict[tuple[str | None, ...], list[RefusalView]] = {}
    for one in refusals:  # a flood of the same is one line, of its newest request
        groups.setdefault((one.tier, one.tenant, one.code, one.message, one.replica), []).append(one)
    lines = [look.paint("LAST REFUSALS", _DIM)]
    for same in groups.values():
        lines += _refusal(same[0], len(same), look)
    return lines


def _refusal(newest: RefusalView, times: int, look: TerminalStyle) -> list[str]:
    clock = strftime("%H:%M:%S", localtime(newest.at_s))
    waited = f" after {short_duration(newest.waited_s)}" if newest.waited_s else ""
    who = "not known" if newest.tier is None else f"{newest.tier}, {newest.tenant}"
    often = f" ({times}x)" if times > 1 else ""
    gave_way = f", preempted {newest.preempted}x" if newest.preempted else ""
    said = look.cut(f"{clock}  {who}  {newest.code}{often}{waited}{gave_way}: {newest.message}", look.width).rstrip()
    return [said, look.paint(look.cut(f"          {newest.request_id}", look.width).rstrip(), _DIM)]


def hit_rate(row: EngineDocument | EngineRow) -> str:
    """The part of its prompts that an engine had cached lately; with `~` where that is only predicted."""
    return "-" if row.hit_rate is None else f"{'' if row.is_measured else '~'}{row.hit_rate:.0%}"


def held_of(row: EngineDocument | EngineRow, name: str) -> str:
    """What an engine holds of its capacity, in `tokens` or `requests`."""
    held = count(getattr(row.held, name) or 0)
    most = None if row.capacity is None else getattr(row.capacity, name)
    return held if most is None else f"{held} of {count(most)}"
