"""Discovery by a file, which is followed as the policy's files are: a broken one leaves the last list standing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from sidecar.fleet.discovery import FollowedDiscovery
from sidecar.policy.fleet import EngineAddress
from sidecar.policy.followed_files import LOOK_EVERY_S, FollowedFiles

ReadEngines: TypeAlias = Callable[[Path], Sequence[EngineAddress]]
"""Reads a file of engines. Raises ValueError (so PolicyError, too) or OSError, with a sentence for the operator."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """Content of the file: engines, or in `problem` the reason why it cannot be used."""

    engines: tuple[EngineAddress, ...]
    problem: str | None = None


class FileDiscovery(FollowedDiscovery):
    """The engines that a file lists, as `read` reads it, in a thread. `every_s` is for tests."""

    def __init__(self, path: str | Path, read: ReadEngines, *, every_s: float = LOOK_EVERY_S) -> None:
        super().__init__(f"the file {path}")
        self._path = Path(path)
        self._read_engines = read
        self._every_s = every_s
        self._is_read = False
        self._file = FollowedFiles(lambda: [str(path)], self._read, lambda found: found.problem is not None)

    def change(self, read: ReadEngines) -> None:
        """Reads the file anew, and from now on, by another function."""
        self._read_engines = read
        self._file.forget()

    async def _look(self) -> float:
        reading = await asyncio.to_thread(self._file.look, at_once=not self._is_read)
        self._is_read |= reading is not None
        if reading is not None and reading.problem is not None:
            self._failed(reading.problem)
        elif reading is not None:
            self._answered(reading.engines)
        return self._file.pause_s(self._every_s)

    def _read(self) -> _Reading:
        try:
            return _Reading(tuple(self._read_engines(self._path)))
        except OSError as error:
            return _Reading((), f"it cannot be read: {error.strerror or error}")
        except ValueError as error:
            return _Reading((), "; ".join(str(error).splitlines()) or "it cannot be read")
