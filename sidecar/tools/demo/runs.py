"""The demo's three runs: how their requests ask, their servers, and what is played where."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from sidecar.admin import PORT_VARIABLE
from sidecar.policy.model import Policy
from sidecar.policy.secrets import FILE_SUFFIX
from sidecar.policy.store import STORE_VARIABLE, StoreAddress, store_address
from sidecar.tools.demo.clients import Arrival, ArrivalStream, Asking, planned
from sidecar.tools.demo.figures import RunMeasurement, measure
from sidecar.tools.demo.server import LOG_PATH, slots
from sidecar.tools.emulator.generation import ServedGeneration
from sidecar.tools.loadgen import Progress, play


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One way to serve the arrivals. `has_admission` is whether the middleware stands before the engine.

    It stands in the engine's own process, or, where the pool is shared, in replicas of their own.
    """

    name: str
    title: str
    has_admission: bool
    asking: Callable[[Policy], Asking]
    sharing: Sharing | None = None

    @property
    def heading(self) -> str:
        """Heading of the run in the table."""
        return self.title if self.sharing is None else f"{self.title}, {self.sharing}"


@dataclass(frozen=True, slots=True)
class RunServers:
    """Where a run is played, in ports of loopback: the servers that its clients ask, the engine's record of requests,
    and the live page, None where there is none.
    """

    sidecars: Sequence[int]
    log: int
    page: int | None = None


def _says_engine_priority(policy: Policy) -> Asking:
    """The engine's own field, with the value that the middleware would send for the tier."""
    dialect = policy.engine()

    def asking(stream: ArrivalStream) -> tuple[Mapping[str, str], Mapping[str, object]]:
        level = policy.level_for(stream.tier)
        assert level is not None
        return {}, {"priority": dialect.priority(level, len(policy.tiers))}

    return asking


def _says_who_it_is(_: Policy) -> Asking:
    """The tenant's key and, where the tier is not the key's own, the tier's name."""

    def asking(stream: ArrivalStream) -> tuple[Mapping[str, str], Mapping[str, object]]:
        asked = {} if stream.header is None else {"x-priority": stream.header}
        return {"authorization": f"Bearer {stream.key}", **asked}, {}

    return asking


RUNS = (
    DemoRun("control", "control: equal priority", has_admission=False, asking=lambda _: lambda _: ({}, {})),
    DemoRun("engine", "engine priority only", has_admission=False, asking=_says_engine_priority),
    DemoRun("admission", "admission", has_admission=True, asking=_says_who_it_is),
)


def shared(sharing: Sharing | None) -> Sequence[DemoRun]:
    """The runs, with admission by replicas where a pool is shared."""
    *others, admission = RUNS
    return (*others, replace(admission, sharing=sharing))


def play_run(
    run: DemoRun,
    place: RunServers,
    arrivals: Sequence[Arrival],
    policy: Policy,
    report: Callable[[float, Progress], None],
) -> RunMeasurement:
    """Plays the arrivals at one place and measures what happened."""
    stalled_s = 0.0

    def watch(elapsed_s: float, progress: Progress) -> None:
        nonlocal stalled_s
        stalled_s = progress.stalled_s
        report(elapsed_s, progress)

    asking, urls = run.asking(policy), [f"http://127.0.0.1:{port}" for port in place.sidecars]
    requests = [planned(arrival, asking) for arrival in arrivals]
    seen = asyncio.run(play(urls, requests, timeout_s=ANSWER_WITHIN_S, report=watch))
    with urllib.request.urlopen(f"http://127.0.0.1:{place.log}{LOG_PATH}") as response:
        log = msgspec.json.decode(response.read(), type=list[ServedGeneration])
    measured = measure(run.name, [tier.name for tier in policy.tiers], arrivals, seen, log, slots=slots(policy))
    answered = Counter(one.url_index for one in seen if one.is_complete)
    replicas = len(place.sidecars) if run.has_admission else 0
    by_replica = [answered[index] for index in range(replicas)]
    return replace(measured, stalled_s=stalled_s, replicas=replicas, answered_by_replica=by_replica)


@dataclass(frozen=True, slots=True)
class Sharing:
    """`store` is the address as it was written, its password included; as text, this shows none.

    `pool` is this demo's own, so that it disturbs no other in the same store. Raises ValueError, when asked for the
    address, for one that cannot be read.
    """

    replicas: int
    store: str = field(repr=False)
    pool: str = field(default_factory=lambda: f"demo-{secrets.token_hex(8)}")

    def __str__(self) -> str:
        return f"{self.replicas} replica{'' if self.replicas == 1 else 's'} through {self.address}"

    @property
    def address(self) -> StoreAddress:
        """The store's address, read."""
        return store_address(self.store)


_LEFT_OUT = frozenset((STORE_VARIABLE, STORE_VARIABLE + FILE_SUFFIX, PORT_VARIABLE))
"""The user's own settings that are not for the demo's servers: their store, and the port of their admin pages."""
ANSWER_WITHIN_S = 60.0
END_WITHIN_S = 1.0
"""A server that has not ended in order until then is killed. The demo's clients are gone by then."""


class CannotStart(Exception):
    """A server did not start. The message is one line, without secrets."""


class Ports(NamedTuple):
    """Ports of a server: that of the API, and that of the admin pages."""

    api: int
    admin: int


@contextlib.contextmanager
def servers(runs: Sequence[DemoRun], policy_path: Path, *, has_page: bool) -> Iterator[Mapping[str, RunServers]]:
    """Starts all servers, and ends them. Gives the place of each run by its name. Raises CannotStart.

    With `has_page` the run with admission has a live page; of several replicas the first one's shows all of them.
    """
    admitting = "page" if has_page else "admission"
    kinds = [admitting if run.has_admission and run.sharing is None else "alone" for run in runs]
    with processes([(kind, str(policy_path)) for kind in kinds]) as ports, contextlib.ExitStack() as replicas:
        places: dict[str, RunServers] = {}
        for run, engine in zip(runs, ports, strict=True):
            sidecars: Sequence[Ports] = (engine,)
            if run.sharing is not None:
                replica = (admitting, str(policy_path), run.sharing.pool, f"http://127.0.0.1:{engine.api}")
                sidecars = replicas.enter_context(processes([replica] * run.sharing.replicas, run.sharing.store))
            page = sidecars[0].admin if run.has_admission and has_page else None
            places[run.name] = RunServers([one.api for one in sidecars], engine.admin, page)
        yield places


@contextlib.contextmanager
def processes(arguments: Sequence[Sequence[str]], store: str | None = None) -> Iterator[Sequence[Ports]]:
    """Starts `demo.server` once for each of these, all at once, gives the ports that they print, and ends them."""
    processes: list[subprocess.Popen[str]] = []
    try:
        processes += (_start(each, store) for each in arguments)
        yield [Ports(_read_port(process), _read_port(process)) for process in processes]
    finally:
        _end(processes)


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.terminate()
    deadline_s = time.monotonic() + END_WITHIN_S
    for process in processes:
        with process:  # closes the pipes
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


def _start(arguments: Sequence[str], store: str | None) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    if store is not None:
        environment[STORE_VARIABLE] = store
    return subprocess.Popen(
        [sys.executable, "-m", "sidecar.tools.demo.server", *arguments],
        stdin=subprocess.PIPE,  # see `end_with_parent`
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # Ctrl-C is for the demo, which ends them in order
    )


def _read_port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line.isdigit():
        raise CannotStart(line or "a server of the demo did not start; its error is above")
    return int(line)
