"""Discovery by a file, which is followed as the policy's files are: a broken one leaves the last list standing."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from sidecar.fleet.discovery import FollowedDiscovery
from sidecar.policy.fleet import EngineAddress
from sidecar.policy.reload import LOOK_AGAIN_S, LOOK_EVERY_S, STILL_BROKEN_S, STILL_S

ReadEngines: TypeAlias = Callable[[Path], Sequence[EngineAddress]]
"""Reads a file of engines. Raises ValueError (so PolicyError, too) or OSError, with a sentence for the operator."""

_Signature: TypeAlias = tuple[int, int, int] | None
_MISSING = (0, 0, 0)
"""No file has this signature. None is that of a file that must be read whatever it has."""


class FileDiscovery(FollowedDiscovery):
    """The engines that a file lists, as `read` reads it, in a thread. `every_s` is for tests."""

    def __init__(self, path: str | Path, read: ReadEngines, *, every_s: float = LOOK_EVERY_S) -> None:
        super().__init__(f"the file {path}")
        self._file = _FollowedFile(Path(path), read)
        self._every_s = every_s

    def change(self, read: ReadEngines) -> None:
        """Reads the file anew, and from now on, by another function."""
        self._file.change(read)

    async def _look(self) -> float:
        reading = await asyncio.to_thread(self._file.look)
        if reading is not None and reading.problem is not None:
            self._failed(reading.problem)
        elif reading is not None:
            self._answered(reading.engines)
        return min(self._every_s, LOOK_AGAIN_S) if self._file.is_changing else self._every_s


@dataclass(frozen=True, slots=True)
class _Reading:
    """Content of the file: engines, or in `problem` the reason why it cannot be used."""

    engines: tuple[EngineAddress, ...]
    problem: str | None = None


class _FollowedFile:
    """One file, looked at now and then in one thread at a time: see `policy.reload.PolicyFiles`."""

    def __init__(self, path: Path, read: ReadEngines) -> None:
        self.is_changing = False
        self._path = path
        self._read_engines = read
        self._is_known = False
        self._known: _Signature = None
        self._changing: _Signature = None
        self._since_s = 0.0

    def change(self, read: ReadEngines) -> None:
        """The next look reads the file, changed or not."""
        self._read_engines, self._known = read, None

    def look(self) -> _Reading | None:
        """The file's content where it has changed and is still since; the first time at once. Else None."""
        signature, now_s = self._signature(), time.monotonic()
        if self._is_known and signature == self._known:
            self.is_changing = False
            return None
        if not self.is_changing or signature != self._changing:
            self.is_changing, self._changing, self._since_s = True, signature, now_s
        still_s = now_s - self._since_s
        if self._is_known and still_s < STILL_S:
            return None
        reading = self._read()
        if self._signature() != signature:  # written meanwhile
            return None
        if self._is_known and reading.problem is not None and still_s < STILL_BROKEN_S:
            return None
        # A file that was not still at the first look is read once more: it may change twice at one date.
        is_settled, self._is_known = self._is_known, True
        self._known, self.is_changing = (signature if is_settled else None), False
        return reading

    def _read(self) -> _Reading:
        try:
            return _Reading(tuple(self._read_engines(self._path)))
        except OSError as error:
            return _Reading((), f"it cannot be read: {error.strerror or error}")
        except ValueError as error:
            return _Reading((), "; ".join(str(error).splitlines()) or "it cannot be read")

    def _signature(self) -> _Signature:
        try:
            status = os.stat(self._path)
        except OSError:
            return _MISSING
        return status.st_mtime_ns, status.st_size, status.st_ino
