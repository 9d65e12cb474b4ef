"""Discovery: which engines exist. An answer that fails leaves the last one standing, with a notice."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from sidecar.policy.fleet import EngineAddress
from sidecar.tasks import end, is_set_within

FIRST_WITHIN_S = 6.0
"""How long the start waits for the first answer: a little more than one lookup may take."""
AFTER_DEFECT_S = 1.0

_log = logging.getLogger("sidecar.fleet")


class EngineDiscovery:
    """A source of engines. `engines` is its last answer, empty before the first one.

    `on_answer` is called after each answer that differs from the one before, and `on_failure` after each lookup that
    failed, both in the event loop. `failures` counts those. `what` names the source in a sentence.
    """

    def __init__(self, what: str) -> None:
        self.engines: tuple[EngineAddress, ...] = ()
        self.failures = 0
        self.on_answer: Callable[[], None] = lambda: None
        self.on_failure: Callable[[], None] = lambda: None
        self._what = what
        self._answered_s: float | None = None
        self._trouble: str | None = None
        self._remark: str | None = None

    async def open(self) -> None:
        """Asks for the first time, and follows from then on. It does not raise."""

    async def close(self) -> None:
        """Asks no more. The last answer stands."""

    def notices(self) -> Sequence[str]:
        """Notices for the operator: that no answer came, or what was left out of the last one."""
        if self._trouble is None:
            return () if self._remark is None else (self._remark,)
        if self._answered_s is None:
            return (f"{self._what} has not named any engine yet: {self._trouble}",)
        age_s = time.monotonic() - self._answered_s
        return (
            f"{self._what} fails: {self._trouble}; the answer of {age_s:.0f} s ago stands, "
            f"with {_count(len(self.engines))}",
        )

    def _answered(self, engines: Sequence[EngineAddress], remark: str | None = None) -> None:
        """`remark` says what was left out."""
        is_first, self._answered_s = self._answered_s is None, time.monotonic()
        if self._trouble is not None and not is_first:
            _log.warning("%s answers again", self._what, extra={"event": "discovery_answers"})
        if remark is not None and remark != self._remark:
            _log.warning("%s", remark, extra={"event": "discovery_remark"})
        self._trouble, self._remark = None, remark
        before, self.engines = self.engines, tuple(engines)
        if before != self.engines or is_first:
            self.on_answer()

    def _failed(self, trouble: str) -> None:
        self.failures += 1
        is_news, self._trouble = trouble != self._trouble, trouble
        if is_news:
            _log.warning("%s", self.notices()[0], extra={"event": "discovery_failed"})
        self.on_failure()


class StaticDiscovery(EngineDiscovery):
    """The engines that the policy lists."""

    def __init__(self, engines: Sequence[EngineAddress]) -> None:
        super().__init__("the policy's list of engines")
        self.engines = tuple(engines)

    async def open(self) -> None:
        """See `EngineDiscovery.open`."""
        self._answered(self.engines)

    def change(self, engines: Sequence[EngineAddress]) -> None:
        """The policy lists other engines from now on."""
        self._answered(engines)


class FollowedDiscovery(EngineDiscovery):
    """A source that is asked again and again, in one event loop from `open` to `close`."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self._has_looked = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """See `EngineDiscovery.open`. Returns after the first answer or failure, within `FIRST_WITHIN_S`."""
        if self._following is None:
            self._has_looked = asyncio.Event()
            self._following = asyncio.get_running_loop().create_task(self._follow(), name="sidecar discovery")
        await is_set_within(self._has_looked, FIRST_WITHIN_S)

    async def close(self) -> None:
        """See `EngineDiscovery.close`."""
        following, self._following = self._following, None
        if following is not None:
            await end(following)

    async def _follow(self) -> None:
        while True:
            try:
                pause_s = await self._look()
            except Exception as defect:
                pause_s = AFTER_DEFECT_S
                if self._trouble is None:
                    _log.exception("a defect in the sidecar: %s", self._what, extra={"event": "defect"})
                self._failed(f"a defect in the sidecar, see the log: {type(defect).__name__}: {defect}")
            self._has_looked.set()
            await asyncio.sleep(pause_s)

    async def _look(self) -> float:
        """Asks once, and reports by `_answered` or `_failed`. Returns when to ask again, in seconds from now."""
        raise NotImplementedError


def _count(engines: int) -> str:
    return "1 engine" if engines == 1 else f"{engines} engines"
