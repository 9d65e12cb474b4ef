"""Lengths of time and numbers of things, as sentences of a request's story have them."""

from __future__ import annotations


def seconds(length_s: float) -> str:
    """A length of time with as many figures as matter."""
    if length_s < 0.0995:
        return f"{length_s * 1000:.3g} ms"
    return f"{length_s:.2f} s" if length_s < 9.995 else f"{length_s:.1f} s" if length_s < 99.95 else f"{length_s:.0f} s"


def counted(number: int, noun: str) -> str:
    """A number with its noun in the singular or the plural."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
