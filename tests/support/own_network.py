"""A network and a resolv.conf that only one process has, and those that it starts: for names that are no one else's."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_MS_BIND = 4096
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def run_inside(module: str, *arguments: str, timeout_s: float = 120) -> str:
    """Runs a module of the tests there. Returns what it printed. Skips the test where there can be no such network."""
    unshare = shutil.which("unshare")
    command = [unshare or "", "--net", "--mount", "--propagation", "private"]
    if unshare is None or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network of its own can be made here (unshare)")
    ended = subprocess.run(
        [*command, sys.executable, "-m", module, *arguments],
        cwd=_ROOT, capture_output=True, text=True, check=False, timeout=timeout_s,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def bring_loopback_up() -> None:
    """For the module itself: 127.0.0.0/8 answers."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def use_own_resolver(search: str | None = None) -> None:
    """For the module itself: names are asked of 127.0.0.1:53, those without a dot in the domain `search` first."""
    libc = ctypes.CDLL(None, use_errno=True)
    domain = "" if search is None else f"search {search}\n"
    for path, text in {
        "/etc/resolv.conf": f"nameserver 127.0.0.1\n{domain}options timeout:1 attempts:1\n",
        "/etc/nsswitch.conf": "hosts: files dns\n",
    }.items():
        with tempfile.NamedTemporaryFile("w", delete=False) as file:
            file.write(text)
        os.chmod(file.name, 0o644)
        if libc.mount(file.name.encode(), path.encode(), None, _MS_BIND, None):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
