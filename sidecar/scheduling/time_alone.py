"""Changes of a pool by time alone: when a decision may be another than now though nothing happened."""

from __future__ import annotations

from collections.abc import Iterator

from sidecar.scheduling.engines import ScheduledEngine
from sidecar.scheduling.guard import DECIDE_EVERY_US
from sidecar.scheduling.scheduler import PATIENCE_US, Scheduler
from sidecar.scheduling.tickets import Ticket

LOOK_AGAIN_US = 100_000
"""By gain each lost token may change the order: a pool is looked at so often, not at each of them."""


def next_change(scheduler: Scheduler, now_us: int) -> int | None:
    """The next moment of a change; None: nothing changes by itself."""
    later = [at for at in _changes(scheduler, now_us) if at > now_us]
    return min(later, default=None)


def _changes(scheduler: Scheduler, now_us: int) -> Iterator[int]:
    for level, state in enumerate(scheduler.tiers):
        if state.queue or state.lined:
            yield state.owes_until_us
            if scheduler.rules.by_gain:
                yield now_us + LOOK_AGAIN_US
        for ticket in scheduler.heads(level):
            yield from _ticket_changes(scheduler, ticket, now_us)
    for ticket in scheduler.line:
        yield ticket.in_line_since_us + PATIENCE_US
        yield from _ticket_changes(scheduler, ticket, now_us)
    for guarded in scheduler.guards.tiers:
        if guarded.has_kept_out:
            yield guarded.decided_us + DECIDE_EVERY_US
    for engine in scheduler.engines.values():
        yield engine.cap_until_us
        yield _next_tenth(engine, now_us)


def _ticket_changes(scheduler: Scheduler, ticket: Ticket, now_us: int) -> Iterator[int]:
    """It reaches another level (rule 3), or may take room back (rule 7)."""
    rules = scheduler.rules
    every_us, after_us = rules.promote_after_us, rules.tiers[ticket.tier].preempt_after_us
    if every_us is not None:
        rises = (now_us - ticket.arrived_us) // every_us + 1
        if rises <= ticket.tier - rules.ceiling:
            yield ticket.arrived_us + rises * every_us
    if after_us is not None and rules.max_preemptions:
        yield ticket.arrived_us + after_us


def _next_tenth(engine: ScheduledEngine, now_us: int) -> int:
    """The end of this tenth of its slow start."""
    if not engine.ramp_us:
        return 0
    tenths = 1 + max(0, now_us - engine.since_us) * 10 // engine.ramp_us
    return engine.since_us - (-tenths * engine.ramp_us // 10) if tenths < 10 else 0
