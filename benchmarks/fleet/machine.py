"""Machine of a run: the processor time of each part, and what was left. Linux only, from /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Moment:
    """Processor seconds so far: of each part by its name, idle, and in all."""

    at_s: float
    parts: Mapping[str, float]
    idle_s: float
    all_s: float

    @staticmethod
    def now(parts: Mapping[str, Iterable[int]]) -> Moment:
        """Reads /proc for the processes of each part. One that is gone counts nothing."""
        fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        used = {name: sum(map(_seconds, processes)) for name, processes in parts.items()}
        idle = fields[3] + fields[4]
        return Moment(time.monotonic(), used, idle / _TICKS_PER_S, sum(fields) / _TICKS_PER_S)


def _seconds(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


@dataclass(frozen=True, slots=True)
class Use:
    """Between two moments: cores used by each part, and the share of the machine that was idle."""

    cores: Mapping[str, float]
    idle: float

    @staticmethod
    def between(begun: Moment, ended: Moment) -> Use:
        """The difference."""
        seconds = max(ended.at_s - begun.at_s, 1e-9)
        cores = {name: (used - begun.parts[name]) / seconds for name, used in ended.parts.items()}
        return Use(cores, (ended.idle_s - begun.idle_s) / max(ended.all_s - begun.all_s, 1e-9))
