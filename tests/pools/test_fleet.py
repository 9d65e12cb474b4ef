"""The pool of several engines in one process: leases that name their engine, and what its fleet may say of engines."""

from __future__ import annotations

import asyncio

import pytest

from sidecar.errors import RequestTooLarge
from sidecar.events import Obstacle
from sidecar.policy.model import Policy
from sidecar.policy.rules import UNLIMITED, Shares, pool_rules
from sidecar.pools import Ask, Lease, Pool
from sidecar.pools.engines import WEIGHT_PERCENT, EngineOffer
from tests.pools.harness import Clock, policy_of

pytestmark = pytest.mark.anyio
A, B = (EngineOffer(f"{name}#1", tokens=100, requests=10, prefill=20) for name in "ab")


def pool_of(policy: Policy, *clock: Clock) -> Pool:
    return Pool(policy, *clock, weight_percent=WEIGHT_PERCENT)


def fleet(*offers: EngineOffer, clock: Clock | None = None) -> Pool:
    shares = (Shares("high"), Shares("low"))
    policy = policy_of(pool_rules(tokens=None, requests=None, tiers=shares))
    pool = pool_of(policy, clock or Clock())
    if offers:
        pool.set_engines(offers)
    return pool


def ask(tokens: int = 10, prompt: int = 1, **more: object) -> Ask:
    return Ask(0, "t", 1, tokens, 1, prompt=prompt, **more)  # type: ignore[arg-type]


async def granted(lease: Lease) -> str | None:
    return (await asyncio.wait_for(lease.wait(), 60)).engine


async def test_a_grant_names_the_engine() -> None:
    pool: Pool = fleet(A, B)
    leases = [await pool.enter(ask()) for _ in range(2)]
    assert [await granted(lease) for lease in leases] == ["a#1", "b#1"]
    assert [engine.held_tokens for engine in pool.engines()] == [10, 10]
    for lease in leases:
        assert [lease.settle(), lease.settle()] == [True, False]
    assert [(it.held_tokens, it.held_requests, it.unprefilled_tokens) for it in pool.engines()] == [(0, 0, 0)] * 2


async def test_before_there_are_engines_requests_wait_and_are_not_refused() -> None:
    pool = fleet()
    lease = await pool.enter(ask(tokens=10**9))
    small = await pool.enter(ask())
    assert (lease.grant, small.grant) == (None, None)
    assert pool.obstacle(ask())[0] is Obstacle.ENGINE
    pool.set_engines([A])
    assert await granted(small) == "a#1"
    with pytest.raises(RequestTooLarge, match="the whole pool"):
        await lease.wait()


async def test_a_request_larger_than_every_engine_is_refused_at_once_and_the_message_says_so() -> None:
    pool = fleet(A, B)
    with pytest.raises(RequestTooLarge, match="allows 100, the largest engine"):
        await pool.enter(ask(tokens=101))
    assert pool.most_tokens(0) == 100


async def test_a_pool_that_shrinks_for_a_while_refuses_nobody_who_waits() -> None:
    pool = fleet(A, B._replace(tokens=200))
    held = await pool.enter(ask(tokens=200))
    waiting = await pool.enter(ask(tokens=150))
    pool.set_engines([A, B._replace(tokens=200, takes_new=False)])
    held.settle()
    assert waiting.grant is None
    pool.set_engines([A, B._replace(tokens=200)])
    assert await granted(waiting) == "b#1"


async def test_the_first_byte_gives_the_prompt_back_once() -> None:
    pool = fleet(A)
    large = await pool.enter(ask(prompt=50))
    waiting = await pool.enter(ask(prompt=5))
    assert waiting.grant is None
    large.prefilled()
    large.prefilled()
    assert await granted(waiting) == "a#1"
    large.settle()
    large.prefilled()
    assert [engine.unprefilled_tokens for engine in pool.engines()] == [5]


async def test_an_engine_that_broke_a_request_does_not_get_it_again_after_a_reload_either() -> None:
    pool = fleet(A, B)
    lease = await pool.enter(ask())
    assert await granted(lease) == "a#1"
    assert (await asyncio.wait_for(lease.hand_back(("a",)), 60)).engine == "b#1"
    waits = lease.hand_back(("b",))
    await asyncio.sleep(0)
    assert not waits.done()
    assert lease.ask.barred == ("a", "b")
    pool.change_policy(pool._sizes.policy)
    pool.set_engines([A, B, A._replace(id="c#1")])
    assert (await asyncio.wait_for(waits, 60)).engine == "c#1"


async def test_a_wait_for_an_engine_that_starts_slowly_ends_by_the_pools_own_timer() -> None:
    pool = pool_of(fleet()._sizes.policy)
    pool.set_engines([A._replace(requests=10, ramp_us=1_000_000, since_us=pool.now_us())])
    first, second = await pool.enter(ask()), await pool.enter(ask())
    assert (first.grant is None, second.grant) == (False, None)
    assert await granted(second) == "a#1"


async def test_the_state_has_the_engines_in_json_types() -> None:
    pool = fleet(A, B._replace(prefill=UNLIMITED))
    await pool.enter(ask())
    state = pool.state()
    assert state["capacity"] == {"tokens": 200, "requests": 20}
    engines = state["engines"]
    assert isinstance(engines, list)
    assert engines[0]["held"] == {"tokens": 10, "requests": 1}
    assert [engine["prefill"] for engine in engines] == [20, None]


async def test_the_cause_of_a_wait_names_the_engines_where_only_all_together_have_room() -> None:
    pool = fleet(A, B)
    for _ in range(2):
        await pool.enter(ask(tokens=60))
    wanted = ask(tokens=60)
    assert (await pool.enter(wanted)).grant is None
    cause, sentence = pool.obstacle(wanted)
    assert (cause, "none of 2 engines has room" in sentence) == (Obstacle.NO_ROOM, True)


def obstacle(pool: Pool, wanted: Ask) -> tuple[str, str]:
    cause, sentence = pool.obstacle(wanted)
    return cause.value, sentence


async def test_a_claim_is_said_where_another_engine_has_room() -> None:
    pool = fleet(*(EngineOffer(f"{name}#1", tokens=100, requests=1, prefill=20) for name in "ab"))
    held = [await pool.enter(ask(tokens=5)), await pool.enter(ask(tokens=90))]
    larger = EngineOffer("b#1", tokens=100, requests=2, prefill=20)
    pool.set_engines([EngineOffer("a#1", tokens=100, requests=1, prefill=20), larger])
    for lease in held:
        pool.prefilled(lease)
    first = ask(tokens=5, prompt=5, hits=(("a#1", 5),))
    assert (await pool.enter(first)).grant is None
    said = "it waits for the engine that suits it best, while engine b has room for it"
    assert obstacle(pool, first) == ("claim", said)


async def test_an_engine_that_still_has_prompts_to_prefill_is_named() -> None:
    pool = fleet(A)
    await pool.enter(ask(prompt=9))
    wanted = ask(tokens=20, prompt=15)
    assert (await pool.enter(wanted)).grant is None
    assert obstacle(pool, wanted) == (
        "no_room",
        "engine a has room for it, and no prefill beside the prompts sent there",
    )


async def test_a_request_larger_than_the_engines_that_are_left_is_said() -> None:
    large = EngineOffer("b#1", tokens=500, requests=10, prefill=20)
    pool = fleet(A, large)
    pool.set_engines([A, EngineOffer("b#1", tokens=500, requests=10, prefill=20, takes_new=False)])
    wanted = ask(tokens=300)
    assert (await pool.enter(wanted)).grant is None
    said = "it is larger than every engine that takes new requests at present"
    assert obstacle(pool, wanted) == ("engine", said)


async def test_an_engine_that_takes_no_requests_is_claimed_by_none() -> None:
    pool = fleet(A, B)
    [await pool.enter(ask(tokens=60)) for _ in range(2)]
    await pool.enter(ask(tokens=70))
    assert [engine.claims for engine in pool.engines()] == [1, 0]
    pool.set_engines([EngineOffer(it.id, 100, 10, 20, takes_new=False) for it in (A, B)])
    assert [engine.claims for engine in pool.engines()] == [0, 0]


def blocked_s(pool: Pool) -> object:
    return pool.state()["no_engine_fits_s"]


async def test_the_seconds_in_which_a_request_fits_the_pool_and_no_engine() -> None:
    clock = Clock()
    pool = fleet(A, B, clock=clock)
    held = [await pool.enter(ask(tokens=60)) for _ in range(2)]
    clock.us += 5_000_000
    assert blocked_s(pool) == 0.0
    waits = await pool.enter(ask(tokens=70))  # 80 are free, 40 on each
    assert (waits.grant, [engine.claims for engine in pool.engines()]) == (None, [1, 0])
    clock.us += 2_000_000
    assert blocked_s(pool) == 2.0
    other = await pool.enter(ask(tokens=10))
    assert other.grant is not None
    clock.us += 1_000_000
    assert blocked_s(pool) == 3.0
    held[0].settle()
    assert waits.grant is not None
    clock.us += 9_000_000
    assert blocked_s(pool) == 3.0
    assert (waits.grant.engine, waits.grant.placed is not None and waits.grant.placed.claimed_us) == ("a#1", 3_000_000)


async def test_a_request_that_does_not_fit_the_pool_is_not_counted_and_one_that_leaves_no_more() -> None:
    clock = Clock()
    pool = fleet(A, B, clock=clock)
    [await pool.enter(ask(tokens=60)) for _ in range(2)]
    too_large = await pool.enter(ask(tokens=90))
    clock.us += 1_000_000
    assert blocked_s(pool) == 0.0
    too_large.leave()
    fitting = await pool.enter(ask(tokens=70))
    clock.us += 1_000_000
    fitting.leave()
    clock.us += 1_000_000
    assert blocked_s(pool) == 1.0


async def test_it_is_counted_too_where_no_engine_has_any_room() -> None:
    clock = Clock()
    tokens, requests = A._replace(requests=10, prefill=UNLIMITED), B._replace(requests=2, prefill=UNLIMITED)
    pool = fleet(tokens, requests, clock=clock)
    full = await pool.enter(ask(tokens=100, barred=("b",)))
    [await pool.enter(ask(tokens=10, barred=("a",))) for _ in range(2)]
    waits = await pool.enter(ask(tokens=50))
    clock.us += 4_000_000
    assert (waits.grant, blocked_s(pool)) == (None, 4.0)
    full.settle()
    clock.us += 1_000_000
    assert (waits.grant is not None, blocked_s(pool)) == (True, 4.0)
