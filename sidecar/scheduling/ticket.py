"""One request's place: a ticket while it waits, a lease once it is admitted, and what its wait is reported as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Rule(str, Enum):
    """The rule by which a ticket was admitted before the head of another tier that had come before it.

    `RESERVE`: it was inside its tier's reserve. `TURN`: its tier was below its reserve, and owed nothing.
    `PASSED_OVER`: the other ticket was before it in order, and would not have fitted even beside the reserves alone.
    """

    ALWAYS_FIRST = "always_first"
    RESERVE = "reserve"
    TURN = "reserve_turn"
    LEVEL = "level"
    LIMIT = "limit"
    PASSED_OVER = "passed_over"


@dataclass(slots=True, eq=False)
class Ticket:
    """A request in the scheduler. `tokens` and `requests` are what it holds, or will hold.

    `sequence` is its place in the order of arrival, `served_before` the served-token counters as they stood then;
    `start` is its fair-queueing tag, set when it becomes the first of its tenant, and `queued` whether it still is in
    its tier's queue, `ahead` and `behind` its neighbors there among the tickets of its tenant. `preemptions` counts how
    often it gave its lease back unused and waited again; `overtaken_us` is then its first overtaking, if need be the
    moment at which it came back. A lease was admitted at `admitted_us`; `excess` is how many whole reserves too much
    its tier held with it, where it was admitted by a turn.
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
    start: float = 0.0
    queued: bool = False
    ahead: Ticket | None = field(default=None, repr=False)
    behind: Ticket | None = field(default=None, repr=False)
    preemptions: int = 0
    overtaken_us: int | None = None
    admitted_us: int = 0
    excess: int = 0


class Wait(NamedTuple):
    """How a ticket's wait went, up to its admission or its departure.

    `overtaken_at_us` is the first admission of a ticket that arrived later, None where there was none; starvation is
    what the wait lasted from then on. `served_ahead[level]` counts the tokens admitted while it waited.
    """

    queue_wait_us: int
    starvation_us: int
    overtaken_at_us: int | None
    served_ahead: Sequence[int]


class Admission(NamedTuple):
    """A ticket that became a lease. `level` is its aged level in whole levels: what an engine may be told.

    `passed` pairs the levels of the other tiers whose head had come before the ticket with the rule by which the ticket
    went first all the same.
    """

    ticket: Ticket
    wait: Wait
    level: int
    passed: Sequence[tuple[int, Rule]]
