"""Hours of the policy as time goes on: what they say is put in force as a reload of the files is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from sidecar.policy.diff import describe_changes
from sidecar.policy.hours import Hours, borders_s, covering
from sidecar.policy.model import Policy
from sidecar.policy.reload import UsesPolicy

LOOK_AGAIN_S = 5.0
"""The longest time without a look: the wall clock may be set, and a timer does not count while a machine sleeps."""
_log = logging.getLogger("sidecar.policy")


class FollowedHours:
    """Between those who change the policy and the object that uses it, which has what counts at the time.

    `clock` is the wall clock, in Unix seconds.
    """

    def __init__(self, governed: UsesPolicy, clock: Callable[[], float] = time.time) -> None:
        self._governed = governed
        self._clock = clock
        self._policy = governed.policy.as_written
        self._all = self._policy.all_hours
        self._now: frozenset[Hours] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def policy(self) -> Policy:
        """The policy as it is written."""
        return self._policy

    def change_policy(self, policy: Policy) -> None:
        """Another policy is written. What it says of this hour is in force at once."""
        now_s = self._clock()
        self._governed.change_policy(policy.at(now_s))
        self._policy, self._all = policy, policy.all_hours
        self._now = covering(self._all, now_s)
        self._look_later(now_s)

    def start(self) -> None:
        """Follows the hours, in this event loop."""
        self._look()

    def stop(self) -> None:
        """Follows them no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Puts in force what counts now, where that is not what counted at the last look."""
        now_s = self._clock()
        try:
            if (now := covering(self._all, now_s)) != self._now:
                before, after = self._governed.policy, self._policy.at(now_s)
                if after != before:
                    self._governed.change_policy(after)
                    changes = describe_changes(before, after)
                    _log.info("hours of the policy: %s", changes, extra={"event": "policy_hours"})
                self._now = now
        except Exception:
            _log.exception("a defect in the sidecar: hours of the policy cannot be followed", extra={"event": "defect"})
        self._look_later(now_s)

    def _look_later(self, now_s: float) -> None:
        self.stop()
        if self._all:
            later_s = min([LOOK_AGAIN_S, *(border_s - now_s for border_s in borders_s(self._all, now_s)[:1])])
            self._timer = asyncio.get_running_loop().call_later(later_s, self._look)
