"""The capacity of an engine, as the size of its pool (`capacity: {from: engine}`).

The engine is read once a second. The pool's size is the policy's fraction of the engine's, and follows its changes. A
size that cannot be read any more is kept, with a warning. Before the first reading no request is admitted.

An engine may not say how many requests it runs at once. Then as many as run while some wait inside it are its limit.

While more requests wait inside the engine than the policy's `waiting`, the pool is held back: inside the engine no tier
has a reserve. Every request waits there for a moment when it arrives, so a figure above the target counts only when the
next reading confirms it. Holding back ends by itself when the engine is not read any more, and one request at a time is
admitted all the same: a figure that stays the same cannot stop the pool for good.
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
from sidecar.policy.model import Mode, Policy
from sidecar.policy.rules import EngineCapacity
from sidecar.pools.base import Ask, Lease, Pool
from sidecar.pools.stats import HELD_BACK

READ_EVERY_S = 1.0
CONFIRM_AFTER_S = 0.1
"""An engine takes new requests in with its next step, which is a fraction of this."""
READ_WHILE_HELD_BACK_S = 0.25
LONGEST_STEP_US = 900_000
"""Longer than any step of an engine, and about as long as the time between two readings."""
HELD_BACK_S = 3.0
"""How long a figure counts that is not read again: a few times as long as one reading may take."""

_log = logging.getLogger("sidecar.capacity")


class EngineSizedPool:
    """A pool around another one, which it opens as soon as the engine's size is known. See `Pool`.

    `on_unfinished` is called with the most requests that the engine may have unfinished, and with when that was asked,
    by the pool's clock. `read_every_s` is for tests.
    """

    def __init__(self, policy: Policy, pool: Pool, pages: Pages, read_every_s: float = READ_EVERY_S) -> None:
        assert policy.engine_capacity is not None
        self._policy = policy
        self._capacity: EngineCapacity = policy.engine_capacity
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
        self.change_rules = pool.change_rules
        self.hold_back = pool.hold_back
        self.pause = pool.pause
        self.oldest = pool.oldest
        self.share = pool.share

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
                f"the engine has not reported its capacity yet ({self._trouble}); try again", retry_after_s=1
            )
        return await self._pool.enter(ask)

    def change_policy(self, policy: Policy) -> None:
        """See `Pool.change_policy`. The size is what the engine last said, by the new fraction and figures."""
        assert policy.engine_capacity is not None
        self._policy, self._capacity = policy, policy.engine_capacity
        if self._size is not None:  # else no request was admitted yet, and the first reading sizes the pool
            self._size, _ = self._sized(self._gauges)
            policy = replace(policy, rules=policy.rules_of(*self._size))
        self._pool.change_policy(policy)

    def state(self) -> Mapping[str, object]:
        """See `Pool.state`; `engine` has its latest figures."""
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
            return (f"the engine has not reported its capacity yet: {self._trouble}",)
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
            found.append(f"{self._gauges.waiting} requests wait inside the engine, more than {self._capacity.waiting}")
        return found

    def obstacle(self, ask: Ask) -> tuple[Obstacle, str]:
        """See `Pool.obstacle`."""
        found = self._pool.obstacle(ask)
        return HELD_BACK if self._is_held_back and found[0] is not Obstacle.ENGINE else found

    def _is_following(self) -> bool:
        """Whether the engine is being read in this event loop: one that has ended reads no more."""
        return self._following is not None and self._following.get_loop() is asyncio.get_running_loop()

    async def _follow(self) -> None:
        while True:
            try:
                await self._read()
            except Exception as defect:
                message = "a defect in the sidecar; going on as if the engine could not be read"
                _log.exception(message, extra={"event": "defect"})
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
        self._report_unfinished(gauges.unfinished, asked_us)
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
        self._hold_back_if_waiting(gauges)

    def _report_unfinished(self, unfinished: int | None, asked_us: int) -> None:
        """Adds two readings up: each may leave out requests that the engine's present step computes."""
        before = self._unfinished
        if unfinished is None:
            self._unfinished = None
        elif before is None or asked_us - before[1] >= LONGEST_STEP_US:
            self._unfinished = (unfinished, asked_us)
            if before is not None and self.on_unfinished is not None:
                self.on_unfinished(before[0] + unfinished, before[1])

    def _learn(self, gauges: Gauges) -> None:
        """Notes how many requests ran while too many waited, in two readings: the engine runs no more than these."""
        is_full = self._is_above_target and self._has_too_many_waiting(gauges)
        if is_full and gauges.running and gauges.running > (self._most_seen_running or 0):
            self._most_seen_running = gauges.running

    def _sized(self, gauges: Gauges) -> tuple[tuple[int | None, int | None], str | None]:
        """The pool's size, and a sentence about a figure that the engine does not report any more: it is kept."""
        most = self._most_seen_running if gauges.max_running is None else gauges.max_running
        tokens, requests = self._capacity.size(gauges.kv_tokens, most)
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
            self._warn_of_unbounded(size)
            await self._pool.open()
        else:
            changed = "the engine's capacity changed, the pool has %s instead of %s"
            _log.warning(changed, _amounts(size), _amounts(before), extra={"event": "capacity_changed"})

    def _warn_of_unbounded(self, size: tuple[int | None, int | None]) -> None:
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
        return gauges.waiting is not None and gauges.waiting > self._capacity.waiting

    def _hold_back_if_waiting(self, gauges: Gauges) -> None:
        """Holds the pool back while too many requests wait inside the engine, by two readings in a row.

        Not while the policy observes: the engine then gets every request, and its queue is not what enforcing leaves.
        """
        was_above, self._is_above_target = self._is_above_target, self._has_too_many_waiting(gauges)
        if self._is_above_target and was_above and self._policy.mode is not Mode.OBSERVE:
            self._is_held_back = True
            self._pool.hold_back(HELD_BACK_S)
        elif self._is_held_back and (not self._is_above_target or self._policy.mode is Mode.OBSERVE):
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
        self._is_above_target = self._is_held_back = False  # holding back ends by itself
        if is_new and self._size is None:
            unknown = "the engine's capacity is not known, no request is admitted: %s"
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
