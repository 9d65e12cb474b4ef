"""The demo's three runs: their requests, their servers, and the table and the sentence that show their results."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from sidecar.app import STORE_VARIABLE
from sidecar.policy.model import Policy
from sidecar.policy.store import StoreAddress, store_address
from sidecar.secrets import FILE_SUFFIX
from sidecar.tools.demo.clients import Arrival, ArrivalStream, Asking, play
from sidecar.tools.demo.figures import Distribution, RunMeasurement, measure
from sidecar.tools.demo.server import LOG_PATH
from sidecar.tools.emulator.generation import Served
from sidecar.tools.loadgen import Progress


@dataclass(frozen=True, slots=True)
class Run:
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
    """Where a run is played, in ports of loopback: the servers that its clients ask, and the engine behind them."""

    sidecars: Sequence[int]
    engine: int


def _says_engine_priority(policy: Policy) -> Asking:
    """The engine's own field, with the value that the middleware would send for the tier."""
    dialect = policy.engine()

    def asking(stream: ArrivalStream) -> tuple[Mapping[str, str], Mapping[str, object]]:
        level = policy.level_of(stream.tier)
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
    Run("control", "control: equal priority", has_admission=False, asking=lambda _: lambda _: ({}, {})),
    Run("engine", "engine priority only", has_admission=False, asking=_says_engine_priority),
    Run("admission", "admission", has_admission=True, asking=_says_who_it_is),
)


def shared(sharing: Sharing | None) -> Sequence[Run]:
    """The runs, with admission by replicas where a pool is shared."""
    *others, admission = RUNS
    return (*others, replace(admission, sharing=sharing))


def play_run(
    run: Run, place: RunServers, arrivals: Sequence[Arrival], policy: Policy, report: Callable[[float, Progress], None]
) -> RunMeasurement:
    """Plays the arrivals at one place and measures what happened."""
    seen = asyncio.run(play(place.sidecars, arrivals, run.asking(policy), report))
    with urllib.request.urlopen(f"http://127.0.0.1:{place.engine}{LOG_PATH}") as response:
        log = msgspec.json.decode(response.read(), type=list[Served])
    figures = measure(run.name, [tier.name for tier in policy.tiers], seen, log, policy.rules.requests)
    if not run.has_admission:
        return figures
    answered = Counter(one.sidecar for one in seen if one.ttft_s is not None)
    replicas = len(place.sidecars)
    return replace(figures, replicas=replicas, answered_by_replica=[answered[index] for index in range(replicas)])


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


_OUR_STORE = frozenset((STORE_VARIABLE, STORE_VARIABLE + FILE_SUFFIX))
START_WITHIN_S = 60.0
"""A server needs about a second; a machine that is busy with other things, many."""


class CannotStart(Exception):
    """A server did not start. The message is one line, without secrets."""


@contextlib.contextmanager
def servers(runs: Sequence[Run], policy_path: Path) -> Iterator[Mapping[str, RunServers]]:
    """Starts all servers, and ends them. Gives the place of each run by its name. Raises CannotStart."""
    kinds = ["admission" if run.has_admission and run.sharing is None else "alone" for run in runs]
    engines = [("sidecar.tools.demo.server", kind, str(policy_path)) for kind in kinds]
    with _processes(engines) as ports, contextlib.ExitStack() as replicas:
        places: dict[str, RunServers] = {}
        for run, engine in zip(runs, ports, strict=True):
            sidecars = (engine,) if run.sharing is None else replicas.enter_context(_replicas(run, engine, policy_path))
            places[run.name] = RunServers(tuple(sidecars), engine)
        yield places


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


_HEAD = f"{'':24} {'requests':>8} {'share':>6}  {'TTFT p50/p95/p99 s':>20}  {'queue wait s':>20}  {'starvation s':>20}"


def table(runs: Sequence[RunMeasurement], played: Sequence[Run] = RUNS) -> str:
    """Every run and tier, a line each. `played` says what the runs were."""
    headings = {run.name: run.heading for run in played}
    lines = [_HEAD]
    for run in runs:
        failed = f", {run.failed} failed" if run.failed else ""
        lines.append(f"{headings[run.name]}  (utilization {run.utilization:.0%}{failed})")
        for tier, figures in run.tiers.items():
            waits = "  ".join(
                f"{_cell(values):>20}" for values in (figures.ttft_s, figures.queue_wait_s, figures.starvation_s)
            )
            lines.append(f"  {tier:22} {figures.requests:>8} {figures.share:>6.0%}  {waits}")
    return "\n".join(lines)


def sentence(runs: Sequence[RunMeasurement]) -> str:
    """The conclusion, with the figures of this run."""
    control, engine, admission = runs
    first, last = "high", "batch"
    if any(tier not in run.tiers for run in runs for tier in (first, last)):
        return f"Too many requests failed: a run without {first} or {last} shows nothing."

    def ttft(run: RunMeasurement) -> str:
        return f"{run.tiers[first].ttft_s['p50']:.2f} s"

    def share(run: RunMeasurement) -> str:
        return f"{run.tiers[last].share:.0%}"

    gains = admission.tiers[last].share > engine.tiers[last].share
    return (
        f"With more requests than the engine can run, {first} has its first token after {ttft(admission)} at the "
        f"median (at equal priority {ttft(control)}, with engine priority {ttft(engine)}), and {last}, which engine "
        f"priority leaves {share(engine)} of the engine, "
        f"{'keeps' if gains else 'gets'} {share(admission)}{': its floor holds' if gains else ' in so short a run'}."
    )


def _cell(values: Distribution) -> str:
    return " / ".join(f"{value:.2f}" for value in values.values())
