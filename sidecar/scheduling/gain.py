"""What a waiting ticket can earn, and how much of it for each microsecond of its engine: the density.

Source: the ProServe paper (arXiv 2512.12928). A request earns the weight of its tier for each output token that comes
before its deadline: the first token within the tier's TTFT, each later one a TPOT after the one before.

A ticket whose first token comes late has lost the tokens whose deadlines passed meanwhile. The answer comes faster than
the deadlines follow each other (`slack_us` is the difference for one token), so the later tokens may still be in time:

    lost = floor(late / slack)
    gain = weight * max(0, tokens - lost)
    density = floor(gain * 10^6 / cost)

All are whole numbers below 2^53, so that every implementation computes the same ones. While a ticket waits, its density
falls or stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sidecar.scheduling.ticket import Ticket

if TYPE_CHECKING:
    from sidecar.scheduling.gain_queue import GainLane

MOST_WEIGHT = 1_000
MOST_TOKENS = 2**22
MOST_COST_US = 2**43
"""Of one request. The densest ticket then has 1,000 * 2^22 * 10^6 < 2^53, and a thousand of the dearest cost less."""
SCALE = 1_000_000

Place = int
"""The place of a ticket by gain. Of two, of two tiers, too, the smaller one comes first. From the highest bits on:

- the deadline, or the density below zero;
- the arrival, 53 bits, and the sequence, 40 bits;
- the slot by which the queue finds the ticket, 30 bits.
"""
SLOT_BITS = 30
SEQUENCE_SHIFT = SLOT_BITS
ARRIVAL_SHIFT = SEQUENCE_SHIFT + 40
KEY_SHIFT = ARRIVAL_SHIFT + 53


class GainFigures(NamedTuple):
    """The figures of one request, estimated once when it comes. Times count from its arrival, in microseconds.

    `weight` is its tier's; `tokens` are the output tokens that it is expected to have, `cost_us` the engine's time for
    its prompt and its output. Its first token is due at `deadline_us`. Admitted after `start_by_us` it comes late: by
    as much as it was admitted late. `slack_us` is its time per output token, less the engine's.
    """

    weight: int
    tokens: int
    cost_us: int
    deadline_us: int
    start_by_us: int
    slack_us: int

    def bounded(self) -> GainFigures:
        """The same within the bounds that the products of these figures need."""
        weight, tokens, cost_us, deadline_us, start_by_us, slack_us = self
        if (
            1 <= weight <= MOST_WEIGHT
            and 1 <= tokens <= MOST_TOKENS
            and 1 <= cost_us <= MOST_COST_US
            and 0 <= deadline_us <= MOST_COST_US
            and 0 <= start_by_us <= MOST_COST_US
            and 1 <= slack_us <= MOST_COST_US
        ):
            return self
        return GainFigures(
            min(max(1, weight), MOST_WEIGHT),
            min(max(1, tokens), MOST_TOKENS),
            min(max(1, cost_us), MOST_COST_US),
            min(max(0, deadline_us), MOST_COST_US),
            min(max(0, start_by_us), MOST_COST_US),
            min(max(1, slack_us), MOST_COST_US),
        )


def density(figures: GainFigures, waited_us: int) -> int:
    """What a ticket that has waited so long earns for a second of its engine, if it is admitted now."""
    weight, tokens, cost_us, _, start_by_us, slack_us = figures
    late_us = waited_us - start_by_us
    if late_us > 0:
        tokens -= late_us // slack_us
        if tokens <= 0:
            return 0
    return weight * tokens * SCALE // cost_us


class GainTicket(Ticket, eq=False):
    """A ticket in a pool that orders by gain. `gain` is None where its tier has no objectives.

    `lane` is that of its queue (`gain_queue`) in which it stands, or stood last, `place` its place by gain there, None
    where it has none. `stored_density` is its density while it has none. A ticket that `is_urgent` stays so. One that
    `is_apart` came back to its queue and stands in no lane. `in_floor` says of a lease that it counts in its tier's
    floor. One that `is_claiming` is a claimant (`claims`).
    """

    stored_density: int = 0
    gain: GainFigures | None = None
    place: Place | None = None
    lane: GainLane | None = None
    is_urgent: bool = False
    is_apart: bool = False
    in_floor: bool = False
    is_claiming: bool = False

    @property
    def density(self) -> int:
        """What was last computed, for one that is urgent: not less than it is now."""
        place = self.place
        return self.stored_density if place is None or place >= 0 else -(place >> KEY_SHIFT)

    def density_at(self, now_us: int) -> int:
        """Its density now; 0 without figures."""
        return 0 if self.gain is None else density(self.gain, now_us - self.arrived_us)

    @property
    def is_waiting(self) -> bool:
        """Whether it waits: in its queue, or as a claimant."""
        return self.queued or self.is_claiming

    @property
    def deadline_us(self) -> int:
        """The deadline of its first token, on the clock of its arrival."""
        assert self.gain is not None
        return self.arrived_us + self.gain.deadline_us
