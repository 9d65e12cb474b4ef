"""The policy's files as they stand on disk, beside what a process runs by: a file that was edited, or broken, shows.

What is found is told and nothing is replaced: a process runs by what it was started with until it is started again.
"""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from sidecar.policy.loading import POOL_FILE, load_files, tenant_files
from sidecar.policy.problems import PolicyError

_Signature = frozenset[tuple[str, int, int, int]]


class Standing(str, Enum):
    """How the files stand to what runs: the same, another policy that could be used, or one that could not."""

    CURRENT = "current"
    CHANGED = "changed"
    REJECTED = "rejected"


class Look(NamedTuple):
    """What the files say. `generation` is that of the files, None where they are rejected; `problem` says why."""

    standing: Standing
    generation: str | None
    problem: str | None


class PolicyFiles:
    """Looked at now and then, by one thread at a time. `generation` is that of the policy that runs."""

    def __init__(self, path: str | Path, generation: str) -> None:
        self.path = Path(path)
        self._generation = generation
        self._pattern: str | None = None
        self._seen: _Signature | None = None
        self._latest: Look | None = None

    def look(self) -> Look | None:
        """What the files say now; None where they say what they said at the last look. Reads the disk."""
        seen = self._signature()
        if seen == self._seen:
            return None
        pattern = self._pattern
        found = self._read()
        # As it was before they were read: what is written while they are read is seen the next time. So is everything
        # where another pattern names other files.
        self._seen = seen if pattern == self._pattern else None
        before, self._latest = self._latest, found
        return None if found == before else found

    def _read(self) -> Look:
        try:
            loaded = load_files(self.path)
        except PolicyError as error:
            return Look(Standing.REJECTED, None, str(error))
        except (OSError, ValueError) as error:
            return Look(Standing.REJECTED, None, f"{self.path}: {error}")
        self._pattern = str((loaded.pool.data or {}).get("tenants") or "")
        generation = loaded.policy.generation
        return Look(Standing.CURRENT if generation == self._generation else Standing.CHANGED, generation, None)

    def _signature(self) -> _Signature:
        """Changes with any file, its content's date, and what a symbolic link leads to (a ConfigMap is swapped so)."""
        pool = self.path / POOL_FILE if self.path.is_dir() else self.path
        names = [str(pool), *(tenant_files(self._pattern, pool.parent) if self._pattern else ())]
        return frozenset(found for name in names if (found := _stamp(name)) is not None)


def _stamp(name: str) -> tuple[str, int, int, int] | None:
    try:
        status = os.stat(name)
    except OSError:
        return None
    return name, status.st_mtime_ns, status.st_size, status.st_ino
