"""`sidecar` with the rule for `Retry-After` that it had before promises: `benchmarks.retry_after` compares with it."""

from __future__ import annotations

import sys

from sidecar.cli import main
from sidecar.errors import QueueFull
from sidecar.pools.base import Ask
from sidecar.pools.queue_places import QueuePlaces


def guessed(self: QueuePlaces, ask: Ask, queued: int, now_us: int) -> QueueFull:
    """No place is ever held: a free one is open to all. `retry-after` is when the queue will have been worked off."""
    return self._sizes.queue_full(ask.tier, self.retry_after_s(ask.tier, queued, now_us))


if __name__ == "__main__":
    QueuePlaces.queue_full = guessed  # type: ignore[method-assign]  # that is what is compared
    sys.exit(main())
