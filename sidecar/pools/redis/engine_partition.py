"""One replica's part of each engine while the store cannot be reached: `partition`, for several engines.

Of every engine that the replica can use its part is, in tokens and in requests, as that of a pool of one engine:

    part = min(C // n, own + free // n)        at first, and C // n later

for n replicas, with C the engine's capacity, and free and own what is free there and what this replica holds there. A
replica whose part of an engine is not even one request does not use it. So the parts of an engine never exceed it, by
figures of the same moment; those of an engine are as old as the latest heartbeat. The un-prefilled tokens that an
engine may have are divided, too; an engine without any still gets one larger prompt from each replica. An engine that
only this replica can use is whole: the app that the middleware is mounted in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from sidecar.policy.rules import UNLIMITED, PoolRules
from sidecar.policy.size_limits import SizeLimits
from sidecar.pools.base import Ask, Lease
from sidecar.pools.clock import Clock
from sidecar.pools.engines import EngineOffer, sum_of_offers
from sidecar.pools.fleet import EngineRuntime, new_fleet_scheduler
from sidecar.pools.redis.engine_ledgers import EngineLedgers
from sidecar.pools.redis.outage import Outage
from sidecar.pools.redis.partition import LastKnown, Partition, fits_into
from sidecar.scheduling.fleet_scheduler import FleetScheduler, RulesOf


class EnginePartition(Partition, EngineRuntime):
    """A part at work. `offers` are the parts of the engines, `unprefilled` what a lease has un-prefilled on its own."""

    def __init__(
        self,
        rules_of: RulesOf,
        weight_percent: int,
        offers: Sequence[EngineOffer],
        leases: Iterable[Lease],
        clock: Clock,
        *,
        unprefilled: Callable[[Lease], int],
        is_paused: bool = False,
    ) -> None:
        self._rules_of = rules_of
        self._weight_percent = weight_percent
        self._offers = offers
        self._unprefilled = unprefilled
        self._now_us = clock()
        super().__init__(rules_of_offers(rules_of, offers), leases, clock, is_paused=is_paused)

    def new_scheduler(self, rules: PoolRules) -> FleetScheduler:
        """See `LeaseRuntime.new_scheduler`."""
        scheduler = new_fleet_scheduler(self._rules_of, self._weight_percent, is_by_gain=rules.is_by_gain)
        scheduler.set_engines(self._offers, self._now_us)
        return scheduler

    def register(self, lease: Lease) -> None:
        """See `Partition.register`."""
        ask = lease.ask
        assert lease.grant is not None
        self.scheduler.register(
            lease.ticket_id,
            tier=ask.tier,
            tokens=ask.tokens,
            requests=ask.requests,
            engine=lease.grant.engine,
            prefill=self._unprefilled(lease),
        )

    def fits(self, ask: Ask) -> bool:
        """See `Partition.fits`."""
        return fits_into_engines(self.part, self._offers, ask)


class EngineOutage(Outage):
    """See `Outage`. `offers` are those of the replica's own engines, `ledgers` the store's figures of all.

    `set_engines` applies other offers. `is_sole_user`: no other replica can use these engines, so that none is divided.
    """

    def __init__(
        self,
        sizes: SizeLimits,
        leases: dict[int, Lease],
        known: LastKnown | None,
        clock: Clock,
        *,
        weight_percent: int,
        offers: Sequence[EngineOffer],
        ledgers: EngineLedgers,
        unprefilled: Callable[[Lease], int],
        is_refused: bool = False,
        is_sole_user: bool = False,
    ) -> None:
        self._is_sole_user = is_sole_user
        self._weight_percent = weight_percent
        self._offers = offers
        self._held = {engine: (ledger.held_tokens, ledger.held_requests) for engine, ledger in ledgers.by_id.items()}
        self._unprefilled = unprefilled
        super().__init__(sizes, leases, known, clock, is_refused=is_refused)

    def set_engines(self, offers: Sequence[EngineOffer], weight_percent: int) -> None:
        """The replica has other engines, or another weight of hits, and so other parts."""
        self._offers, self._weight_percent = offers, weight_percent
        self.change_rules()

    def fits(self, ask: Ask) -> bool:
        """See `Outage.fits`."""
        return fits_into_engines(self._part, self._equal_offers(), ask)

    def _equal_part(self) -> PoolRules:
        return rules_of_offers(self._sizes.policy.rules_of, self._equal_offers())

    def _equal_offers(self) -> Sequence[EngineOffer]:
        known = self._known
        if not self._divides or known is None:
            return ()
        replicas = 1 if self._is_sole_user else known.replicas
        return [part for offer in self._offers if (part := _part(offer, replicas))]

    def _first_offers(self, known: LastKnown) -> Sequence[EngineOffer]:
        """The parts right after the store was lost. Where it did not tell what is free, nothing is."""
        own_tokens: Counter[str | None] = Counter()
        own_requests: Counter[str | None] = Counter()
        for lease in self._leases.values():
            if lease.grant is not None:
                own_tokens[lease.grant.engine] += lease.ask.tokens
                own_requests[lease.grant.engine] += lease.ask.requests
        found = []
        for offer in self._offers:
            tokens, requests = self._held.get(offer.id, (0, 0))
            if known.held_tokens == UNLIMITED:
                tokens = requests = UNLIMITED
            mine = own_tokens[offer.id], own_requests[offer.id]
            free = max(0, offer.tokens - tokens), max(0, offer.requests - requests)
            most = mine[0] + free[0] // known.replicas, mine[1] + free[1] // known.replicas
            if part := _part(offer, known.replicas, *most):
                found.append(part)
        return found

    def _divide(self) -> None:
        """See `Outage._divide`."""
        self.suspend()
        known = self._known if self._divides and self._is_patient else None
        is_equal = known is None or self._is_sole_user  # its own leases are all that such an engine holds
        offers = self._equal_offers() if is_equal or known is None else self._first_offers(known)
        self.partition = EnginePartition(
            self._sizes.policy.rules_of,
            self._weight_percent,
            offers,
            self._leases.values(),
            self._clock,
            unprefilled=self._unprefilled,
            is_paused=self._is_paused,
        )
        self.rules = self.partition.part


def _part(
    offer: EngineOffer, replicas: int, most_tokens: int = UNLIMITED, most_requests: int = UNLIMITED
) -> EngineOffer | None:
    """An n-th of an engine, and at most so much of it; None where that is nothing."""
    tokens, requests, prefill = (
        whole if whole == UNLIMITED else whole // replicas for whole in (offer.tokens, offer.requests, offer.prefill)
    )
    tokens = tokens if offer.tokens == UNLIMITED else min(tokens, most_tokens)
    requests = requests if offer.requests == UNLIMITED else min(requests, most_requests)
    return offer._replace(tokens=tokens, requests=requests, prefill=prefill) if tokens and requests else None


def rules_of_offers(rules_of: RulesOf, offers: Sequence[EngineOffer]) -> PoolRules:
    """The rules of a pool of these engines with their whole capacity."""
    return rules_of(*sum_of_offers([offer for offer in offers if offer.takes_new]))


def fits_into_engines(rules: PoolRules, offers: Sequence[EngineOffer], ask: Ask) -> bool:
    """Whether a pool with these rules and engines could ever admit the request."""
    return fits_into(rules, ask) and any(
        ask.tokens <= offer.tokens and ask.requests <= offer.requests for offer in offers
    )
