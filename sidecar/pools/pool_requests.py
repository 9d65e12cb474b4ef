"""The requests of one process in its pool: their places in the queues, their waits, and what they held."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from sidecar.errors import QueueFull
from sidecar.events import Grant
from sidecar.policy.size_limits import SizeLimits
from sidecar.pools.base import Ask, Lease, TenantUse
from sidecar.pools.elsewhere import ServedElsewhere
from sidecar.pools.ledger_link import new_ticket
from sidecar.pools.member import ANSWER_WITHIN_US
from sidecar.pools.member_events import MemberMode
from sidecar.pools.queue_places import QueuePlaces
from sidecar.scheduling.tickets import ScheduledLease as Held
from sidecar.scheduling.tickets import Ticket

# -- The places of one tier's queue, by tenant: each has a share of them by its weight, and who is above it gives way.
#
# In a tenant whose users take turns, the user with the most requests gives way.


class TenantPlaces:
    """The requests of one tier that wait, those that came back apart: they give their place to nobody.

    A tenant has the weight of its latest request.
    """

    def __init__(self) -> None:
        self._leases: dict[str, dict[int, Lease]] = {}
        self._of_users: dict[str, dict[str, dict[int, Lease]]] = {}
        self._weights: dict[str, int] = {}
        self._sum = 0

    def add(self, lease: Lease) -> None:
        """A request waits."""
        tenant, weight = lease.ask.tenant, lease.ask.weight
        self._leases.setdefault(tenant, {})[lease.id] = lease
        if lease.ask.user is not None:
            self._of_users.setdefault(tenant, {}).setdefault(lease.ask.user, {})[lease.id] = lease
        self._sum = self._with(tenant, weight)
        self._weights[tenant] = weight

    def remove(self, lease: Lease) -> None:
        """A request waits no more. Nothing changes where it had come back."""
        tenant, user = lease.ask.tenant, lease.ask.user
        mine = self._leases.get(tenant, {})
        if user is not None and lease.id in mine:
            users = self._of_users[tenant]
            del users[user][lease.id]
            if not users[user]:
                del users[user]
        if mine.pop(lease.id, None) is not None and not mine:
            del self._leases[tenant]
            self._sum -= self._weights.pop(tenant)

    def is_within_share(self, tenant: str, weight: int, places: int, promised: int = 0) -> bool:
        """True if one more request of a tenant, with the places `promised` to it, is within its share of all places."""
        waiting = len(self._leases.get(tenant, ()))
        return (waiting + promised + 1) * self._with(tenant, weight) <= places * weight

    def displaced(self, ask: Ask, places: int) -> Lease | None:
        """The newest request of the tenant furthest above its share: a newcomer within its own takes that place.

        Else it may take that of another user of its tenant, who has more requests than its own then has. It looks at
        all tenants that wait, and at the users of one: 0.1 us each.
        """
        tenant, weight = ask.tenant, ask.weight
        if not self.is_within_share(tenant, weight, places):
            users = self._of_users.get(tenant, {})
            own, longest = users.get(ask.user or "", ()), max(users.values(), key=len, default={})
            return None if ask.user is None or len(longest) <= len(own) + 1 else longest[next(reversed(longest))]
        weights, most, furthest = self._with(tenant, weight), 0, ""
        for name, leases in self._leases.items():
            excess = len(leases) * weights - places * self._weights[name]
            if excess > most or (excess == most > 0 and name < furthest):
                most, furthest = excess, name
        if not most:
            return None
        found = max(self._of_users.get(furthest, {}).values(), key=len, default=self._leases[furthest])
        return found[next(reversed(found))]

    def _with(self, tenant: str, weight: int) -> int:
        """The weights of all tenants that wait, and of this one."""
        return self._sum + weight - self._weights.get(tenant, 0)


# -- How the requests of one process have waited: since when they are overtaken, and what was served ahead of them.
#
# What other replicas of the pool admit comes with the ledger's replies: late, but for no more than a heartbeat.
#
# A request is overtaken by the first one that arrived after it and was admitted.

NONE_AHEAD: Mapping[str, Any] = {}


class Waits:
    """Of a pool with tiers of these names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._served: Sequence[int] = [0] * len(names)
        self._latest = 0
        self._waiting = [dict[int, Lease]() for _ in names]
        # Not overtaken: those that came, by number, and the few that came back or to another tier.
        self._ahead, self._ahead_again = OrderedDict[int, Lease](), dict[int, Lease]()
        self.new = dict[int, Lease]()  # those that came since the call was made whose reply was the last

    def came(self, lease: Lease) -> None:
        """A request. It waits from `begins` on, if it is not admitted at once."""
        self._begins_anew(lease, lease.entered_us)
        self.new[lease.id] = lease
        is_last = not self._ahead or lease.id > next(reversed(self._ahead))
        (self._ahead if is_last else self._ahead_again)[lease.id] = lease

    def _begins_anew(self, lease: Lease, since_us: int) -> None:
        lease.since_us, lease.before, lease.after, lease.overtaken_us = since_us, self._served, lease.id, None

    def has_not_waited(self, lease: Lease, now_us: int) -> None:
        """A request is about to enter, and nothing was in its way; unless a later one has entered before it."""
        if lease.overtaken_us is None:
            lease.since_us = now_us

    def entered(self, lease: Lease, now_us: int) -> None:
        """A request that enters an engine as it comes, while none waits."""
        self._begins_anew(lease, now_us)
        self._is_admitted(lease, now_us)

    def begins(self, lease: Lease) -> None:
        """A request waits, behind all that came before."""
        self._waiting[lease.tier][lease.id] = lease

    def leaves_tier(self, lease: Lease) -> None:
        """A waiting request is about to wait in another tier. It is as overtaken as it was."""
        del self._waiting[lease.tier][lease.id]

    def admitted(self, lease: Lease, now_us: int) -> None:
        """A request enters an engine."""
        self.ended(lease)
        self._is_admitted(lease, now_us)

    def _is_admitted(self, lease: Lease, now_us: int) -> None:
        if lease.id > self._latest:
            self._latest = lease.id
            self._overtakes(lease.id, now_us)
        tokens = lease.admitted_tokens = lease.ticket.tokens
        served = [*self._served]  # another list: those that came before keep theirs
        served[lease.tier] += tokens
        self._served = served

    def _overtakes(self, number: int, now_us: int) -> None:
        ahead = self._ahead
        if ahead and next(reversed(ahead)) < number:  # all at once: one by one, 100,000 would take three times as long
            for lease in ahead.values():
                lease.overtaken_us = now_us
            ahead.clear()
        while ahead and next(iter(ahead)) < number:
            ahead.popitem(last=False)[1].overtaken_us = now_us
        for lease in [lease for lease in self._ahead_again.values() if lease.after < number]:
            lease.overtaken_us = now_us
            self._is_ahead_no_more(lease)

    def _is_ahead_no_more(self, lease: Lease) -> None:
        if self._ahead.pop(lease.id, None) is None:
            self._ahead_again.pop(lease.id, None)

    def served_elsewhere(self, news: ServedElsewhere) -> None:
        """Other replicas admitted requests between two replies: ahead of those that came before the former's call."""
        if any(news.tokens):
            self._served = [*_plus(self._served, news.tokens)]
            for lease in self.new.values():
                lease.before = _plus(lease.before, news.tokens)
        self.new = {number: lease for number, lease in self.new.items() if lease.since_us > news.asked_us}
        if news.latest is not None:
            came_us, admitted_us = news.latest
            overtaken = [*takewhile(lambda lease: lease.since_us < came_us, self._ahead.values())]
            overtaken += [lease for lease in self._ahead_again.values() if lease.since_us < came_us]
            for lease in overtaken:
                lease.overtaken_us = admitted_us
                self._is_ahead_no_more(lease)

    def ended(self, lease: Lease) -> None:
        """A request waits no more."""
        self._waiting[lease.tier].pop(lease.id, None)
        self._is_ahead_no_more(lease)

    def came_back(self, lease: Lease, now_us: int, *, is_overtaken: bool) -> None:
        """An admitted request waits again, by its first arrival. No request is served ahead of itself."""
        before = list(lease.before)
        before[lease.tier] += lease.admitted_tokens
        lease.before, lease.after = before, self._latest
        self.begins(lease)
        if is_overtaken and lease.overtaken_us is None:
            lease.overtaken_us = now_us
        if lease.overtaken_us is None:
            self._ahead_again[lease.id] = lease

    def so_far(self, lease: Lease, level: int, now_us: int, passed: Mapping[str, str] = NONE_AHEAD) -> Grant:
        """How a request has waited, as the grant that ends it now at an aged `level`."""
        overtaken_us, ahead = lease.overtaken_us, NONE_AHEAD
        if self._served is not lease.before:
            tiers = zip(self._names, self._served, lease.before, strict=True)
            ahead = {name: now - before for name, now, before in tiers if now != before}
        starvation_us = 0 if overtaken_us is None else now_us - overtaken_us
        return Grant(now_us, now_us - lease.since_us, starvation_us, overtaken_us, ahead, level, passed)

    def oldest(self, tier: int) -> Lease | None:
        """The request of a tier that came first, of those that wait and are not deferred."""
        waiting = self._waiting[tier]
        first = min((number for number, lease in waiting.items() if not lease.ask.is_deferred), default=None)
        return None if first is None else waiting[first]

    def queued(self, tier: int) -> int:
        """How many requests of a tier wait."""
        return len(self._waiting[tier])


def _plus(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


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
