"""A pool that is as large as its engine says (`capacity: {from: engine}`), and waits while enough waits in the engine.

The engine is read once a second. Its size becomes the pool's, by the policy's fraction; a size that changes is
followed, one that cannot be read any more is kept, and said so. Until it was first read nobody is admitted.

An engine that does not say how many requests it runs at once shows it when some wait inside it: as many as run then.

When more requests wait inside the engine than the policy's `waiting`, nobody is admitted until they are fewer: in there
no tier is reserved anything. Requests wait for a moment whenever they arrive, so that a figure above the target counts
only when it is still there a moment later. What is held back ends by itself when the engine is read no more, and one
request may go even so while nothing is held: no figure that stands still stops the pool for good.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sidecar.engines.base import Gauges
from sidecar.engines.pages import Pages, Unread
from sidecar.errors import CapacityUnknown
from sidecar.events import Obstacle
from sidecar.policy.model import Policy
from sidecar.policy.rules import EngineCapacity, PoolRules
from sidecar.pools.obstacles import HELD_BACK
from sidecar.pools.pool import Ask, Grant, Lease, Pool, Shared

READ_EVERY_S = 1.0
CONFIRM_AFTER_S = 0.1
"""An engine's step, in which it takes in what has just arrived, is a fraction of this."""
READ_WHILE_HELD_BACK_S = 0.25
LONGEST_STEP_US = 900_000
"""No step of an engine is as long; the engine is read about so often."""
HELD_BACK_S = 3.0
"""For so long a figure counts that is not read again: a few times what one reading may take."""

_log = logging.getLogger("sidecar.capacity")


class EngineSizedPool:
    """Around another pool, which it opens as soon as its size is known. See `Pool`.

    `on_unfinished` is told how many requests the engine has at most, and when that was asked, by the pool's clock.
    `read_every_s` is for tests.
    """

    def __init__(self, policy: Policy, pool: Pool, pages: Pages, read_every_s: float = READ_EVERY_S) -> None:
        assert policy.engine_capacity is not None
        self._policy = policy
        self._told: EngineCapacity = policy.engine_capacity
        self._pool = pool
        self._pages = policy.engine.followed(pages)
        self._read_every_s = read_every_s
        self._size: tuple[int | None, int | None] | None = None
        self._gauges = Gauges()
        self._most_seen_running: int | None = None
        self._read_us = 0
        self._trouble: str | None = "not read yet"
        self._is_above_target = False
        self._is_held_back = False
        self._following: asyncio.Task[None] | None = None
        self._has_read = asyncio.Event()
        self._unfinished: tuple[int, int] | None = None
        self.on_unfinished: Callable[[int, int], None] | None = None
        self.now_us = pool.now_us
        self.retry_after_s = pool.retry_after_s
        self.most_tokens = pool.most_tokens

    async def open(self) -> None:
        """See `Pool.open`. Returns when the engine was read, or could not be."""
        if not self._is_following():
            self._has_read = asyncio.Event()
            self._following = asyncio.get_running_loop().create_task(self._follow(), name="sidecar capacity")
        await self._has_read.wait()

    async def close(self) -> None:
        """See `Pool.close`."""
        following, self._following = self._following, None
        if following is not None and following.get_loop() is asyncio.get_running_loop():
            following.cancel()
            await asyncio.wait((following,))
        await self._pool.close()

    async def enter(self, ask: Ask) -> Lease:
        """See `Pool.enter`. Raises CapacityUnknown, too."""
        if not self._is_following():
            await self.open()
        if self._size is None:
            raise CapacityUnknown(
                f"the engine has not said yet how much it holds ({self._trouble}); try again", retry_after_s=1
            )
        return await self._pool.enter(ask)

    def change_rules(self, rules: PoolRules) -> None:
        """See `Pool.change_rules`."""
        self._pool.change_rules(rules)

    def change_policy(self, policy: Policy) -> None:
        """See `Pool.change_policy`. The size is what the engine last said, by the new fraction and figures."""
        assert policy.engine_capacity is not None
        self._policy, self._told = policy, policy.engine_capacity
        if self._size is not None:  # else nobody is in, and the first reading sizes it
            self._size, _ = self._sized(self._gauges)
            policy = replace(policy, rules=policy.rules_of(*self._size))
        self._pool.change_policy(policy)

    def hold_back(self, for_s: float) -> None:
        """See `Pool.hold_back`."""
        self._pool.hold_back(for_s)

    def state(self) -> Mapping[str, object]:
        """See `Pool.state`; `engine` is what it last said."""
        gauges = self._gauges
        engine = {
            "kv_tokens": gauges.kv_tokens,
            "max_running": gauges.max_running,
            "running": gauges.running,
            "waiting": gauges.waiting,
            "read_s_ago": round(self._age_s(), 3) if self._read_us else None,
            "trouble": self._trouble,
            "held_back": self._is_held_back,
        }
        return {**self._pool.state(), "engine": engine}

    def readiness(self) -> Sequence[str]:
        """See `Pool.readiness`."""
        if self._size is None:
            return (f"the engine has not said yet how much it holds: {self._trouble}",)
        return self._pool.readiness()

    def notices(self) -> Sequence[str]:
        """See `Pool.notices`."""
        found = list(self._pool.notices())
        if self._size is not None and self._trouble is not None:
            found.append(
                f"the engine's capacity was read {self._age_s():.0f} s ago and cannot be now: {self._trouble}; "
                f"going on with {_amounts(self._size)}"
            )
        if self._is_held_back:
            found.append(f"{self._gauges.waiting} requests wait inside the engine, more than {self._told.waiting}")
        return found

    def oldest(self) -> Sequence[Grant | None]:
        """See `Pool.oldest`."""
        return self._pool.oldest()

    def obstacle(self, ask: Ask) -> tuple[Obstacle, str]:
        """See `Pool.obstacle`."""
        return HELD_BACK if self._is_held_back else self._pool.obstacle(ask)

    async def share(self, report: bytes) -> Mapping[str, Shared]:
        """See `Pool.share`."""
        return await self._pool.share(report)

    def _is_following(self) -> bool:
        """Whether the engine is being read, by this event loop: one that has ended reads no more."""
        return self._following is not None and self._following.get_loop() is asyncio.get_running_loop()

    async def _follow(self) -> None:
        while True:
            try:
                await self._read()
            except Exception as defect:
                told = "a defect in the sidecar; going on as if the engine could not be read"
                _log.exception(told, extra={"event": "defect"})
                self._failed(f"{type(defect).__name__}: {defect}")
            self._has_read.set()
            await asyncio.sleep(self._pause_s())

    def _pause_s(self) -> float:
        if self._is_held_back:
            return min(self._read_every_s, READ_WHILE_HELD_BACK_S)
        return min(self._read_every_s, CONFIRM_AFTER_S) if self._is_above_target else self._read_every_s

    async def _read(self) -> None:
        asked_us = self.now_us()
        try:
            gauges = await self._policy.engine.gauges(self._pages)
        except Unread as error:
            self._failed(str(error))
            return
        self._tell_unfinished(gauges.unfinished, asked_us)
        self._learn(gauges)
        size, missing = self._sized(gauges)
        if size == (None, None):
            self._failed("no page of the engine says it; write capacity: tokens, requests or both")
            return
        self._gauges = gauges
        await self._resize(size)
        if missing is None:
            self._succeeded()
        else:
            self._failed(missing)
        self._heed(gauges)

    def _tell_unfinished(self, unfinished: int | None, asked_us: int) -> None:
        """Adds two readings up: each may leave out requests that the engine's present step computes."""
        before = self._unfinished
        if unfinished is None:
            self._unfinished = None
        elif before is None or asked_us - before[1] >= LONGEST_STEP_US:
            self._unfinished = (unfinished, asked_us)
            if before is not None and self.on_unfinished is not None:
                self.on_unfinished(before[0] + unfinished, before[1])

    def _learn(self, gauges: Gauges) -> None:
        """Notes how many ran while more waited than should, for more than a moment: the engine takes no more."""
        is_full = self._is_above_target and self._has_too_many_waiting(gauges)
        if is_full and gauges.running and gauges.running > (self._most_seen_running or 0):
            self._most_seen_running = gauges.running

    def _sized(self, gauges: Gauges) -> tuple[tuple[int | None, int | None], str | None]:
        """The pool's size, and what the engine said before and says no more: that is kept."""
        most = self._most_seen_running if gauges.max_running is None else gauges.max_running
        tokens, requests = self._told.size(gauges.kv_tokens, most)
        known_tokens, known_requests = self._size or (None, None)
        missing = None
        if tokens is None and known_tokens is not None:
            tokens, missing = known_tokens, "it no longer says how many tokens it holds"
        if requests is None and known_requests is not None:
            requests, missing = known_requests, "it no longer says how many requests it runs at once"
        return (tokens, requests), missing

    async def _resize(self, size: tuple[int | None, int | None]) -> None:
        before, self._size = self._size, size
        if size == before:
            return
        self._pool.change_rules(self._policy.rules_of(*size))
        if before is None:
            known = "the engine's capacity is known, the pool has %s"
            _log.info(known, _amounts(size), extra={"event": "capacity_known"})
            self._say_what_is_unbounded(size)
            await self._pool.open()
        else:
            changed = "the engine's capacity changed, the pool has %s instead of %s"
            _log.warning(changed, _amounts(size), _amounts(before), extra={"event": "capacity_changed"})

    def _say_what_is_unbounded(self, size: tuple[int | None, int | None]) -> None:
        for amount, name, example in zip(size, ("tokens", "requests"), ("400k", "160"), strict=True):
            if amount is None:
                _log.warning(
                    "%s does not say how many %s it holds at once: nothing bounds them until it is seen to be full; "
                    "better write the number beside it, such as capacity: {from: engine, %s: %s}",
                    self._policy.engine.name,
                    name,
                    name,
                    example,
                    extra={"event": "capacity_unbounded"},
                )

    def _has_too_many_waiting(self, gauges: Gauges) -> bool:
        return gauges.waiting is not None and gauges.waiting > self._told.waiting

    def _heed(self, gauges: Gauges) -> None:
        """Holds the pool back while too much waits inside the engine, and has for more than a moment."""
        was_above, self._is_above_target = self._is_above_target, self._has_too_many_waiting(gauges)
        if self._is_above_target and was_above:
            self._is_held_back = True
            self._pool.hold_back(HELD_BACK_S)
        elif self._is_held_back and not self._is_above_target:
            self._is_held_back = False
            self._pool.hold_back(0)

    def _succeeded(self) -> None:
        if self._trouble is not None and self._read_us:
            again = "the engine's capacity can be read again: %s"
            _log.warning(again, _amounts(self._size or (None, None)), extra={"event": "capacity_read_again"})
        self._trouble = None
        self._read_us = self.now_us()

    def _failed(self, trouble: str) -> None:
        is_new, self._trouble = trouble != self._trouble, trouble
        self._is_above_target = self._is_held_back = False  # what was held back ends by itself
        if is_new and self._size is None:
            unknown = "the engine's capacity is not known, nobody is admitted: %s"
            _log.warning(unknown, trouble, extra={"event": "capacity_unknown"})
        elif is_new:
            _log.warning(
                "the engine's capacity cannot be read, going on with %s: %s",
                _amounts(self._size or (None, None)),
                trouble,
                extra={"event": "capacity_unread"},
            )

    def _age_s(self) -> float:
        return (self.now_us() - self._read_us) / 1e6


def _amounts(size: tuple[int | None, int | None]) -> str:
    tokens, requests = ("any number of" if amount is None else f"{amount:,}" for amount in size)
    return f"{tokens} tokens and {requests} requests"
