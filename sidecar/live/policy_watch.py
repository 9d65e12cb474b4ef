"""Keeps a door to its policy's files: what was changed there replaces what runs, or is said to be of no use.

Said in the log, in metrics and wherever somebody asks: what changed, what cannot be used and why, and what needs a
restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Protocol

from sidecar.policy.differences import told
from sidecar.policy.loading import Loaded
from sidecar.policy.policy import Policy
from sidecar.policy.replacing import needs_restart
from sidecar.policy.warnings import warnings
from sidecar.policy.watch import Look, PolicyFiles

LOOK_EVERY_S = 0.5
"""With what it takes until the files are still, a key that was removed stops within a second."""
LOOK_AGAIN_S = 0.1
"""While the files are changing."""

_log = logging.getLogger("sidecar.policy")


class Governed(Protocol):
    """What goes by a policy."""

    @property
    def policy(self) -> Policy:
        """The one in force."""

    def change_policy(self, policy: Policy) -> None:
        """Goes by another. Raises, and nothing has changed, where it cannot."""


class PolicyWatch:
    """One per process. `rejections` counts the changes that could not be used.

    The disk is read in a thread, so that one which hangs holds up nobody. `every_s` is for tests.
    """

    def __init__(self, files: PolicyFiles, governed: Governed, every_s: float = LOOK_EVERY_S) -> None:
        self.rejections = 0
        self._files = files
        self._governed = governed
        self._every_s = every_s
        self._notice: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._asked = asyncio.Event()

    async def start(self) -> None:
        """Begins to look, in this event loop."""
        self._asked = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._look_on(), name="sidecar policy files")

    async def stop(self) -> None:
        """Looks no more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def look_at_once(self) -> None:
        """Somebody says that the files are as they should be. Call it in the event loop."""
        _log.info("asked to read the policy's files", extra={"event": "policy_asked"})
        self._asked.set()

    def notices(self) -> Sequence[str]:
        """What whoever is on call should know."""
        return () if self._notice is None else (self._notice,)

    async def _look_on(self) -> None:
        is_asked = False
        while True:
            is_asked |= self._asked.is_set()  # until there is an answer: what is written just now is read again
            self._asked.clear()
            try:
                look = await asyncio.to_thread(self._files.look, at_once=is_asked)
                if look is not None:
                    self._heed(look, is_asked=is_asked)
                    is_asked = False
            except Exception:
                self._report_defect()
            await self._pause()

    async def _pause(self) -> None:
        for_s = min(self._every_s, LOOK_AGAIN_S) if self._files.is_changing else self._every_s
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._asked.wait(), for_s)

    def _report_defect(self) -> None:
        """Logs the exception being handled, once for as long as it lasts."""
        said = "the policy's files could not be looked at, or what they say not be used: a defect, see the log"
        if self._notice != said:
            _log.exception("a defect in the sidecar: %s", said, extra={"event": "defect"})
        self._notice = said

    def _heed(self, look: Look, *, is_asked: bool) -> None:
        """Does what the files say, where that can be done."""
        had_notice, self._notice = self._notice is not None, None
        running = self._governed.policy
        if look.loaded is None:
            self._reject(look.problem or "")
        elif look.generation == running.generation:
            if had_notice or is_asked:
                _log.info("the policy's files are those that the process runs by", extra={"event": "policy_current"})
        elif keys := needs_restart(running, look.loaded.policy):
            self._keep_out(keys, look.generation)
        else:
            self._replace(running, look.loaded.policy)
            self._warn(running, look.loaded)

    def _warn(self, running: Policy, loaded: Loaded) -> None:
        """Of what was not so before."""
        known = {(warning.path, warning.message) for warning in warnings(running)}
        for warning in warnings(loaded.policy, loaded.place):
            if (warning.path, warning.message) not in known:
                _log.warning("%s", warning, extra={"event": "policy_warning"})

    def _reject(self, problem: str) -> None:
        self.rejections += 1
        generation = self._governed.policy.generation
        self._notice = f"the policy's files cannot be used, generation {generation} stays in force: {problem}"
        _log.error("%s", self._notice, extra={"event": "policy_rejected"})

    def _keep_out(self, keys: Sequence[str], generation: str | None) -> None:
        """All of it: half of a policy is none that anybody has written."""
        self.rejections += 1
        self._notice = (
            f"the policy's files have changed to generation {generation}, which needs a restart for {', '.join(keys)}: "
            f"all of it is kept out, generation {self._governed.policy.generation} stays in force"
        )
        _log.warning("%s", self._notice, extra={"event": "policy_needs_restart"})

    def _replace(self, running: Policy, policy: Policy) -> None:
        try:
            self._governed.change_policy(policy)
        except Exception as defect:
            _log.exception("a defect in the sidecar: a policy that is in order cannot be used")
            self._reject(f"a defect in the sidecar, see the log: {type(defect).__name__}: {defect}")
            return
        generations = running.generation, policy.generation
        line = "policy reloaded, generation %s -> %s: %s"
        _log.warning(line, *generations, told(running, policy), extra={"event": "policy_reloaded"})
