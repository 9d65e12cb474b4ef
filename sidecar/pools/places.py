"""The places in the tiers' queues: how fast they come free, whether one may be taken, when to ask for one again."""

from __future__ import annotations

from sidecar.errors import QueueFull
from sidecar.pools.drain_rate import DrainRate
from sidecar.pools.pool import Ask
from sidecar.pools.promises import Promises
from sidecar.pools.sizes import Sizes


class Places:
    """Of one pool, as one process knows it. `queued` is how many wait in a tier's queue.

    Where many `replicas` share a pool, each promises its part of what comes free, and keeps what it promised itself. A
    client that comes again to another one is let in there for its count of attempts alone, which only some send. With
    two replicas and 150% load 99% of those got in who came back to the same one; of those who came back to any, all who
    sent the count, and 60% of the others.
    """

    def __init__(self, sizes: Sizes, tiers: int) -> None:
        self.replicas = 1
        self._sizes = sizes
        self._drain_rates = tuple(DrainRate() for _ in range(tiers))
        self._promises = tuple(Promises() for _ in range(tiers))

    def admitted(self, tier: int, now_us: int, count: int = 1) -> None:
        """Counts requests that left a queue for the engine, or needed none."""
        self._drain_rates[tier].admitted(now_us, count)

    def retry_after_s(self, tier: int, queued: int, now_us: int) -> float:
        """See `Pool.retry_after_s`."""
        return self._drain_rates[tier].retry_after_s(queued, now_us)

    def promised(self, ask: Ask, queued: int, now_us: int) -> int | None:
        """Where the places that are free are promised to other requests: how many of them to the same tenant.

        None where one is free. Of many replicas each takes it that the others promised as many.
        """
        most, promises = self._sizes.places(ask.tier), self._promises[ask.tier]
        if not most or not promises.are_in_the_way(ask, most - queued, most, now_us, replicas=self.replicas):
            return None
        return promises.held_for(ask.tenant) * self.replicas

    def queue_full(self, ask: Ask, queued: int, now_us: int) -> QueueFull:
        """The refusal of a request that found no place. It is promised one, where its tier has any."""
        if not self._sizes.places(ask.tier):
            return self._sizes.queue_full(ask.tier, self.retry_after_s(ask.tier, queued, now_us))
        drain_per_s = self._drain_rates[ask.tier].per_second(now_us) / self.replicas
        return self._sizes.queue_full(ask.tier, self._promises[ask.tier].promise_s(ask, drain_per_s, now_us))

    def taken(self, ask: Ask) -> None:
        """A request is in its queue, or beyond: whatever it was promised is kept."""
        self._promises[ask.tier].kept(ask)
