"""How fast a tier's queue drains: what an honest `Retry-After` is made of."""

from __future__ import annotations

import math
import random

WINDOW_S = 10.0
"""The memory of the rate: admissions count by exp(-age / window). Ten seconds smooth over batches of finishing requests
and still follow a change of load within the waits that clients are told."""
LEAST_S, MOST_S = 1.0, 60.0
"""A retry sooner than a second only adds load; a figure beyond a minute would be a guess."""
JITTER = 0.2
"""Clients refused together are told times up to a fifth apart either way: they do not come back together."""


class DrainRate:
    """Exponentially weighted requests admitted per second. O(1) per admission."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._updated_us = 0
        self._began_us: int | None = None

    def admitted(self, now_us: int, count: int = 1) -> None:
        """Counts admissions."""
        if self._began_us is None:
            self._began_us = now_us
        self._weight = self._decayed(now_us) + count
        self._updated_us = now_us

    def per_second(self, now_us: int) -> float:
        """Requests admitted per second, lately. In the first seconds, over what of the window has passed."""
        if self._began_us is None:
            return 0.0
        passed_s = max(1.0, (now_us - self._began_us) / 1e6)
        return self._decayed(now_us) / (WINDOW_S * (1 - math.exp(-passed_s / WINDOW_S)))

    def retry_after_s(self, ahead: int, now_us: int) -> float:
        """Seconds until `ahead` requests will have been admitted, jittered and capped."""
        rate = self.per_second(now_us)
        expected = (ahead + 1) / rate if rate > 0 else MOST_S
        # Capped before it is jittered: clients that are told the cap must not come back together either.
        within = min(MOST_S / (1 + JITTER), max(LEAST_S / (1 - JITTER), expected))
        return within * random.uniform(1 - JITTER, 1 + JITTER)

    def _decayed(self, now_us: int) -> float:
        return self._weight * math.exp((self._updated_us - now_us) / 1e6 / WINDOW_S)
