"""All workers of one supervisor: started and kept running, reloaded and ended together."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from socket import socket

import msgspec

from sidecar.composition.serving import ServeSettings
from sidecar.composition.stores import TAKE_OVER_VARIABLE
from sidecar.server.server import wait_first
from sidecar.tasks import is_set_within, report_failure
from sidecar.telemetry.logs.setup import LogSettings
from sidecar.workers.channel import CUT, Begin, WorkerState
from sidecar.workers.process import ProcessEnd, WorkerProcess

OVERDUE_S = 25.0
"""After the grace. A worker's telemetry may wait twice ten seconds for a Collector that does not answer."""
CUT_WITHIN_S = 10.0
"""A worker needs two seconds to cut its requests off, and holds their room for up to five: until the engine has aborted
them."""

_RESOURCE = "OTEL_RESOURCE_ATTRIBUTES"
_INSTANCE = re.compile(r"(service\.instance\.id=[^,]*)")
_log = logging.getLogger("sidecar.workers")


class Crew:
    """`number` workers with the same `settings`. `failed` is set with a `failure` where one cannot be kept running.

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
            WorkerProcess(each, folder / f"worker-{each}.sock", self._note_serving) for each in range(1, number + 1)
        ]
        self.failure: str | None = None
        self.failed, self.ending, self.all_serving = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._settings, self._log, self._environment = settings, log, environment
        self._listener = listener
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Starts all. `all_serving` is set when they listen."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._keep(each), name=f"worker {each.number}") for each in self.workers]
        for worker, task in zip(self.workers, self._tasks, strict=True):
            report_failure(task, partial(self._note_failure, worker.number))

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

    def fail(self, reason: str) -> None:
        """The command cannot go on."""
        self.failure = self.failure or reason
        self.failed.set()

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

    async def close(self) -> None:
        """Ends what is left, at once."""
        self.ending.set()
        for worker in self.workers:
            worker.send(signal.SIGKILL)
        await self._ended()
        for worker in self.workers:
            await worker.pages.close()

    async def _ended(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _keep(self, worker: WorkerProcess) -> None:
        """Runs one worker, again and again."""
        settings, environment = self._settings, environment_for(self._environment, worker.number)
        while not self.ending.is_set():
            listener, waits = self._listener(), bool(self.serving())
            begin = Begin(worker.number, settings, self._log, worker.socket, listener.fileno(), waits)
            ending = await worker.run(begin, listener, environment)
            pause_s = None if self.ending.is_set() else self._pause_s(worker, ending)
            if pause_s is None:
                return
            # Once: another process may have taken the pool over since.
            settings = msgspec.structs.replace(settings, takes_over_pool=False)
            environment.pop(TAKE_OVER_VARIABLE, None)
            await is_set_within(self.ending, pause_s)

    def _pause_s(self, worker: WorkerProcess, ending: ProcessEnd) -> float | None:
        """How long to wait before the worker's next start; None where there is none."""
        if ending.failed and not self.all_serving.is_set():
            self.fail(ending.failed.reason)  # the first start says what one process would say
            return None
        if ending.failed and ending.failed.is_policy and self.serving():
            pause_s: float | None = worker.restarts.pause_again_s()  # the others run by the files as they were
        else:
            pause_s = worker.restarts.pause_s(ending.served_s)
        if pause_s is None:
            self.fail(f"worker {worker.number} cannot be kept running: {worker.reason}, as the times before")
            return None
        message = "worker %d is down: %s; it is started again"
        _log.warning(message, worker.number, worker.reason, extra={"event": "worker_down"})
        return pause_s

    def _note_failure(self, number: int, reason: str) -> None:
        self.fail(f"worker {number} cannot be kept running: {reason}")

    def _note_serving(self) -> None:
        if len(self.serving()) == len(self.workers):
            self.all_serving.set()


def environment_for(environment: Mapping[str, str], number: int) -> dict[str, str]:
    """A worker's variables: an instance that they name gets the worker's number.

    A backend adds up what it gets from processes that it takes for one.
    """
    changed = dict(environment)
    if _RESOURCE in changed:
        changed[_RESOURCE] = _INSTANCE.sub(rf"\1-{number}", changed[_RESOURCE])
    return changed
