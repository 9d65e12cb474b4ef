"""Places in the tiers' queues: how fast they come free, which request may take one, and an honest `Retry-After`.

A full queue refuses a request, and promises it a place for the time that its `Retry-After` states. Without promises, a
place that comes free goes to whichever request comes next, and waiting as advised gains a client nothing.

Law. The refused requests stand in a virtual queue, first come, first served:

    at(n) = max(at(n - 1) + gap, now + max(LEAST, (open + 1) * gap))        gap = 1 / (PROMISED * drain rate)

is when the n-th may come, and `open` is the number of open promises then. A place of the queue is held for it from LEAD
before that time until GRACE after it; another request may take a free place only while more are free than are held. The
tenth of the drain that is not promised keeps the line stable: it makes up for a rate that was measured too high, and
otherwise goes to other requests. No promise is made for later than MOST.

Bounds. At most half of a queue's places are held at a time. A request that is refused because of a promise therefore
has at least as many waiting before it as are held, and the engine never runs idle for a promise. An unused promise ends
GRACE after its time. The open promises are at most those of MOST + GRACE seconds: `PROMISED * drain rate * (MOST +
GRACE)` while the rate is steady. A call costs at most some 10 ns for each.

Tenants. A place that is held for one tenant does not keep out another that is within its share of the places, counting
the places held for it: a flood of refused requests must not keep the others out.

A promise belongs to one request. That is recognized by its tenant and its body, and by the client's own count of
attempts where the client sends one. A promise is no guarantee: where the drain slows down there may be no place at its
time. Then the promise stays, and the client is asked to come again a moment later.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right, insort
from dataclasses import dataclass
from operator import attrgetter

from sidecar.errors import QueueFull
from sidecar.policy.size_limits import SizeLimits
from sidecar.pools.base import Ask

WINDOW_S = 10.0
"""The memory of the rate: admissions count by exp(-age / window). Ten seconds smooth over batches of finishing requests
and still follow a change of load within the usual `Retry-After`."""
TOGETHER_US = 10_000
"""A thousandth of the window: the rate is at most so much too low."""
LEAST_S, MOST_S = 1.0, 60.0
"""A retry sooner than a second only adds load; a figure beyond a minute would be a guess."""
JITTER = 0.2
"""Clients that are refused together get times up to a fifth apart either way: they do not come back together."""

PROMISED = 0.9
"""The part of the drain that is promised."""
LEAD_S = 2.0
"""How long before its time a place is held: places come free in bursts, as an engine's batch ends."""
GRACE_S = 3.0
"""How late a client may come: a second for clients that count in whole ones, the rest for the network."""

_TIME = attrgetter("at_us")


class DrainRate:
    """How fast a tier's queue drains: exponentially weighted admissions per second. O(1) per admission.

    `total` counts all admissions.
    """

    def __init__(self) -> None:
        self.total = 0
        self._weight = 0.0
        self._updated_us = -TOGETHER_US
        self._began_us: int | None = None

    def admitted(self, now_us: int) -> None:
        """Counts an admission. One that follows another within TOGETHER_US counts as of that moment."""
        self.total += 1
        if now_us - self._updated_us < TOGETHER_US:
            self._weight += 1
            return
        if self._began_us is None:
            self._began_us = now_us
        self._weight = 1 + self._weight * math.exp((self._updated_us - now_us) / 1e6 / WINDOW_S)
        self._updated_us = now_us

    def per_second(self, now_us: int) -> float:
        """Requests admitted per second, lately. In the first seconds, over the part of the window that has passed."""
        if self._began_us is None:
            return 0.0
        passed_s = max(1.0, (now_us - self._began_us) / 1e6)
        return self._decayed(now_us) / (WINDOW_S * (1 - math.exp(-passed_s / WINDOW_S)))

    def retry_after_s(self, ahead: int, now_us: int) -> float:
        """Seconds until `ahead` requests will have been admitted, jittered and capped."""
        rate = self.per_second(now_us)
        expected = (ahead + 1) / rate if rate > 0 else MOST_S
        # Capped before it is jittered: clients that get the cap must not come back together either.
        within = min(MOST_S / (1 + JITTER), max(LEAST_S / (1 - JITTER), expected))
        return within * random.uniform(1 - JITTER, 1 + JITTER)

    def _decayed(self, now_us: int) -> float:
        return self._weight * math.exp((self._updated_us - now_us) / 1e6 / WINDOW_S)


@dataclass(eq=False)
class _Promise:
    request: int
    tenant: str
    at_us: int


class HeldPlaces:
    """The promises of one tier's queue, `by_request`. `now_us` never goes back from call to call."""

    def __init__(self) -> None:
        self._promises: list[_Promise] = []  # in the order of their times
        self.by_request: dict[int, list[_Promise]] = {}
        self._last_us = 0

    def held_for(self, tenant: str, now_us: int) -> int:
        """How many places are held for a tenant."""
        return sum(promise.tenant == tenant for promise in self._held(now_us))

    def are_in_the_way(self, ask: Ask, free: int, places: int, now_us: int, *, replicas: int = 1) -> bool:
        """True if the places that are `free`, of a queue's `places`, are held for other requests than this one.

        Each of many replicas knows its own promises alone. It assumes that the others have as many, and that a request
        that comes again without a promise here has one there.
        """
        held = self._held(now_us)
        if not held or free > min(len(held) * replicas, places // 2):
            return False
        promise = self._promise_to(ask)
        if promise is None:
            return replicas == 1 or not ask.attempt
        return promise not in held

    def kept(self, ask: Ask) -> None:
        """A request has found its place: its promise is over."""
        if (promise := self._promise_to(ask)) is not None:
            self._end(promise)

    def promise_s(self, ask: Ask, drain_per_s: float, now_us: int) -> float:
        """The seconds after which a request that found no place may come again: it is promised one for then.

        A request with a promise gets the same time again, or a moment from now where that time has come. Such moments
        are jittered, and so is the longest time, which a request gets for which no place can be promised.
        """
        held, promise = self._held(now_us), self._promise_to(ask)
        if promise is None:
            return self._new_s(ask, drain_per_s, now_us)
        if promise in held:
            postponed_us = now_us + round(LEAST_S * random.uniform(1, 1 + JITTER) * 1e6)
            promise.at_us = max(promise.at_us, postponed_us)
            self._promises.sort(key=_TIME)
        return max(LEAST_S, (promise.at_us - now_us) / 1e6)

    def _promise_to(self, ask: Ask) -> _Promise | None:
        """The first promise to this request. A first attempt has none, though a copy of the request may."""
        if ask.attempt == 0:
            return None
        return next(iter(self.by_request.get(hash(ask.request), ())), None)

    def _new_s(self, ask: Ask, drain_per_s: float, now_us: int) -> float:
        # With a slower drain there is no place within MOST.
        gap_us = 1e6 / (PROMISED * max(drain_per_s, 1 / (2 * MOST_S)))
        soonest_us = now_us + max(LEAST_S * 1e6, (len(self._promises) + 1) * gap_us)
        at_us = round(max(self._last_us + gap_us, soonest_us))
        if at_us > now_us + MOST_S * 1e6:
            return MOST_S * random.uniform(1 - JITTER, 1)
        self._last_us = at_us
        promise = _Promise(hash(ask.request), ask.tenant, at_us)
        self.by_request.setdefault(promise.request, []).append(promise)
        insort(self._promises, promise, key=_TIME)
        return (at_us - now_us) / 1e6

    def _end(self, promise: _Promise) -> None:
        self._promises.remove(promise)
        copies = self.by_request[promise.request]
        copies.remove(promise)
        if not copies:
            del self.by_request[promise.request]

    def _held(self, now_us: int) -> list[_Promise]:
        """The promises that a place is held for now. Those whose clients did not come end."""
        while self._promises and self._promises[0].at_us < now_us - GRACE_S * 1e6:
            self._end(self._promises[0])
        return self._promises[: bisect_right(self._promises, now_us + LEAD_S * 1e6, key=_TIME)]


class QueuePlaces:
    """The places of one pool, as one process knows them. `queued` is how many requests wait in a tier's queue.

    Where many `replicas` share a pool, each promises its part of the places that come free, and keeps its own promises.
    Another replica lets a client that comes again in by its count of attempts alone, which only some clients send. With
    two replicas and 150% load, 99% of the requests that came back to the same replica got in; of those that came back
    to any replica, all that sent the count, and 60% of the others.
    """

    def __init__(self, sizes: SizeLimits, tiers: int) -> None:
        self.replicas = 1
        self._sizes = sizes
        self.drain_rates = tuple(DrainRate() for _ in range(tiers))
        self._promises = tuple(HeldPlaces() for _ in range(tiers))

    def retry_after_s(self, tier: int, queued: int, now_us: int) -> float:
        """Seconds after which one more request of a tier may expect to be admitted."""
        return self.drain_rates[tier].retry_after_s(queued, now_us)

    def promised(self, ask: Ask, queued: int, now_us: int) -> int | None:
        """The number of places promised to the request's tenant, where all free places are promised to other requests.

        None where a place is free. Each of many replicas assumes that the others promised as many.
        """
        most, promises = self._sizes.places(ask.tier), self._promises[ask.tier]
        if not most or not promises.are_in_the_way(ask, most - queued, most, now_us, replicas=self.replicas):
            return None
        return promises.held_for(ask.tenant, now_us) * self.replicas

    def queue_full(self, ask: Ask, queued: int, now_us: int) -> QueueFull:
        """The refusal of a request that found no place. It is promised one, where its tier has any."""
        if not self._sizes.places(ask.tier):
            return self._sizes.queue_full(ask.tier, self.retry_after_s(ask.tier, queued, now_us))
        drain_per_s = self.drain_rates[ask.tier].per_second(now_us) / self.replicas
        return self._sizes.queue_full(ask.tier, self._promises[ask.tier].promise_s(ask, drain_per_s, now_us))

    def keep_promise(self, ask: Ask) -> None:
        """A request is in its queue, or was admitted: its promise is kept."""
        promises = self._promises[ask.tier]
        if promises.by_request:
            promises.kept(ask)
