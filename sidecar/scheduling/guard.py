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

from typing import NamedTuple

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
