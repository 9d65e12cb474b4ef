"""Controller of a guarded tier: how full the pool may be when less important work is admitted, so that the tier's SLO
holds. No I/O and no clock.

A tier with `slo` and `hold` has one number g in (0, 1]. A ticket of a less important tier fits where, with it, ALL that
the pool's tickets hold is at most g * C in every dimension; or the less important then hold no more than their floors;
or they hold nothing yet. `decide` moves g every `DECIDE_EVERY_S` seconds, by what the tier's requests saw since.

Everything that is held counts, not only the less important work, because an engine is as slow as all that it runs. So
less important work gives way at once when a burst of the tier comes, before any request was late, and uses the tier's
room while the tier is idle. That does most of the work; the controller only has to find how fast the engine is.

It is additive-increase, multiplicative-decrease (Chiu and Jain, 1989, "Analysis of the Increase and Decrease
Algorithms for Congestion Avoidance in Computer Networks"), with three changes that congestion control made since:

- It remembers where it last failed and is quick below that, slow near and above it (BIC, and CUBIC: RFC 9438).
- The increase is by a share of g: g is .05 on one engine and .9 on another, and a step is to mean the same on both.
- A cut is from what was held where that is less than g, and nothing grows that does not bind (RFC 7661): a limit that
  nobody reached says nothing.
"""

from __future__ import annotations

from typing import NamedTuple

DECIDE_EVERY_S = 2.0
"""Between two decisions. A prefill of 16,000 tokens takes as long: a change shows in the next or the one after."""
LEAST = 0.01
"""Of g. One ticket of the less important fits at any g, so this only bounds the way back: to .1 within 100 s."""
BEGIN = 0.1
"""Of g, or the floors of the less important where they are more: too little for a while, instead of too late."""
FEWEST = 10
"""Requests for a cut: with `hold: 97%` one miss of fewer is no sign of more than 3%."""
STALE_AFTER = 15
"""Decisions after which requests count no more, where there were too few of them: the engine has other work by then."""
CUT = 0.8
"""Of g that is left after a cut. A running answer ends within 5 to 20 s, so three more cuts may follow: .4 in all."""
FAST, SLOW, NEAR = 0.05, 0.005, 0.95
"""Growth of g in a decision, fast below `NEAR` of where it last failed, else slow. Fast doubles it in 30 s, and may
exceed the right value by some 30% before the first late answer ends; slow takes a minute from `CUT` of it to all."""


class GuardedPeriod(NamedTuple):
    """Events of one guarded tier since the last decision, and what is held now. Replicas add up the first four.

    A request is counted once, as missed when its first token was late, else when its answer ended, by both targets:
    `hold` is a share of requests, and a late first token is known long before the answer's end. `tickets` of the tier
    wait or run now. `waits` are the less important tickets that g alone kept out.

    `held` is the largest share, over the dimensions, that the less important hold, `total` that of all tickets, and
    `floors` the share of the less important's floors.
    """

    met: int
    missed: int
    tickets: int
    waits: int
    held: float
    total: float
    floors: float


class GuardState(NamedTuple):
    """One guarded tier's g, where it last failed, its value when the tier last had requests, and what is not decided:
    the requests since the last move, and the decisions that they took.
    """

    g: float
    failed_at: float = 1.0
    busy: float = 1.0
    met: int = 0
    missed: int = 0
    decisions: int = 0


def first_state(floors: float) -> GuardState:
    """State of a tier that nothing is known of."""
    return GuardState(min(1.0, max(BEGIN, floors)))


def decide(state: GuardState, seen: GuardedPeriod, hold: float) -> GuardState:
    """State after one more period. `hold` is the share of requests that must meet the SLO."""
    if not seen.tickets and not seen.met and not seen.missed:
        return state._replace(g=_grown(state.g, SLOW, seen))
    g = min(state.g, state.busy)
    met, missed, decisions = state.met + seen.met, state.missed + seen.missed, state.decisions + 1
    requests, failed_at = met + missed, state.failed_at
    if requests < FEWEST and missed and decisions < STALE_AFTER:
        return GuardState(g, failed_at, g, met, missed, decisions)
    if requests >= FEWEST and missed > (1 - hold) * requests:
        if seen.held > seen.floors:
            failed_at, g = g, max(LEAST, CUT * min(g, seen.total))
    elif seen.met:
        g = _grown(g, FAST if g < NEAR * failed_at else SLOW, seen)
    if requests >= FEWEST or decisions >= STALE_AFTER:
        return GuardState(g, failed_at, g)
    return GuardState(g, failed_at, g, met, missed, decisions)


def _grown(g: float, share: float, seen: GuardedPeriod) -> float:
    return min(1.0, g * (1 + share)) if seen.waits else g
