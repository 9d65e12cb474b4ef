"""All shadows of a door: so many at most, each in a task of its own, and none left when the door closes."""

from __future__ import annotations

import asyncio
import logging

from sidecar.asgi.observe.shadow import Shadow

MOST_SHADOWS = 10_000
"""Requests whose shadows wait or hold; 10 KB each. Where a tier's queue has no bound, this is it."""
STOPPED, DEFECT = "stopped", "defect"

_log = logging.getLogger("sidecar.observing")


class Shadows:
    """One per door. `close` belongs to the server's end, before the pool's."""

    def __init__(self, most: int = MOST_SHADOWS) -> None:
        self._most = most
        self._following: dict[asyncio.Task[None], Shadow] = {}
        self._is_closed = False
        self._reported = False

    def __len__(self) -> int:
        return len(self._following)

    def follow(self, shadow: Shadow) -> bool:
        """Sends a shadow into the pool, in the background. False where there is no room for one more."""
        if self._is_closed or len(self._following) >= self._most:
            return False
        task = asyncio.get_running_loop().create_task(shadow.run(), name="sidecar shadow")
        self._following[task] = shadow
        task.add_done_callback(self._over)
        return True

    def end_unreal(self) -> None:
        """From now on requests are held: nobody may wait for those that wait, or hold, in place of one that is over."""
        for task, shadow in tuple(self._following.items()):
            if not shadow.is_real:
                task.cancel()

    async def close(self) -> None:
        """Ends all of them; each gives back what it held."""
        self._is_closed = True
        following = tuple(self._following)
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)

    def report(self, defect: BaseException) -> None:
        """Logs a defect of ours, the first time only: the requests go on, and must not write a line each."""
        if not self._reported:
            self._reported = True
            _log.error(
                "a defect in the sidecar: a request was not observed, and passed; further ones are not logged",
                exc_info=defect,
                extra={"event": "observing_failed"},
            )

    def _over(self, task: asyncio.Task[None]) -> None:
        shadow = self._following.pop(task)
        defect = None if task.cancelled() else task.exception()
        shadow.give_up(STOPPED if defect is None else DEFECT)
        if defect is not None:
            self.report(defect)
