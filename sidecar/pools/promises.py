"""Places in a full queue, promised to those whom it refused: what makes a `Retry-After` worth obeying.

While an overload lasts, a place that comes free goes to whoever happens to come next, and a client that was told when
to come back meets the same odds as everybody else. So the refused stand in a virtual queue, first come, first served:

    at(n) = max(at(n - 1) + gap, now + max(LEAST, (open + 1) * gap))        gap = 1 / (PROMISED * drain rate)

is when the n-th may come, `open` being the promises open then. A place of the queue is held for him from LEAD before
that time until GRACE behind it; somebody else may take a free place only where more are free than are held. The tenth
of the drain that is not promised keeps the line stable: it makes up for a rate that was measured too high, and goes to
others where it does not have to. No promise is made for later than MOST.

Bounds. At most half of a queue's places are held at a time: whoever is refused for a promise's sake has at least as
many waiting before him as are held, so the engine never runs dry for it. A promise that nobody comes for ends GRACE
behind its time, a postponed one up to LEAD + GRACE later. The promises open are those of MOST + GRACE seconds at the
most, so `PROMISED * drain rate * (MOST + GRACE)` while the rate is steady. Every call takes O(1), amortized.

Tenants. A place that is held for one tenant is no obstacle to another that is within its share of the places, with what
is held for it itself: a flood that is refused again and again must not keep the others out.

A promise is kept to the request that it was made to, which is told from others by its tenant and its body, and from
its twins by the client's own count of attempts where it sends one. It is no guarantee: where the drain slows down
there may be no place at its time. Then it stays, and the client is told to come again a moment later.
"""

from __future__ import annotations

import random
from collections import Counter, deque

from sidecar.pools.drain_rate import JITTER, LEAST_S, MOST_S
from sidecar.pools.pool import Ask

PROMISED = 0.9
"""The part of the drain that is promised."""
LEAD_S = 2.0
"""How long before its time a place is held: places come free in bursts, as an engine's batch ends."""
GRACE_S = 3.0
"""How much later than told a client may come: a second for those that count whole ones, the rest for its way."""


class _Promise:
    __slots__ = ("at_us", "is_due", "is_over", "request", "tenant")

    def __init__(self, ask: Ask, at_us: int) -> None:
        self.request = ask.request
        self.tenant = ask.tenant
        self.at_us = at_us
        self.is_due = False
        self.is_over = False


class Promises:
    """The promises of one tier's queue. `now_us` never goes back from call to call."""

    def __init__(self) -> None:
        self._ahead: deque[_Promise] = deque()  # in the order of their times; what is over is dropped in passing
        self._due: deque[tuple[int, _Promise]] = deque()  # by the time that each had when it was put here
        self._of: dict[int, deque[_Promise]] = {}
        self._open = 0
        self._held = 0
        self._held_for: Counter[str] = Counter()  # by tenant
        self._last_us = 0

    def held_for(self, tenant: str) -> int:
        """How many places are held for a tenant, as of the last call with a time."""
        return self._held_for.get(tenant, 0)

    def are_in_the_way(self, ask: Ask, free: int, places: int, now_us: int, *, replicas: int = 1) -> bool:
        """Whether what is `free` of a queue's `places` is held for others than whoever asks.

        Of many replicas each knows its own promises: it takes it that the others have as many, and that who comes again
        and was promised nothing here was promised it there.
        """
        self._pass_time(now_us)
        if not self._held or free > min(self._held * replicas, places // 2):
            return False
        promise = self._promise_to(ask)
        if promise is None:
            return replicas == 1 or not ask.attempt
        return not promise.is_due

    def kept(self, ask: Ask) -> None:
        """A request has found its place: whatever it was promised is over."""
        promise = self._promise_to(ask)
        if promise is not None:
            self._end(promise)

    def promise_s(self, ask: Ask, drain_per_s: float, now_us: int) -> float:
        """The seconds after which a request that found no place may come again: it is promised one for then.

        One that was promised a place before is told the same time again; where that has come, that it may come again in
        a moment. The latter are jittered, and so is the most, which is what those are told whom no place is promised.
        """
        self._pass_time(now_us)
        promise = self._promise_to(ask)
        if promise is None:
            return self._new_s(ask, drain_per_s, now_us)
        if promise.is_due:
            self._postpone(promise, now_us)
        return max(LEAST_S, (promise.at_us - now_us) / 1e6)

    def _promise_to(self, ask: Ask) -> _Promise | None:
        """The first of those made to this request: a first attempt was promised nothing, whatever its twins were."""
        if not self._of or ask.attempt == 0:
            return None
        promises = self._of.get(ask.request)
        return promises[0] if promises else None

    def _new_s(self, ask: Ask, drain_per_s: float, now_us: int) -> float:
        gap_us = 1e6 / (PROMISED * max(drain_per_s, 1 / (2 * MOST_S)))  # slower than that it has no place within MOST
        soonest_us = now_us + max(LEAST_S * 1e6, (self._open + 1) * gap_us)
        at_us = round(max(self._last_us + gap_us, soonest_us))
        if at_us > now_us + MOST_S * 1e6:
            return MOST_S * random.uniform(1 - JITTER, 1)
        self._last_us = at_us
        promise = _Promise(ask, at_us)
        self._of.setdefault(ask.request, deque()).append(promise)
        self._open += 1
        self._ahead.append(promise)
        return (at_us - now_us) / 1e6

    def _postpone(self, promise: _Promise, now_us: int) -> None:
        at_us = now_us + round(LEAST_S * random.uniform(1, 1 + JITTER) * 1e6)
        promise.at_us = max(promise.at_us, at_us)

    def _end(self, promise: _Promise) -> None:
        promise.is_over = True
        twins = self._of[promise.request]
        twins.remove(promise)
        if not twins:
            del self._of[promise.request]
        self._open -= 1
        if promise.is_due:
            self._hold(promise, -1)

    def _hold(self, promise: _Promise, count: int) -> None:
        self._held += count
        self._held_for[promise.tenant] += count
        if not self._held_for[promise.tenant]:
            del self._held_for[promise.tenant]

    def _pass_time(self, now_us: int) -> None:
        """Holds a place for whoever may come soon, and gives up those whose clients did not come."""
        ahead, due = self._ahead, self._due
        while ahead and (ahead[0].is_over or ahead[0].at_us <= now_us + LEAD_S * 1e6):
            promise = ahead.popleft()
            if not promise.is_over:
                promise.is_due = True
                self._hold(promise, 1)
                due.append((promise.at_us, promise))
        lapsed_us = now_us - GRACE_S * 1e6
        while due and (due[0][1].is_over or due[0][0] < lapsed_us):
            _, promise = due.popleft()
            if promise.is_over:
                continue
            if promise.at_us < lapsed_us:
                self._end(promise)
            else:  # postponed meanwhile
                due.append((promise.at_us, promise))
