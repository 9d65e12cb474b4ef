"""The capacity of an engine, as the size of its pool (`capacity: {from: engine}`).

The engine is read once a second (`engine_reader`). The pool's size is the policy's fraction of the engine's, and
follows its changes. A size that cannot be read any more is kept, with a warning. Before the first reading no request is
admitted.

While more requests wait inside the engine than the policy's `waiting`, the pool is held back: inside the engine no tier
has a reserve. Holding back ends by itself when the engine is not read any more, and one request at a time is admitted
all the same: a figure that stays the same cannot stop the pool for good.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sidecar.engines.pages import Pages
from sidecar.errors import CapacityUnknown
from sidecar.events import Obstacle
from sidecar.policy.model import Mode, Policy
from sidecar.policy.rules import EngineCapacity
from sidecar.pools.base import Ask, Lease, Pool
from sidecar.pools.engine_reader import READ_EVERY_S, EngineReader, Size, amounts, warn_of_unbounded
from sidecar.pools.stats import HELD_BACK

HELD_BACK_S = 3.0
"""How long a figure counts that is not read again: a few times as long as one reading may take."""

_log = logging.getLogger("sidecar.capacity")


class EngineSizedPool:
    """A pool around another one, which it opens as soon as the engine's size is known. See `Pool`.

    `read_every_s` is for tests.
    """

    def __init__(self, policy: Policy, pool: Pool, pages: Pages, read_every_s: float = READ_EVERY_S) -> None:
        assert policy.engine_capacity is not None
        self._policy = policy
        self._capacity: EngineCapacity = policy.engine_capacity
        self._pool = pool
        self._reader = EngineReader(
            policy.engine,
            self._capacity,
            pages,
            pool.now_us,
            resized=self._resized,
            was_read=self._hold_back_if_crowded,
            read_every_s=read_every_s,
        )
        self._size: Size | None = None
        self._is_following = self._reader.is_following
        self.now_us = pool.now_us
        self.retry_after_s = pool.retry_after_s
        self.mark = pool.mark
        self.use_of = pool.use_of
        self.allowance = pool.allowance
        self.standing = pool.standing
        self.most_tokens, self.most_requests = pool.most_tokens, pool.most_requests
        self.change_rules = pool.change_rules
        self.hold_back = pool.hold_back
        self.pause = pool.pause
        self.oldest = pool.oldest
        self.share = pool.share

    @property
    def on_unfinished(self) -> Callable[[int, int], None] | None:
        """See `EngineReader`."""
        return self._reader.on_unfinished

    @on_unfinished.setter
    def on_unfinished(self, called: Callable[[int, int], None] | None) -> None:
        """See `EngineReader`."""
        self._reader.on_unfinished = called

    @property
    def on_preemptions(self) -> Callable[[int, int], None] | None:
        """See `EngineReader`."""
        return self._reader.on_preemptions

    @on_preemptions.setter
    def on_preemptions(self, called: Callable[[int, int], None] | None) -> None:
        """See `EngineReader`."""
        self._reader.on_preemptions = called

    async def open(self) -> None:
        """See `Pool.open`. Returns when the engine was read, or could not be."""
        await self._reader.open()

    async def close(self) -> None:
        """See `Pool.close`."""
        await self._reader.close()
        await self._pool.close()

    async def enter(self, ask: Ask) -> Lease:
        """See `Pool.enter`. Raises CapacityUnknown, too."""
        if not self._is_following():
            await self.open()
        if self._size is None:
            raise CapacityUnknown(
                f"the engine has not reported its capacity yet ({self._reader.trouble}); try again", retry_after_s=1
            )
        return await self._pool.enter(ask)

    def change_policy(self, policy: Policy) -> None:
        """See `Pool.change_policy`. The size is what the engine last said, by the new fraction and figures."""
        assert policy.engine_capacity is not None
        self._policy, self._capacity = policy, policy.engine_capacity
        self._reader.change_capacity(self._capacity)
        self._size = self._reader.size
        if self._size is not None:  # else no request was admitted yet, and the first reading sizes the pool
            policy = replace(policy, rules=policy.rules_of(*self._size))
        self._pool.change_policy(policy)

    def state(self) -> Mapping[str, object]:
        """See `Pool.state`; `engine` has its latest figures."""
        reader, gauges = self._reader, self._reader.gauges
        engine = {
            "kv_tokens": gauges.kv_tokens,
            "max_running": gauges.max_running,
            "running": gauges.running,
            "waiting": gauges.waiting,
            "preemptions": gauges.preemptions,
            "read_s_ago": None if reader.age_s is None else round(reader.age_s, 3),
            "trouble": reader.trouble,
            "held_back": reader.is_held_back,
        }
        return {**self._pool.state(), "engine": engine}

    def readiness(self) -> Sequence[str]:
        """See `Pool.readiness`."""
        if self._size is None:
            return (f"the engine has not reported its capacity yet: {self._reader.trouble}",)
        return self._pool.readiness()

    def notices(self) -> Sequence[str]:
        """See `Pool.notices`."""
        found, reader = list(self._pool.notices()), self._reader
        if self._size is not None and reader.trouble is not None:
            found.append(
                f"the engine's capacity was read {reader.age_s or 0:.0f} s ago and cannot be now: {reader.trouble}; "
                f"going on with {amounts(self._size)}"
            )
        if reader.is_held_back:
            found.append(f"{reader.gauges.waiting} requests wait inside the engine, more than {self._capacity.waiting}")
        return found

    def obstacle(self, ask: Ask) -> tuple[Obstacle, str]:
        """See `Pool.obstacle`."""
        found = self._pool.obstacle(ask)
        return HELD_BACK if self._reader.is_held_back and found[0] is not Obstacle.ENGINE else found

    async def _resized(self, before: Size | None) -> None:
        self._size = size = self._reader.size
        assert size is not None
        self._pool.change_rules(self._policy.rules_of(*size))
        if before is None:
            known = "the engine's capacity is known, the pool has %s"
            _log.info(known, amounts(size), extra={"event": "capacity_known"})
            warn_of_unbounded(self._policy.engine, size)
            await self._pool.open()
        else:
            changed = "the engine's capacity changed, the pool has %s instead of %s"
            _log.warning(changed, amounts(size), amounts(before), extra={"event": "capacity_changed"})

    def _hold_back_if_crowded(self) -> None:
        """Holds the pool back while too many requests wait inside the engine, by two readings in a row.

        Not while the policy observes: the engine then gets every request, and its queue is not what enforcing leaves.
        """
        reader, observes = self._reader, self._policy.mode is Mode.OBSERVE
        if reader.is_crowded and not observes:
            reader.is_held_back = True
            self._pool.hold_back(HELD_BACK_S)
        elif reader.is_held_back and (not reader.is_above_target or observes):
            reader.is_held_back = False
            self._pool.hold_back(0)
