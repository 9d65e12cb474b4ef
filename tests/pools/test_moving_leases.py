"""Leases that change their size while they run, in every pool: who gets in, and what is held."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sidecar.errors import RequestTooLarge, TenantLimit
from sidecar.policy.rules import Shares, pool_rules
from sidecar.policy.tenant import Account, Limits
from sidecar.pools import Ask, Lease, Pool
from sidecar.pools.member import Member
from tests.pools.conftest import in_both_orders
from tests.pools.harness import Clock, Harness, LocalHarness, ask, change_rules, policy_of, simple
from tests.scheduling import reference

pytestmark = pytest.mark.anyio
CAPACITY = 100


def held(pool: Pool) -> int:
    tiers: Any = pool.state()["tiers"]
    return sum(tier["held"]["tokens"] for tier in tiers)


def is_held(lease: Lease) -> bool:
    return lease.grant is not None


# -- who gets in


async def test_a_smaller_lease_lets_others_in_and_growth_is_never_refused(harness: Harness) -> None:
    pool = await harness.pool(simple(tokens=CAPACITY), Clock())
    running = await pool.enter(ask(tokens=80))
    first, second = await pool.enter(ask(tokens=30)), await pool.enter(ask(tokens=30))
    assert (first.grant, second.grant) == (None, None)
    assert running.resize(70)
    await harness.quiet(pool)
    assert (first.grant is not None, second.grant) == (True, None)
    assert running.resize(500)
    await harness.quiet(pool)
    assert held(pool) == 530
    first.settle()
    await harness.quiet(pool)
    assert not is_held(second), "the leases hold more than the pool"
    assert running.resize(71)
    await harness.quiet(pool)
    assert not is_held(second)
    assert running.resize(70)
    await harness.quiet(pool)
    assert is_held(second)
    assert [running.settle(), running.resize(1), held(pool) > 0] == [True, False, True]
    with pytest.raises(ValueError, match="at least 1 token, not 0"):
        second.resize(0)


async def test_a_lease_that_is_handed_back_asks_for_what_it_held_last(harness: Harness) -> None:
    pool = await harness.pool(simple(tokens=CAPACITY), Clock())
    blocker, lease = await pool.enter(ask(tokens=60)), await pool.enter(ask(tokens=40, tier=1))
    lease.resize(90)
    lease.resize(30)
    blocker.resize(75)
    lease.hand_back()
    await harness.quiet(pool)
    assert not is_held(lease), "30 do not fit beside 75"
    blocker.resize(70)
    await harness.quiet(pool)
    assert is_held(lease)
    assert held(pool) == 100


@in_both_orders
async def test_a_chosen_lease_that_shrinks_or_grows_waits_again_with_its_last_size(harness: Harness) -> None:
    tiers = (Shares("high", preempt_after_us=0), Shares("low", preemptible=True))
    policy = policy_of(pool_rules(tokens=CAPACITY, requests=None, tiers=tiers, max_preemptions=2))
    pool = await harness.pool(policy, Clock())
    low = await pool.enter(ask(tier=1, tokens=90))
    chosen: list[None] = []
    low.on_preempt = lambda: chosen.append(None)
    high = await pool.enter(ask(tokens=60))
    await harness.quiet(pool)
    assert (len(chosen), high.grant) == (1, None)
    low.resize(95)
    low.resize(50)
    low.requeue()
    await harness.quiet(pool)
    assert is_held(high)
    assert not is_held(low)
    high.resize(50)
    await harness.quiet(pool)
    assert is_held(low), "it holds 50 now"
    assert held(pool) == 100


# -- in any order


class Compared:
    """A pool beside the literal reference: what both decide after each step of a random program."""

    def __init__(self, pool: Pool, clock: Clock, harness: Harness, luck: random.Random) -> None:
        self.pool, self.clock, self.harness, self.luck, self.began_us = pool, clock, harness, luck, clock.us
        tiers = [{"name": "high", "preempt_after_s": 0.01}, {"name": "low", "preemptible": True}]
        self.judge = reference.new({"tiers": tiers, "capacity": {"tokens": CAPACITY}, "max_preemptions": 2})
        self.leases: dict[str, Lease] = {}
        self.asked: set[str] = set()

    def those(self, state: str) -> list[Any]:
        return [request for request in self.judge.all if request.state == state]

    async def step(self) -> None:
        self.clock.advance(0.001)
        now_us = self.clock.us - self.began_us
        verb = self.luck.choice(["enter", "enter", "resize", "resize", "end", "leave", "hand_back", "requeue"])
        if verb == "enter":
            await self.enter(now_us)
        else:
            self.change(verb, now_us)
        self.judge.dispatch(now_us)
        self.judge.preempt(now_us)
        await self.harness.poke(self.pool)
        await self.harness.quiet(self.pool)
        running = {request.id for request in self.those("running")}
        assert {name for name, it in self.leases.items() if it.grant is not None and not it.is_over} == running, verb
        assert {request.id for request in self.those("running") if request.chosen} == self.asked & running, verb
        assert held(self.pool) == sum(self.leases[name].ask.tokens for name in running)

    async def enter(self, now_us: int) -> None:
        name, tier = str(len(self.leases)), self.luck.randrange(2)
        tokens, tenant = self.luck.randint(1, CAPACITY), self.luck.choice("xyz")
        step = {"do": "submit", "id": name, "tier": ("high", "low")[tier], "tokens": tokens, "tenant": tenant}
        self.judge.do(step, now_us)
        lease = self.leases[name] = await self.pool.enter(ask(tier, tokens, tenant=tenant))
        lease.on_preempt = lambda: self.asked.add(name)

    def change(self, verb: str, now_us: int) -> None:
        found = self.those("waiting" if verb == "leave" else "running")
        if verb in ("hand_back", "requeue"):  # what has outgrown the pool is refused: it could never be admitted
            found = [it for it in found if it.tokens <= CAPACITY and (it.chosen or verb == "hand_back")]
        if not found:
            return
        request, step = self.luck.choice(found), dict[str, Any](do=verb)
        lease = self.leases[request.id]
        if verb == "resize":
            step["tokens"] = self.luck.randint(1, self.luck.choice([90, 3 * CAPACITY]))
            assert lease.resize(step["tokens"])
        elif verb == "end":
            step["do"] = "settle"
            assert lease.settle()
        elif verb == "leave":
            step["do"] = "cancel"
            lease.leave()
        else:
            self.asked.discard(request.id)
            lease.hand_back() if verb == "hand_back" else lease.requeue()
        self.judge.do({**step, "id": request.id}, now_us)


async def compare(harness: Harness, seed: int, steps: int = 60) -> None:
    clock = Clock()
    tiers = (Shares("high", preempt_after_us=10_000), Shares("low", preemptible=True))
    pool = await harness.pool(
        policy_of(pool_rules(tokens=CAPACITY, requests=None, tiers=tiers, max_preemptions=2)), clock
    )
    compared = Compared(pool, clock, harness, random.Random(seed))
    for _ in range(steps):
        await compared.step()
    for lease in compared.leases.values():
        if not lease.settle():
            lease.leave()
    await harness.quiet(pool)
    assert (pool.state()["leases"], pool.state()["waiting"], held(pool)) == (0, 0, 0)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 30))])
async def test_every_pool_decides_as_the_reference_whatever_leases_do(harness: Harness, seed: int) -> None:
    await compare(harness, seed)


async def test_a_pool_that_forgets_sizes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(Member, "resize", lambda *_: None)
    with pytest.raises(AssertionError):
        await compare(LocalHarness(), 0)


# -- the most that a request may use


async def test_the_size_limit_counts_the_most_and_room_what_is_held(harness: Harness) -> None:
    pool = await harness.pool(simple(tokens=100), Clock())
    leases = [await pool.enter(Ask(0, "t", 1, 25, 1, most=100)) for _ in range(5)]
    assert [lease.grant is not None for lease in leases] == [True, True, True, True, False]
    with pytest.raises(RequestTooLarge, match=r"would hold 101 tokens \(prompt and maximum output\)"):
        await pool.enter(Ask(0, "t", 1, 25, 1, most=101))
    with pytest.raises(RequestTooLarge, match="would hold 101 tokens"):
        await pool.enter(Ask(0, "t", 1, 101, 1, most=50))
    reported = leases[4].wait()
    change_rules(pool, simple(tokens=99).rules)
    with pytest.raises(RequestTooLarge, match="allows 99, the whole pool"):
        await reported


@pytest.mark.parametrize("used", [None, 30, 250])
async def test_a_tenant_is_charged_the_most_and_then_what_was_used(harness: Harness, used: int | None) -> None:
    limits = Limits(tokens_per_minute=600)

    def asks(most: int) -> Ask:
        return Ask(0, "t", 1, 20, 1, accounts=(Account("t", limits),), most=most)

    pool = await harness.pool(simple(tokens=100_000), Clock())
    lease = await pool.enter(asks(200))
    assert lease.allowance is not None
    assert lease.allowance.tokens is not None
    assert lease.allowance.tokens.left == 400
    with pytest.raises(TenantLimit, match=r"400 are left, and this request counts for 401 tokens \(prompt and"):
        await pool.enter(asks(401))
    lease.resize(35)
    lease.settle(used)
    await harness.quiet(pool)
    last = await pool.enter(asks(0))
    assert last.allowance is not None
    assert last.allowance.tokens is not None
    assert last.allowance.tokens.left == 600 - (200 if used is None else used) - 20
