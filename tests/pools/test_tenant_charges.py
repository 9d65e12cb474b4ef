"""Leases that use more than their tenants were charged for: who comes next, in every pool, and what it costs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sidecar.policy.cost import RequestCost, TokenCost
from sidecar.pools import Ask, Lease, Pool
from tests.pools.harness import Clock, Harness, ask, simple
from tests.pools.load import beat
from tests.pools.scripted_link import Replicas

pytestmark = pytest.mark.anyio


async def opened(harness: Harness) -> Pool:
    return await harness.pool(simple(tokens=100), Clock())


async def order_of(harness: Harness, pool: Pool, waiting: dict[str, Lease], running: Lease) -> list[str]:
    """The names in the order in which they run, one at a time."""
    order = []
    while waiting:
        running.settle()
        await harness.quiet(pool)
        (name,) = [name for name, lease in waiting.items() if lease.grant is not None]
        order.append(name)
        running = waiting.pop(name)
    running.settle()
    await harness.quiet(pool)
    return order


async def entered(harness: Harness, pool: Pool, *names: str) -> dict[str, Lease]:
    """Requests, each of the tenant that its name begins with, and each as large as the pool."""
    leases = {}
    for name in names:
        leases[name] = await pool.enter(ask(tokens=100, tenant=name[0]))
        await harness.quiet(pool)
    return leases


@pytest.mark.parametrize(("tokens", "order"), [(0, ["b1", "a1", "b2"]), (250, ["b1", "b2", "a1"])])
async def test_a_charge_sends_the_next_admission_to_the_other_tenant(
    harness: Harness, tokens: int, order: list[str]
) -> None:
    pool = await opened(harness)
    running = (await entered(harness, pool, "a"))["a"]
    waiting = await entered(harness, pool, "b1")
    running.charge_tenant(tokens)
    await harness.quiet(pool)
    waiting |= await entered(harness, pool, "a1", "b2")
    assert await order_of(harness, pool, waiting, running) == order


async def test_only_a_lease_that_runs_charges_and_only_where_others_wait(harness: Harness) -> None:
    pool = await opened(harness)
    running = (await entered(harness, pool, "a"))["a"]
    running.charge_tenant(10_000)  # no one waits: the tags start afresh
    await harness.quiet(pool)
    waiting = await entered(harness, pool, "b1", "a1", "b2")
    waiting["a1"].charge_tenant(10_000)  # it does not run
    running.charge_tenant(0)
    running.charge_tenant(-5)
    over = running
    order = await order_of(harness, pool, waiting, running)
    over.charge_tenant(10_000)
    assert order == ["b1", "a1", "b2"]


async def test_charges_travel_together_and_a_lost_store_hears_of_them_once_it_is_back() -> None:
    all_of_them = await Replicas(simple(tokens=100)).joined()
    (pool, _), link = all_of_them.pools, all_of_them.links[0]
    running = await pool.enter(ask(tokens=100, tenant="a"))
    await pool.enter(ask(tokens=100, tenant="b"))
    await all_of_them.quiet()
    calls = len(link.calls)
    for _ in range(1000):
        running.charge_tenant(3)
    await all_of_them.quiet()
    assert len(link.calls) == calls
    all_of_them.clock.advance(0.02)
    await all_of_them.quiet()
    assert len(link.calls) == calls + 1
    assert sum(it.tokens for it in link.calls[-1].charges) == 3000
    all_of_them.cut()
    running.charge_tenant(70)
    await all_of_them.pass_s(5)
    all_of_them.cut(is_cut=False)
    beat(pool)
    await all_of_them.pass_s(5)
    told = [sum(it.tokens for it in call.charges) for call in link.calls if call.kind == "state"]
    assert told[-1] == 70
    assert pool._member.due_us() is not None


# -- weights


DEAR = TokenCost(1000, 1000, 4000)


def costing(tenant: str, tokens: int = 100, prompt: int = 0, weights: TokenCost = DEAR) -> Ask:
    return msgspec.structs.replace(ask(tokens=tokens, tenant=tenant), cost=RequestCost(weights, prompt))


async def entered_at_cost(harness: Harness, pool: Pool, *names: str, **more: Any) -> dict[str, Lease]:
    """Requests of `a` have a cost; those of others count as they are."""
    leases = {}
    for name in names:
        leases[name] = await pool.enter(costing(name[0], **more) if name[0] == "a" else ask(tokens=100, tenant=name[0]))
        await harness.quiet(pool)
    return leases


@pytest.mark.parametrize(
    ("used", "order"),
    [
        (None, ["b1", "b2", "b3", "b4", "a2", "b5"]),  # not known: the estimate of 400 stands
        (100, ["b1", "a2", "b2", "b3", "b4", "b5"]),
        (0, ["b1", "a2", "b2", "b3", "b4", "b5"]),
        (2**50, ["b1", "b2", "b3", "b4", "a2", "b5"]),  # no lease uses more than it may at its dearest: 400
    ],
)
async def test_a_lease_is_charged_for_what_it_used_when_it_ends(
    harness: Harness, used: int | None, order: list[str]
) -> None:
    pool = await opened(harness)
    running = (await entered(harness, pool, "x"))["x"]
    waiting = await entered_at_cost(harness, pool, "a1", "b1", "a2", "b2", "b3", "b4", "b5")
    running.settle()
    await harness.quiet(pool)
    running = waiting.pop("a1")
    assert running.grant is not None
    running.settle(used)
    await harness.quiet(pool)
    (first,) = [name for name, lease in waiting.items() if lease.grant is not None]
    assert [first, *await order_of(harness, pool, waiting, waiting.pop(first))] == order


async def test_what_was_never_charged_is_not_given_back(harness: Harness) -> None:
    """The first two enter while no one waits."""
    pool = await harness.pool(simple(tokens=200), Clock())
    (uncharged, other) = (await entered_at_cost(harness, pool, "a0", "x")).values()
    waiting = await entered_at_cost(harness, pool, "a1", "b1", "a2", "b2", "b3")
    other.settle()
    await harness.quiet(pool)
    charged = waiting.pop("a1")
    assert charged.grant is not None
    uncharged.settle(1)
    await harness.quiet(pool)
    assert waiting.pop("b1").grant is not None
    assert await order_of(harness, pool, waiting, charged) == ["b2", "b3", "a2"]


async def test_tokens_that_cost_nothing_take_turns(harness: Harness) -> None:
    pool = await opened(harness)
    running = (await entered(harness, pool, "x"))["x"]
    names = "a1", "a2", "a3", "b1"
    waiting = await entered_at_cost(harness, pool, *names, weights=TokenCost(0, 0, 0))
    assert await order_of(harness, pool, waiting, running) == ["a1", "b1", "a2", "a3"]
