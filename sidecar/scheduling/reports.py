"""Reports on a ticket that enters an engine. No rule depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sidecar.scheduling.scheduler import Candidate, Scheduler


class Rule(str, Enum):
    """Why a ticket entered before the first of another tier that had come before it.

    `PASSED_OVER`: that one did not fit the pool, and did not hold its place. `CLAIM`: it waits for an engine.
    `GUARDED`: it would hold more than the SLO of a more important tier leaves to it (rule 10).
    """

    FIRST = "always_first"
    RESERVE = "reserve"
    TURN = "reserve_turn"
    LEVEL = "level"
    GAIN = "gain"
    LIMIT = "limit"
    GUARDED = "guarded"
    PASSED_OVER = "passed_over"
    CLAIM = "claim"


_OF_CLASS = (Rule.FIRST, Rule.RESERVE, Rule.RESERVE, Rule.TURN)


class Found(NamedTuple):
    """An engine as a ticket finds it that enters it, and for how long that one had stood in line."""

    tokens: int
    requests: int
    held_tokens: int
    held_requests: int
    sent: int
    lined_us: int


def passed(scheduler: Scheduler, entering: Candidate, order: Sequence[Candidate]) -> dict[int, Rule]:
    """The other tiers whose first came before the ticket, each with the rule by which it enters before that one."""
    found: dict[int, Rule] = {}
    for level, tier in enumerate(scheduler.tiers):
        if level == entering.ticket.tier or not (tier.lined or tier.queue):
            continue
        first = next((candidate for candidate in order if candidate.ticket.tier == level), None)
        ticket = tier.queue.next() if first is None else first.ticket
        if ticket is not None and ticket.arrival < entering.ticket.arrival:
            if first is None:
                found[level] = Rule.GUARDED if level in scheduler.guards.kept_out else Rule.LIMIT
            else:
                found[level] = _rule(scheduler, entering, first)
    return found


def _rule(scheduler: Scheduler, entering: Candidate, first: Candidate) -> Rule:
    order_class = entering.order_class
    if first < entering:
        return Rule.CLAIM if scheduler.fits(first.ticket) else Rule.PASSED_OVER
    if order_class < first.order_class:
        return _OF_CLASS[order_class]
    if _OF_CLASS[order_class : order_class + 1] == (Rule.TURN,):
        return Rule.TURN
    earns = order_class == len(_OF_CLASS) and scheduler.rules.by_gain and not entering.place[1]
    return Rule.GAIN if earns else Rule.LEVEL
