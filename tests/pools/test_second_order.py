"""A second order of tickets, in Python and in Lua: order.py and ordering.lua are replaced, and both agree.

The calls of the script that do without functions know the order by level alone, so another order leaves them out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from importlib.resources import files
from typing import Any

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.policy.model import Policy
from sidecar.policy.rules import Shares, pool_rules
from sidecar.pools.redis import protocol
from sidecar.pools.redis.script import joined
from sidecar.scheduling import Scheduler, Ticket
from sidecar.scheduling.order import Candidate, LevelOrder
from sidecar.scheduling.tier import TierState
from tests.pools import scripted
from tests.pools.redis_harness import CLOCK_KEY, CLOCK_LINE
from tests.pools.test_differential import (
    FEW,
    OPERATIONS,
    PREEMPTING_OPERATIONS,
    compare,
    policy_of,
    pools,
    preempting_pools,
)
from tests.support.examples import examples
from tests.support.redis_servers import RedisServer

CLOCK = f"local function clock_us() return tonumber(redis.call('GET', '{CLOCK_KEY}')) end"
ORDERING = files(protocol.__package__) / "lua" / "ordering.lua"


class ShortestFirst(LevelOrder):
    """In each class the smallest ticket comes first, whatever its level. The engine receives another level."""

    def candidate(self, tier: TierState, ticket: Ticket, now_us: int) -> Candidate:
        levels = {"headroom_level": ticket.tier, "yields_to": 0, "engine_level": ticket.tokens % 3}
        return super().candidate(tier, ticket, now_us)._replace(precedence=ticket.tokens, **levels)

    def changes_us(self, heads: Iterable[Ticket], now_us: int) -> Iterator[int]:
        return iter(())


SHORTEST_FIRST = """
local by_level = pool.candidate
function pool.candidate(level, ticket)
  local found = by_level(level, ticket)
  found.precedence, found.headroom_level, found.yields_to = ticket.tokens, level, 0
  found.engine_level = ticket.tokens % 3
  return found
end

function pool.next_rise(soonest) return soonest end
"""


def replace_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_order_type", ShortestFirst)


def replace_lua(monkeypatch: pytest.MonkeyPatch) -> None:
    source = joined({"ordering.lua": ORDERING.read_text() + SHORTEST_FIRST, "plain_calls.lua": "local is_plain"})
    monkeypatch.setattr(scripted, "CLOCKED_SOURCE", source.replace(CLOCK_LINE, CLOCK))


@pytest.fixture
def shortest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_python(monkeypatch)
    replace_lua(monkeypatch)


def two_sizes() -> Scheduler:
    scheduler = Scheduler(pool_rules(tokens=40, requests=None, tiers=(Shares("first"), Shares("second"))))
    scheduler.submit("running", tier=0, tokens=40, now_us=0)
    scheduler.dispatch(0)
    scheduler.submit("large", tier=0, tokens=40, now_us=1)
    scheduler.submit("small", tier=1, tokens=5, now_us=2)
    scheduler.settle("running", 3)
    return scheduler


def test_the_level_order_admits_the_more_important_ticket_first():
    (admission,) = two_sizes().dispatch(3)
    assert (admission.ticket.id, admission.level) == ("large", 0)


def test_another_order_admits_another_ticket_first_and_gives_the_engine_another_level(shortest_first):
    (admission,) = two_sizes().dispatch(3)
    assert (admission.ticket.id, admission.level) == ("small", 2)


@pytest.mark.long
@given(policy=pools(), program=OPERATIONS, batch=st.sampled_from([1, 4, 16]))
@settings(FEW, max_examples=examples(4))
def test_a_real_server_orders_as_one_process_does(
    shortest_first, redis_server: RedisServer, policy: Policy, program: Any, batch: int
):
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        client.flushall()
        asyncio.run(compare(client, policy, program, batch))


@pytest.mark.long
@given(policy=preempting_pools(), program=PREEMPTING_OPERATIONS)
@settings(FEW, max_examples=examples(2))
def test_a_real_server_preempts_in_that_order_as_one_process_does(
    shortest_first, redis_server: RedisServer, policy: Policy, program: Any
):
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        client.flushall()
        asyncio.run(compare(client, policy, program, 1))


@pytest.mark.parametrize("replace_one", [replace_python, replace_lua])
def test_an_order_that_only_one_of_them_follows_is_noticed(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, replace_one
):
    """The negative control."""
    replace_one(monkeypatch)
    policy = policy_of(pool_rules(tokens=40, requests=None, tiers=(Shares("first"), Shares("second"))))
    program = [("enter", 0, "a", 40, 1), ("enter", 0, "a", 30, 1), ("enter", 1, "a", 5, 1), ("end", 0)]
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        client.flushall()
        with pytest.raises(AssertionError):
            asyncio.run(compare(client, policy, program, 1))
