"""Processor time of a process and of those that it started, in nanoseconds of the scheduler's own accounts (Linux)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def processor_time_s(pid: int) -> float:
    """Seconds that all threads of the process and of its descendants ran. Threads that have ended are not in it."""
    total_ns = 0
    for process in tree(pid):
        for task in _tasks(process):
            with contextlib.suppress(OSError):
                total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def tree(pid: int) -> Iterator[int]:
    """The process and its descendants."""
    yield pid
    for task in _tasks(pid):
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                yield from tree(int(child))


def _tasks(pid: int) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(Path(f"/proc/{pid}/task").iterdir())
    return []
