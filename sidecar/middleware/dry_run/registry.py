"""Registry of shadow requests: a bounded number, each in a task of its own, and none after the server's end."""

from __future__ import annotations

import asyncio
import logging

from sidecar.middleware.dry_run.shadow import ShadowRequest

MOST_SHADOWS = 10_000
"""The most shadow requests that wait or hold; 10 KB each. It also bounds a tier's queue that has no bound."""
STOPPED, DEFECT = "stopped", "defect"

_log = logging.getLogger("sidecar.observing")


class ShadowRegistry:
    """All shadow requests of a controller. `close` is called at the server's end, before the pool's."""

    def __init__(self, most: int = MOST_SHADOWS) -> None:
        self._most = most
        self._following: dict[asyncio.Task[None], ShadowRequest] = {}
        self._is_closed = False
        self._reported = False

    def __len__(self) -> int:
        return len(self._following)

    def follow(self, shadow: ShadowRequest) -> bool:
        """Runs a shadow request in the background. False where there are too many already."""
        if self._is_closed or len(self._following) >= self._most:
            return False
        task = asyncio.get_running_loop().create_task(shadow.run(), name="sidecar shadow")
        self._following[task] = shadow
        task.add_done_callback(self._over)
        return True

    def end_unreal(self) -> None:
        """Ends the shadows that wait, or hold for a request that is over: real requests must not wait for them."""
        for task, shadow in tuple(self._following.items()):
            if not shadow.is_real:
                task.cancel()

    async def close(self) -> None:
        """Ends all of them; each releases what it holds."""
        self._is_closed = True
        following = tuple(self._following)
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)

    def report(self, defect: BaseException) -> None:
        """Logs the first defect of the dry run; later ones would write a line for each request."""
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
