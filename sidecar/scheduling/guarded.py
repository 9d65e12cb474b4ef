"""Rule 10: how full less important work may make a pool beside a tier whose SLO is held (`hold`)."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from sidecar.policy.rules import rounded_part
from sidecar.scheduling.amounts import NOTHING, UNBOUNDED, Amount, larger, minus, plus
from sidecar.scheduling.figures import Figures, Rules
from sidecar.scheduling.guard import BEGIN, DECIDE_EVERY_S

if TYPE_CHECKING:
    from sidecar.scheduling.scheduler import Candidate, Scheduler
    from sidecar.scheduling.tickets import Ticket

FIRST_SHARE = Fraction(str(BEGIN))
"""Where nothing is known of an SLO yet."""

DECIDE_EVERY_US = round(DECIDE_EVERY_S * 1e6)
"""So often it is decided to what share less important work may fill the pool."""


@dataclass(eq=False)
class GuardedTier:
    """A tier whose SLO is held. Tickets of the tiers `below` it may fill the pool to its `share`: `most`.

    What all tiers hold counts there: an engine is as slow as all that it runs, so less important work gives way as soon
    as more of the tier comes, before any of that is late. Else it may fill the `floors` of those tiers, or enter where
    each holds no more than its own: so a large one comes through as well, and a tier without a floor beside one whose
    floor is always in use. Each dimension for itself.

    The share was decided at `decided_us`, 0 for never. Since then the SLO was `met` and `missed` so often, and
    `has_kept_out`: something has waited for the guard alone. `state`: what the next decision needs of the last one.
    """

    level: int
    below: Sequence[int] = ()
    share: Fraction = FIRST_SHARE
    most: Amount = NOTHING
    floors: Amount = NOTHING
    decided_us: int = 0
    met: int = 0
    missed: int = 0
    has_kept_out: bool = False
    state: Sequence[float] = ()

    def take(self, other: GuardedTier) -> None:
        """Takes over another record of this tier: its share, and the counts since that was decided."""
        self.share, self.decided_us, self.state = other.share, other.decided_us, other.state
        self.met, self.missed, self.has_kept_out = other.met, other.missed, other.has_kept_out

    def leaves(self, needed: Amount, below: Amount, beyond: Amount, total: Amount) -> bool:
        """True if it leaves room for a ticket beside what the less important tiers hold, and all tiers.

        `beyond`: what each of the less important tiers holds beyond its own floor, together.
        """
        return all(
            not beyond[d] or below[d] + needed[d] <= self.floors[d] or total[d] + needed[d] <= self.most[d]
            for d in range(3)
        )


class Guards:
    """The guarded tiers of a pool. `kept_out`: the levels of those that the last order left out for one of them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._figures: Figures
        self.tiers: list[GuardedTier] = []
        self.kept_out: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self.tiers)

    def change_rules(self, rules: Rules) -> None:
        """Other rules. A tier that stays guarded keeps its share."""
        before = {guarded.level: guarded for guarded in self.tiers}
        self.tiers = [before.get(n) or GuardedTier(n) for n, tier in enumerate(rules.tiers) if tier.hold > 0]
        for guarded in self.tiers:
            lower = range(guarded.level + 1, len(rules.tiers))
            guarded.below = [level for level in lower if not rules.tiers[level].always_first]

    def take_figures(self, figures: Figures) -> None:
        """The pool has these figures from now on."""
        self._figures = figures
        for guarded in self.tiers:
            guarded.floors = _sum(figures.reserve[level] for level in guarded.below)
            guarded.most = rounded_part(guarded.share, figures.capacity, UNBOUNDED)

    def of(self, level: int) -> GuardedTier | None:
        """The tier of that level, where it is guarded."""
        return next((guarded for guarded in self.tiers if guarded.level == level), None)

    def decide(self, guarded: GuardedTier, share: Fraction, now_us: int, state: Sequence[float]) -> None:
        """The tiers below a guarded one may fill the pool up to another share from now on."""
        guarded.share, guarded.decided_us, guarded.state, guarded.has_kept_out = share, max(1, now_us), state, False
        self.take_figures(self._figures)

    def held_below(self, guarded: GuardedTier) -> Amount:
        """The amount that the tiers below it hold."""
        return _sum(self._scheduler.tiers[level].used for level in guarded.below)

    def are_at_least(self, guarded: GuardedTier) -> bool:
        """True if the tiers below it hold no more than may enter at any share: their floors, and one beyond these.

        By the sums: no more requests than one beyond, and in the other dimensions no more than twice the mean of one.
        """
        held, beyond = self.held_below(guarded), self._held_beyond_floors(guarded)
        requests = max(1, held[1])
        return beyond[1] <= 1 and all(beyond[d] * requests <= 2 * held[d] for d in (0, 2))

    def _held_beyond_floors(self, guarded: GuardedTier) -> Amount:
        """The amount that each of the tiers below it holds beyond its own floor, together."""
        beyond = (minus(self._scheduler.tiers[level].used, self._figures.reserve[level]) for level in guarded.below)
        return _sum(larger(NOTHING, amount) for amount in beyond)

    def keeping_out(self, ticket: Ticket) -> GuardedTier | None:
        """The most important one that leaves no room to a ticket that is beyond its floor."""
        return next(self._keeping_out(ticket, ()), None)

    def allowed(self, order: Iterable[Candidate]) -> list[Candidate]:
        """The order without those beyond their floors for which no room is left, and those like them that come after.

        So a large one is not passed by small ones for ever.
        """
        kept: list[Candidate] = []
        closed: set[int] = set()
        self.kept_out = set()
        for candidate in order:
            _, ticket, order_class = candidate
            keeping = list(self._keeping_out(ticket, closed)) if order_class == order_class.OTHER else []
            for guarded in keeping:
                closed.add(guarded.level)
                self.kept_out.add(ticket.tier)
                guarded.has_kept_out |= self._scheduler.fits(ticket)
            if not keeping:
                kept.append(candidate)
        return kept

    def _keeping_out(self, ticket: Ticket, closed: Container[int]) -> Iterator[GuardedTier]:
        for guarded in self.tiers:
            if ticket.tier in guarded.below and (guarded.level in closed or not self._has_room(guarded, ticket)):
                yield guarded

    def _has_room(self, guarded: GuardedTier, ticket: Ticket) -> bool:
        below, beyond = self.held_below(guarded), self._held_beyond_floors(guarded)
        return guarded.leaves(self._scheduler.need(ticket), below, beyond, self._scheduler.held)


def _sum(amounts: Iterable[Amount]) -> Amount:
    total = NOTHING
    for amount in amounts:
        total = plus(total, amount)
    return total


def largest_share(held: Amount, capacity: Amount) -> float:
    """The largest share of a bounded dimension that is held."""
    return max((h / c for h, c in zip(held, capacity, strict=True) if 0 < c < UNBOUNDED), default=0.0)
