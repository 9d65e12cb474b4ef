"""The order of the waiting tickets: rules 1 and 4 of `scheduler`.

Rule 1 sorts tickets into four classes (`OrderClass`). Among turns the tier with the oldest latest admission comes
first. Then, and in the other classes, the smaller precedence comes first; then the earlier arrival.

Another order is another class with the same methods (`gain_order`). The precedence of `LevelOrder` is the aged level.
For each ticket an order decides four separate things, the fields of `Candidate`:

- its place: `order_class`, `turn`, `precedence`, arrival and sequence, compared in this sequence;
- `headroom_level`: the ticket may not use the headroom of a tier that is more important than this level (rule 2);
- `yields_to`: in class OTHER a tier that is more important than this level always comes before the ticket, so rule 3
  counts everything that such a tier holds. An order that does not look at levels in class OTHER sets 0;
- `engine_level`: the level that the engine receives as the priority of the request.

An order that must see every waiting ticket, and not only the heads of the tiers, has a subclass of `FairQueue` in a
subclass of `TierState`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from sidecar.policy.rules import PoolRules
from sidecar.scheduling.ticket import Rule, Ticket
from sidecar.scheduling.tier import TierState


class OrderClass(IntEnum):
    """The four classes of rule 1, in order."""

    ALWAYS_FIRST = 0
    INSIDE = 1
    TURN = 2
    OTHER = 3


# Looked up once: an enumeration's attribute costs as much as a call.
_ALWAYS_FIRST, _INSIDE, _TURN, _OTHER = OrderClass

_CLASS_RULES = {_ALWAYS_FIRST: Rule.ALWAYS_FIRST, _INSIDE: Rule.RESERVE, _TURN: Rule.TURN}


class Candidate(NamedTuple):
    """A ticket that may be next. Candidates compare by their place in order; the sequence is unique."""

    order_class: OrderClass
    turn: int
    precedence: int
    arrived_us: int
    sequence: int
    ticket: Ticket
    headroom_level: int
    yields_to: int
    engine_level: int


_new = tuple.__new__  # a named tuple's own constructor is one call more


class LevelOrder:
    """Order by aged level. All three levels of a candidate are its aged level, rounded up to a whole one.

    The precedence is the aged level times `promote_after`, a whole number. Without aging one level counts 1.
    """

    def __init__(self, rules: PoolRules, tiers: Sequence[TierState]) -> None:
        self._tiers = tiers
        self.change_rules(rules)

    def change_rules(self, rules: PoolRules) -> None:
        """Applies other rules for the same tiers from now on."""
        self._promote_after_us = unit_us = rules.promote_after_us or 1
        self._ceiling = rules.ceiling if rules.promote_after_us is not None else len(rules.tiers)
        self._ceiling_precedence = rules.ceiling * unit_us
        self._precedences = [level * unit_us for level in range(len(rules.tiers))]

    def candidate(self, tier: TierState, ticket: Ticket, now_us: int) -> Candidate:
        """The place and the levels of one waiting ticket. Every decision calls this, so it calls nothing itself."""
        rules, held_tokens, held_requests = tier.rules, tier.held_tokens, tier.held_requests
        turn = 0
        if rules.always_first:
            order_class = _ALWAYS_FIRST
        elif (
            held_tokens + ticket.tokens <= rules.reserve_tokens
            and held_requests + ticket.requests <= rules.reserve_requests
        ):
            order_class = _INSIDE
        elif (
            now_us >= tier.owes_until_us
            and held_tokens < rules.reserve_tokens
            and held_requests < rules.reserve_requests
        ):
            order_class, turn = _TURN, tier.latest_admission
        else:
            order_class = _OTHER
        level, arrived_us = rules.level, ticket.arrived_us
        precedence = self._precedences[level]
        if level > self._ceiling:
            precedence -= now_us - arrived_us
            if precedence < self._ceiling_precedence:  # noqa: PLR1730  # `max` is one call more
                precedence = self._ceiling_precedence
            level = -(-precedence // self._promote_after_us)
        return _new(
            Candidate, (order_class, turn, precedence, arrived_us, ticket.sequence, ticket, level, level, level)
        )

    def in_order(self, now_us: int) -> list[Candidate]:
        """The candidates, the first in order first."""
        found: list[Candidate] = []
        for tier in self._tiers:
            if not tier.queue.count:
                continue
            for head in tier.heads(now_us):
                if not (tier.rules.limited and tier.is_at_limit(head)):
                    found.append(self.candidate(tier, head, now_us))  # noqa: PERF401  # a comprehension is one call more
        if len(found) > 1:
            found.sort()
        return found

    def in_turn(self, now_us: int, *, is_idle: bool) -> list[Candidate]:
        """The candidates while the pool is held back; those of class OTHER only while the pool `is_idle`.

        Class ALWAYS_FIRST comes first, class OTHER last. Classes INSIDE and TURN count as one: in it the tier with the
        oldest latest admission comes first.
        """
        last = _OTHER if is_idle else _TURN
        return sorted(
            [candidate for candidate in self.in_order(now_us) if candidate.order_class <= last],
            key=lambda candidate: (
                _TURN if candidate.order_class is _INSIDE else candidate.order_class,
                self._tiers[candidate.ticket.tier].latest_admission,
            ),
        )  # stable: `in_order` decides between two heads of one tier, and between tiers without any admission

    def comes_before(self, ticket: Ticket, candidate: Candidate, now_us: int) -> bool:
        """Whether a ticket of a tier that has its reserve comes before a candidate."""
        place = self.candidate(self._tiers[ticket.tier], ticket, now_us)
        return (_OTHER, 0, *place[2:5]) < candidate[:5]

    def rule(self, candidate: Candidate, head: Candidate) -> Rule:
        """The rule by which a candidate is admitted before the head of another tier that arrived earlier."""
        if head < candidate:
            return Rule.PASSED_OVER
        if candidate.order_class < head.order_class:
            return _CLASS_RULES[candidate.order_class]
        return Rule.TURN if candidate.order_class is _TURN else Rule.LEVEL

    def changes_us(self, heads: Iterable[Ticket], now_us: int) -> Iterator[int]:
        """The moments at which time alone may let one of the heads in.

        A head reaches a whole level at such a moment. From then on it may use the headroom of one tier more. A head at
        the ceiling also has a new place: it is ordered by arrival among the tickets of that level.
        """
        unit_us, ceiling = self._promote_after_us, self._ceiling
        for head in heads:
            if head.tier > ceiling:
                rise = (now_us - head.arrived_us) // unit_us + 1
                if rise <= head.tier - ceiling:
                    yield head.arrived_us + rise * unit_us
