"""Open-loop client for OpenAI-compatible servers, and the statistics of its results.

Shared by `sidecar demo`, `sidecar replay`, `sidecar doctor` and the benchmarks.
"""

from __future__ import annotations

from sidecar.tools.loadgen.client import Planned, Progress, Seen, most_at_once, play
from sidecar.tools.loadgen.statistics import Correlation, Distribution, quantile, spearman, starvation_s

__all__ = [
    "Correlation",
    "Distribution",
    "Planned",
    "Progress",
    "Seen",
    "most_at_once",
    "play",
    "quantile",
    "spearman",
    "starvation_s",
]
