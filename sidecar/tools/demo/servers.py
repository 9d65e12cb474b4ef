"""Processes of the demo: an engine for each run, and replicas in front of the last one where a pool is shared."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sidecar.app import STORE_VARIABLE
from sidecar.secrets import FILE_SUFFIX
from sidecar.tools.demo.runs import Place, Run

_OUR_STORE = frozenset((STORE_VARIABLE, STORE_VARIABLE + FILE_SUFFIX))
START_WITHIN_S = 60.0
"""A server needs about a second; a machine that is busy with other things, many."""


class CannotStart(Exception):
    """A server did not start. The message is one line, without secrets."""


@contextlib.contextmanager
def servers(runs: Sequence[Run], policy_path: Path) -> Iterator[Mapping[str, Place]]:
    """Starts all servers, and ends them. Gives the place of each run by its name. Raises CannotStart."""
    engines = [("sidecar.tools.demo.server", _kind(run), str(policy_path)) for run in runs]
    with _processes(engines) as ports, contextlib.ExitStack() as replicas:
        places: dict[str, Place] = {}
        for run, engine in zip(runs, ports, strict=True):
            sidecars = (engine,) if run.sharing is None else replicas.enter_context(_replicas(run, engine, policy_path))
            places[run.name] = Place(tuple(sidecars), engine)
        yield places


def _kind(run: Run) -> str:
    return "admission" if run.has_admission and run.sharing is None else "alone"


def _replicas(run: Run, engine: int, policy_path: Path) -> contextlib.AbstractContextManager[Sequence[int]]:
    assert run.sharing is not None
    command = ("sidecar.tools.demo.replica", str(policy_path), run.sharing.pool, f"http://127.0.0.1:{engine}")
    return _processes([command] * run.sharing.replicas, run.sharing.store)


@contextlib.contextmanager
def _processes(commands: Sequence[Sequence[str]], store: str | None = None) -> Iterator[Sequence[int]]:
    """Starts Python modules with their arguments, all at once, gives the ports that they print, and ends them."""
    processes: list[subprocess.Popen[str]] = []
    try:
        processes += (_start(command, store) for command in commands)
        yield [_port_of(process) for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            with process:  # closes the pipes, once it has ended in order
                process.wait(START_WITHIN_S)


def _start(command: Sequence[str], store: str | None) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in _OUR_STORE}
    if store is not None:
        environment[STORE_VARIABLE] = store
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        stdin=subprocess.PIPE,  # see `end_with_parent`
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # Ctrl-C is for the demo, which ends them in order
    )


def _port_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line.isdigit():
        raise CannotStart(line or "a server of the demo did not start; its error is above")
    return int(line)
