"""Figures of three runs, as short as they can be."""

from __future__ import annotations

from sidecar.tools.demo.figures import RunMeasurement, TierMeasurement


def tier(ttft_s: float, share: float) -> TierMeasurement:
    values = {"p50": ttft_s, "p95": ttft_s * 2, "p99": ttft_s * 3}
    return TierMeasurement(10, 10, share, values, values, {"p50": 0.0, "p95": 0.0, "p99": 0.0})


def run_figures(name: str, high_s: float = 1.0, batch_share: float = 0.2, failed: int = 0) -> RunMeasurement:
    return RunMeasurement(name, 0.934, failed, {"high": tier(high_s, 1 - batch_share), "batch": tier(4.0, batch_share)})


def three(batch_share: float = 0.06, failed: int = 0) -> list[RunMeasurement]:
    """As the demo gives them: control, engine, admission."""
    return [
        run_figures("control", 2.3),
        run_figures("engine", 0.1, 0.0, failed),
        run_figures("admission", 0.2, batch_share),
    ]
