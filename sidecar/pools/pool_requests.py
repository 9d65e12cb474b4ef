"""The requests of one process in its pool: their places in the queues, their waits, and what they held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from sidecar.errors import QueueFull
from sidecar.policy.size_limits import SizeLimits
from sidecar.pools.base import Ask, Grant, Lease, TenantUse, use_of
from sidecar.pools.elsewhere import ServedElsewhere
from sidecar.pools.member import ANSWER_WITHIN_US
from sidecar.pools.member_events import Mode
from sidecar.pools.queue_places import QueuePlaces
from sidecar.pools.tenant_places import TenantPlaces
from sidecar.pools.waits import NONE_AHEAD, Wait, Waits
from sidecar.scheduling.tickets import Lease as Held
from sidecar.scheduling.tickets import Ticket


class PoolRequest(msgspec.Struct, eq=False, gc=False):
    """A lease that waits or is held, as the ledger's side and the reports know it. `held` is None while it waits.

    `is_prompt`: the replica was in its pool when it came. `full`: it found no place in its queue, and is refused unless
    its tenant's limits do so.
    """

    lease: Lease
    ticket: Ticket
    wait: Wait
    held: Held | None = None
    is_prompt: bool = False
    full: QueueFull | None = None


class PoolRequests:
    """Of a pool with tiers of these names. Some that are neither held nor in `waiting` are just entering."""

    def __init__(self, sizes: SizeLimits, names: Sequence[str]) -> None:
        self.places = QueuePlaces(sizes, len(names))
        self.waiting: dict[str, PoolRequest] = {}
        self._sizes = sizes
        self._all: dict[str, PoolRequest] = {}
        self._waits = Waits(names)
        self._tenants = [TenantPlaces() for _ in names]
        self._queued_tokens = [0] * len(names)

    def __getitem__(self, ticket_id: str) -> PoolRequest:
        return self._all[ticket_id]

    def get(self, ticket_id: str) -> PoolRequest | None:
        """The request of a ticket, None where it is over."""
        return self._all.get(ticket_id)

    def all(self) -> list[PoolRequest]:
        """All of them."""
        return list(self._all.values())

    def held(self) -> int:
        """How many do not wait."""
        return len(self._all) - len(self.waiting)

    def came(self, lease: Lease, ticket: Ticket, mode: Mode) -> PoolRequest:
        """A request is entering."""
        wait = self._waits.came(lease.id, lease.tier, lease.entered_us)
        request = PoolRequest(lease, ticket, wait, None, mode is Mode.SHARED)
        self._all[lease.ticket_id] = request
        return request

    def entered(self, lease: Lease, ticket: Ticket, held: Held, now_us: int) -> Grant:
        """A request that is held as it comes, while none waits."""
        tier = ticket.tier
        wait = self._waits.entered(lease.id, tier, ticket.tokens, now_us)
        self._all[lease.ticket_id] = PoolRequest(lease, ticket, wait, held)
        self.places.drain_rates[tier].admitted(now_us)
        return Grant(now_us, 0, 0, None, NONE_AHEAD, tier)

    def begins_to_wait(self, request: PoolRequest) -> None:
        """It takes a place in its tier's queue."""
        lease = request.lease
        self.waiting[lease.ticket_id] = request
        self._waits.begins(request.wait)
        self._tenants[lease.tier].add(lease)
        self._queued_tokens[lease.tier] += request.ticket.tokens

    def stops_waiting(self, request: PoolRequest) -> None:
        """Its place is free. Nothing changes where it had none."""
        lease = request.lease
        if self.waiting.pop(lease.ticket_id, None) is None:
            return
        self._tenants[lease.tier].remove(lease)
        self._waits.ended(request.wait)
        self._queued_tokens[lease.tier] -= request.ticket.tokens

    def ended(self, request: PoolRequest) -> None:
        """It is over: it has left, or was held."""
        if request.held is None:
            self.stops_waiting(request)
            self._waits.ended(request.wait)
        self._waits.new.pop(request.lease.id, None)
        del self._all[request.lease.ticket_id]

    def admitted(
        self, request: PoolRequest, level: int, now_us: int, passed: Mapping[str, str], *, is_first: bool
    ) -> Grant:
        """It enters an engine: how it has waited. `is_first`: with its first call, whose round trip is no wait."""
        if is_first and request.is_prompt and now_us < request.wait.came_us + ANSWER_WITHIN_US:
            self._waits.has_not_waited(request.wait, now_us)
        grant = self._waits.so_far(request.wait, level, now_us, passed)
        if self.waiting:
            self.stops_waiting(request)
        self._waits.admitted(request.wait, request.ticket.tokens, now_us)
        self.places.drain_rates[request.ticket.tier].admitted(now_us)
        return grant

    def served_elsewhere(self, news: ServedElsewhere | None) -> None:
        """What a reply told of other replicas; before the grants that it brought."""
        if news is not None:
            self._waits.served_elsewhere(news)

    def came_back(self, request: PoolRequest, now_us: int, *, is_overtaken: bool) -> None:
        """One that was held waits again, by its first arrival. It takes no place from others."""
        lease, request.held = request.lease, None
        lease.waits_again()
        self._waits.came_back(request.wait, now_us, is_overtaken=is_overtaken)
        self.waiting[lease.ticket_id] = request
        self._queued_tokens[lease.tier] += request.ticket.tokens

    def held_as(self, lease: Lease) -> Held:
        """A lease that does not wait, as the ledger's side knows it."""
        held = self._all[lease.ticket_id].held
        assert held is not None
        return held

    def size_now(self, ticket: Ticket) -> None:
        """A waiting request is about to be shown to the ledger: more may be known of it than when it came."""
        request = self._all.get(ticket.id)
        if request is None or request.lease.size_now is None:
            return
        self._asks_for(request, tokens := request.lease.size_now())
        ticket.tokens = tokens
        if not ticket.has_returned:
            request.lease.paid_tokens = tokens

    def has_grown(self, request: PoolRequest, tokens: int) -> None:
        """One that was about to be held waits on, for so many tokens. Its tenant is charged for what it has grown."""
        request.held = None
        request.lease.paid_tokens += tokens - request.ticket.tokens
        self._asks_for(request, tokens)

    def _asks_for(self, request: PoolRequest, tokens: int) -> None:
        lease = request.lease
        if lease.ticket_id in self.waiting:
            self._queued_tokens[lease.tier] += tokens - request.ticket.tokens
        lease.ask = msgspec.structs.replace(lease.ask, tokens=tokens)

    def clear(self) -> None:
        """All are gone."""
        for request in self.all():
            request.lease.is_over = True
            self.stops_waiting(request)
        self._all.clear()

    # -- places in the queues

    def find_place(self, ask: Ask, most: int, now_us: int) -> Lease | None:
        """The request that has to give its place, None where one is free. Raises QueueFull where there is neither."""
        tenants, queued = self._tenants[ask.tier], self.queued(ask.tier)
        if queued < most:
            promised = self.places.promised(ask, queued, now_us)
            if promised is None or tenants.is_within_share(ask.tenant, ask.weight, most, promised):
                return None
        elif (displaced := tenants.displaced(ask.tenant, ask.weight, most)) is not None:
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

    def so_far(self, request: PoolRequest, now_us: int) -> Grant:
        """How it has waited."""
        return self._waits.so_far(request.wait, request.lease.tier, now_us)

    def oldest(self, now_us: int) -> Sequence[Grant | None]:
        """How the oldest request of every tier has waited; None where none waits."""
        oldest = [self._waits.oldest(tier) for tier in range(len(self._tenants))]
        return [None if wait is None else self._waits.so_far(wait, wait.tier, now_us) for wait in oldest]

    def use_of(self, tenant: str) -> TenantUse:
        """What a tenant's requests use."""
        return use_of((request.lease for request in self._all.values()), tenant)
