"""Controller of a guarded tier: how full the pool may be when less important work is admitted, so that the tier's SLO
holds. No I/O and no clock.

A tier with `slo` and `hold` has one number, its share g in (0, 1]. A ticket of a less important tier fits where, in
each dimension, ALL that tickets hold is with it at most g * C; or where the less important hold with it no more than
their floors; or where each of them holds no more than its own floor yet. `decide` moves g every `DECIDE_EVERY_S`
seconds, by what the tier's requests saw meanwhile.

All that is held counts, not the less important work alone, because an engine is as slow as all that it runs. So less
important work gives way at the first request of a burst, before any was late, and uses the tier's room while the tier
is idle. That is worth more than any rule by which g moves: `benchmarks.guard` has both. The controller only has to find
how much this engine runs within this SLO.

It is additive increase and multiplicative decrease (Chiu and Jain, 1989, "Analysis of the Increase and Decrease
Algorithms for Congestion Avoidance in Computer Networks") with changes that congestion control made since:

- It remembers where it failed last, is quick below that and slow near and above it (BIC; CUBIC, RFC 9438).
- It grows by a share of g: g is .15 on one engine and .9 on another, and a step is to mean the same on both.
- It cuts from what was held, where that is less, and what does not bind does not grow (RFC 7661): a limit that nobody
  reached says nothing.

Tried and left out, for bursts on a full pool (met share in `benchmarks.guard`, bursts on 64 places, in the mean of 24
seeds, without `TELLING_CUTS`: .918 without `MOST`, .944 with it, .958 with .8, which costs 2% of batch tokens under a
steady load; `TELLING_CUTS` costs .01 and gives 14% more batch tokens):

- To keep free what the tier held at its recent peak, for minutes: .957 with .8, so it adds nothing. After a burst g
  is small anyway. The burst that is late is the first, which no memory knows.
- The same against g instead of the whole pool: too few batch tokens on seven of nine rows.
- To keep `failed_at` over cuts that follow each other, or not to cut while the tier alone fills g: more batch tokens
  after a burst, and 1 to 9 points fewer in time.
- To count tickets of the tier that wait as missed: .949, with a tenth fewer batch tokens. g has closed the pool by
  then, and what holds their places runs on.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from sidecar.policy.rules import rounded_part
from sidecar.scheduling.amounts import NOTHING, UNBOUNDED, Amount, larger, minus, plus
from sidecar.scheduling.figures import Figures, Rules

if TYPE_CHECKING:
    from sidecar.scheduling.scheduler import Candidate, Scheduler
    from sidecar.scheduling.tickets import Ticket


DECIDE_EVERY_S = 2.0
"""Between two decisions. A prompt of 16,000 tokens takes as long: a change shows in the next or the one after."""
LEAST = 0.01
"""Of g. One ticket of the less important fits at any g, so this bounds only the way back."""
MOST = 0.85
"""Of g while the tier has requests. A pool that is fuller does no more: it has no place for the first of a burst, and
those that wait for one then are late to the end of the burst, because new ones come as fast as places."""
BEGIN = 0.1
"""Of g, or the floors of the less important where they are more: too little for a while, instead of too late."""
FEWEST = 10
"""Requests for a cut."""
SPARE = 1
"""Misses beyond those allowed before a cut. One of ten may be chance where one of 33 is allowed, two rarely are."""
STALE_AFTER = 15
"""Decisions after which requests that were too few to decide count no more: the engine has other work by then."""
CUT = 0.7
"""Of g that is left after a cut. Less important answers run on for 5 to 20 s, so that others may follow."""
TELLING_CUTS = 3
"""Cuts in a row that tell where it failed. What is missed after these began before them: after an engine that stood
still for 20 s the share would else need 18 minutes to come back."""
FAST, SLOW, NEAR = 0.12, 0.006, 0.95
"""Growth of g in a decision: fast below `NEAR` of where it failed last, else slow. Fast doubles g in 12 s: answers show
in 20 s that it was too much, and .16 misses the SLO on two engines. Slow takes 30 s for a tenth, to fail rarely."""


class GuardedPeriod(NamedTuple):
    """Events of one guarded tier since the last decision, and what is held now. Replicas add up the first two.

    A request counts once: as missed when its first token is late, else when its answer ends, by both targets. `hold` is
    a share of requests, and a late first token is known long before the end. `held` is the largest share, over the
    dimensions, that the less important hold, `total` that of all tickets, and `floors` that of the less important's
    floors. `waits`: g alone kept a less important ticket out.
    """

    met: float
    missed: float
    held: float
    total: float
    floors: float
    waits: bool


class GuardState(NamedTuple):
    """One guarded tier's `share`, where that failed last, and its value when the tier last had requests.

    `met`, `missed` and `periods`: requests that were too few to decide, and the decisions that they took. `cuts`: those
    in a row.
    """

    share: float = BEGIN
    failed_at: float = 1.0
    busy: float = MOST
    met: float = 0.0
    missed: float = 0.0
    periods: float = 0.0
    cuts: float = 0.0


def first_state(floors: float) -> GuardState:
    """State of a tier that nothing is known of."""
    return GuardState(min(1.0, max(BEGIN, floors)))


def is_missed(met: float, missed: float, hold: float) -> bool:
    """True if of so many requests more missed the SLO than `hold` allows and than chance explains."""
    return met + missed >= FEWEST and missed > (1 - hold) * (met + missed) + SPARE


def decide(state: GuardState, seen: GuardedPeriod, hold: float) -> GuardState:
    """State after one more period. `hold` is the share of requests that must meet the SLO."""
    if not (seen.met or seen.missed or state.missed):
        return state._replace(share=_grown(state.share, SLOW, seen, 1.0))
    share, failed_at, cuts = min(state.share, state.busy), state.failed_at, state.cuts
    met, missed, periods = state.met + seen.met, state.missed + seen.missed, state.periods + 1
    requests = met + missed
    allowed = (1 - hold) * requests
    is_decided = requests >= FEWEST or periods >= STALE_AFTER
    if is_missed(met, missed, hold):
        if seen.held > seen.floors:
            failed_at, cuts = (share if cuts < TELLING_CUTS else failed_at), cuts + 1
            share = max(LEAST, CUT * min(share, seen.total))
    elif missed > allowed:
        is_decided = periods >= STALE_AFTER
    else:
        cuts, share = 0.0, _grown(share, FAST if share < NEAR * failed_at else SLOW, seen, MOST)
    if is_decided:
        return GuardState(share, failed_at, share, cuts=cuts)
    return GuardState(share, failed_at, share, met, missed, periods, cuts)


def _grown(share: float, by: float, seen: GuardedPeriod, most: float) -> float:
    return min(most, share * (1 + by)) if seen.waits else share


# -- Rule 10: how full less important work may make a pool beside a tier whose SLO is held (`hold`).

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
