"""The bypass of the OpenTelemetry SDK: durations that we add up, and spans that we make, where the result is the same.

It saves about half of the CPU time of telemetry (`benchmarks/results/telemetry_bypass.txt`). Some of what it reads has
no public name in the SDK, so all of it is in this folder, tests compare it with the SDK's own results, and an SDK that
does not look as expected is used in the ordinary way. `SIDECAR_SDK_BYPASS=off` turns the bypass off.
"""

from __future__ import annotations

import os

VARIABLE = "SIDECAR_SDK_BYPASS"


def is_enabled() -> bool:
    """Whether the bypass may be used in this process."""
    return os.environ.get(VARIABLE, "").strip().lower() != "off"
