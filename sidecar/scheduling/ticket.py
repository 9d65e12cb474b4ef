"""The ticket of one request, a lease once it is admitted, and the report of its wait."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

import msgspec

from sidecar.scheduling.placement import Placing

_NOT_PLACED: Any = msgspec.UNSET


class Rule(str, Enum):
    """The rule by which a ticket was admitted before the head of another tier that had come before it.

    `RESERVE`: it was inside its tier's reserve. `TURN`: its tier was below its reserve, and owed nothing. `GAIN`: it
    earned more, or its deadline was nearer, in a pool that orders by gain.
    `PASSED_OVER`: the other ticket was before it in order, and would not have fitted even beside the reserves alone.
    `CLAIM`: the other ticket was before it in order, fitted the pool, and claimed another engine, which had no room.
    """

    ALWAYS_FIRST = "always_first"
    RESERVE = "reserve"
    TURN = "reserve_turn"
    LEVEL = "level"
    GAIN = "gain"
    LIMIT = "limit"
    PASSED_OVER = "passed_over"
    CLAIM = "claim"


class Demand(Protocol):
    """What a request asks for: `tokens` and `requests` from a tier, for a tenant of some weight."""

    @property
    def tier(self) -> int:
        """The level of its tier."""

    @property
    def tokens(self) -> int:
        """At least 1."""

    @property
    def requests(self) -> int:
        """At least 1."""

    @property
    def tenant(self) -> str:
        """The tenant's name."""

    @property
    def weight(self) -> int:
        """At least 1."""


class Ticket(msgspec.Struct, eq=False):
    """A request in the scheduler. `tokens` and `requests` are the amounts that it holds, or will hold.

    `sequence` is its place in the order of arrival, `served_before` the served-token counters as they stood then;
    `start` is its fair-queueing tag, set when it becomes the first of its tenant. `queued` says whether it is still in
    the queue of its tier; `previous` and `next` are its neighbors there among the tickets of its tenant. `returns`
    counts how often it was a lease and waited again; `overtaken_us` is then its first overtaking, after a preemption at
    the latest the moment of its first return. Where it is None, only tickets after the place `overtaken_after` in the
    order of arrival overtake it. A lease was admitted at `admitted_us` with `admitted_tokens`, which counted as served;
    `excess` is how many whole reserves too much its tier held with it, where it was admitted by a turn. `placing` is
    set only in a pool of several engines.
    """

    id: str
    tier: int
    tenant: str
    weight: int
    tokens: int
    requests: int
    arrived_us: int
    sequence: int
    served_before: tuple[int, ...]
    admitted_us: int = 0
    admitted_tokens: int = 0
    excess: int = 0
    start: float = 0.0
    queued: bool = False
    previous: Ticket | None = None
    next: Ticket | None = None
    returns: int = 0
    overtaken_us: int | None = None
    overtaken_after: int = 0
    placing: Placing = _NOT_PLACED

    def __repr__(self) -> str:
        """Names the ticket without its neighbors, which name theirs."""
        return f"{type(self).__name__}({self.id!r}, tier={self.tier}, tokens={self.tokens}, requests={self.requests})"


class Wait(NamedTuple):
    """The wait of a ticket, up to its admission or its cancellation.

    `overtaken_at_us` is the first admission of a ticket that arrived later, None where there was none. Starvation is
    the part of the wait after it. `served_ahead[level]` counts the tokens admitted while the ticket waited.
    """

    queue_wait_us: int
    starvation_us: int
    overtaken_at_us: int | None
    served_ahead: Sequence[int]


class Admission(NamedTuple):
    """A ticket that became a lease. `level` is the level that the engine receives as its priority.

    `passed` pairs the levels of the other tiers whose head had arrived before the ticket with the rule by which the
    ticket was admitted first. `engine` is the id of its engine in a pool of several.
    """

    ticket: Ticket
    wait: Wait
    level: int
    passed: Sequence[tuple[int, Rule]]
    engine: str | None = None
