"""Sockets that the servers listen on: a port, one that several processes share, a Unix socket."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
from collections.abc import Iterator

from sidecar.server import CannotServe
from sidecar.server.unix_address import SCHEME, socket_path

_FOR_ALL = 0o666
"""As a port is; the folder says who may enter. uvicorn has the same."""


def socket_address(listener: socket.socket, *, has_tls: bool = False) -> str:
    """The address of a socket's server."""
    name = listener.getsockname()
    if isinstance(name, str):
        return f"{SCHEME}{name}"
    host, port = name[:2]
    scheme = "https" if has_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket, on which the server listens when the app is up. Raises CannotServe.

    `host` may be a Unix socket's address: then `port` says nothing.
    """
    path = socket_path(host)
    with _bound(host, port) if path is None else _bound_to(path) as listener:
        try:
            # Fails here, before the start, where another process listens already.
            listener.listen(1)
        except OSError as error:
            raise _cannot_listen(host, port, error) from None
        yield listener


def sharing(host: str, port: int) -> socket.socket:
    """A socket bound to a port which other processes of this user bind, too, and which does not listen yet.

    Linux divides the connections among the sockets that listen. Raises CannotServe.
    """
    return _bound(host, port, is_shared=True)


def _bound(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    with contextlib.ExitStack() as stack:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
            )[0]
            # Only with the protocol named asyncio turns Nagle's algorithm off, which costs 40 ms per response.
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            if sys.platform != "win32":
                # Otherwise a restart has to wait for the last connections' TIME_WAIT.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
        except OSError as error:
            raise _cannot_listen(host, port, error) from None
        stack.pop_all()
    return listener


@contextlib.contextmanager
def _bound_to(path: str) -> Iterator[socket.socket]:
    """A Unix socket, whose file is removed at the end."""
    _remove_stale(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(path)
            os.chmod(path, _FOR_ALL)
            own = os.stat(path)
        except OSError as error:
            raise CannotServe(f"cannot listen on {SCHEME}{path}: {error.strerror}") from None
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(path), own):  # else another process has it now
                    os.unlink(path)


def _remove_stale(path: str) -> None:
    """Removes the file of a socket on which no one listens: its process was killed. Raises CannotServe for another."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # one whose queue is full does not answer
        try:
            probe.connect(path)
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                os.unlink(path)
                return
            raise CannotServe(f"cannot listen on {SCHEME}{path}: there is a file that is no socket") from None
        except BlockingIOError:
            pass
        except OSError as error:
            raise CannotServe(f"cannot listen on {SCHEME}{path}: {error.strerror}") from None
    raise CannotServe(f"cannot listen on {SCHEME}{path}: another process listens there")


def _cannot_listen(host: str, port: int, error: OSError) -> CannotServe:
    return CannotServe(f"cannot listen on {host}:{port}: {error.strerror}")
