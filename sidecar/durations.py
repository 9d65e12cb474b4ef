"""Durations as text, in every form that the sidecar writes.

The forms differ on purpose: a table needs few characters, a story needs three figures, and a policy's value must be
readable by `policy.units`. Only the rate-limit headers write their own form, beside them: bytes, as Go writes them.
"""

from __future__ import annotations


def short_duration(seconds: float) -> str:
    """For pages and tables: `420 ms`, `9.4 s`, `42 s`, `3 m 05 s`, `2 h 10 m`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} m"


def exact_duration(seconds: float) -> str:
    """For the story of one request: milliseconds below 0.1 s, else seconds, with three figures."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s" if seconds < 99.95 else f"{seconds:.0f} s"


def policy_duration(seconds: float) -> str:
    """As a policy writes it: `2h`, `5m`, `90s`, `250ms`."""
    for size_s, unit in ((3600, "h"), (60, "m")):
        if seconds >= size_s and seconds % size_s == 0:
            return f"{seconds / size_s:g}{unit}"
    return f"{seconds:g}s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:g}ms"
