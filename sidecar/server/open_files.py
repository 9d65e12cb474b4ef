"""The system's limit on the open files of this process: each connection is one."""

from __future__ import annotations

import contextlib
import sys

WHERE_UNLIMITED = 65_536
"""The soft limit where the hard one is none: macOS refuses more than its kernel has."""
OWN = 64
"""Files that are no connection of a client or to an engine: the admin port's, the store's, the event loop's."""


def raise_limit() -> tuple[int, int] | None:
    """Raises the soft limit to the hard one. Returns both limits, before and now, where that changed anything."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = WHERE_UNLIMITED if hard == resource.RLIM_INFINITY else hard
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return soft, wanted
    return None


def limit() -> int:
    """The limit in force."""
    with contextlib.suppress(ImportError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            return soft
    return sys.maxsize


def most_clients() -> int:
    """How many connections of clients leave one for each to its engine, and `OWN` others."""
    return max(1, (limit() - OWN) // 2)
