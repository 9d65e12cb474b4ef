"""Several emulated engines at once: a process each, so that they use every core and each can be killed on its own."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import TypeAlias

from sidecar.tools.emulator.config import EmulatorConfig
from sidecar.tools.emulator.server import serve

Say: TypeAlias = Callable[[str], None]
CTRL_C_PATIENCE_S = 2.0
"""A replica that starts ignores Ctrl-C, and one that ends its streams needs a moment."""

POLL_S = 0.5

_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine to run. `greeting` is printed once it answers, with its process id."""

    config: EmulatorConfig
    listener: socket.socket
    url: str
    greeting: str
    startup_delay_s: float = 0.0


def run_replicas(replicas: Sequence[Replica], say: Say) -> int:
    """Runs all until the last one has ended. Returns 0 where SIGTERM or Ctrl-C ended them, else 1.

    A replica that dies is reported, and the others run on. SIGTERM is passed on, so that each drains as its engine
    does; Ctrl-C ends all at once. `say` is called in every process. They end with this process, too, however it ends.
    """
    running: dict[SpawnProcess, Replica] = {}
    stopping = _Stopping(running)
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, stopping.handle)
    _start(replicas, running, say)
    stopping.pass_on()
    while running:
        # Not without a limit: after a signal's handler Python goes on waiting where it was.
        wait([process.sentinel for process in running], POLL_S)
        stopping.kill_late()
        for process in [process for process in running if not process.is_alive()]:
            replica = running.pop(process)
            if not stopping.signal:
                say(_obituary(process, replica, len(running), len(replicas)))
    return 0 if stopping.signal else 1


def _start(replicas: Sequence[Replica], running: dict[SpawnProcess, Replica], say: Say) -> None:
    resource_tracker.ensure_running()  # or the first start would do it, and unblock the signal
    # The processes inherit it: Ctrl-C waits until they have imported their modules, and gets no traceback from there.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    for replica in replicas:
        process = _SPAWN.Process(target=_run, args=(replica, say), daemon=True)
        process.start()
        running[process] = replica
        # A copy that stays open here would accept connections, for no one, after the replica's death.
        replica.listener.close()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class _Stopping:
    """Handler of the signals that end all. `signal` is the last one, 0 before the first."""

    def __init__(self, running: dict[SpawnProcess, Replica]) -> None:
        self._running = running
        self._kill_at_s = math.inf
        self.signal = 0

    def handle(self, sig: int, frame: FrameType | None) -> None:
        """Called by the signal's handler, between any two instructions."""
        del frame
        self.signal = sig
        self.pass_on()

    def pass_on(self) -> None:
        """Sends the signal, if there was one, to all that run."""
        if self.signal == signal.SIGINT:
            self._kill_at_s = time.monotonic() + CTRL_C_PATIENCE_S
        for process in list(self._running) if self.signal else ():
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, self.signal)

    def kill_late(self) -> None:
        """Kills those that ignore Ctrl-C, because they still start."""
        if time.monotonic() >= self._kill_at_s:
            for process in self._running:
                process.kill()


def _obituary(process: SpawnProcess, replica: Replica, left: int, of: int) -> str:
    code = process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    name = replica.config.name
    return f"{name}: {replica.url} {how} (process {process.pid}); {left} of {of} engines run"


def _run(replica: Replica, say: Say) -> None:
    """The replica's own process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the server has its own handler
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    greeting = f"{replica.greeting}, process {os.getpid()}"
    serve(replica.config, replica.listener, partial(say, greeting), replica.startup_delay_s)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
