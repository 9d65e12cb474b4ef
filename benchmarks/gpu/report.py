"""What was measured, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.plan import TIERS
from benchmarks.gpu.playing import ADMISSION, PRIORITY, WAYS, Played
from sidecar.tools.loadgen import quantile


def figures(played: Sequence[Played]) -> dict[str, dict[str, Any]]:
    """Medians over the rounds, for each way: times in seconds, shares from 0 to 1."""
    return {way: _of([one for one in played if one.way == way]) for way in WAYS}


def _of(rounds: Sequence[Played]) -> dict[str, Any]:
    middle = statistics.median
    found: dict[str, Any] = {
        "tokens_per_s": middle(one.tokens_per_s for one in rounds),
        "whole_s": middle(one.whole_s for one in rounds),
        "idle_share": middle(one.device.idle_share for one in rounds),
        "most_in_engine_queue": max(one.most_in_engine_queue for one in rounds),
    }
    for tier in TIERS:
        of_tier = [
            sorted(seen.first_s for seen in one.seen if seen.tier == tier and seen.first_s is not None)
            for one in rounds
        ]
        if all(of_tier):
            found[f"{tier}_ttft_p50_s"] = middle(quantile(times, 0.5) for times in of_tier)
            found[f"{tier}_ttft_p99_s"] = middle(quantile(times, 0.99) for times in of_tier)
    return found


def costs(found: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """What admission costs, beside the engine's own priority: idle time in points, and tokens a second in percent."""
    with_, without = found[ADMISSION], found[PRIORITY]
    return {
        "idle_points": 100 * (with_["idle_share"] - without["idle_share"]),
        "tokens_per_s_percent": 100 * (with_["tokens_per_s"] / without["tokens_per_s"] - 1),
    }


def text(about: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """The table."""
    lines = [about, "", f"{'':28}" + "".join(f"{way:>24}" for way in WAYS)]
    rows = [
        (f"{tier} TTFT {which}", f"{tier}_ttft_{which}_s", "{:.2f} s") for tier in TIERS for which in ("p50", "p99")
    ]
    rows += [
        ("output, tokens/s", "tokens_per_s", "{:.0f}"),
        ("all answered after", "whole_s", "{:.1f} s"),
        ("device idle", "idle_share", "{:.1%}"),
        ("most in the engine's queue", "most_in_engine_queue", "{:.0f}"),
    ]
    for title, name, form in rows:
        values = [form.format(found[way][name]) if name in found[way] else "-" for way in WAYS]
        lines.append(f"{title:28}" + "".join(f"{value:>24}" for value in values))
    cost = costs(found)
    lines += [
        "",
        f"admission beside the engine's priority: {cost['idle_points']:+.1f} points of the device's time idle, "
        f"{cost['tokens_per_s_percent']:+.1f}% tokens a second",
    ]
    return "\n".join(lines) + "\n"
