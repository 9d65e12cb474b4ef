"""One replica's part of the pool while the store cannot be reached (`on_store_loss: divide`).

The part is the replica's n-th of the pool, for the n replicas that were last known. At first it is less: what others
held beyond their part when the store was lost they still run, and it ends in its own time. So until a lease without a
heartbeat would have been swept (`SILENCE_S`), a replica goes on with what it held itself and its n-th of what was free:

    part = min(C // n, own + free // n)        free = C - everything held, own = what is held by this replica

in tokens and in requests, each. Every tier's floor, headroom and limit are the same share of the part as of the pool.

Bound: with every replica's figures of the same moment, sum(part) <= sum(own) + free = C. Whoever holds more than its
part admits nobody until it is below. A replica's figures are as old as its last call; by what others took of the free
room since then the parts together may exceed the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from sidecar.policy.rules import UNLIMITED, PoolRules, largest_admissible
from sidecar.pools.dispatcher import Clock, Dispatcher
from sidecar.pools.figures import grant_of
from sidecar.pools.pool import Ask, Grant
from sidecar.pools.redis.lease import RedisLease
from sidecar.pools.redis.protocol import Reply
from sidecar.scheduling import Admission, Scheduler


class LastKnown(NamedTuple):
    """The pool as the store last told it: replicas that may be alive, what is held in all, and by this replica."""

    replicas: int
    held_tokens: int
    held_requests: int
    own_tokens: int
    own_requests: int


def last_known(replicas: int, last: Reply | None, own_tokens: int, own_requests: int) -> LastKnown:
    """What an answer of the store says, and what this replica holds.

    None where there is no answer with what all replicas hold, since which nothing was admitted: then nothing is free.
    """
    held = (UNLIMITED, UNLIMITED) if last is None else (last.held_tokens, last.held_requests)
    return LastKnown(max(1, replicas), *held, own_tokens, own_requests)


def nth(rules: PoolRules, replicas: int) -> PoolRules:
    """One of `replicas` equal parts of a pool, rounded down, so that the parts never exceed it."""
    return _part(rules, _nth(rules.tokens, replicas), _nth(rules.requests, replicas))


def first_part(rules: PoolRules, known: LastKnown) -> PoolRules:
    """The part right after the loss. See above."""
    return _part(
        rules,
        _first(rules.tokens, known.replicas, known.own_tokens, known.held_tokens),
        _first(rules.requests, known.replicas, known.own_requests, known.held_requests),
    )


def _first(capacity: int, replicas: int, own: int, held: int) -> int:
    free = max(0, capacity - held)
    return UNLIMITED if capacity == UNLIMITED else min(capacity // replicas, own + free // replicas)


def _nth(figure: int, replicas: int) -> int:
    return UNLIMITED if figure == UNLIMITED else figure // replicas


def fits_into(rules: PoolRules, ask: Ask) -> bool:
    """Whether a pool with these rules could ever admit what is asked for."""
    tokens, requests = largest_admissible(rules, ask.tier)
    return ask.tokens <= tokens and ask.requests <= requests


def _part(rules: PoolRules, tokens: int, requests: int) -> PoolRules:
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
    """What a figure of the whole is in the part."""
    if whole == UNLIMITED:
        return figure
    return -(-figure * part // whole) if rounds_up else figure * part // whole


class Alone:
    """A part at work. It takes over the leases of the replica, and whoever of those that wait fits into it at all."""

    def __init__(
        self, part: PoolRules, leases: Iterable[RedisLease], clock: Clock, granted: Callable[[RedisLease, Grant], None]
    ) -> None:
        self.part = part
        self._clock = clock
        self._granted = granted
        self._names = tuple(tier.name for tier in part.tiers)
        self._scheduler = Scheduler(part)
        self._dispatcher = Dispatcher(self._scheduler, clock, self._admitted, self._chosen)
        self._waiting: dict[int, RedisLease] = {}
        self._takeable: dict[int, RedisLease] = {}  # those granted here that may be preempted
        self._parked: dict[int, RedisLease] = {}  # does not fit now; the part may grow, or the store come back
        self._take_over(leases)

    def enter(self, lease: RedisLease) -> None:
        """Takes a new request in: it is granted, or waits; one that does not fit now, for the part to grow."""
        self._submit_or_park(lease)
        self._dispatcher.dispatch(self._clock())

    def end(self, lease: RedisLease) -> Grant | None:
        """Gives a lease back, or ends a wait and says how it had gone."""
        now_us = self._clock()
        wait = None if self._scheduler.settle(str(lease.id), now_us) else self._scheduler.cancel(str(lease.id), now_us)
        self._waiting.pop(lease.id, None)
        self._parked.pop(lease.id, None)
        self._takeable.pop(lease.id, None)
        self._dispatcher.dispatch(now_us)
        return None if wait is None else grant_of(self._names, wait, now_us, lease.ask.tier)

    def resize(self, lease: RedisLease) -> None:
        """Follows what a lease holds."""
        self._scheduler.resize(str(lease.id), lease.ask.tokens)
        self._dispatcher.dispatch(self._clock())

    def keep(self, lease: RedisLease) -> None:
        """A lease is not to be preempted any more."""
        if self._takeable.pop(lease.id, None) is not None and self._scheduler.keep(str(lease.id)):
            self._dispatcher.dispatch(self._clock())

    def requeue(self, lease: RedisLease) -> None:
        """A lease gives its room back and waits again; one that was chosen by the store, or by an earlier part, too."""
        now_us = self._clock()
        if self._takeable.pop(lease.id, None) is not None and self._scheduler.requeue(str(lease.id), now_us):
            self._waiting[lease.id] = lease
        else:
            self._scheduler.settle(str(lease.id), now_us)
            self._submit_or_park(lease)
        self._dispatcher.dispatch(now_us)

    def hold_back(self, for_us: int) -> None:
        """Admits nobody for so long while anything is held."""
        now_us = self._clock()
        self._scheduler.hold_back(now_us + for_us)
        self._dispatcher.dispatch(now_us)

    def queued(self, level: int) -> int:
        """How many requests of a tier wait here."""
        return self._scheduler.queued(level)[1] + sum(lease.ask.tier == level for lease in self._parked.values())

    def displaced(self, ask: Ask, places: int) -> RedisLease | None:
        """The lease whose place in a full queue a newcomer takes: see `Scheduler.displaced`."""
        ticket = self._scheduler.displaced(ask.tier, ask.tenant, ask.weight, places)
        return None if ticket is None else self._waiting[int(ticket.id)]

    def stop(self) -> None:
        """The store is back, or the process ends: nobody is admitted here any more."""
        self._dispatcher.stop()

    def _take_over(self, leases: Iterable[RedisLease]) -> None:
        for lease in leases:
            ask = lease.ask
            if lease.grant is not None:
                self._scheduler.register(str(lease.id), tier=ask.tier, tokens=ask.tokens, requests=ask.requests)
            else:
                self._submit_or_park(lease)
        self._dispatcher.dispatch(self._clock())

    def _submit_or_park(self, lease: RedisLease) -> None:
        if fits_into(self.part, lease.ask):
            self._waiting[lease.id] = lease
            self._dispatcher.submit(str(lease.id), lease.ask, lease.entered_us, lease.preemptions)
        else:
            self._parked[lease.id] = lease

    def _admitted(self, admission: Admission, now_us: int) -> None:
        lease = self._waiting.pop(int(admission.ticket.id))
        if self.part.tiers[lease.ask.tier].preemptible:
            self._takeable[lease.id] = lease
        self._granted(lease, grant_of(self._names, admission.wait, now_us, admission.level, admission.passed))

    def _chosen(self, lease_id: str) -> None:
        lease = self._takeable[int(lease_id)]
        lease.chosen(lease.preemptions)
