"""Addresses of Unix sockets, written `unix:PATH`: of an engine's server, and of the sidecar's own."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp

SCHEME = "unix:"
BASE = "http://localhost"
"""What HTTP needs in place of a host. The path has none."""
MOST_BYTES = 107 if sys.platform.startswith("linux") else 103
"""The system's own bound on a socket's path (`sun_path`, less its last NUL)."""


def socket_path(address: str) -> str | None:
    """The path in `address`; None where it is an address of another kind. Raises ValueError for what is no path."""
    if not address.lower().startswith(SCHEME):
        return None
    path = address[len(SCHEME) :]
    if not address.startswith("unix:/") or path.startswith("//") or "\0" in path:
        raise ValueError(
            f"{address!r} is no Unix socket's address; write unix:, and its path from the root: unix:/run/vllm.sock"
        )
    if (size := len(path.encode())) > MOST_BYTES:
        raise ValueError(f"{address!r} has a path of {size} bytes; a Unix socket's has at most {MOST_BYTES}")
    return path


def url_for(address: str) -> str:
    """URL that an HTTP client is given for `address`, beside `connector_to`."""
    return address if socket_path(address) is None else BASE


def connector_to(address: str) -> aiohttp.BaseConnector:
    """Connections to `address`, without a limit on their number."""
    import aiohttp

    path = socket_path(address)
    return aiohttp.TCPConnector(limit=0) if path is None else aiohttp.UnixConnector(path, limit=0)
