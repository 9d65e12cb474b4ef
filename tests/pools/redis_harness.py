"""What the contract suite needs of a pool in Redis: servers, and time that only the test moves."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from sidecar.policy.model import Policy
from sidecar.policy.store import store_address
from sidecar.pools import Pool
from sidecar.pools.redis import RedisPool
from sidecar.pools.redis.connection import ANSWER_WITHIN_S, StoreConnection, connector
from sidecar.pools.redis.protocol import Argument, root_key
from sidecar.pools.redis.script import joined, source
from sidecar.pools.redis.wire import Answered, Wire
from tests.pools.harness import Clock
from tests.support.redis_servers import RedisServer

CLOCK_LINE = "local function clock_us() local time = redis.call('TIME') return time[1] * 1000000 + time[2] end"
CLOCK_KEY = "the-tests-clock"
CLOCK = f"local function clock_us() return tonumber(redis.call('GET', '{CLOCK_KEY}')) end"


def clocked(script: str) -> str:
    """A script with the time of a test."""
    assert CLOCK_LINE in script
    return script.replace(CLOCK_LINE, CLOCK)


ADMITTED_LINE = re.compile(r"^local ADMIT_US = \d+ ", re.MULTILINE)


def undivided(script: str) -> str:
    """A script that admits all that it may in one call, so that each call compares with one decision of a scheduler.

    `test_long_queues` has the tests of the bound.
    """
    assert ADMITTED_LINE.search(script)
    return ADMITTED_LINE.sub("local ADMIT_US = 1000000000 ", script)


CLOCKED_SOURCE, CLOCKED_GAIN_SOURCE = (undivided(clocked(joined(is_by_gain=by_gain))) for by_gain in (False, True))

_pools = count(1)


class Observed(StoreConnection):
    """A connection of which a test knows whether a call is on its way. With a clock, it sets the script's time.

    That is another command on the same connection: so then the client reads all answers, and there is no `send`.
    """

    def __init__(self, client: Any, policy: Policy, clock: Clock | None) -> None:
        is_by_gain = policy.rules.is_by_gain
        script = source(is_by_gain=is_by_gain)
        super().__init__(
            client, root_key(policy.pool, is_by_gain=is_by_gain), script if clock is None else clocked(script)
        )
        self._clock = clock
        self.begun = 0
        self.answered = 0

    async def call(self, arguments: Sequence[Argument], within_s: float = ANSWER_WITHIN_S) -> Any:
        self.begun += 1
        if self._clock is not None:
            await self._client.execute_command("SET", CLOCK_KEY, self._clock.us)
        answer = await super().call(arguments, within_s)
        self.answered += 1
        return answer

    def send(self, arguments: Sequence[Argument], answered: Answered) -> None:
        self.begun += 1

        def came(answer: Any) -> None:
            self.answered += 1
            answered(answer)

        super().send(arguments, came)

    def _opened_wire(self) -> Wire | None:
        return super()._opened_wire() if self._clock is None else None


@dataclass
class Opened:
    """A pool, and its latest connection."""

    pool: RedisPool
    connection: Observed | None = None


class SharedHarness:
    """Pools in some Redis. Pools of one harness and one policy name share what they hold."""

    def __init__(self) -> None:
        self.name = f"test-{next(_pools)}"
        self._opened: dict[int, Opened] = {}

    async def client(self) -> Any:
        """A client, connected."""
        raise NotImplementedError

    async def pool(self, policy: Policy, clock: Clock | None = None) -> RedisPool:
        policy = replace(policy, pool=self.name)
        opened: list[Opened] = []

        async def connect() -> StoreConnection:
            connection = Observed(await self.client(), policy, clock)
            if opened[0].connection is None or opened[0].connection.is_closed:  # else it is for reports
                opened[0].connection = connection
            return connection

        pool = RedisPool(policy, connect) if clock is None else RedisPool(policy, connect, clock)
        opened.append(Opened(pool))
        self._opened[id(pool)] = opened[0]
        await pool.open()
        for _ in range(1_000):  # a busy machine may greet too late the first time
            if not pool.readiness():
                break
            await asyncio.sleep(0.01)
        return pool

    async def quiet(self, pool: Pool) -> None:
        await self.poke(pool)

    async def poke(self, pool: Pool) -> None:
        """Waits for the answer of a call that begins after all that was asked so far."""
        opened = self._opened[id(pool)]
        assert opened.connection is not None
        begun = opened.connection.begun
        opened.pool._batches.wake()
        end_s = time.monotonic() + 60
        while opened.connection.answered <= begun or opened.connection.answered != opened.connection.begun:
            assert time.monotonic() < end_s
            await asyncio.sleep(0)
        await asyncio.sleep(0.001)  # the requests that were answered, and what was published meanwhile

    async def close(self) -> None:
        for opened in self._opened.values():
            await opened.pool.close()


class RedisHarness(SharedHarness):
    """A real server."""

    def __init__(self, server: RedisServer) -> None:
        super().__init__()
        self.server = server

    async def client(self) -> Any:
        connection = await connector(store_address(self.server.url), self.name)()
        return connection._client
