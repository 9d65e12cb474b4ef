"""The sentence that says why a request waits counts what the pool bounds."""

from __future__ import annotations

import pytest

from sidecar.events import Obstacle
from sidecar.pools import LocalPool
from tests.pools.harness import Clock, ask, simple

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("tokens", "requests", "said"),
    [
        (None, 3, "the pool has no room: 2 of 3 requests are held, and it asks for 2"),
        (
            100,
            3,
            "the pool has no room: 60 of 100 tokens and 2 of 3 requests are held, and it asks for 30 and 2 requests",
        ),
        (80, None, "the pool has no room: 60 of 80 tokens are held, and it asks for 30"),
    ],
)
async def test_a_pool_without_room_says_what_it_counts(tokens: int | None, requests: int | None, said: str) -> None:
    pool = LocalPool(simple(tokens=tokens, requests=requests), Clock())
    await pool.enter(ask(tokens=60, requests=2))
    waiting = ask(tokens=30, requests=2)
    assert (await pool.enter(waiting)).grant is None
    assert pool.obstacle(waiting) == (Obstacle.NO_ROOM, said)
