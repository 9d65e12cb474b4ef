"""Prometheus' text format, as far as gauges and counters need it: names, labels and values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")


class Sample(NamedTuple):
    """One line of a metric."""

    labels: Mapping[str, str]
    value: float


class Metrics:
    """The samples of a page by metric. Lines that are none, and values that are no finite number, are left out."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[Sample]] = {}
        for line in text.splitlines():
            found = None if line.startswith("#") else _SAMPLE.fullmatch(line.strip())
            if found and math.isfinite(value := _number(found[3])):
                self._samples.setdefault(found[1], []).append(Sample(_labels(found[2] or ""), value))

    def __contains__(self, name: object) -> bool:
        return name in self._samples

    def names(self) -> Sequence[str]:
        """All metrics of the page."""
        return tuple(self._samples)

    def samples(self, name: str) -> Sequence[Sample]:
        """A metric's samples, none where the page does not have it."""
        return self._samples.get(name, ())

    def sum(self, name: str) -> float | None:
        """What a metric's samples add up to, None where there are none."""
        samples = self.samples(name)
        return sum(sample.value for sample in samples) if samples else None

    def count(self, name: str) -> int | None:
        """The same as a whole number that is not negative."""
        value = self.sum(name)
        return None if value is None or value < 0 else round(value)


def _labels(text: str) -> Mapping[str, str]:
    return {name: _ESCAPED.sub(_unescaped, value) for name, value in _LABEL.findall(text)}


def _unescaped(escape: re.Match[str]) -> str:
    return "\n" if escape[1] == "n" else escape[1]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
