"""Looks at the policy's files while the process runs, and says what it finds: in the log, in metrics, when asked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from sidecar.policy.watch import Look, PolicyFiles, Standing

LOOK_EVERY_S = 2.0

_log = logging.getLogger("sidecar.policy")


class PolicyWatch:
    """One per process. `rejections` counts the changes that could not be used.

    The disk is read in a thread, so that one which hangs holds up nobody. `every_s` is for tests.
    """

    def __init__(self, files: PolicyFiles, every_s: float = LOOK_EVERY_S) -> None:
        self.rejections = 0
        self._files = files
        self._every_s = every_s
        self._latest: Look | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to look, in this event loop."""
        self._task = asyncio.get_running_loop().create_task(self._look_on(), name="sidecar policy files")

    async def stop(self) -> None:
        """Looks no more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def notices(self) -> Sequence[str]:
        """What whoever is on call should know."""
        latest = self._latest
        if latest is None or latest.standing is Standing.CURRENT:
            return ()
        if latest.standing is Standing.CHANGED:
            return (f"the policy's files have changed to generation {latest.generation}: restart to run by them",)
        return (f"the policy's files cannot be used, a restart would fail: {latest.problem}",)

    async def _look_on(self) -> None:
        while True:
            try:
                look = await asyncio.to_thread(self._files.look)
            except Exception:
                _log.exception("a defect in the sidecar: the policy's files are not looked at any more")
                return
            if look is not None:
                self._note(look)
            await asyncio.sleep(self._every_s)

    def _note(self, look: Look) -> None:
        before, self._latest = self._latest, look
        if look.standing is Standing.REJECTED:
            self.rejections += 1
            _log.error(
                "the policy's files cannot be used, the process goes on by what it was started with: %s",
                look.problem,
                extra={"event": "policy_rejected"},
            )
        elif look.standing is Standing.CHANGED:
            _log.warning(
                "the policy's files have changed to generation %s: restart to run by them",
                look.generation,
                extra={"event": "policy_changed"},
            )
        elif before is not None:
            _log.info("the policy's files are those that the process runs by again", extra={"event": "policy_current"})
