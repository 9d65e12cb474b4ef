"""The sentence that says why a request waits counts what the pool bounds."""

from __future__ import annotations

from fractions import Fraction

import pytest

from sidecar.events import Obstacle
from sidecar.policy.rules import Shares, pool_rules
from sidecar.pools import Pool
from tests.pools.harness import Clock, ask, policy_of, simple

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("tokens", "requests", "asked", "said"),
    [
        (None, 3, 2, "2 of 3 requests are held, and it asks for 2 requests"),
        (100, 3, 2, "2 of 3 requests are held, and it asks for 2 requests"),
        (80, 3, 2, "60 of 80 tokens and 2 of 3 requests are held, and it asks for 30 tokens and 2 requests"),
        (80, 9, 2, "60 of 80 tokens are held, and it asks for 30 tokens"),
        (80, None, 2, "60 of 80 tokens are held, and it asks for 30 tokens"),
        (1000, 1, 1, "1 of 1 requests are held, and it asks for 1 request"),
    ],
)
async def test_a_pool_without_room_says_what_it_counts(
    tokens: int | None, requests: int | None, asked: int, said: str
) -> None:
    pool = Pool(simple(tokens=tokens, requests=requests), Clock())
    await pool.enter(ask(tokens=60, requests=asked))
    waiting = ask(tokens=30, requests=asked)
    assert (await pool.enter(waiting)).grant is None
    assert pool.obstacle(waiting) == (Obstacle.NO_ROOM, f"the pool has no room: {said}")


async def test_a_tier_at_its_limit_says_which_one() -> None:
    tiers = (Shares("high", Fraction(0)), Shares("low", Fraction(0), limit=Fraction(1, 5)))
    pool = Pool(policy_of(pool_rules(tokens=1000, requests=10, tiers=tiers)), Clock())
    for _ in range(3):
        await pool.enter(ask(tier=1, tokens=5))
    obstacle, said = pool.obstacle(ask(tier=1, tokens=5))
    assert (obstacle, said) == (
        Obstacle.LIMIT,
        "tier low is at its limit: it holds 2 of 2 requests, and it asks for 1 request",
    )
