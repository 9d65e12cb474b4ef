"""A replica's part of several engines while the store is lost: no engine ever gets more than it can hold."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sidecar.pools.redis.engine_ledgers import EngineLedgers, StoredEngine
from sidecar.pools.redis.engine_partition import EngineOutage
from sidecar.pools.redis.partition import LastKnown

from sidecar.policy.rules import UNLIMITED, Shares
from sidecar.policy.size_limits import SizeLimits
from sidecar.pools.base import Grant, Lease, WaitOutcome, new_lease
from sidecar.pools.engines import EngineOffer
from tests.pools.fleet_scripted import engines_policy
from tests.pools.harness import Clock, ask

pytestmark = pytest.mark.anyio
ENGINES = ("a#1", "b#1", "c#2")


class NoOwner:
    """The owner of leases that no one ends."""

    def end(self, lease: Lease, outcome: WaitOutcome | None, used_tokens: int | None = 0) -> None:
        raise AssertionError

    def change_size(self, lease: Lease, tokens: int) -> None:
        raise AssertionError

    def keep(self, lease: Lease, *, was_chosen: bool) -> None:
        raise AssertionError

    def requeue(self, lease: Lease) -> None:
        raise AssertionError

    def hand_back(self, lease: Lease) -> None:
        raise AssertionError

    def prefilled(self, lease: Lease) -> None:
        raise AssertionError


def lease_on(engine: str, number: int, tokens: int) -> Lease:
    lease = new_lease(NoOwner(), number, ask(tokens=tokens), 0)
    lease.granted(Grant(0, 0, 0, None, {}, 0, engine=engine))
    return lease


def ledgers_of(offers: Sequence[EngineOffer], leases: Sequence[Lease]) -> EngineLedgers:
    """What the store would say of these leases."""
    ledgers = EngineLedgers()
    for offer in offers:
        mine = [lease.ask for lease in leases if lease.grant and lease.grant.engine == offer.id]
        held = sum(wanted.tokens for wanted in mine), sum(wanted.requests for wanted in mine)
        size = offer.tokens, offer.requests, offer.prefill
        ledgers.by_id[offer.id] = StoredEngine(1, 1, *size, 1000, 1, 0, 0, 0, *size, size[1], 0, 0, 0, *held, 0, 0)
    return ledgers


sizes = st.one_of(st.integers(1, 50), st.just(UNLIMITED))
engines = st.lists(st.tuples(sizes, sizes), min_size=1, max_size=3)
held = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 20)), max_size=12)


@given(sizes=engines, held=held, replicas=st.integers(1, 5), is_patient=st.booleans())
async def test_the_parts_of_all_replicas_never_exceed_an_engine(
    sizes: list[tuple[int, int]], held: list[tuple[int, int, int]], replicas: int, is_patient: bool
) -> None:
    offers = [EngineOffer(name, *size, 30) for name, size in zip(ENGINES, sizes, strict=False)]
    leases: list[tuple[int, Lease]] = []
    room = {offer.id: [offer.tokens, offer.requests] for offer in offers}
    for number, (replica, engine, tokens) in enumerate(held):
        offer = offers[engine % len(offers)]
        if room[offer.id][0] >= tokens and room[offer.id][1] >= 1:
            room[offer.id] = [room[offer.id][0] - tokens, room[offer.id][1] - 1]
            leases.append((replica % replicas, lease_on(offer.id, number, tokens)))
    ledgers = ledgers_of(offers, [lease for _, lease in leases])
    policy = engines_policy((Shares("one"),))
    parts: dict[str, list[EngineOffer]] = {offer.id: [] for offer in offers}
    for replica in range(replicas):
        mine = {lease.id: lease for owner, lease in leases if owner == replica}
        own = sum(lease.ask.tokens for lease in mine.values()), len(mine)
        known = LastKnown(replicas, sum(lease.ask.tokens for _, lease in leases), len(leases), *own)
        outage = EngineOutage(
            SizeLimits(policy), mine, known, Clock(), weight_percent=200, offers=offers, ledgers=ledgers,
            unprefilled=lambda _: 0,
        )  # fmt: skip
        for part in outage._first_offers(known) if is_patient else outage._equal_offers():
            parts[part.id].append(part)
        outage.end()
    for offer in offers:
        for whole, column in ((offer.tokens, "tokens"), (offer.requests, "requests")):
            if whole != UNLIMITED:
                assert sum(getattr(part, column) for part in parts[offer.id]) <= whole
        for part in parts[offer.id]:
            assert part.tokens >= 1
            assert part.requests >= 1
