"""How requests have waited, against a literal account: each looks at all admissions of its time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.pools.elsewhere import ServedElsewhere
from sidecar.pools.waits import Wait, Waits
from tests.pools.harness import Clock, Harness, ask, simple

EVENTS = st.sampled_from(["come", "admit", "leave", "back", "taken", "told", "again"])
STEPS = st.lists(st.tuples(EVENTS, st.integers(0, 99)), max_size=60)


@given(steps=STEPS)
def test_each_wait_is_what_a_literal_account_says(steps: list[tuple[str, int]]) -> None:
    pool = Waits(["high", "low"])
    waiting: list[Wait] = []
    running: list[Wait] = []
    overtaken: dict[int, int | None] = {}
    ahead: dict[int, list[int]] = {}
    after: dict[int, int] = {}
    latest = number = 0
    asked_us = -1
    for now_us, (what, which) in enumerate(steps):
        if what == "come":
            number += 1
            wait = pool.came(number, which % 2, now_us)
            pool.begins(wait)
            overtaken[number], ahead[number], after[number] = None, [0, 0], number
            waiting.append(wait)
        elif what == "again" and waiting:  # at another tier
            wait = waiting.pop(which % len(waiting))
            pool.ended(wait)
            again = pool.came(wait.number, 1, now_us)
            pool.begins(again)
            overtaken[wait.number], ahead[wait.number], after[wait.number] = None, [0, 0], wait.number
            waiting.append(again)
        elif what in ("admit", "leave") and waiting:
            wait = waiting.pop(which % len(waiting))
            if what == "leave":
                pool.ended(wait)
                continue
            pool.admitted(wait, 1 + which, now_us)
            is_latest, latest = wait.number > latest, max(latest, wait.number)
            for other in waiting:
                ahead[other.number][wait.tier] += 1 + which
                if is_latest and after[other.number] < wait.number and overtaken[other.number] is None:
                    overtaken[other.number] = now_us
            for other in running:
                ahead[other.number][wait.tier] += 1 + which
            running.append(wait)
        elif what in ("back", "taken") and running:
            wait = running.pop(which % len(running))
            pool.came_back(wait, now_us, is_overtaken=what == "taken")
            after[wait.number] = latest
            if what == "taken" and overtaken[wait.number] is None:
                overtaken[wait.number] = now_us
            waiting.append(wait)
        elif what == "told":
            arrived_us = now_us - which % 7
            for other in waiting + running:
                if other.came_us <= asked_us:
                    ahead[other.number][which % 2] += which
            for other in waiting:
                if other.came_us < arrived_us and overtaken[other.number] is None:
                    overtaken[other.number] = now_us
            asked_us = max(asked_us, now_us - which % 4)
            tokens = [0, which] if which % 2 else [which, 0]
            pool.served_elsewhere(ServedElsewhere(tokens, asked_us, (arrived_us, now_us)))
        for wait in waiting:
            grant = pool.so_far(wait, 0, now_us)
            assert grant.overtaken_at_us == overtaken[wait.number]
            assert [grant.served_ahead.get(name, 0) for name in ("high", "low")] == ahead[wait.number]
        for tier in range(2):
            mine = [wait for wait in waiting if wait.tier == tier]
            assert pool.queued(tier) == len(mine)
            assert pool.oldest(tier) is min(mine, key=lambda wait: wait.number, default=None)


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
