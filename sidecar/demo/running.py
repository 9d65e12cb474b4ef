"""The three runs: their servers, what their clients send, and how one of them is played."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sidecar.demo.arrivals import Arrival, Stream
from sidecar.demo.client import Asking, Progress, play
from sidecar.demo.measuring import RunFigures, measure
from sidecar.demo.server import LOG_PATH
from sidecar.emulator.generation import Served
from sidecar.engines import dialect_of
from sidecar.policy.policy import Policy

START_WITHIN_S = 60.0
"""A server needs about a second; a machine that is busy with other things, many."""


@dataclass(frozen=True, slots=True)
class Run:
    """One way to serve the arrivals. `behind_door` is whether the middleware stands before the engine."""

    name: str
    title: str
    behind_door: bool
    asking: Callable[[Policy], Asking]


def _says_nothing(_: Policy) -> Asking:
    return lambda _: ({}, {})


def _says_engine_priority(policy: Policy) -> Asking:
    """The engine's own field, with the value that the middleware would send for the tier."""
    dialect = dialect_of(policy.engine, None)

    def asking(stream: Stream) -> tuple[Mapping[str, str], Mapping[str, object]]:
        level = policy.level_of(stream.tier)
        assert level is not None
        return {}, {"priority": dialect.priority(level, len(policy.tiers))}

    return asking


def _says_who_it_is(_: Policy) -> Asking:
    """The tenant's key and, where the tier is not the key's own, the tier's name."""

    def asking(stream: Stream) -> tuple[Mapping[str, str], Mapping[str, object]]:
        asked = {} if stream.header is None else {"x-priority": stream.header}
        return {"authorization": f"Bearer {stream.key}", **asked}, {}

    return asking


RUNS = (
    Run("control", "control: equal priority", behind_door=False, asking=_says_nothing),
    Run("engine", "engine priority only", behind_door=False, asking=_says_engine_priority),
    Run("admission", "admission", behind_door=True, asking=_says_who_it_is),
)


def play_run(
    run: Run, port: int, arrivals: Sequence[Arrival], policy: Policy, report: Callable[[float, Progress], None]
) -> RunFigures:
    """Plays the arrivals against one server and measures what happened."""
    seen = asyncio.run(play(port, arrivals, run.asking(policy), report))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{LOG_PATH}") as response:
        log = msgspec.json.decode(response.read(), type=list[Served])
    return measure(run.name, [tier.name for tier in policy.tiers], seen, log, policy.rules.requests)


@contextlib.contextmanager
def servers(policy_path: Path) -> Iterator[Mapping[str, int]]:
    """Starts a server for each run, all at once, and ends them. Gives their ports by the runs' names."""
    processes = {run.name: _start(run, policy_path) for run in RUNS}
    try:
        yield {name: _port_of(process) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.communicate(timeout=START_WITHIN_S)


def _start(run: Run, policy_path: Path) -> subprocess.Popen[str]:
    kind = "door" if run.behind_door else "alone"
    command = [sys.executable, "-m", "sidecar.demo.server", kind, str(policy_path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _port_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.strip().isdigit():
        raise RuntimeError("a server of the demo did not start; its error is above")
    return int(line)
