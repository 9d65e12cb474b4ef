"""One replica's part of the pool while the store cannot be reached (`on_store_loss: divide`).

The part is an n-th of the pool, for the n replicas that were last known. At first it is less: the other replicas still
run what they held beyond their parts when the store was lost. So until a lease without a heartbeat would have been
removed (`SILENCE_S`), a replica goes on with what it held itself and an n-th of what was free:

    part = min(C // n, own + free // n)        free = C - everything held, own = what is held by this replica

in tokens and in requests, each. Every tier's floor, headroom and limit are the same share of the part as of the pool.

Bound: with every replica's figures of the same moment, sum(part) <= sum(own) + free = C. A replica that holds more than
its part admits no request until it holds less. Its figures are as old as its last call; the other replicas may have
taken free room since then, and the parts together may exceed the pool by that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import msgspec

from sidecar.errors import AdmissionError, StoreUnavailable, TenantLimit
from sidecar.policy.model import Limits
from sidecar.policy.rules import UNLIMITED, PoolRules, largest_admissible
from sidecar.policy.size_limits import SizeLimits
from sidecar.pools.base import Ask, Grant, Lease
from sidecar.pools.clock import Clock
from sidecar.pools.limits import TenantLimits
from sidecar.pools.redis.protocol import BEAT_S
from sidecar.pools.runtime import LeaseRuntime

TAKEN_OVER_AT_ONCE = 192
"""Leases and waiting requests that a part takes over in one turn of the event loop: 4 to 20 us each."""


class LastKnown(NamedTuple):
    """The pool by the store's last answer: replicas that may be alive, what is held in all, and by this replica.

    Where that answer does not tell how much is free, UNLIMITED is held: then nothing is free.
    """

    replicas: int
    held_tokens: int
    held_requests: int
    own_tokens: int
    own_requests: int


def equal_part(rules: PoolRules, replicas: int) -> PoolRules:
    """One of `replicas` equal parts of a pool, rounded down, so that the parts never exceed it."""
    return part_of(rules, _divided(rules.tokens, replicas), _divided(rules.requests, replicas))


def first_part(rules: PoolRules, known: LastKnown) -> PoolRules:
    """The part right after the store was lost. See above."""
    return part_of(
        rules,
        _first(rules.tokens, known.replicas, known.own_tokens, known.held_tokens),
        _first(rules.requests, known.replicas, known.own_requests, known.held_requests),
    )


def _first(capacity: int, replicas: int, own: int, held: int) -> int:
    free = max(0, capacity - held)
    return UNLIMITED if capacity == UNLIMITED else min(capacity // replicas, own + free // replicas)


def _divided(figure: int, replicas: int) -> int:
    return UNLIMITED if figure == UNLIMITED else figure // replicas


def fits_into(rules: PoolRules, ask: Ask) -> bool:
    """Whether a pool with these rules could ever admit the request."""
    tokens, requests = largest_admissible(rules, ask.tier)
    return ask.tokens <= tokens and ask.requests <= requests


def part_of(rules: PoolRules, tokens: int, requests: int) -> PoolRules:
    """A pool of that size in which every tier has the same share."""
    # Floors and limits are rounded up: one of a single request must not vanish where there are two replicas.
    tiers = tuple(
        replace(
            tier,
            reserve_tokens=_share(tier.reserve_tokens, tokens, rules.tokens, rounds_up=True),
            reserve_requests=_share(tier.reserve_requests, requests, rules.requests, rounds_up=True),
            headroom_tokens=_share(tier.headroom_tokens, tokens, rules.tokens),
            headroom_requests=_share(tier.headroom_requests, requests, rules.requests),
            limit_tokens=_share(tier.limit_tokens, tokens, rules.tokens, rounds_up=True),
            limit_requests=_share(tier.limit_requests, requests, rules.requests, rounds_up=True),
        )
        for tier in rules.tiers
    )
    return replace(rules, tokens=tokens, requests=requests, tiers=tiers)


def _share(figure: int, part: int, whole: int, *, rounds_up: bool = False) -> int:
    """A figure of the whole, in the part."""
    if whole == UNLIMITED:
        return figure
    return -(-figure * part // whole) if rounds_up else figure * part // whole


class Partition(LeaseRuntime):
    """A part at work. It takes over the replica's leases, and the waiting requests that could ever fit into it.

    Of very many it takes over some in each turn of the event loop. It admits no request before it has all, and those
    that come meanwhile stand after them.
    """

    def __init__(self, part: PoolRules, leases: Iterable[Lease], clock: Clock, *, is_paused: bool = False) -> None:
        super().__init__(part, clock)
        self.part = part
        self._is_paused = is_paused
        self._parked: dict[int, Lease] = {}  # does not fit now; the part may grow, or the store come back
        self._left = deque(leases)  # not taken over yet; some may have ended
        self._taking_over: asyncio.Handle | None = None
        self.scheduler.is_paused = True
        self._take_over()

    def take_over_all(self) -> None:
        """Takes over whatever is left at once: a request comes whose fate depends on all that wait."""
        if self._left:
            self._stop_taking_over()
            while self._left:
                self._take_over_next()
            self._take_over()

    def _take_over(self) -> None:
        self._taking_over = None
        for _ in range(min(TAKEN_OVER_AT_ONCE, len(self._left))):
            self._take_over_next()
        if self._left:
            self._taking_over = asyncio.get_running_loop().call_soon(self._take_over)
        else:
            self.pause(is_paused=self._is_paused)

    def _take_over_next(self) -> None:
        lease = self._left.popleft()
        if lease.is_over or lease.ticket_id in self.waiting or lease.id in self._parked:
            return  # a lease that waits again meanwhile is there twice
        if lease.grant is not None:
            self.register(lease)
        else:
            self._add(lease)

    def _stop_taking_over(self) -> None:
        if self._taking_over is not None:
            self._taking_over.cancel()
            self._taking_over = None

    def pause(self, *, is_paused: bool) -> None:
        """See `LeaseRuntime.pause`."""
        self._is_paused = is_paused
        super().pause(is_paused=is_paused or bool(self._left))

    def stop(self) -> None:
        """See `LeaseRuntime.stop`."""
        self._stop_taking_over()
        super().stop()

    def register(self, lease: Lease) -> None:
        """A lease that the store granted, or an earlier part."""
        ask = lease.ask
        self.scheduler.register(lease.ticket_id, tier=ask.tier, tokens=ask.tokens, requests=ask.requests)

    def fits(self, ask: Ask) -> bool:
        """Whether the part could admit a request now, if nothing else were held."""
        return fits_into(self.part, ask)

    def submit(self, lease: Lease) -> None:
        """See `LeaseRuntime.submit`. A request that does not fit now waits for the part to grow."""
        if self._left:
            self._left.append(lease)
        else:
            self._add(lease)

    def _add(self, lease: Lease) -> None:
        if self.fits(lease.ask):
            super().submit(lease)
        else:
            self._parked[lease.id] = lease

    def end(self, lease: Lease, now_us: int) -> Grant | None:
        """See `LeaseRuntime.end`."""
        self._parked.pop(lease.id, None)
        return super().end(lease, now_us)

    def requeue(self, lease: Lease, now_us: int) -> bool:
        """See `LeaseRuntime.requeue`. A lease that the store chose, or an earlier part, is submitted anew."""
        if not super().requeue(lease, now_us):
            self.scheduler.settle(lease.ticket_id, now_us)
            self.submit(lease)
        self.dispatch(now_us)
        return True

    def queued(self, tier: int) -> int:
        """See `LeaseRuntime.queued`."""
        outside = {lease.id: lease for lease in chain(self._parked.values(), self._left)}
        return super().queued(tier) + sum(
            lease.tier == tier and lease.grant is None and not lease.is_over and lease.ticket_id not in self.waiting
            for lease in outside.values()
        )


class PartitionLimits(TenantLimits):
    """One replica's part of every tenant's limits: an n-th of them, for n `replicas`, while the store is lost.

    Its buckets begin full. Requests that the replica runs or has waiting count among its tenants' concurrent ones.
    """

    def __init__(self, sizes: SizeLimits, replicas: int) -> None:
        super().__init__(sizes)
        self._replicas = replicas

    def admit(self, lease: Lease, now_us: int) -> AdmissionError | None:
        """Charges a new request, or moves it to its lower tier. The refusal, where it is over its part."""
        limits = lease.ask.limits
        if limits is None:
            return None
        part = equal_limits(limits, self._replicas)
        asked = msgspec.structs.replace(lease.ask, limits=part)
        try:
            entered = self.within(asked, now_us)
        except TenantLimit as error:
            if not error.never_fits or not _fits(lease.ask, limits):
                return error
            return StoreUnavailable(
                f"the store of this pool cannot be reached, and this request ({lease.ask.charged_tokens} tokens) does "
                f"not fit into this replica's part of the limits of tenant {lease.ask.tenant}; try again, or ask for "
                "less output",
                retry_after_s=BEAT_S,
            )
        if entered is not asked:
            lease.ask = entered
        self.charge(lease, part, now_us)
        return None


def equal_limits(limits: Limits, replicas: int) -> Limits:
    """One of `replicas` equal parts, at least one of each."""
    requests, tokens, concurrent = (
        None if figure is None else max(1, figure // replicas)
        for figure in (limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent_requests)
    )
    return replace(limits, requests_per_minute=requests, tokens_per_minute=tokens, concurrent_requests=concurrent)


def _fits(ask: Ask, limits: Limits) -> bool:
    per_minute = limits.tokens_per_minute
    return per_minute is None or ask.charged_tokens * 60_000_000 <= per_minute * limits.burst_us
