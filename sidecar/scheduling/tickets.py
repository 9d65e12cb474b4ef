"""Tickets wait in a queue or in line; a lease is a ticket that entered an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TypeAlias

import msgspec

from sidecar.scheduling.amounts import NOTHING, Amount

Arrival: TypeAlias = tuple[int, str, int]
LanePlace: TypeAlias = tuple[int, int, str, int]
BY_ARRIVAL: Callable[[Ticket], Arrival] = attrgetter("arrival")
BY_PLACE: Callable[[Ticket], LanePlace] = attrgetter("lane_place")

MOST_OF_GAIN = 2**43
"""A thousand times that can be computed with doubles."""


class TicketGain(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Gain of a request by the time of its start (rule 9).

    `tokens`: its expected tokens that are in time if it enters `start_by_us` after its arrival or before; one less for
    each whole `slack_us` later. `cost_us`: the engine's time for it.
    """

    weight: int
    tokens: int
    cost_us: int
    start_by_us: int
    slack_us: int

    def bounded(self) -> TicketGain:
        """The gain within the bounds that the products of these figures need."""
        most = MOST_OF_GAIN
        return TicketGain(
            self.weight,
            min(max(1, self.tokens), most),
            min(max(1, self.cost_us), most),
            min(max(0, self.start_by_us), most),
            min(max(1, self.slack_us), most),
        )

    def earned_after(self, waited_us: int) -> int:
        """Weight for time: what the tokens that are still in time are worth for a second of the engine."""
        share, late_us = 1_000, waited_us - self.start_by_us
        if late_us >= self.slack_us:
            lost = late_us // self.slack_us
            share = (self.tokens - lost) * 1_000 // self.tokens if lost < self.tokens else 0
        return self.weight * share * 1_000_000 // self.cost_us


class Ticket(msgspec.Struct, eq=False):
    """A request that waits. Its owner fills the first block, the scheduler the second.

    `tier` is its level. `hits`: engine to cached prompt tokens. `barred`: names of engines that refused it.
    `arrived_us`: when it first came, also if it came back. `hint`: its start tag where it waited
    at its owner while the virtual time went on. `user`: of its tenant; None where the tenant's users take no turns.
    `place`: where it comes among its tenant's users, 0 for all of a tenant whose users take no turns. `cost`: what its
    tenant is charged for in place of its tokens. `afresh`: how often its tier's tags had started afresh when its owner
    first showed it.
    """

    id: str
    tier: int
    tenant: str
    tokens: int
    requests: int = 1
    prompt: int = 0
    weight: int = 1
    hits: Mapping[str, int] = {}
    barred: frozenset[str] = frozenset()
    arrived_us: int = 0
    owner: str = ""
    number: int = 0
    gain: TicketGain | None = None
    has_returned: bool = False
    hint: float | None = None
    user: str | None = None
    cost: int | None = None
    afresh: int = -2

    start: float | None = None
    place: int = 0
    engine: str | None = None
    is_in_line: bool = False
    in_line_since_us: int = 0
    count: int = 0
    counted_us: int = 0
    admission: int = 0
    excess: int = 0
    excess_prompt: int = 0
    is_in_floor: bool = False

    @property
    def arrival(self) -> Arrival:
        """Compares tickets by arrival, then by the order of submission."""
        return self.arrived_us, self.owner, self.number

    @property
    def lane_place(self) -> LanePlace:
        """Compares the tickets of a tenant: those of its users by their turns, all others by arrival."""
        return self.place, self.arrived_us, self.owner, self.number

    @property
    def charged(self) -> int:
        """Its tenant's charge in fair order (rule 2)."""
        return self.tokens if self.cost is None else self.cost

    @property
    def is_for_floor(self) -> bool:
        """True if it stands in line for its tier's floor (rule 6), so that its tier holds it already."""
        return self.is_in_line and self.admission > 0

    @property
    def on_floor(self) -> Amount:
        """The part of it that counts where U is compared with R by gain (rule 9)."""
        return self.amount if self.is_in_floor else NOTHING

    def earned(self, now_us: int) -> int:
        """Rule 9: what it earns if it enters now."""
        return 0 if self.gain is None else self.gain.earned_after(now_us - self.arrived_us)

    def come_back(self) -> None:
        """It waits again, and does not count any more."""
        self.has_returned, self.start, self.admission = True, None, 0
        self.count = self.excess = self.excess_prompt = 0

    def sent_to(self, engine: str) -> int:
        """The prompt tokens that an engine has to prefill of it."""
        return max(1, self.prompt - self.hits.get(engine, 0))

    @property
    def amount(self) -> Amount:
        """Amount that its tier holds by it once it counts."""
        return self.tokens, self.requests, self.count


class ScheduledLease(msgspec.Struct, eq=False):
    """A ticket that entered `engine` as the `entered`-th. Its owner keeps it, and tells the scheduler sums.

    `sent`: its prompt as it was sent, 0 from the first byte on. `returns`: how often it came back. `is_kept`: its first
    byte is on its way. `is_chosen`: to be taken back.
    """

    ticket: Ticket
    engine: str
    entered: int
    sent: int
    returns: int = 0
    is_kept: bool = False
    is_chosen: bool = False

    @property
    def amount(self) -> Amount:
        """Its part of what the tier holds."""
        return self.ticket.amount

    def first_byte(self, now_us: int) -> int:
        """Ends the prefill. Returns for how long its tier owes more (rule 5)."""
        owed, self.ticket.excess_prompt = self.ticket.excess_prompt, 0
        self.ticket.count = self.sent = 0
        return owed * (now_us - self.ticket.counted_us)

    def end(self, now_us: int) -> int:
        """Ends the lease. Returns for how long its tier owes more (rule 5)."""
        owed, self.ticket.excess = self.ticket.excess, 0
        return self.first_byte(now_us) + owed * (now_us - self.ticket.counted_us)
