"""Number of server processes that share one engine, as the server, its supervisor or the environment says it.

Each process of a server has a queue of its own, unless they share one pool in a store. So several processes without a
store would each admit a whole pool. A supervisor does not report to the app how many it starts, so this module reads it
where the operator wrote it, or where the process got it. Read from uvicorn 0.54 (`_subprocess.py`,
`supervisors/multiprocess.py`), gunicorn 27 (`app/base.py`, `arbiter.py`), hypercorn 0.18 (`run.py`) and granian 2.8
(`server/mp.py`, `cli.py`).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from starlette.types import Scope

PROCESSES_VARIABLE = "SIDECAR_PROCESSES"
"""The number of processes, where the server does not report it. The launchers set it, and it overrides supervisors."""


_POOLS_OF_THEIR_OWN = (
    "each would admit a whole pool of its own: set SIDECAR_STORE=redis://HOST:6379/0 so that they share one, start a "
    "single server process, or run `sidecar serve` in front"
)
_OFFERED_TWICE = (
    "with `engines: {mounted: true}` each would offer the pool all of it: start a single server process, or write "
    "`capacity` in place of `engines`"
)


class ServerProcesses(NamedTuple):
    """`number` processes that serve one engine. `supervisor` started them; None where no known one did.

    A supervisor may start a new process before the one that it replaces has ended.
    """

    number: int
    supervisor: str | None = None


def server_processes(scope: Scope, environment: Mapping[str, str]) -> ServerProcesses:
    """The processes that serve the app of a lifespan's `scope`. Raises ValueError for an invalid number.

    vLLM's own number comes first, then that of the environment, then that of the supervisor.
    """
    arguments = getattr(getattr(scope.get("app"), "state", None), "args", None)
    count = getattr(arguments, "api_server_count", None)  # vLLM's; None where there is one process
    if isinstance(count, int):
        return ServerProcesses(max(1, count))
    supervised = _find_supervised()
    written = environment.get(PROCESSES_VARIABLE, "").strip()
    if not written:
        return supervised
    if not written.isdecimal() or int(written) < 1:
        raise ValueError(f"{PROCESSES_VARIABLE}: {written!r} is no number of processes; write 1 or more")
    return supervised._replace(number=int(written))


def check_processes(
    scope: Scope, environment: Mapping[str, str], *, is_shared: bool, is_engine: bool
) -> ServerProcesses:
    """The server's processes, by its first scope.

    Raises ValueError where each would have a pool of its own (not `is_shared`), or offer a pool the one engine of all
    (`is_engine`).
    """
    processes = server_processes(scope, environment)
    refuse_several(processes, is_shared=is_shared, is_engine=is_engine)
    return processes


def refuse_several(processes: ServerProcesses, *, is_shared: bool, is_engine: bool) -> None:
    """See `check_processes`."""
    number, supervisor = processes
    if number > 1 and (is_engine or not is_shared):
        why = _OFFERED_TWICE if is_engine else _POOLS_OF_THEIR_OWN
        started = f"{number} server processes" if supervisor is None else f"{number} server processes of {supervisor}"
        switch = "" if supervisor is None else f"; if each has an engine of its own, set {PROCESSES_VARIABLE}=1"
        raise ValueError(f"{started} share this engine, and {why}{switch}")


def _find_supervised() -> ServerProcesses:
    """The processes of the supervisor that started this one; one where it is not known to have several."""
    return _find_multiprocessing() or _find_gunicorn() or _find_granian() or ServerProcesses(1)


_WITH_CONFIG = frozenset(("uvicorn", "hypercorn"))


def _find_multiprocessing() -> ServerProcesses | None:
    """Uvicorn's and hypercorn's supervisors pass their configuration to each process that they start.

    It has the number in every way that they take one: `--workers`, `WEB_CONCURRENCY`, a file, an argument of `run`.
    uvicorn ignores the number where it reloads, and starts one.
    """
    config = getattr(multiprocessing.current_process(), "_kwargs", {}).get("config")
    supervisor = _package(config)
    workers = getattr(config, "workers", None)
    if supervisor not in _WITH_CONFIG or not isinstance(workers, int):
        return None
    return ServerProcesses(1 if getattr(config, "reload", False) is True else max(1, workers), supervisor)


def _find_gunicorn() -> ServerProcesses | None:
    """Its workers have the command line of their supervisor, and the environment that it names itself in.

    What the operator wrote is read once more as gunicorn reads it: `-w`, `WEB_CONCURRENCY`, `GUNICORN_CMD_ARGS`, a
    file. Raises ValueError where that fails: a file's relative path leads elsewhere after `--chdir`.
    """
    program = Path(sys.argv[0])
    is_gunicorn = os.environ.get("SERVER_SOFTWARE", "").startswith("gunicorn/")
    if not is_gunicorn or "gunicorn" not in (program.name, program.parent.name):
        return None
    from gunicorn.app.wsgiapp import WSGIApplication

    try:
        return ServerProcesses(max(1, WSGIApplication().cfg.workers), "gunicorn")
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"gunicorn's number of processes cannot be read ({error}): set {PROCESSES_VARIABLE} to it"
        ) from None


def _find_granian() -> ServerProcesses | None:
    written = written_for_granian("workers") or "1"
    return ServerProcesses(max(1, int(written)) if written.isdecimal() else 1, "granian") if _is_granians() else None


def _is_granians() -> bool:
    return multiprocessing.current_process().name == "granian-worker"


def written_for_granian(name: str) -> str | None:
    """An option of granian's command line, or of its environment; None where there is none, and in other processes.

    A new process has the command line of its supervisor, and its environment.
    """
    if not _is_granians():
        return None
    written = os.environ.get(f"GRANIAN_{name.upper()}")
    for option, value in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        left, _, attached = option.partition("=")
        if left == f"--{name}":
            written = attached or value
    return written


def _package(owner: object) -> str:
    return type(owner).__module__.partition(".")[0]
