"""Reader of one engine's capacity: its size and its requests, read once a second, and what they mean for a pool.

A size that cannot be read any more is kept, with a warning. An engine may not say how many requests it runs at once.
Then as many as run while some wait inside it are its limit.

Every request waits inside the engine for a moment when it arrives, so a figure above the target counts only when the
next reading confirms it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from sidecar.engines.base import Engine, Gauges
from sidecar.engines.pages import Pages, Unread
from sidecar.policy.capacity import Capacity
from sidecar.tasks import end

READ_EVERY_S = 1.0
CONFIRM_AFTER_S = 0.1
"""An engine takes new requests in with its next step, which is a fraction of this."""
READ_WHILE_HELD_BACK_S = 0.25
HELD_BACK_S = 1.0
"""How long an engine is capped because too many requests wait inside it, by one reading: a few times as long as until
the next.
"""
LONGEST_STEP_US = 900_000
"""Longer than any step of an engine, and about as long as the time between two readings."""

Size: TypeAlias = tuple[int | None, int | None]
"""Tokens and requests; None for a dimension that nothing bounds."""

_log = logging.getLogger("sidecar.capacity")


class EngineReader:
    """One engine, read in one event loop from `open` to `close`. `size` is None before the first reading of one.

    `resized` is called with the size before, None at first, after each change of `size`, which is logged, and
    `was_read` after each reading. `on_unfinished` is called with the most requests that the engine may have unfinished,
    and with when that was asked, by the clock `now_us`. `on_preemptions` is called with the preemptions of the engine
    since the first reading, and with the time, after each reading that has them. `who` names the engine in the log, and
    `unread` says there what its unknown capacity means. The owner sets `is_held_back` while too many requests wait
    inside the engine (`is_crowded`) and it lets the engine get fewer for that; a reading that fails ends it.
    """

    def __init__(
        self,
        engine: type[Engine],
        capacity: Capacity,
        pages: Pages,
        now_us: Callable[[], int],
        *,
        resized: Callable[[Size | None], Awaitable[None]],
        was_read: Callable[[], None],
        read_every_s: float = READ_EVERY_S,
        who: str = "the engine",
        unread: str = "no request is admitted",
    ) -> None:
        self._engine = engine
        self._capacity = capacity
        self._pages = engine.followed(pages)
        self._now_us = now_us
        self._resized = resized
        self._was_read = was_read
        self._read_every_s = read_every_s
        self._who = who
        self._unread = unread
        self.size: Size | None = None
        self.gauges = Gauges()
        self.trouble: str | None = "not read yet"
        self.is_above_target = False
        self.is_crowded = False
        self.is_held_back = False
        self.on_unfinished: Callable[[int, int], None] | None = None
        self.on_preemptions: Callable[[int, int], None] | None = None
        self._preemptions = 0
        self._last_counter: int | None = None
        self._most_seen_running: int | None = None
        self._read_us = 0
        self._unfinished: tuple[int, int] | None = None
        self._following: asyncio.Task[None] | None = None
        self._has_read = asyncio.Event()

    async def open(self) -> None:
        """Begins to read the engine. Returns when it was read, or could not be."""
        if not self.is_following():
            self._has_read = asyncio.Event()
            self._following = asyncio.get_running_loop().create_task(self._follow(), name="sidecar capacity")
        await self._has_read.wait()

    async def close(self) -> None:
        """Reads no more."""
        following, self._following = self._following, None
        if following is not None and following.get_loop() is asyncio.get_running_loop():
            await end(following)

    def is_following(self) -> bool:
        """True if the engine is being read in this event loop: one that has ended reads no more."""
        return self._following is not None and self._following.get_loop() is asyncio.get_running_loop()

    @property
    def age_s(self) -> float | None:
        """Seconds since the last reading that lacked nothing; None before the first one."""
        return (self._now_us() - self._read_us) / 1e6 if self._read_us else None

    def change_capacity(self, capacity: Capacity) -> None:
        """Applies another fraction and other figures to the engine's last reported size. `resized` is not called."""
        self._capacity = capacity
        if self.size is not None:
            self.size, _ = self._sized(self.gauges)

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
        if self.is_held_back:
            return min(self._read_every_s, READ_WHILE_HELD_BACK_S)
        return min(self._read_every_s, CONFIRM_AFTER_S) if self.is_above_target else self._read_every_s

    async def _read(self) -> None:
        asked_us = self._now_us()
        try:
            gauges = await self._engine.gauges(self._pages)
        except Unread as error:
            self._failed(str(error))
            return
        self._report_unfinished(gauges.unfinished, asked_us)
        self._report_preemptions(gauges.preemptions)
        self._learn(gauges)
        size, missing = self._sized(gauges)
        if size == (None, None):
            self._failed("no page of the engine says it; write capacity: tokens, requests or both")
            return
        self.gauges = gauges
        before, self.size = self.size, size
        if size != before:
            self._log_size(before)
            await self._resized(before)
        if missing is None:
            self._succeeded()
        else:
            self._failed(missing)
        was_above, self.is_above_target = self.is_above_target, self._has_too_many_waiting(gauges)
        self.is_crowded = self.is_above_target and was_above
        self._was_read()

    def _report_unfinished(self, unfinished: int | None, asked_us: int) -> None:
        """Adds two readings up: each may leave out requests that the engine's present step computes."""
        before = self._unfinished
        if unfinished is None:
            self._unfinished = None
        elif before is None or asked_us - before[1] >= LONGEST_STEP_US:
            self._unfinished = (unfinished, asked_us)
            if before is not None and self.on_unfinished is not None:
                self.on_unfinished(before[0] + unfinished, before[1])

    def _report_preemptions(self, counter: int | None) -> None:
        """The engine's own counter begins at 0 with each restart."""
        if counter is None:
            return
        last, self._last_counter = self._last_counter, counter
        if last is not None:
            self._preemptions += counter - last if counter >= last else counter
        if self.on_preemptions is not None:
            self.on_preemptions(self._preemptions, self._now_us())

    def _learn(self, gauges: Gauges) -> None:
        """Notes how many requests ran while too many waited, in two readings: the engine runs no more than these."""
        is_full = self.is_above_target and self._has_too_many_waiting(gauges)
        if is_full and gauges.running and gauges.running > (self._most_seen_running or 0):
            self._most_seen_running = gauges.running

    def _sized(self, gauges: Gauges) -> tuple[Size, str | None]:
        """The size, and a sentence about a figure that the engine does not report any more: it is kept."""
        most = self._most_seen_running if gauges.max_running is None else gauges.max_running
        tokens, requests = self._capacity.size(gauges.kv_tokens, most)
        known_tokens, known_requests = self.size or (None, None)
        missing = None
        if tokens is None and known_tokens is not None:
            tokens, missing = known_tokens, "it no longer says how many tokens it holds"
        if requests is None and known_requests is not None:
            requests, missing = known_requests, "it no longer says how many requests it runs at once"
        return (tokens, requests), missing

    def _has_too_many_waiting(self, gauges: Gauges) -> bool:
        return gauges.waiting is not None and gauges.waiting > self._capacity.waiting

    @property
    def notice(self) -> str | None:
        """Sentence for the operator where a size that was read cannot be read now."""
        if self.size is None or self.trouble is None:
            return None
        return (
            f"{self._who}'s capacity was read {self.age_s or 0:.0f} s ago and cannot be now: {self.trouble}; "
            f"going on with {amounts(self.size)}"
        )

    def _log_size(self, before: Size | None) -> None:
        if before is None:
            _log.info("%s's capacity is known: %s", self._who, amounts(self.size), extra={"event": "capacity_known"})
        else:
            changed = "%s's capacity changed: %s instead of %s"
            _log.warning(changed, self._who, amounts(self.size), amounts(before), extra={"event": "capacity_changed"})

    def _succeeded(self) -> None:
        if self.trouble is not None and self._read_us:
            again = "%s's capacity can be read again: %s"
            _log.warning(again, self._who, amounts(self.size), extra={"event": "capacity_read_again"})
        self.trouble = None
        self._read_us = self._now_us()

    def _failed(self, trouble: str) -> None:
        is_new, self.trouble = trouble != self.trouble, trouble
        self.is_above_target = self.is_crowded = self.is_held_back = False  # holding back ends by itself
        if is_new and self.size is None:
            unknown = "%s's capacity is not known, %s: %s"
            _log.warning(unknown, self._who, self._unread, trouble, extra={"event": "capacity_unknown"})
        elif is_new:
            _log.warning(
                "%s's capacity cannot be read, going on with %s: %s",
                self._who,
                amounts(self.size),
                trouble,
                extra={"event": "capacity_unread"},
            )


def amounts(size: Size | None) -> str:
    """A size in words."""
    tokens, requests = ("any number of" if amount is None else f"{amount:,}" for amount in size or (None, None))
    return f"{tokens} tokens and {requests} requests"


def warn_of_unbounded(engine: type[Engine], size: Size) -> None:
    """Logs which dimension of a size that was read for the first time nothing bounds."""
    for amount, name, example in zip(size, ("tokens", "requests"), ("400k", "160"), strict=True):
        if amount is None:
            _log.warning(
                "%s does not say how many %s it holds at once: nothing bounds them until it is seen to be full; "
                "better write the number beside it, such as capacity: {from: engine, %s: %s}",
                engine.name,
                name,
                name,
                example,
                extra={"event": "capacity_unbounded"},
            )
