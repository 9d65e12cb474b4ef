"""All workers of one supervisor: started and kept running, reloaded and ended together."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from socket import socket

import msgspec

from sidecar.composition.serving import ServeSettings
from sidecar.server import CannotServe
from sidecar.server.server import wait_first
from sidecar.server.unix_address import SCHEME
from sidecar.tasks import is_set_within
from sidecar.telemetry.logs.setup import LogSettings
from sidecar.workers.process import CUT, Begin, WorkerProcess, WorkerState

OVERDUE_S = 25.0
"""After the grace. A worker's telemetry may wait twice ten seconds for a Collector that does not answer."""
CUT_WITHIN_S = 10.0
"""A worker needs two seconds to cut its requests off, and holds their room for up to five: until the engine has aborted
them."""

_RESOURCE = "OTEL_RESOURCE_ATTRIBUTES"
_INSTANCE = re.compile(r"(service\.instance\.id=[^,]*)")
_log = logging.getLogger("sidecar.workers")


class Crew:
    """`number` workers with the same `settings`.

    `listener` makes the clients' socket of one process. `folder` is for the sockets of the workers' pages.
    """

    def __init__(
        self,
        settings: ServeSettings,
        number: int,
        log: LogSettings,
        environment: Mapping[str, str],
        folder: Path,
        *,
        listener: Callable[[], socket],
    ) -> None:
        self.workers = [
            WorkerProcess(each, f"{SCHEME}{folder}/worker-{each}.sock", self._note_change)
            for each in range(1, number + 1)
        ]
        self.ending, self.all_serving = asyncio.Event(), asyncio.Event()
        self._settings, self._log, self._environment = settings, log, environment
        self._listener = listener
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> Sequence[asyncio.Task[None]]:
        """Starts all; `all_serving` is set when they listen. A task raises CannotServe where its worker cannot be kept
        running.
        """
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._keep(each), name=f"worker {each.number}") for each in self.workers]
        return self._tasks

    def serving(self) -> Sequence[WorkerProcess]:
        """Workers that listen."""
        return [worker for worker in self.workers if worker.is_serving]

    def reload(self) -> None:
        """All read the policy's files at once. One that is starting reads them anyway; none does while they end: the
        signal would kill one that only sends its last telemetry.
        """
        for worker in () if self.ending.is_set() else self.workers:
            if worker.state in (WorkerState.STARTED, WorkerState.SERVING):
                worker.send(signal.SIGHUP)

    async def end(self, grace_s: float, at_once: asyncio.Event) -> None:
        """Ends all in order. Returns when they have ended: within the grace and what follows it, or soon after
        `at_once`.
        """
        self.ending.set()
        for worker in self.workers:
            worker.send(signal.SIGTERM if worker.is_serving else signal.SIGKILL)
        await wait_first(self._ended(), at_once.wait(), timeout_s=grace_s + OVERDUE_S)
        for worker in self.workers:
            worker.send(CUT)
        await wait_first(self._ended(), timeout_s=CUT_WITHIN_S)
        for worker in self.workers:
            worker.send(signal.SIGKILL)
        await asyncio.gather(*self._tasks, return_exceptions=True)  # several may have failed

    async def close(self) -> None:
        """Closes the connections to the workers' pages."""
        for worker in self.workers:
            await worker.pages.close()

    async def _ended(self) -> None:
        await asyncio.wait(self._tasks)

    async def _keep(self, worker: WorkerProcess) -> None:
        """Runs one worker, again and again. Raises CannotServe."""
        settings, environment = self._settings, environment_for(self._environment, worker.number)
        while not self.ending.is_set():
            listener, waits = self._listener(), bool(self.serving())
            begin = Begin(worker.number, settings, self._log, worker.address, listener.fileno(), waits)
            served_s = await worker.run(begin, listener, environment)
            if not self.ending.is_set():
                await is_set_within(self.ending, self._pause_s(worker, served_s))
            # Once: another process may have taken the pool over since.
            settings = msgspec.structs.replace(settings, takes_over_pool=False)

    def _pause_s(self, worker: WorkerProcess, served_s: float) -> float:
        """How long to wait before the worker's next start. Raises CannotServe where there is none."""
        failed = worker.failed
        if failed and not self.all_serving.is_set():
            raise CannotServe(failed.reason)  # the first start says what one process would say
        if failed and failed.is_policy and self.serving():
            pause_s: float | None = worker.restarts.pause_again_s()  # the others run by the files as they were
        else:
            pause_s = worker.restarts.pause_s(served_s)
        if pause_s is None:
            raise CannotServe(f"worker {worker.number} cannot be kept running: {worker.reason}, as the times before")
        message = "worker %d is down: %s; it is started again"
        _log.warning(message, worker.number, worker.reason, extra={"event": "worker_down"})
        return pause_s

    def _note_change(self, worker: WorkerProcess) -> None:
        if len(self.serving()) == len(self.workers):
            self.all_serving.set()
        if self.ending.is_set() and worker.state is WorkerState.STARTING:
            worker.send(signal.SIGKILL)  # it was not there yet when the others were ended


def environment_for(environment: Mapping[str, str], number: int) -> dict[str, str]:
    """A worker's variables: an instance that they name gets the worker's number.

    A backend adds up what it gets from processes that it takes for one.
    """
    named = environment.get(_RESOURCE, "")
    return {**environment, _RESOURCE: _INSTANCE.sub(rf"\1-{number}", named)} if named else {**environment}
