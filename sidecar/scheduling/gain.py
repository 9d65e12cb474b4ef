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

from dataclasses import dataclass
from typing import NamedTuple

from sidecar.scheduling.placement import EngineLedger
from sidecar.scheduling.ticket import Ticket

MOST_WEIGHT = 1_000
MOST_TOKENS = 2**22
MOST_COST_US = 2**43
"""Of one request. The densest ticket then has 1,000 * 2^22 * 10^6 < 2^53, and a thousand of the dearest cost less."""
SCALE = 1_000_000


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
        return GainFigures(
            min(max(1, self.weight), MOST_WEIGHT),
            min(max(1, self.tokens), MOST_TOKENS),
            min(max(1, self.cost_us), MOST_COST_US),
            min(max(0, self.deadline_us), MOST_COST_US),
            min(max(0, self.start_by_us), MOST_COST_US),
            min(max(1, self.slack_us), MOST_COST_US),
        )


def density(figures: GainFigures, waited_us: int) -> int:
    """What a ticket that has waited so long earns for a second of its engine, if it is admitted now."""
    late_us = waited_us - figures.start_by_us
    tokens = figures.tokens if late_us <= 0 else max(0, figures.tokens - late_us // figures.slack_us)
    return figures.weight * tokens * SCALE // figures.cost_us


@dataclass(slots=True, eq=False)
class GainTicket(Ticket):
    """A ticket in a pool that orders by gain. `gain` is None where its tier has no objectives.

    `density` is what was last computed: not less than it is now. A ticket that `is_urgent` stays so. One that
    `is_apart` came back to its queue and stands in no lane. `in_floor` says of a lease that it counts in its tier's
    floor. One that `is_claiming` is a claimant (`claims`); as one for its tier's floor it keeps the engine `kept`.
    """

    gain: GainFigures | None = None
    density: int = 0
    is_urgent: bool = False
    is_apart: bool = False
    in_floor: bool = False
    is_claiming: bool = False
    kept: EngineLedger | None = None

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
