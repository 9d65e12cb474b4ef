"""The demo's three runs: their requests and how a run is played."""

from __future__ import annotations

import asyncio
import secrets
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from sidecar.policy.model import Policy
from sidecar.policy.store import StoreAddress, store_address
from sidecar.tools.demo.clients import Arrival, Asking, Seen, Stream, play
from sidecar.tools.demo.figures import RunMeasurement, measure
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
class Place:
    """Where a run is played, in ports of loopback: the servers that its clients ask, and the engine behind them."""

    sidecars: Sequence[int]
    engine: int


def _says_nothing(_: Policy) -> Asking:
    return lambda _: ({}, {})


def _says_engine_priority(policy: Policy) -> Asking:
    """The engine's own field, with the value that the middleware would send for the tier."""
    dialect = policy.engine()

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
    Run("control", "control: equal priority", has_admission=False, asking=_says_nothing),
    Run("engine", "engine priority only", has_admission=False, asking=_says_engine_priority),
    Run("admission", "admission", has_admission=True, asking=_says_who_it_is),
)


def shared(sharing: Sharing | None) -> Sequence[Run]:
    """The runs, with admission by replicas where a pool is shared."""
    *others, admission = RUNS
    return (*others, replace(admission, sharing=sharing))


def play_run(
    run: Run, place: Place, arrivals: Sequence[Arrival], policy: Policy, report: Callable[[float, Progress], None]
) -> RunMeasurement:
    """Plays the arrivals at one place and measures what happened."""
    seen = asyncio.run(play(place.sidecars, arrivals, run.asking(policy), report))
    with urllib.request.urlopen(f"http://127.0.0.1:{place.engine}{LOG_PATH}") as response:
        log = msgspec.json.decode(response.read(), type=list[Served])
    figures = measure(run.name, [tier.name for tier in policy.tiers], seen, log, policy.rules.requests)
    if not run.has_admission:
        return figures
    answered = [_answered(seen, sidecar) for sidecar in range(len(place.sidecars))]
    return replace(figures, replicas=len(place.sidecars), answered_by_replica=answered)


def _answered(seen: Sequence[Seen], sidecar: int) -> int:
    return sum(one.sidecar == sidecar and one.ttft_s is not None for one in seen)


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
