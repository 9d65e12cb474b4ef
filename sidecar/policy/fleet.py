"""Fleet policy that the running process uses: the engines of a pool, and the models that have pools of their own.

Nothing here reads a file. `fleet_compiler` makes these records from the policy, and from the engine list that it names.
Durations are in seconds, `UNLIMITED` stands for no bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from sidecar.engines.pages import Health
from sidecar.policy.rules import UNLIMITED, EngineCapacity

MOST_ENGINES = 64
"""Engines of one pool. A decision looks at each of them (`scheduling.placement`)."""
MOST_OF_AN_ENGINE = 10**12
"""Tokens, or requests, of one engine. Sums and scores over 64 engines then stay below 2**53, so exact in Lua."""
PROMPT_CACHE_KEY = b"prompt_cache_key"
"""The source of a session that is a member of the body. Every other source is a header's name, in lower case."""


def offered(amount: int | None) -> int:
    """An engine's tokens or requests, as its pool counts them. What an engine says of itself may be any number."""
    return UNLIMITED if amount is None else min(amount, MOST_OF_AN_ENGINE)


@dataclass(frozen=True, slots=True)
class WrittenCapacity:
    """An engine's capacity as the policy writes it; None where it does not bound the engine."""

    tokens: int | None = None
    requests: int | None = None

    def size(self, kv_tokens: int | None, max_running: int | None) -> tuple[int | None, int | None]:  # noqa: ARG002  # as `EngineCapacity.size`
        """(tokens, requests), whatever the engine reports."""
        return self.tokens, self.requests


MemberCapacity = WrittenCapacity | EngineCapacity
"""An engine's capacity: written, or (`EngineCapacity`) read from the engine. `size` of both has the same arguments."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """An engine that the policy, or its engine list, names. `speed` is in thousandths: 1000 is 1.0.

    `prefill` is the most un-prefilled prompt tokens that it may have at once.
    """

    name: str
    url: str
    capacity: MemberCapacity
    prefill: int = UNLIMITED
    speed: int = 1000

    @property
    def is_written(self) -> bool:
        """Whether its capacity stands in the file."""
        return isinstance(self.capacity, WrittenCapacity)


class Discovery(str, Enum):
    """Source of the engines: their addresses, or the processes that the middleware is mounted in."""

    STATIC = "static"
    FILE = "file"
    DNS = "dns"
    MOUNTED = "mounted"


@dataclass(frozen=True, slots=True)
class DnsService:
    """A name whose records are the engines: A and AAAA with `port`, or SRV where `port` is None."""

    name: str
    port: int | None
    refresh_s: float = 5.0

    def __str__(self) -> str:
        return self.name if self.port is None else f"{self.name}:{self.port}"


@dataclass(frozen=True, slots=True)
class Affinity:
    """Attraction of a request to the engine that has its prefix: `weight_percent` of the predicted hit.

    `prefix`: hits are predicted from the prompt's bytes. `session` are the sources of a session's name, first the one
    that counts first: `PROMPT_CACHE_KEY`, or a header.
    """

    prefix: bool
    weight_percent: int
    session: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """Replays of a request whose engine broke before its first byte: how many, and for which part of the admissions."""

    before_first_byte: int
    budget: Fraction


@dataclass(frozen=True, slots=True)
class FleetPolicy:
    """The engines of a pool, and how they are used.

    `static` are the engines that the policy names, or those of the engine list after `Policy.of_engines`; `file` is the
    path of that list, `dns` the name that is looked up. `capacity` and `prefill` are those of an engine that writes
    none of its own. `mounted`: each process that mounts the middleware is an engine, for its own requests alone.
    """

    static: tuple[EngineAddress, ...]
    file: str | None
    dns: DnsService | None
    capacity: MemberCapacity
    prefill: int
    affinity: Affinity
    health: Health
    slow_start_s: float
    replay: Replay
    drain_timeout_s: float
    mounted: bool = False

    @property
    def discovery(self) -> Discovery:
        """Source of the engines."""
        if self.mounted:
            return Discovery.MOUNTED
        if self.file is not None:
            return Discovery.FILE
        return Discovery.STATIC if self.dns is None else Discovery.DNS


@dataclass(frozen=True, slots=True)
class ModelPolicy:
    """A model with a pool of its own. `engines` is None where all engines serve it."""

    name: str
    engines: tuple[str, ...] | None
    aliases: tuple[str, ...] = ()


def pool_size(engines: Iterable[EngineAddress]) -> tuple[int | None, int | None]:
    """The sum of the written (tokens, requests); None in a dimension that an engine does not write, or of no engine."""
    sizes = [engine.capacity.size(None, None) for engine in engines]
    return _sum([tokens for tokens, _ in sizes]), _sum([requests for _, requests in sizes])


def pool_prefill(engines: Iterable[EngineAddress]) -> int | None:
    """The sum of the engines' un-prefilled prompt tokens; None where one of them has no bound, or there is none."""
    return _sum([None if engine.prefill == UNLIMITED else engine.prefill for engine in engines])


def largest_of(engines: Iterable[EngineAddress]) -> tuple[int, int]:
    """The most (tokens, requests) that one engine holds, by dimension; UNLIMITED where one of them writes no bound.

    A request that fits no engine is refused at once. Engines of which one has the most tokens, and another the most
    requests, are judged by both: a request that only the two together could hold waits, and is refused by its wait.
    """
    sizes = [engine.capacity.size(None, None) for engine in engines]
    return _most([tokens for tokens, _ in sizes]), _most([requests for _, requests in sizes])


def _sum(amounts: Sequence[int | None]) -> int | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if known and len(known) == len(amounts) else None


def _most(amounts: Sequence[int | None]) -> int:
    known = [amount for amount in amounts if amount is not None]
    return max(known) if known and len(known) == len(amounts) else UNLIMITED
