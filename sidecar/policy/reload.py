"""Policy reload: reads changed files, and replaces the running policy or reports why it cannot.

The log, the metrics and the admin pages say what changed, what is invalid and why, and what needs a restart. SIGHUP
reads the files at once. In a server that is not ours the signal is taken only where it has no meaning yet: a handler
that exists stays, an ignored signal stays ignored, and a process with a terminal still ends with its terminal.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from sidecar.policy.choices import Mode
from sidecar.policy.compiler import Loaded, load_files, pool_file
from sidecar.policy.diff import describe_changes, needs_restart
from sidecar.policy.followed_files import LOOK_EVERY_S, FollowedFiles
from sidecar.policy.hours import Hours, borders_s, covering
from sidecar.policy.model import Policy, is_forced
from sidecar.policy.passing import says_pass
from sidecar.policy.problems import PolicyError
from sidecar.policy.source import read
from sidecar.policy.tenant_files import tenant_files
from sidecar.policy.warnings import warnings
from sidecar.tasks import end, is_set_within

_log = logging.getLogger("sidecar.policy")


class UsesPolicy(Protocol):
    """An object that applies a policy."""

    @property
    def policy(self) -> Policy:
        """The one in force."""

    def change_policy(self, policy: Policy) -> None:
        """Applies another policy. Raises, with nothing changed, where it cannot."""


class PolicyReloader:
    """One per process. `rejections` counts the changes that could not be used.

    The disk is read in a thread, so that a disk that hangs holds up no request. `every_s` is for tests.
    """

    def __init__(self, files: PolicyFiles, governed: UsesPolicy, every_s: float = LOOK_EVERY_S) -> None:
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
            await end(task)

    def look_at_once(self) -> None:
        """Reads the files at once. Call it in the event loop."""
        _log.info("asked to read the policy's files", extra={"event": "policy_asked"})
        self._asked.set()

    def notices(self) -> Sequence[str]:
        """Notices for the operator."""
        return () if self._notice is None else (self._notice,)

    async def _look_on(self) -> None:
        is_asked = False
        while True:
            is_asked |= self._asked.is_set()  # until there is an answer: what is written just now is read again
            self._asked.clear()
            try:
                look = await asyncio.to_thread(self._files.look, at_once=is_asked)
                if look is not None:
                    self._apply(look, is_asked=is_asked)
                    is_asked = False
            except Exception:
                self._report_defect()
            await is_set_within(self._asked, self._files.pause_s(self._every_s))

    def _report_defect(self) -> None:
        """Logs the exception being handled, once for as long as it lasts."""
        notice = "the policy's files could not be looked at, or what they say not be used: a defect, see the log"
        if self._notice != notice:
            _log.exception("a defect in the sidecar: %s", notice, extra={"event": "defect"})
        self._notice = notice

    def _apply(self, look: FilesReading, *, is_asked: bool) -> None:
        """Does what the files say, where that can be done."""
        had_notice, self._notice = self._notice is not None, None
        running = self._governed.policy
        keys = [] if look.loaded is None else needs_restart(running, look.loaded.policy)
        if look.says_pass and (look.loaded is None or keys) and running.mode is not Mode.PASS:
            # Whatever else the files say: it is for the hour in which no one has the time to mend them.
            self._governed.change_policy(replace(running, mode=Mode.PASS))
        if look.loaded is None:
            self._reject(look.problem or "")
        elif look.generation == running.generation and look.loaded.policy.mode is running.mode:
            if had_notice or is_asked:
                _log.info("the policy's files are those that the process runs by", extra={"event": "policy_current"})
        elif keys:
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
        notice = f"the policy's files cannot be used, generation {generation} stays in force"
        self._notice = f"{notice}: {problem}"
        one_line = "; ".join(problem.splitlines())
        _log.error("%s: %s", notice, one_line, extra={"event": "policy_rejected"})

    def _keep_out(self, keys: Sequence[str], generation: str | None) -> None:
        """Keeps all of it out: no operator has written one half of a policy."""
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
        _log.warning(line, *generations, describe_changes(running, policy), extra={"event": "policy_reloaded"})


@dataclass(frozen=True, slots=True)
class FilesReading:
    """Content of the files: a policy, or in `problem` the reason why they cannot be used. See `passing.says_pass`."""

    loaded: Loaded | None
    problem: str | None
    says_pass: bool

    def says_as(self, other: FilesReading | None) -> bool:
        """True if both say the same: the same contents, or the same mistake."""
        own = self.generation, self.problem, self.says_pass
        return other is not None and own == (other.generation, other.problem, other.says_pass)

    @property
    def generation(self) -> str | None:
        """That of the files; None where they cannot be used."""
        return None if self.loaded is None else self.loaded.policy.generation


class PolicyFiles:
    """The pool's file and the tenants' files. Looked at by one thread at a time. `clock` is monotonic, in seconds."""

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = Path(path)
        self._pattern = ""
        self._latest: FilesReading | None = None
        self._files = FollowedFiles(self._names, self._read, _is_broken, clock)
        self.pause_s = self._files.pause_s

    def engine_place(self) -> str:
        """File and line of the policy's engine, ` (policies/policy.yaml:7)`; empty where it cannot be read. Reads the
        disk.
        """
        document = read(pool_file(self.path))
        return "" if document.data is None or "engine" not in document.data else f" ({document.place(('engine',))})"

    def look(self, *, at_once: bool = False) -> FilesReading | None:
        """New reading of the files, None where nothing has changed; see `FollowedFiles.look`."""
        found = self._files.look(at_once=at_once)
        if found is None:
            return None
        before, self._latest = self._latest, found
        return None if found.says_as(before) and not at_once else found

    def _names(self) -> Sequence[str]:
        pool = pool_file(self.path)
        return [str(pool), *(tenant_files(self._pattern, pool.parent) if self._pattern else ())]

    def _read(self) -> FilesReading:
        try:
            loaded = load_files(self.path)
        except PolicyError as error:
            return FilesReading(None, str(error), says_pass(self.path))
        except (OSError, ValueError) as error:
            return FilesReading(None, f"{self.path}: {error}", says_pass(self.path))
        self._pattern = str((loaded.pool.data or {}).get("tenants") or "")
        return FilesReading(loaded, None, loaded.policy.mode is Mode.PASS)


def _is_broken(found: FilesReading) -> bool:
    return found.problem is not None and not found.says_pass


def files_for(path: str | Path, environment: Mapping[str, str]) -> PolicyFiles | None:
    """The files that a process follows: none where its environment says that every request passes."""
    return None if is_forced(environment) else PolicyFiles(path)


_HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)


class ReloadSignal:
    """Calls `called` in the running event loop at every SIGHUP, from `take` on and until `let_go`."""

    def __init__(self, called: Callable[[], None]) -> None:
        self._called = called
        self._loop: asyncio.AbstractEventLoop | None = None

    def take(self) -> bool:
        """Takes the signal, in this event loop, where it is free. False where it is not."""
        if _HANGUP is None or not _is_free(_HANGUP):
            return False
        loop = asyncio.get_running_loop()
        try:
            loop.add_signal_handler(_HANGUP, self._called)
        except (NotImplementedError, RuntimeError, ValueError):  # another kind of loop, or one that may not
            return False
        self._loop = loop
        return True

    def let_go(self) -> None:
        """The signal does again what it did."""
        loop, self._loop = self._loop, None
        if loop is not None and _HANGUP is not None and not loop.is_closed():
            loop.remove_signal_handler(_HANGUP)


def _is_free(hangup: signal.Signals) -> bool:
    if threading.current_thread() is not threading.main_thread():
        return False
    return signal.getsignal(hangup) is signal.SIG_DFL and not _has_terminal()


def _has_terminal() -> bool:
    """True if the process has a terminal, whose end the same signal reports."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    os.close(terminal)
    return True


# -- Hours of the policy as time goes on: what they say is put in force as a reload of the files is.

LOOK_AGAIN_S = 5.0
"""The longest time without a look: the wall clock may be set, and a timer does not count while a machine sleeps."""


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
