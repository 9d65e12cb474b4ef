"""The supervisor's private folder: the sockets of its Valkey and of the workers' admin pages.

It has a lock that is held while the supervisor lives. The next start removes folders whose lock is free: their
supervisor was killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sidecar.server import CannotServe

_PREFIX, _LOCK = "sidecar-workers", "lock"
_LONGEST_NAME = "worker-64.sock"
_MOST_BYTES = 107
"""Of a socket's path, on Linux."""
_YOUNG_S = 60.0
"""A younger folder may be one whose supervisor is about to lock it."""


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder that only this user can enter, while the block runs. Raises CannotServe where there can be none."""
    prefix = f"{_PREFIX}-{os.getuid()}-"
    try:
        _remove_leftovers(prefix)
        path = Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        reason = "the workers' sockets need a folder, and none can be made"
        raise CannotServe(f"{reason} ({error.strerror}); set TMPDIR to a folder that can be written") from None
    lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if len(os.fsencode(path / _LONGEST_NAME)) > _MOST_BYTES:
            raise CannotServe(f"the path of a socket in {path} would be too long; set TMPDIR to a shorter folder")
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _remove_leftovers(prefix: str) -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            if _is_own_and_old(path) and _is_unlocked(path):
                shutil.rmtree(path)


def _is_own_and_old(path: Path) -> bool:
    status = path.lstat()  # another user may have put a link there
    is_own_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return is_own_folder and time.time() - status.st_ctime > _YOUNG_S


def _is_unlocked(path: Path) -> bool:
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(lock)
    return True
