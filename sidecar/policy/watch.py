"""The policy's files as they stand on disk: when they say something else than before, and what.

Files are not written at once: an editor truncates and writes, a copy takes a file after the other, a ConfigMap's link
is swapped between two of our reads. So nothing is told before the files have been still for a moment, a mistake in them
not before they have been for longer, and what changed while it was read is read again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sidecar.policy.loading import POOL_FILE, Loaded, load_files, tenant_files
from sidecar.policy.problems import PolicyError

STILL_S = 0.2
"""A change that was not followed by another for so long is read: editors and copies write on within milliseconds."""
STILL_BROKEN_S = 1.0
"""So long a change that cannot be used may yet be half of one. What is in force stays in force meanwhile, anyhow."""

_Signature = frozenset[tuple[str, int, int, int]]


@dataclass(frozen=True, slots=True)
class Look:
    """What the files say: a policy, or in `problem` why they cannot be used."""

    loaded: Loaded | None
    problem: str | None

    def says_as(self, other: Look | None) -> bool:
        """Whether both say the same: the same contents, or the same mistake."""
        return other is not None and (self.generation, self.problem) == (other.generation, other.problem)

    @property
    def generation(self) -> str | None:
        """That of the files; None where they cannot be used."""
        return None if self.loaded is None else self.loaded.policy.generation


@dataclass(slots=True)
class _Change:
    """Files that are not as they were told, since when they stand so, and what they say where that was read."""

    signature: _Signature
    since_s: float
    found: Look | None = None


class PolicyFiles:
    """Looked at now and then, by one thread at a time. `clock` is monotonic, in seconds."""

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = Path(path)
        self._clock = clock
        self._pattern: str | None = None
        self._told: _Signature | None = None
        self._latest: Look | None = None
        self._change: _Change | None = None

    @property
    def is_changing(self) -> bool:
        """Whether they are other files than those told of: a look soon will say more."""
        return self._change is not None

    def look(self, *, at_once: bool = False) -> Look | None:
        """What the files say now; None where they say what they said, or are not still yet. Reads the disk.

        `at_once` reads and tells them as they are, whatever was told: somebody says that they are ready.
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

    def _look_at(self, change: _Change, *, at_once: bool) -> Look | None:
        still_s = self._clock() - change.since_s
        if still_s < STILL_S and not at_once:
            return None
        found = change.found
        if found is None:
            found = self._read()
            if self._signature() != change.signature:  # written meanwhile, or another pattern names other files
                return None
            change.found = found
        if found.problem is not None and still_s < STILL_BROKEN_S and not at_once:
            return None
        # Twice within the resolution of a file's date are one: what was not still is looked at once more.
        self._told = change.signature if still_s >= STILL_S else None
        self._change = None
        before, self._latest = self._latest, found
        return None if found.says_as(before) and not at_once else found

    def _read(self) -> Look:
        try:
            loaded = load_files(self.path)
        except PolicyError as error:
            return Look(None, str(error))
        except (OSError, ValueError) as error:
            return Look(None, f"{self.path}: {error}")
        self._pattern = str((loaded.pool.data or {}).get("tenants") or "")
        return Look(loaded, None)

    def _signature(self) -> _Signature:
        """Changes with any file, its content's date, and what a symbolic link leads to (a ConfigMap is swapped so)."""
        try:
            pool = self.path / POOL_FILE if self.path.is_dir() else self.path
            names = [str(pool), *(tenant_files(self._pattern, pool.parent) if self._pattern else ())]
        except OSError:  # a folder that may not be entered: reading says so
            return frozenset()
        return frozenset(found for name in names if (found := _stamp(name)) is not None)


def _stamp(name: str) -> tuple[str, int, int, int] | None:
    try:
        status = os.stat(name)
    except OSError:
        return None
    return name, status.st_mtime_ns, status.st_size, status.st_ino
