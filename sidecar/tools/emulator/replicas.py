"""Several emulated engines at once: a process each, so that they use every core and each can be killed on its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from sidecar.tools.child_process import end_with_parent
from sidecar.tools.emulator.config import EmulatorConfig
from sidecar.tools.emulator.server import serve

# The path is set first: `python -c` would find modules in the working directory before those of this process.
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from sidecar.tools.emulator.replicas import main; main()"


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine to run. `greeting` is printed once it answers, with its process id."""

    config: EmulatorConfig
    listener: socket.socket
    url: str
    greeting: str
    startup_delay_s: float = 0.0


def say(text: str) -> None:
    """Prints a line, in one write: two processes must not mix theirs."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def run_replicas(replicas: Sequence[Replica]) -> int:
    """Runs all until the last one has ended. Returns 0 where SIGTERM or Ctrl-C ended them, else 1.

    A replica that dies is reported, and the others run on. SIGTERM is passed on, so that each drains as its engine
    does; Ctrl-C ends all at once. They end with this process, too, however it ends.
    """
    running: dict[Process, Replica] = {}
    ended_by: list[signal.Signals] = []

    def pass_on() -> None:
        for process in running if ended_by else ():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                process.send_signal(signal.SIGKILL if ended_by[-1] is signal.SIGINT else ended_by[-1])

    def end(number: signal.Signals) -> None:
        ended_by.append(number)
        pass_on()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end, number)
    for replica in replicas:
        running[await _start(replica)] = replica
    pass_on()  # to those that were started meanwhile

    async def follow(process: Process, replica: Replica) -> None:
        code = await process.wait()
        del running[process]
        if not ended_by:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            left = f"{len(running)} of {len(replicas)} engines run"
            say(f"{replica.config.name}: {replica.url} {how} (process {process.pid}); {left}")

    await asyncio.gather(*(follow(*one) for one in running.items()))
    return 0 if ended_by else 1


async def _start(replica: Replica) -> Process:
    """Starts a replica's process, which alone has its socket then: a copy here would accept connections for no one."""
    with replica.listener as listener:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _PROGRAM, *sys.path),
            stdin=PIPE,
            pass_fds=(listener.fileno(),),
            start_new_session=True,  # a terminal's Ctrl-C is for this process alone
        )
        assert process.stdin is not None
        parts = replica.config, listener.fileno(), replica.greeting, replica.startup_delay_s
        process.stdin.write(pickle.dumps(parts))
    return process


def main() -> None:
    """Runs a replica's own process. Its standard input begins with what to run."""
    config, listener, greeting, startup_delay_s = pickle.load(sys.stdin.buffer)
    end_with_parent()
    answers = partial(say, f"{greeting}, process {os.getpid()}")
    serve(config, socket.socket(fileno=listener), answers, startup_delay_s)
