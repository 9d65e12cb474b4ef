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

from sidecar.policy.compiler import POOL_FILE, Loaded, load_files
from sidecar.policy.diff import describe_changes, needs_restart
from sidecar.policy.model import Mode, Policy, is_forced
from sidecar.policy.passing import says_pass
from sidecar.policy.problems import PolicyError
from sidecar.policy.source import read
from sidecar.policy.tenant_files import tenant_files
from sidecar.policy.warnings import warnings
from sidecar.tasks import end, is_set_within

LOOK_EVERY_S = 0.5
"""With what it takes until the files are still, a key that was removed stops within a second."""
LOOK_AGAIN_S = 0.1
"""While the files are changing."""

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
                    self._heed(look, is_asked=is_asked)
                    is_asked = False
            except Exception:
                self._report_defect()
            await self._pause()

    async def _pause(self) -> None:
        for_s = min(self._every_s, LOOK_AGAIN_S) if self._files.is_changing else self._every_s
        await is_set_within(self._asked, for_s)

    def _report_defect(self) -> None:
        """Logs the exception being handled, once for as long as it lasts."""
        said = "the policy's files could not be looked at, or what they say not be used: a defect, see the log"
        if self._notice != said:
            _log.exception("a defect in the sidecar: %s", said, extra={"event": "defect"})
        self._notice = said

    def _heed(self, look: FilesReading, *, is_asked: bool) -> None:
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
        said = f"the policy's files cannot be used, generation {generation} stays in force"
        self._notice = f"{said}: {problem}"
        one_line = "; ".join(problem.splitlines())
        _log.error("%s: %s", said, one_line, extra={"event": "policy_rejected"})

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


STILL_S = 0.2
"""A change that was not followed by another for so long is read: editors and copies write on within milliseconds."""
STILL_BROKEN_S = 1.0
"""Time for which an invalid change may still be incomplete. The running policy stays in force meanwhile."""

_Signature = frozenset[tuple[str, int, int, int]]


@dataclass(frozen=True, slots=True)
class FilesReading:
    """Content of the files: a policy, or in `problem` the reason why they cannot be used. See `passing.says_pass`."""

    loaded: Loaded | None
    problem: str | None
    says_pass: bool

    def says_as(self, other: FilesReading | None) -> bool:
        """Whether both say the same: the same contents, or the same mistake."""
        said = self.generation, self.problem, self.says_pass
        return other is not None and said == (other.generation, other.problem, other.says_pass)

    @property
    def generation(self) -> str | None:
        """That of the files; None where they cannot be used."""
        return None if self.loaded is None else self.loaded.policy.generation


@dataclass(slots=True)
class _Change:
    """Files that differ from those reported last: since when, and their content where it was read."""

    signature: _Signature
    since_s: float
    found: FilesReading | None = None


class PolicyFiles:
    """Looked at now and then, by one thread at a time. `clock` is monotonic, in seconds."""

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = Path(path)
        self._clock = clock
        self._pattern: str | None = None
        self._told: _Signature | None = None
        self._latest: FilesReading | None = None
        self._change: _Change | None = None

    @property
    def is_changing(self) -> bool:
        """Whether the files differ from those reported last; another look soon will say more."""
        return self._change is not None

    def engine_place(self) -> str:
        """File and line of the policy's engine, ` (policies/policy.yaml:7)`; empty where it cannot be read. Reads the
        disk.
        """
        file = self.path / POOL_FILE if self.path.is_dir() else self.path
        document = read(file)
        return "" if document.data is None or "engine" not in document.data else f" ({document.place(('engine',))})"

    def look(self, *, at_once: bool = False) -> FilesReading | None:
        """The files' content now; None where nothing has changed, or where they are still changing. Reads the disk.

        `at_once` reads and reports them as they are, also where nothing has changed.
        """
        signature = self._signature()
        if at_once:
            self._told = None
        elif signature == self._told:
            self._change = None
            return None
        change = self._change
        if change is None or change.signature != signature:
            change = self._change = _Change(signature, self._clock())
        return self._look_at(change, at_once=at_once)

    def _look_at(self, change: _Change, *, at_once: bool) -> FilesReading | None:
        still_s = self._clock() - change.since_s
        if still_s < STILL_S and not at_once:
            return None
        found = change.found
        if found is None:
            found = self._read()
            if self._signature() != change.signature:  # written meanwhile, or another pattern names other files
                return None
            change.found = found
        if found.problem is not None and not found.says_pass and still_s < STILL_BROKEN_S and not at_once:
            return None
        # Twice within the resolution of a file's date are one: what was not still is looked at once more.
        self._told = change.signature if still_s >= STILL_S else None
        self._change = None
        before, self._latest = self._latest, found
        return None if found.says_as(before) and not at_once else found

    def _read(self) -> FilesReading:
        try:
            loaded = load_files(self.path)
        except PolicyError as error:
            return FilesReading(None, str(error), says_pass(self.path))
        except (OSError, ValueError) as error:
            return FilesReading(None, f"{self.path}: {error}", says_pass(self.path))
        self._pattern = str((loaded.pool.data or {}).get("tenants") or "")
        return FilesReading(loaded, None, loaded.policy.mode is Mode.PASS)

    def _signature(self) -> _Signature:
        """Changes with any file, its content's date, and what a symbolic link leads to (a ConfigMap is swapped so)."""
        try:
            pool = self.path / POOL_FILE if self.path.is_dir() else self.path
            names = [str(pool), *(tenant_files(self._pattern, pool.parent) if self._pattern else ())]
        except OSError:  # a folder that may not be entered: reading says so
            return frozenset()
        return frozenset(found for name in names if (found := stamp(name)) is not None)


def files_of(path: str | Path, environment: Mapping[str, str]) -> PolicyFiles | None:
    """The files that a process follows: none where its environment says that every request passes."""
    return None if is_forced(environment) else PolicyFiles(path)


def stamp(name: str) -> tuple[str, int, int, int] | None:
    """What changes with a file and its content, also where a symbolic link leads to it; None where there is none."""
    try:
        status = os.stat(name)
    except OSError:
        return None
    return name, status.st_mtime_ns, status.st_size, status.st_ino


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
    """Whether the process has a terminal, whose end the same signal reports."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    os.close(terminal)
    return True
