"""The requests of one process in its pool: their places in the queues, their waits, and what they held."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from sidecar.errors import QueueFull
from sidecar.events import Grant
from sidecar.pools.base import Ask, Lease, TenantUse
from sidecar.pools.elsewhere import ServedElsewhere
from sidecar.pools.ledger_rules import new_ticket
from sidecar.pools.member import ANSWER_WITHIN_US
from sidecar.pools.member_events import MemberMode
from sidecar.pools.queue_places import QueuePlaces
from sidecar.pools.size_limits import SizeLimits
from sidecar.pools.tenant_places import TenantPlaces
from sidecar.pools.waits import NONE_AHEAD, Waits
from sidecar.scheduling.tickets import ScheduledLease as Held
from sidecar.scheduling.tickets import Ticket

RECENT = 64
"""Requests of a tier whose waits say how long one takes there: a batch of an engine, and more."""


class PoolRequests:
    """Of a pool with tiers of these names. Some that are neither held nor in `waiting` are just entering.

    `recent` has of each tier when the latest that waited were admitted, and after how long a wait in that tier.
    """

    def __init__(self, sizes: SizeLimits, names: Sequence[str]) -> None:
        self.places = QueuePlaces(sizes, len(names))
        self.waiting: dict[int, Lease] = {}
        self._sizes = sizes
        self._all: dict[int, Lease] = {}
        self._waits = Waits(names)
        self._tenants = [TenantPlaces() for _ in names]
        self._queued_tokens = [0] * len(names)
        self.recent = [deque[tuple[int, int]](maxlen=RECENT) for _ in names]

    def __getitem__(self, ticket: Ticket) -> Lease:
        return self._all[ticket.number]

    def get(self, number: int) -> Lease | None:
        """The request of a number, None where it is over."""
        return self._all.get(number)

    def all(self) -> list[Lease]:
        """All of them."""
        return list(self._all.values())

    def held(self) -> int:
        """How many do not wait."""
        return len(self._all) - len(self.waiting)

    def came(self, lease: Lease, mode: MemberMode) -> None:
        """A request is entering."""
        self._waits.came(lease)
        lease.is_prompt = mode is MemberMode.SHARED
        self._all[lease.id] = lease

    def entered(self, lease: Lease, held: Held, now_us: int) -> Grant:
        """A request that is held as it comes, while none waits."""
        lease.held, level = held, lease.tier
        self._waits.entered(lease, now_us)
        self._all[lease.id] = lease
        self.places.drain_rates[level].admitted(now_us)
        return Grant(now_us, 0, 0, None, NONE_AHEAD, level)

    def begins_to_wait(self, lease: Lease) -> None:
        """It takes a place in its tier's queue."""
        self.waiting[lease.id] = lease
        self._waits.begins(lease)
        self._tenants[lease.tier].add(lease)
        self._queued_tokens[lease.tier] += lease.ticket.tokens

    def stops_waiting(self, lease: Lease) -> None:
        """Its place is free. Nothing changes where it had none."""
        if self.waiting.pop(lease.id, None) is not None:
            self._tenants[lease.tier].remove(lease)
            self._queued_tokens[lease.tier] -= lease.ticket.tokens

    def ended(self, lease: Lease) -> None:
        """It is over: it has left, or was held."""
        if lease.held is None:
            self.stops_waiting(lease)
            self._waits.ended(lease)
        self._waits.new.pop(lease.id, None)
        del self._all[lease.id]

    def admitted(self, lease: Lease, level: int, now_us: int, passed: Mapping[str, str]) -> Grant:
        """It enters an engine: how it has waited. The round trip of its first call is no wait."""
        if lease.is_entering and lease.is_prompt and now_us < lease.since_us + ANSWER_WITHIN_US:
            self._waits.has_not_waited(lease, now_us)
        grant = self._waits.so_far(lease, level, now_us, passed)
        if grant.queue_wait_us:
            self.recent[lease.tier].append((now_us, min(grant.queue_wait_us, now_us - lease.rose_us)))
        self.stops_waiting(lease)
        self._waits.admitted(lease, now_us)
        self.places.drain_rates[lease.tier].admitted(now_us)
        return grant

    def served_elsewhere(self, news: ServedElsewhere | None) -> None:
        """Takes a reply's news of other replicas; before the grants that it brought."""
        if news is not None:
            self._waits.served_elsewhere(news)

    def came_back(self, lease: Lease, now_us: int, *, is_overtaken: bool) -> None:
        """One that was held waits again, by its first arrival. It takes no place from others."""
        lease.waits_again()
        self._waits.came_back(lease, now_us, is_overtaken=is_overtaken)
        self.waiting[lease.id] = lease
        self._queued_tokens[lease.tier] += lease.ticket.tokens

    def rises(self, lease: Lease, ask: Ask, now_us: int) -> None:
        """A waiting request leaves its place for one in the queue of the tier of `ask`. It waits on as before."""
        ticket = new_ticket(ask, lease.id, lease.entered_us)
        ticket.has_returned = lease.ticket.has_returned  # then its tenant is not charged again
        self.stops_waiting(lease)
        self._waits.leaves_tier(lease)
        self.places.keep_promise(ask)
        lease.ask, lease.ticket, lease.rose_us = ask, ticket, now_us
        self.begins_to_wait(lease)

    def size_now(self, ticket: Ticket) -> None:
        """A waiting request is about to be shown to the ledger: more may be known of it than when it came."""
        lease = self._all.get(ticket.number)
        if lease is None or lease.size_now is None:
            return
        self._asks_for(lease, tokens := lease.size_now())
        cost = lease.ask.cost
        ticket.tokens, ticket.cost = tokens, None if cost is None else cost.in_turns(tokens)
        if not ticket.has_returned:
            lease.paid_tokens = tokens

    def has_grown(self, lease: Lease, tokens: int) -> int:
        """One that was about to be held waits on, for so many tokens. Returns the charge for what it has grown."""
        lease.held, before = None, lease.ticket.charged
        lease.paid_tokens += tokens - lease.ticket.tokens
        self._asks_for(lease, tokens)
        lease.ticket.cost = None if lease.ask.cost is None else lease.ask.cost.in_turns(tokens)
        return (lease.ticket.cost or tokens) - before

    def _asks_for(self, lease: Lease, tokens: int) -> None:
        if lease.id in self.waiting:
            self._queued_tokens[lease.tier] += tokens - lease.ticket.tokens
        lease.ask = msgspec.structs.replace(lease.ask, tokens=tokens)

    def clear(self) -> None:
        """All are gone."""
        for lease in self.all():
            lease.is_over, lease.held = True, None
            self.ended(lease)

    # -- places in the queues

    def find_place(self, ask: Ask, now_us: int) -> Lease | None:
        """The request that has to give its place, None where one is free. Raises QueueFull where there is neither."""
        tenants, queued, most = self._tenants[ask.tier], self.queued(ask.tier), self._sizes.places(ask.tier)
        if most is None:
            return None
        if queued < most:
            promised = self.places.promised(ask, queued, now_us)
            if promised is None or tenants.is_within_share(ask.tenant, ask.weight, most, promised):
                return None
        elif (displaced := tenants.displaced(ask, most)) is not None:
            return displaced
        raise self.queue_full(ask, now_us)

    def queue_full(self, ask: Ask, now_us: int) -> QueueFull:
        """The refusal of a request that found no place, or lost it."""
        return self.places.queue_full(ask, self.queued(ask.tier), now_us)

    # -- figures

    def queued(self, tier: int) -> int:
        """How many of a tier wait."""
        return self._waits.queued(tier)

    def queues(self) -> Sequence[tuple[int, int]]:
        """The tokens and the number of those that wait, by tier."""
        return [(tokens, self._waits.queued(tier)) for tier, tokens in enumerate(self._queued_tokens)]

    def so_far(self, lease: Lease, now_us: int) -> Grant:
        """How it has waited."""
        return self._waits.so_far(lease, lease.tier, now_us)

    def oldest(self, now_us: int) -> Sequence[Grant | None]:
        """How the oldest request of every tier has waited; None where none waits."""
        oldest = [self._waits.oldest(tier) for tier in range(len(self._tenants))]
        return [None if lease is None else self.so_far(lease, now_us) for lease in oldest]

    def tenant_use(self, tenant: str) -> TenantUse:
        """Use by a tenant's requests."""
        mine = [lease for lease in self._all.values() if lease.ask.tenant == tenant]
        running = [lease for lease in mine if lease.grant is not None]
        return TenantUse(len(mine) - len(running), len(running), sum(lease.ask.tokens for lease in running))
