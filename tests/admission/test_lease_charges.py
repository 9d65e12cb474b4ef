"""Leases that grow pay for it: a tenant of many short answers and a few very long ones gets its share, and no more."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass

import pytest

from sidecar.apis import Api
from sidecar.lengths.estimator import LengthEstimator
from sidecar.lengths.lease_size import Expected, LeaseSize, LeaseSizes
from sidecar.payload.decode import decode
from sidecar.policy.model import Learn
from sidecar.policy.rules import Shares, pool_rules
from sidecar.pools import Pool
from sidecar.pools.base import Ask, Lease
from tests.admission.test_lease_size import Stream
from tests.pools.harness import policy_of

pytestmark = pytest.mark.anyio

PROMPT, MOST, STEP = 20, 8192, 64
BODY = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": MOST}).encode()


@dataclass
class Running:
    lease: Lease
    size: LeaseSize
    expected: Expected
    length: int
    chunks: int = 0
    output_tokens: int | None = None
    large_tokens: int = 0
    later_chunks: int = 0
    later_tokens: int | None = None


class World:
    """One pool that is always full, two tenants of equal weight that always wait, and their real lengths."""

    def __init__(self, learn: Learn) -> None:
        self.pool = Pool(policy_of(pool_rules(tokens=60_000, requests=None, tiers=(Shares("normal"),))))
        self.sizes = LeaseSizes(learn, self.pool.now_us, LengthEstimator())
        self.payload = decode(Api.CHAT, BODY)
        self.rng = random.Random(7)
        self.waiting: dict[str, list[tuple[Lease, Expected]]] = {"steady": [], "bursty": []}
        self.running: list[Running] = []
        self.used: Counter[str] = Counter()

    def length(self, tenant: str) -> int:
        if tenant == "steady":
            return self.rng.randint(200, 400)
        return 6000 if self.rng.random() < 0.04 else self.rng.randint(8, 16)

    def expect(self, tenant: str) -> Expected:
        expected = self.sizes.expect(tenant, "/v1/chat", self.payload, PROMPT, PROMPT + MOST, MOST, MOST, 60_000)
        assert expected is not None
        return expected

    async def step(self) -> None:
        """Every running answer gets 64 tokens more."""
        for _ in range(20):
            await asyncio.sleep(0)
        for tenant, queue in self.waiting.items():
            while sum(lease.grant is None for lease, _ in queue) < 120:
                expected = self.expect(tenant)
                queue.append((await self.pool.enter(Ask(0, tenant, 1, expected.tokens, 1, most=MOST)), expected))
            for lease, expected in [one for one in queue if one[0].grant is not None]:
                queue.remove((lease, expected))
                answer = Running(lease, None, expected, self.length(tenant))  # type: ignore[arg-type]
                answer.size = self.sizes.begin(expected, lease, answer, streams=True)
                self.running.append(answer)
        for answer in list(self.running):
            before = answer.chunks
            answer.chunks = min(answer.length, answer.chunks + STEP)
            self.used[answer.expected.place.tenant] += answer.chunks - before
            if answer.chunks == answer.length:
                answer.output_tokens = answer.length
                self.used[answer.expected.place.tenant] += PROMPT
                self.sizes.learn(answer.expected, answer, is_complete=True)
                answer.size.ended(PROMPT + answer.length)
                answer.lease.settle(PROMPT + answer.length)
                self.running.remove(answer)
            elif answer.chunks >= answer.size.next_look:
                answer.size.look()


async def share_of_bursty(learn: Learn) -> float:
    world = World(learn)
    for _ in range(300):
        await world.step()
    world.used.clear()
    for _ in range(700):
        await world.step()
    return world.used["bursty"] / world.used.total()


@pytest.mark.parametrize("learn", [Learn.CAUTIOUS, pytest.param(Learn.FULL, marks=pytest.mark.long)])
async def test_a_tenant_whose_few_answers_are_very_long_gets_half_of_two_tenants(learn: Learn) -> None:
    assert 0.42 <= await share_of_bursty(learn) <= 0.56


async def test_without_the_charge_it_would_get_far_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lease, "charge_tenant", lambda self, tokens: None)
    assert await share_of_bursty(Learn.CAUTIOUS) > 0.65


@pytest.mark.parametrize("said", [10**400, 2**63, -5], ids=["huge", "large", "negative"])
async def test_an_engine_that_says_an_absurd_number_costs_no_more_than_the_request_may_use(said: int) -> None:
    world = World(Learn.CAUTIOUS)
    for _ in range(60):
        world.sizes.learn(world.expect("steady"), Stream(chunks=40, output_tokens=40), is_complete=True)
    expected = world.expect("steady")
    assert expected.tokens < 100
    running = await world.pool.enter(Ask(0, "steady", 1, expected.tokens, 1, most=60_000))
    await world.pool.enter(Ask(0, "bursty", 1, 60_000, 1))
    answer = Running(running, None, expected, 1)  # type: ignore[arg-type]
    size = world.sizes.begin(expected, running, answer, streams=False)
    assert size is not None
    size.ended(said)
    assert running.paid_tokens == (PROMPT + MOST if said > 0 else expected.tokens)
