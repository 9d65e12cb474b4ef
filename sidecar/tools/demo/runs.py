"""The demo's three runs: how their requests ask, their servers, and what is played where."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec

from sidecar.events import StoreState
from sidecar.policy.compiler import load
from sidecar.policy.model import Policy
from sidecar.policy.store import STORE_VARIABLE, StoreAddress, store_address
from sidecar.tools.demo.figures import Arrival, ArrivalStream, Asking, RunMeasurement, measure, planned
from sidecar.tools.emulator.app import LOG_PATH
from sidecar.tools.emulator.generation import ServedGeneration
from sidecar.tools.loadgen import Progress, play

# A step of a full batch takes 46 ms, so 156 sequences give about 3,500 tokens a second: 110 requests of this size, and
# little enough work for the emulator that two cores are idle most of the time.
STEP_MS = 30.0
STEP_MS_PER_SEQUENCE = 0.1
PREFILL_TOKENS_PER_STEP = 4096
TOKENS_PER_CHUNK = 4
"""As TensorRT-LLM's `stream_interval`; the first token still travels alone. With a chunk for every token the servers
need most of a core, and on a busy machine the demo measures that machine."""
WAITING_IN_ENGINE = 4
"""Requests of the pool that wait in the engine: about as many as end in one step. Without them a place that becomes
free is empty for a step, until the next request has come: 3% of the engine is idle (`waiting` of `capacity`)."""


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One way to serve the arrivals. `has_admission` is whether a sidecar stands before the engine, or several that
    share a pool.
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
    """Where a run is played, in ports of loopback: the servers that its clients ask, the engine, and the live page,
    None where there is none.
    """

    sidecars: Sequence[int]
    engine: int
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
    progress = Progress()
    asking, urls = run.asking(policy), [f"http://127.0.0.1:{port}" for port in place.sidecars]
    requests = [planned(arrival, asking) for arrival in arrivals]
    seen = asyncio.run(play(urls, requests, timeout_s=ANSWER_WITHIN_S, report=report, progress=progress))
    log = msgspec.convert(read_json(place.engine, LOG_PATH), list[ServedGeneration])
    measured = measure(run.name, [tier.name for tier in policy.tiers], arrivals, seen, log, slots=slots(policy))
    answered = Counter(one.url_index for one in seen if one.is_complete)
    replicas = len(place.sidecars) if run.has_admission else 0
    by_replica = [answered[index] for index in range(replicas)]
    return replace(measured, stalled_s=progress.stalled_s, replicas=replicas, answered_by_replica=by_replica)


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


ANSWER_WITHIN_S = 60.0
END_WITHIN_S = 1.0
"""A server that has not ended in order until then is killed. The demo's clients are gone by then."""
STORE_WITHIN_S = 2.0
"""Some attempts to reach the store: where many processes start at once, the first may be too slow."""


class CannotStart(Exception):
    """A server did not start. The message is one line, without secrets."""


class Ports(NamedTuple):
    """Ports of a sidecar: that for clients, and that of the admin pages."""

    api: int
    admin: int


def slots(policy: Policy) -> int:
    """The requests that the engine runs at once."""
    return policy.rules.requests - WAITING_IN_ENGINE


@contextlib.contextmanager
def servers(runs: Sequence[DemoRun], policy_path: Path) -> Iterator[Mapping[str, RunServers]]:
    """Starts all servers, and ends them. Gives the place of each run by its name. Raises CannotStart.

    The live page of a run with admission is that of its sidecar; of several replicas the first one's shows all of them.
    """
    policy = load(policy_path)
    flags = engine_flags(policy, slots(policy), STEP_MS, STEP_MS_PER_SEQUENCE, TOKENS_PER_CHUNK)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        places: dict[str, RunServers] = {}
        for run, (engine,) in zip(runs, stack.enter_context(commands([flags] * len(runs))), strict=True):
            places[run.name] = RunServers([engine], engine)
            if not run.has_admission:
                continue
            sharing, path = run.sharing, policy_path
            if sharing is not None:
                path = _sharing_policy(policy_path, folder, sharing.pool)
            count, store = (1, None) if sharing is None else (sharing.replicas, sharing.store)
            found = stack.enter_context(commands([sidecar_flags(path, engine)] * count, store))
            sidecars = [Ports(*ports) for ports in found]
            if sharing is not None:
                for sidecar in sidecars:
                    _require_shared(sidecar.admin, sharing)
            places[run.name] = RunServers([one.api for one in sidecars], engine, sidecars[0].admin)
        yield places


def _sharing_policy(policy_path: Path, folder: Path, pool: str) -> Path:
    """The policy, for a pool of its own of which the store keeps nothing."""
    copied = shutil.copytree(policy_path, folder / pool)
    with (copied / "policy.yaml").open("a", encoding="utf-8") as file:
        file.write(f"\npool: {pool}\nusage_days: 0\n")
    return copied


def _require_shared(admin: int, sharing: Sharing) -> None:
    """Returns when the sidecar shares its pool. Raises CannotStart where the store cannot be used."""
    deadline_s = time.monotonic() + STORE_WITHIN_S
    while (store := read_json(admin, "/state")["pool"]["store"])["state"] != StoreState.SHARED.value:
        if time.monotonic() > deadline_s:
            raise CannotStart(f"the store {sharing.address} cannot be used: {store['reason']}")
        time.sleep(0.1)


def read_json(port: int, path: str) -> Any:
    """A page of a server of the demo."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as response:
        return msgspec.json.decode(response.read())


def engine_flags(
    policy: Policy, sequences: int, step_ms: float, step_ms_per_sequence: float, tokens_per_chunk: int
) -> Sequence[str]:
    """The command of an engine that holds the tokens of the policy's pool."""
    flags = {
        "--engine": "tensorrt-llm",
        "--port": 0,
        "--max-num-seqs": sequences,
        "--kv-tokens": policy.rules.tokens,
        "--prefill-tokens-per-step": PREFILL_TOKENS_PER_STEP,
        "--step-ms": step_ms,
        "--step-ms-per-seq": step_ms_per_sequence,
        "--tokens-per-chunk": tokens_per_chunk,
    }
    return ["emulate", *(str(part) for flag in flags.items() for part in flag)]


def sidecar_flags(policy_path: Path, engine: int) -> Sequence[str]:
    """The command of a sidecar before the engine on that port. When a demo is over, no request is under way."""
    line = ["serve", "--policy", str(policy_path), "--upstream", f"http://127.0.0.1:{engine}", "--no-check"]
    return [*line, "--port", "0", "--admin-port", "0", "--grace", "500ms", "--log-level", "error"]


@contextlib.contextmanager
def commands(lines: Sequence[Sequence[str]], store: str | None = None) -> Iterator[Sequence[Sequence[int]]]:
    """Starts `sidecar ...` for each of these, all at once, gives the ports that each prints, and ends them.

    `store` is in their environment: it may contain a password, and every user of the machine can read arguments.
    Raises CannotStart.
    """
    processes: list[subprocess.Popen[str]] = []
    try:
        processes += (_start(line, store) for line in lines)
        counts = [2 if line[0] == "serve" else 1 for line in lines]
        yield [[_read_port(process) for _ in range(count)] for process, count in zip(processes, counts, strict=True)]
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


_PROGRAM = (
    "import sys; from sidecar.cli import main; from sidecar.tools.child_process import end_with_parent; "
    "end_with_parent(); sys.exit(main())"
)


def _start(line: Sequence[str], store: str | None) -> subprocess.Popen[str]:
    # The user's own settings are not for the demo's servers.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SIDECAR_")}
    if store is not None:
        environment[STORE_VARIABLE] = store
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *line],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # Ctrl-C is for the demo, which ends them in order
    )


def _read_port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    found = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
    if found is None:
        raise CannotStart("a server of the demo did not start; its error is above")
    return int(found[1])
