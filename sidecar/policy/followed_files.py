"""Files that are followed: looked at now and then, and read when they have changed and are still."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

LOOK_EVERY_S = 0.5
"""With what it takes until the files are still, a key that was removed stops within a second."""
LOOK_AGAIN_S = 0.1
"""While the files are changing."""
STILL_S = 0.2
"""A change that was not followed by another for so long is read: editors and copies write on within milliseconds."""
STILL_BROKEN_S = 1.0
"""Time for which an invalid change may still be incomplete. What was read before stays in force meanwhile."""

Stamp = tuple[str, int, int, int]
R = TypeVar("R")


def stamp(name: str) -> Stamp | None:
    """A stamp that changes with a file and its content, also where a symbolic link leads to it; None where there is
    none.
    """
    try:
        status = os.stat(name)
    except OSError:
        return None
    return name, status.st_mtime_ns, status.st_size, status.st_ino


@dataclass(slots=True)
class _Change(Generic[R]):
    """Files that differ from those reported last: since when, and their content where it was read."""

    stamps: frozenset[Stamp]
    since_s: float
    found: R | None = None


class FollowedFiles(Generic[R]):
    """The files that `names` lists, as `read` reads them. Looked at by one thread at a time.

    `is_broken` says whether a reading may be of files that are still incomplete. `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        names: Callable[[], Iterable[str]],
        read: Callable[[], R],
        is_broken: Callable[[R], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names, self._read, self._is_broken, self._clock = names, read, is_broken, clock
        self._reported: frozenset[Stamp] | None = None
        self._change: _Change[R] | None = None

    @property
    def is_changing(self) -> bool:
        """True if the files differ from those reported last; another look soon will say more."""
        return self._change is not None

    def pause_s(self, every_s: float) -> float:
        """The time until the next look, where there is one every `every_s`."""
        return min(every_s, LOOK_AGAIN_S) if self.is_changing else every_s

    def forget(self) -> None:
        """The next look reads the files, changed or not."""
        self._reported = None

    def look(self, *, at_once: bool = False) -> R | None:
        """The files' content now; None where nothing has changed, or where they are still changing. Reads the disk.

        `at_once` reads and reports them as they are, also where nothing has changed.
        """
        stamps = self._stamps()
        if at_once:
            self._reported = None
        elif stamps == self._reported:
            self._change = None
            return None
        change = self._change
        if change is None or change.stamps != stamps:
            change = self._change = _Change(stamps, self._clock())
        still_s = self._clock() - change.since_s
        if still_s < STILL_S and not at_once:
            return None
        if change.found is None:
            found = self._read()
            if self._stamps() != stamps:  # written meanwhile, or the names are now others
                return None
            change.found = found
        if self._is_broken(change.found) and still_s < STILL_BROKEN_S and not at_once:
            return None
        # Twice within the resolution of a file's date are one: what was not still is looked at once more.
        self._reported = stamps if still_s >= STILL_S else None
        self._change = None
        return change.found

    def _stamps(self) -> frozenset[Stamp]:
        try:
            return frozenset(found for name in self._names() if (found := stamp(name)) is not None)
        except OSError:  # a folder that may not be entered: reading says so
            return frozenset()
