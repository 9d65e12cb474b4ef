"""Rule 10 between replicas and their ledger: what was seen of guarded tiers, and what is decided about them.

Replicas add up what they saw in the ledger. One whose reply says that the time has come decides, and says so with its
next call; of several the first counts. So it does not matter which of them dies.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from functools import reduce

from sidecar.pools.calls import NO_GUARD, PPM, Call, GuardDecided, GuardHeld, Reply, SloSeen
from sidecar.scheduling.amounts import NOTHING, plus
from sidecar.scheduling.figures import Rules
from sidecar.scheduling.guard import GuardedPeriod, GuardState, decide, first_state
from sidecar.scheduling.guarded import DECIDE_EVERY_US, share_of
from sidecar.scheduling.scheduler import Scheduler

TOLD_EVERY_US = 1_000_000
"""What was seen is told so often: one tenant's part of it is found in that time."""


def take(scheduler: Scheduler, levels: Mapping[str, int], call: Call, last_number: int, now_us: int) -> None:
    """What a call says of guarded tiers counts in the ledger's scheduler, what it said before (`last_number`) once."""
    for decided in call.guards:
        guarded = scheduler.guards.of(levels.get(decided.tier, -1))
        if guarded is not None and guarded.decided_us == decided.since_us:
            guarded.met, guarded.missed = max(0, guarded.met - decided.met), max(0, guarded.missed - decided.missed)
            scheduler.guards.decide(guarded, Fraction(decided.share_ppm, PPM), now_us, decided.state)
    for seen in call.seen:
        guarded = scheduler.guards.of(levels.get(seen.tier, -1))
        if guarded is not None and seen.told_with > last_number:
            guarded.met, guarded.missed = guarded.met + seen.met, guarded.missed + seen.missed


def held(scheduler: Scheduler, level: int) -> GuardHeld:
    """A tier as a reply has it."""
    of = scheduler.guards.of(level)
    if of is None:
        return NO_GUARD
    return GuardHeld(int(of.share * PPM), of.decided_us, of.met, of.missed, of.has_kept_out, list(of.state))


def mirror(scheduler: Scheduler, level: int, held: GuardHeld) -> None:
    """The scheduler of a replica has a guarded tier as a reply had it."""
    guarded = scheduler.guards.of(level)
    if guarded is not None and held.share_ppm:
        guarded.share, guarded.has_kept_out = Fraction(held.share_ppm, PPM), held.has_kept_out


class MemberGuard:
    """A replica's part: what its requests saw, and what it decides. The levels are those of its own rules."""

    def __init__(self, rules: Rules) -> None:
        self._counts: dict[int, dict[str, list[int]]] = {}
        self._decided: list[GuardDecided] = []
        self._tell_at_us: int | None = None
        self.change_rules(rules)

    def change_rules(self, rules: Rules) -> None:
        """Other rules of the same tiers."""
        self._rules = rules
        self._levels = [level for level, tier in enumerate(rules.tiers) if tier.hold > 0]
        self._counts = {level: counts for level, counts in self._counts.items() if level in self._levels}

    def note(self, level: int, tenant: str, *, is_missed: bool, now_us: int) -> int | None:
        """A first token or an answer of a tier. Returns when it is to be told, None where the tier is not guarded."""
        if level not in self._levels:
            return None
        self._counts.setdefault(level, {}).setdefault(tenant, [0, 0])[is_missed] += 1
        if self._tell_at_us is None:
            self._tell_at_us = now_us + TOLD_EVERY_US
        return self._tell_at_us

    def seen(self, now_us: int) -> list[SloSeen]:
        """What is to be told now."""
        if self._tell_at_us is None or now_us < self._tell_at_us:
            return []
        counts, self._counts, self._tell_at_us = self._counts, {}, None
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

    def is_due(self, reply: Reply) -> bool:
        """True if a reply says that something is to be decided."""
        return bool(self._levels) and any(
            tier.guard.share_ppm and reply.now_us >= tier.guard.decided_us + DECIDE_EVERY_US for tier in reply.tiers
        )

    def decide(self, reply: Reply, pool: Scheduler) -> None:
        """Decides by a reply, and by what the tiers of the `pool` hold."""
        held = {tier.tier: tier.guard for tier in reply.tiers}
        for level in self._levels:
            tier = self._rules.tiers[level]
            of, guarded = held.get(tier.name, NO_GUARD), pool.guards.of(level)
            if guarded is None or not of.share_ppm or reply.now_us < of.decided_us + DECIDE_EVERY_US:
                continue
            below = pool.guards.held_below(guarded)
            floors = share_of(guarded.floors, pool.capacity)
            seen = GuardedPeriod(
                of.met,
                of.missed,
                # One ticket of them is let through at any share: where they hold no more, a smaller one is no help.
                share_of(below, pool.capacity) if below[1] > 1 else 0.0,
                share_of(reduce(plus, (tier.used for tier in pool.tiers), NOTHING), pool.capacity),
                floors,
                of.has_kept_out,
            )
            before = GuardState(*of.state) if of.state else first_state(floors)
            after = decide(before, seen, float(tier.hold))
            share_ppm = max(1, round(after.share * PPM))
            self._decided.append(
                GuardDecided(tier.name, of.decided_us, share_ppm, of.met, of.missed, [float(it) for it in after])
            )

    @property
    def has_decided(self) -> bool:
        """True if the ledger is to hear of a decision."""
        return bool(self._decided)


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
