"""The files that a policy's `tenants` pattern names, and what keeps the pattern from reaching them."""

from __future__ import annotations

import glob
import os
import stat
from pathlib import Path

from sidecar.policy.problems import printable
from sidecar.policy.source import unreadable


def tenant_files(pattern: str, folder: Path) -> list[str]:
    """The files that a pool's `tenants` pattern names, sorted. `folder` is the one that the pool's file is in.

    A broken link and a file that may not be read are among them: without them, their tenants' keys would be unknown.
    """
    whole = pattern if Path(pattern).is_absolute() else str(Path(glob.escape(str(folder))) / pattern)
    return sorted(name for name in glob.glob(whole, recursive=True) if _is_meant(name))


def _is_meant(name: str) -> bool:
    """True if a name that the pattern matches is to be read: no folder, device or pipe."""
    try:
        return stat.S_ISREG(os.stat(name).st_mode)
    except FileNotFoundError:
        return os.path.islink(name)  # otherwise it has been removed meanwhile
    except OSError:
        return True


def obstacles(pattern: str, folder: Path) -> list[str]:
    """The folders on the pattern's way that are missing, or no folders, or cannot be read: one half sentence for each.

    `glob` passes over such a folder, as if nothing were in it.
    """
    whole = Path(folder, pattern)
    steps = list(Path(pattern).parts)
    if steps[-1] == "**":
        steps.append("*")  # the files in the folders below count as well
    places, found = [str(whole.anchor if Path(pattern).is_absolute() else folder)], []
    is_searched = False
    for step in steps:
        reasons = [_obstacle(place, is_listed=glob.has_magic(step), is_searched=is_searched) for place in places]
        found += [reason for reason in reasons if reason]
        places = [place for place, reason in zip(places, reasons, strict=True) if reason is None]
        is_searched = glob.has_magic(step)
        places = [below for place in places for below in _below(place, step)]
    return found


def _below(place: str, step: str) -> list[str]:
    """Paths that one step of a pattern leads to."""
    if glob.has_magic(step):
        return sorted(glob.glob(os.path.join(glob.escape(place), step), recursive=True))
    return [os.path.join(place, step)]


def _obstacle(place: str, *, is_listed: bool, is_searched: bool) -> str | None:
    """Why nothing in this folder can be found; None where it can. `is_listed`: its entries are searched by a pattern.

    `is_searched`: the folder itself was found by a pattern, so that a file in its place is no mistake: an empty reason.
    """
    try:
        if is_listed:
            os.scandir(place).close()
        else:
            os.stat(os.path.join(place, ""))  # with a slash at its end only a folder is found
    except (FileNotFoundError, NotADirectoryError) as error:
        return "" if is_searched else f"{printable(place, 300)}: {unreadable(place, error, 'folder')}"
    except OSError as error:
        return f"{printable(place, 300)}: {unreadable(place, error, 'folder')}"
    return None
