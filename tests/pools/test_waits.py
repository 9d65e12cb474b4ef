"""How requests have waited, against a literal account: each looks at all admissions of its time."""

from __future__ import annotations

import asyncio
import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.errors import StoreUnavailable
from sidecar.pools import Lease, Pool
from sidecar.pools.elsewhere import ServedElsewhere
from sidecar.pools.ledger_link import new_ticket
from sidecar.pools.pool_requests import Waits
from tests.pools.harness import Clock, Harness, ask, simple

EVENTS = st.sampled_from(["come", "admit", "leave", "back", "taken", "told", "again"])
OWNER = Pool(simple())
STEPS = st.lists(st.tuples(EVENTS, st.integers(0, 99)), max_size=60)


def new(number: int, tier: int, now_us: int) -> Lease:
    asked = ask(tier)
    return Lease(OWNER, number, asked, now_us, new_ticket(asked, number, now_us), 0)


@given(steps=STEPS)
def test_each_wait_is_what_a_literal_account_says(steps: list[tuple[str, int]]) -> None:
    pool = Waits(["high", "low"])
    waiting: list[Lease] = []
    running: list[Lease] = []
    overtaken: dict[int, int | None] = {}
    ahead: dict[int, list[int]] = {}
    after: dict[int, int] = {}
    latest = number = 0
    asked_us = -1
    for now_us, (what, which) in enumerate(steps):
        if what == "come":
            number += 1
            lease = new(number, which % 2, now_us)
            pool.came(lease)
            pool.begins(lease)
            overtaken[number], ahead[number], after[number] = None, [0, 0], number
            waiting.append(lease)
        elif what == "again" and waiting:  # at another tier
            lease = waiting.pop(which % len(waiting))
            pool.ended(lease)
            lease.ask, lease.entered_us = ask(1), now_us
            pool.came(lease)
            pool.begins(lease)
            overtaken[lease.id], ahead[lease.id], after[lease.id] = None, [0, 0], lease.id
            waiting.append(lease)
        elif what in ("admit", "leave") and waiting:
            lease = waiting.pop(which % len(waiting))
            if what == "leave":
                pool.ended(lease)
                continue
            lease.ticket.tokens = 1 + which
            pool.admitted(lease, now_us)
            is_latest, latest = lease.id > latest, max(latest, lease.id)
            for other in waiting:
                ahead[other.id][lease.tier] += 1 + which
                if is_latest and after[other.id] < lease.id and overtaken[other.id] is None:
                    overtaken[other.id] = now_us
            for other in running:
                ahead[other.id][lease.tier] += 1 + which
            running.append(lease)
        elif what in ("back", "taken") and running:
            lease = running.pop(which % len(running))
            pool.came_back(lease, now_us, is_overtaken=what == "taken")
            after[lease.id] = latest
            if what == "taken" and overtaken[lease.id] is None:
                overtaken[lease.id] = now_us
            waiting.append(lease)
        elif what == "told":
            arrived_us = now_us - which % 7
            for other in waiting + running:
                if other.since_us <= asked_us:
                    ahead[other.id][which % 2] += which
            for other in waiting:
                if other.since_us < arrived_us and overtaken[other.id] is None:
                    overtaken[other.id] = now_us
            asked_us = max(asked_us, now_us - which % 4)
            tokens = [0, which] if which % 2 else [which, 0]
            pool.served_elsewhere(ServedElsewhere(tokens, asked_us, (arrived_us, now_us)))
        for lease in waiting:
            grant = pool.so_far(lease, 0, now_us)
            assert grant.overtaken_at_us == overtaken[lease.id]
            assert [grant.served_ahead.get(name, 0) for name in ("high", "low")] == ahead[lease.id]
        for tier in range(2):
            mine = [lease for lease in waiting if lease.tier == tier]
            assert pool.queued(tier) == len(mine)
            assert pool.oldest(tier) is min(mine, key=lambda lease: lease.id, default=None)


@pytest.mark.anyio
@pytest.mark.parametrize("harness", ["shared", "three replicas", "shared by gain"], indirect=True)
async def test_what_another_replica_admits_counts_for_those_that_waited_then(harness: Harness) -> None:
    clock = Clock()
    here, there = await harness.pool(simple(), clock), await harness.pool(simple(), clock)
    await there.enter(ask(tokens=50))
    clock.advance(1)
    first = await here.enter(ask(tier=1, tokens=60))
    clock.advance(1)
    await there.enter(ask(tokens=40))
    elsewhere_us = clock.us
    clock.advance(1)
    second = await here.enter(ask(tier=1, tokens=60))
    clock.advance(1)
    await here.enter(ask(tokens=10))
    here_us = clock.us
    clock.advance(1)
    await harness.quiet(here)
    ended = [await first.leave(), await second.leave()]
    assert [(end.overtaken_at_us, end.starvation_us, end.served_ahead) for end in ended if end is not None] == [
        (elsewhere_us, 3_000_000, {"high": 50}),
        (here_us, 1_000_000, {"high": 10}),
    ]


@pytest.mark.anyio
async def test_a_refusal_whose_request_has_gone_is_no_error_of_the_event_loop() -> None:
    logged: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    lease = new(1, 0, 0)
    lease.enters()
    lease.refused(StoreUnavailable("the store of this pool cannot be reached", retry_after_s=1))
    del lease
    gc.collect()
    assert logged == []
