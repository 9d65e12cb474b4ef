"""Test for an upstream's address that this process itself listens on."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from sidecar.server.unix_address import socket_path

_PORTS = {"http": 80, "https": 443}


def leads_to(url: str, listeners: Sequence[socket.socket]) -> bool:
    """True if a request to `url` would reach one of `listeners`.

    A name is resolved only where its port is one of theirs. A name that cannot be resolved, and another machine's
    address that leads back here, are not noticed: there the `via` header shows the loop.
    """
    names = [listener.getsockname() for listener in listeners]
    if (path := socket_path(url)) is not None:
        return any(isinstance(name, str) and _is_same(path, name) for name in names)
    parts = urlsplit(url)
    port = parts.port or _PORTS.get(parts.scheme)
    own = [name[0] for name in names if not isinstance(name, str) and name[1] == port]
    if not own:
        return False
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_is_reached(str(info[4][0]), listens) for info in found for listens in own)


def _is_same(path: str, own: str) -> bool:
    try:
        return os.path.samefile(path, own)
    except OSError:
        return False


def _is_reached(address: str, listens: str) -> bool:
    if address == listens or ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        return True
    return ipaddress.ip_address(listens.partition("%")[0]).is_unspecified and _is_local(address)


def _is_local(address: str) -> bool:
    """True if this machine has the address: only then a socket can be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
