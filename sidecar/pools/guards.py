"""Rule 10 between replicas and their ledger: what was seen of guarded tiers, and what is decided about them.

Replicas add up what they saw in the ledger. One whose reply says that the time has come decides, and says so with its
next call; of several the first counts. So it does not matter which of them dies.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from sidecar.pools.calls import NO_GUARD, PPM, Call, GuardDecided, GuardHeld, Reply, SloSeen
from sidecar.scheduling.amounts import UNBOUNDED
from sidecar.scheduling.figures import Rules
from sidecar.scheduling.guard import (
    DECIDE_EVERY_US,
    FEWEST,
    LEAST,
    GuardedPeriod,
    GuardState,
    decide,
    first_state,
    is_missed,
    largest_share,
)
from sidecar.scheduling.scheduler import Scheduler

_STATE_SIZE = len(GuardState._fields) + 2
"""Of what a decision leaves to the next one: the controller's state, and the ledger's moments of the first and the last
one in vain, without another one between them.

They are 0 for never. One of another ledger that is later than now counts as never."""

SURE_AFTER_US = 20_000_000
"""So long all decisions are in vain until the guard is: answers that ran beside less important work end first."""

IN_VAIN_US = 60_000_000
"""For so long a decision shows that the guard was in vain. Perhaps nobody makes another one."""

REPORT_EVERY_US = 1_000_000
"""A replica reports so often what it saw: one tenant's part of it is found in that time."""


def take(scheduler: Scheduler, levels: Mapping[str, int], call: Call, last_number: int, now_us: int) -> None:
    """Counts what a call decided, and what it saw, unless an earlier one (`last_number`) said so, in the scheduler."""
    for decided in call.guards:
        guarded = scheduler.guards.of(levels.get(decided.tier, -1))
        if guarded is not None and guarded.decided_us == decided.since_us:
            guarded.met, guarded.missed = max(0, guarded.met - decided.met), max(0, guarded.missed - decided.missed)
            scheduler.guards.decide(guarded, Fraction(decided.share_ppm, PPM), now_us, decided.state)
    for seen in call.seen:
        guarded = scheduler.guards.of(levels.get(seen.tier, -1))
        if guarded is not None and seen.first_call > last_number:
            guarded.met, guarded.missed = guarded.met + seen.met, guarded.missed + seen.missed


def held(scheduler: Scheduler, level: int) -> GuardHeld:
    """A tier as a reply has it."""
    of = scheduler.guards.of(level)
    if of is None:
        return NO_GUARD
    return GuardHeld(int(of.share * PPM), of.decided_us, of.met, of.missed, of.has_kept_out, list(of.state))


def mirror(scheduler: Scheduler, level: int, held: GuardHeld) -> None:
    """The scheduler of a replica has a tier as a reply had it: without a bound where the pool does not guard it."""
    guarded = scheduler.guards.of(level)
    if guarded is not None:
        guarded.share, guarded.decided_us = Fraction(held.share_ppm or PPM, PPM), held.decided_us
        guarded.met, guarded.missed, guarded.has_kept_out = held.met, held.missed, held.has_kept_out
        guarded.state = held.state


class GuardFigures(NamedTuple):
    """A guarded tier. Less important requests may fill the pool to `share` of it: they hold `below` of it, all `total`.

    `usable`: no larger share is known to be too much. It is `share`, or where that failed last.
    `met` and `missed` count what this process has seen since it began. `is_in_vain`: the SLO was missed at all
    decisions of the last `SURE_AFTER_US` though a smaller share could not have helped, whoever decided.
    """

    tier: str
    share: float
    below: float
    total: float
    met: int
    missed: int
    is_in_vain: bool
    usable: float = 1.0


class MemberGuard:
    """A replica's part: what its requests saw, and what it decides. `levels`: the guarded ones of its own rules."""

    def __init__(self, rules: Rules) -> None:
        self._counts: dict[int, dict[str, list[int]]] = {}
        self._decided: list[GuardDecided] = []
        self._seen: dict[int, list[int]] = {}  # since the process began
        self._in_vain_until_us: dict[str, int] = {}
        self._undecided_us: int | None = None  # first reply without a decision: others may state one
        self._report_at_us: int | None = None
        self.change_rules(rules)

    def change_rules(self, rules: Rules) -> None:
        """Other rules of the same tiers."""
        self._rules = rules
        self.levels = [level for level, tier in enumerate(rules.tiers) if tier.hold > 0]
        self._counts = {level: counts for level, counts in self._counts.items() if level in self.levels}

    def note(self, level: int, tenant: str, *, is_missed: bool, now_us: int) -> int | None:
        """A request of a tier. Returns when it is to be reported, None where the tier is not guarded."""
        if level not in self.levels:
            return None
        self._counts.setdefault(level, {}).setdefault(tenant, [0, 0])[is_missed] += 1
        self._seen.setdefault(level, [0, 0])[is_missed] += 1
        if self._report_at_us is None:
            self._report_at_us = now_us + REPORT_EVERY_US
        return self._report_at_us

    def seen(self, now_us: int) -> list[SloSeen]:
        """Returns the reports that are due."""
        if self._report_at_us is None or now_us < self._report_at_us:
            return []
        counts, self._counts, self._report_at_us = self._counts, {}, None
        found = []
        for level, of_tenants in counts.items():
            tier = self._rules.tiers[level]
            met, missed = _without_majority(list(of_tenants.values()), 1 - tier.hold)
            found.append(SloSeen(tier.name, met, missed, 0))
        return found

    def put(self, call: Call, known: Reply | None) -> None:
        """Adds what was decided to a call; to a statement what was in force last, for a ledger that knows nothing."""
        if call.kind == "state":
            tiers = [] if known is None else known.tiers
            guards = [(tier.tier, tier.guard) for tier in tiers if tier.guard.share_ppm]
            call.guards = [GuardDecided(tier, 0, of.share_ppm, 0, 0, of.state) for tier, of in guards]
        else:
            call.guards = self._decided
        self._decided = []

    def answered(self, reply: Reply, now_us: int) -> int | None:
        """Takes a reply. Returns when something is to be decided, from its moment on; 0: now. None: nothing was seen.

        A replica of other tiers holds nothing of the pool, and decides nothing.
        """
        moments = {tier.tier: _in_vain_us(tier.guard) for tier in reply.tiers}
        own_us = now_us - reply.now_us + IN_VAIN_US
        self._in_vain_until_us = {
            tier: last + own_us
            for tier, (first, last) in moments.items()
            if 0 < first <= last - SURE_AFTER_US and last <= reply.now_us
        }
        if reply.is_foreign:
            return None
        own = {self._rules.tiers[level].name for level in self.levels}
        guards = [tier.guard for tier in reply.tiers if tier.tier in own and tier.guard.share_ppm]
        if all(of.decided_us for of in guards):
            self._undecided_us = None
        elif self._undecided_us is None or reply.now_us < self._undecided_us:
            self._undecided_us = reply.now_us
        found = [self._due_in_us(of, reply) for of in guards if of.met or of.missed or of.has_kept_out]
        return min(found, default=None)

    def _due_in_us(self, of: GuardHeld, reply: Reply) -> int:
        since_us = of.decided_us or self._undecided_us or 0
        return max(0, since_us + DECIDE_EVERY_US - reply.now_us)

    def decide(self, reply: Reply, pool: Scheduler) -> None:
        """Decides by a reply, and by what the tiers of the `pool` hold."""
        guards = {tier.tier: tier.guard for tier in reply.tiers}
        for level in self.levels:
            tier = self._rules.tiers[level]
            of, guarded = guards.get(tier.name, NO_GUARD), pool.guards.of(level)
            if guarded is None or not of.share_ppm or self._due_in_us(of, reply):
                continue
            held = pool.guards.held_below(guarded), pool.held, guarded.floors
            below, total, floors = (largest_share(amount, pool.capacity) for amount in held)
            if pool.guards.are_at_least(guarded):
                below = 0.0  # a smaller share is no help
            seen = GuardedPeriod(of.met, of.missed, below, total, floors, of.has_kept_out)
            before = _last_state(of) or first_state(floors)
            after = decide(before, seen, float(tier.hold))
            is_in_vain = _is_in_vain(before, seen, float(tier.hold))
            first_us, last_us = _in_vain_us(of)
            if is_in_vain is not None:
                first_us, last_us = (first_us or reply.now_us, reply.now_us) if is_in_vain else (0, 0)
            share_ppm = max(1, round(after.share * PPM))
            state = [*map(float, after), float(first_us), float(last_us)]
            self._decided.append(GuardDecided(tier.name, of.decided_us, share_ppm, of.met, of.missed, state))

    def figures(self, pool: Scheduler, now_us: int) -> list[GuardFigures]:
        """The guarded tiers, as they stand in the `pool`."""
        found = []
        for guarded in pool.guards.tiers:
            held = pool.guards.held_below(guarded), pool.held
            below, total = (largest_share(amount, pool.capacity) for amount in held)
            met, missed = self._seen.get(guarded.level, (0, 0))
            name = self._rules.tiers[guarded.level].name
            in_vain = now_us < self._in_vain_until_us.get(name, 0)
            share = float(guarded.share)
            usable = max(share, guarded.state[1]) if len(guarded.state) == _STATE_SIZE else 1.0
            found.append(GuardFigures(name, share, below, total, met, missed, in_vain, usable))
        return found

    @property
    def has_decided(self) -> bool:
        """True if the ledger is to hear of a decision."""
        return bool(self._decided)


def _last_state(of: GuardHeld) -> GuardState | None:
    """State of the last decision. One of another version is not read, but for the share. None: nothing was decided."""
    if not of.decided_us:
        return None
    share = max(LEAST, of.share_ppm / PPM)
    if len(of.state) == _STATE_SIZE:
        state = GuardState._make(of.state[:-2])
        are_shares = all(LEAST <= it <= 1 for it in (state.share, state.failed_at, state.busy))
        are_counts = all(0 <= it <= UNBOUNDED for it in state[3:])
        if are_shares and are_counts and round(state.share * PPM) == of.share_ppm:
            return state
    return GuardState(share, 1.0, share)


def _in_vain_us(of: GuardHeld) -> tuple[int, int]:
    return (int(of.state[-2]), int(of.state[-1])) if len(of.state) == _STATE_SIZE else (0, 0)


def _is_in_vain(before: GuardState, seen: GuardedPeriod, hold: float) -> bool | None:
    """True if the SLO was missed though no decision could help. None: of too few requests to say."""
    met, missed = before.met + seen.met, before.missed + seen.missed
    if met + missed < FEWEST:
        return None
    return is_missed(met, missed, hold) and (seen.held <= seen.floors or before.share <= LEAST)


def _without_majority(tenants: list[list[int]], allowed: Fraction) -> tuple[int, int]:
    """Sums of (met, missed), where one tenant counts as no more than half while the others are served well.

    Else who sends what must miss could shut out all less important work.
    """
    met, missed = sum(it[0] for it in tenants), sum(it[1] for it in tenants)
    largest = max(tenants, key=sum)
    others_met, others_missed = met - largest[0], missed - largest[1]
    others = others_met + others_missed
    if not others or sum(largest) <= others or others_missed > allowed * others:
        return met, missed
    counted = largest[1] * others // sum(largest)
    return others_met + others - counted, others_missed + counted
