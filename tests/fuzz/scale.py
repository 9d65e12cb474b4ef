"""How many cases: a seeded share in the default suite, all of them with `sh .ci/test --fuzz`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, settings

VARIABLE = "SIDECAR_FUZZ"
IS_FULL = os.environ.get(VARIABLE, "")
"""Set by `sh .ci/test --fuzz`; its value seeds what is generated, so that two runs try different things."""
tried: Counter[str] = Counter()
"""How many cases there were of each kind, those of a failure's shrinking included."""


def cases(few: int, many: int) -> Callable[[Any], Any]:
    """Runs a property `few` times, always the same ones, or `many` times, from the seed."""
    return settings(
        max_examples=many if IS_FULL else few,
        derandomize=not IS_FULL,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
