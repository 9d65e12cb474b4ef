"""Tenants' limits in the pool of one process and in the script: the same operations, the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sidecar.pools.local import LocalPool
from sidecar.pools.redis.pool import _remaining

from sidecar.errors import QueueFull, RemainingLimits, TenantLimit
from sidecar.policy.model import Limits, Policy
from sidecar.pools import Ask
from sidecar.pools.base import Lease
from sidecar.pools.limits import downgraded, tenant_limit
from sidecar.pools.redis import protocol
from tests.pools import scripted
from tests.pools.harness import Clock, allow_any_size, simple
from tests.pools.scripted import Scripted
from tests.support.examples import examples
from tests.support.redis_servers import RedisServer

FEW = settings(
    max_examples=examples(8),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a shorter example would take minutes to find
)
LIMITS = st.builds(
    Limits,
    requests_per_minute=st.sampled_from([None, 1, 60, 600]),
    tokens_per_minute=st.sampled_from([None, 7, 600, 6000, 100_000_000]),
    concurrent_requests=st.sampled_from([None, 1, 3]),
    burst_us=st.sampled_from([1_000_000, 10_000_000, 60_000_000]),
)
OPERATIONS = st.lists(
    st.one_of(
        *[st.tuples(st.just("enter"), st.sampled_from("aab"), st.integers(1, 120), st.integers(0, 3))] * 2,
        st.tuples(st.just("end"), st.integers(0, 30), st.sampled_from([None, 0, 1, 10, 50, 200])),
        st.tuples(st.just("pass"), st.sampled_from([0, 1, 999, 100_000, 1_000_000, 15_000_000, 61_000_000])),
        st.tuples(st.just("change"), st.sampled_from("ab"), LIMITS),
    ),
    min_size=40,
    max_size=120,
)
Answer = tuple[Any, ...]
MOSTS = (2, 0, 1, 5)
"""The most that a request may use, as a multiple of what it holds; 0: it says none."""


@dataclass
class Local:
    """The pool of one process."""

    pool: LocalPool
    leases: dict[int, Lease] = field(default_factory=dict)

    async def enter(self, ticket: int, ask: Ask) -> Answer:
        try:
            lease = self.leases[ticket] = await self.pool.enter(ask)
        except QueueFull:
            return ("full",)
        except TenantLimit as error:
            return ("over", error.message, error.retry_after_s, error.allowance)
        return ("in", lease.tier, lease.allowance)

    async def end(self, ticket: int, used: int | None) -> None:
        lease = self.leases.pop(ticket)
        if not lease.settle(used):
            await lease.leave()

    def held(self) -> set[int]:
        return {ticket for ticket, lease in self.leases.items() if lease.grant is not None}


class Lua:
    """The script, asked by one replica."""

    def __init__(self, client: Any, policy: Policy, clock: Clock, sizes: Any) -> None:
        self.replica = Scripted(client, clock, policy)
        self.replica.sync()
        self._sizes = sizes
        self._asks: dict[int, Ask] = {}
        self._held: set[int] = set()

    def enter(self, ticket: int, ask: Ask) -> Answer:
        lower = downgraded(ask, self._sizes) if ask.limits else None
        self._asks[ticket] = ask
        reply = self._call(protocol.enter(ticket, ask, None if lower is None else lower.tier))
        if ticket in reply.refused:
            return ("full",)
        if ask.limits is None:
            return ("in", ask.tier, None)
        (verdict,) = reply.verdicts
        limits = ask.limits
        allowance = RemainingLimits(
            _remaining(limits.requests_per_minute, verdict.requests),
            _remaining(limits.tokens_per_minute, verdict.tokens),
            verdict.is_downgraded,
        )
        if verdict.over is not None:
            error = tenant_limit(ask, verdict.over, allowance)
            return ("over", error.message, error.retry_after_s, error.allowance)
        return ("in", verdict.level, allowance)

    def end(self, ticket: int, used: int | None) -> None:
        self._call(protocol.end(ticket, self._asks[ticket], used))
        self._held.discard(ticket)

    def held(self) -> set[int]:
        return self._held

    def _call(self, arguments: Any) -> protocol.Reply:
        reply = self.replica.call(*arguments)
        self._held |= {ticket for ticket, _ in reply.grants}
        return reply


def operations_of(
    program: list[tuple[Any, ...]], limits: dict[str, Limits], mosts: tuple[int, ...]
) -> Iterator[tuple[Any, ...]]:
    """Entries with their asks; which of those that are in ends is the player's to tell."""
    tickets = 0
    for operation in program:
        match operation:
            case ("enter", tenant, tokens, kind):
                tickets += 1
                downgrade = 1 if kind == 1 else None
                metered = limits[tenant] if kind != 3 and limits[tenant].are_counted else None
                most = mosts[tickets % len(mosts)] * tokens
                yield "enter", tickets, Ask(0, tenant, 1, tokens, 1, limits=metered, downgrade=downgrade, most=most)
            case ("change", tenant, changed):
                limits[tenant] = changed
            case _:
                yield operation


async def compare(
    client: Any,
    policy: Policy,
    program: list[tuple[Any, ...]],
    limits: dict[str, Limits],
    mosts: tuple[int, ...] = MOSTS,
) -> None:
    clock = Clock()
    pool = LocalPool(policy, clock)
    allow_any_size(pool._sizes)  # a replica refuses what is too large before it asks for anything: not the matter here
    local, lua = Local(pool), Lua(client, policy, clock, pool._sizes)
    open_tickets: list[int] = []
    for operation in operations_of(program, limits, mosts):
        match operation:
            case ("enter", ticket, ask):
                expected = await local.enter(ticket, ask)
                assert expected == lua.enter(ticket, ask), operation
                if expected[0] == "in":
                    open_tickets.append(ticket)
            case ("end", index, used) if open_tickets:
                ticket = open_tickets.pop(index % len(open_tickets))
                await local.end(ticket, used)
                lua.end(ticket, used)
            case ("pass", us):
                clock.us += us
        assert local.held() == lua.held(), operation
    await pool.close()


PROGRAMS = {
    "program": OPERATIONS,
    "first": LIMITS,
    "second": LIMITS,
    "size": st.sampled_from([(100_000, None), (300, None), (300, 2), (300, 0)]),
}


def play(client: Any, program: Any, first: Limits, second: Limits, size: tuple[int, int | None]) -> None:
    policy = simple(tokens=size[0], max_waiting=size[1])
    asyncio.run(compare(client, policy, program, {"a": first, "b": second}))


@pytest.mark.long
@given(**PROGRAMS)
@FEW
def test_a_real_server_limits_as_one_process_does(
    redis_server: RedisServer, program: Any, first: Limits, second: Limits, size: tuple[int, int | None]
) -> None:
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        client.flushall()
        play(client, program, first, second, size)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("if refund > 0 then", "if refund > 1e18 then"),
        ("charged = charged or tokens", "charged = tokens"),
        ("if charge then pool.undo(account, charged) end", ""),
        (
            "math.max(UNIT, account.rpm * burst), account.requests, UNIT)",
            "account.rpm * burst, account.requests, UNIT)",
        ),
    ],
)
def test_another_law_is_noticed(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str
) -> None:
    """The negative control."""
    assert right in scripted.CLOCKED_SOURCE
    limits = Limits(requests_per_minute=1, tokens_per_minute=600, burst_us=10_000_000)
    program: list[tuple[Any, ...]] = [
        ("enter", "b", 90, 3),  # without limits: fills the pool
        ("enter", "a", 80, 0),  # charged, and refused by the queue
        ("end", 0, 0),
        ("enter", "a", 80, 0),
        ("end", 0, 0),
        ("pass", 61_000_000),
        ("enter", "a", 90, 0),
        ("end", 0, 10),
        ("enter", "a", 1, 0),  # which heard what came back
    ]
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:

        def play_both() -> None:
            for mosts in (MOSTS, (0,)):
                client.flushall()
                own = {"a": limits, "b": Limits()}
                asyncio.run(compare(client, simple(tokens=100, max_waiting=0), program, own, mosts))

        play_both()
        monkeypatch.setattr(scripted, "CLOCKED_SOURCE", scripted.CLOCKED_SOURCE.replace(right, wrong))
        with pytest.raises(AssertionError):
            play_both()
