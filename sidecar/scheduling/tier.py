"""One tier at work: its rules, what waits in it, what its leases hold and what it owes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from sidecar.policy.rules import PoolRules, TierRules
from sidecar.scheduling.fair_queue import FairQueue
from sidecar.scheduling.ticket import Ticket

MOST_EXCESS = 1_000
"""The most whole reserves that one ticket is counted as too much, so that what a tier owes stays a whole number below
2^53 (Lua) for every lease of less than 100 days."""

LATEST_US = 2**53 - 1


class Rank(IntEnum):
    """The four classes of rule 1, the first first."""

    ALWAYS_FIRST = 0
    INSIDE = 1
    TURN = 2
    OTHER = 3


# Looked up once: an enumeration's attribute costs as much as a call.
_ALWAYS_FIRST, _INSIDE, _TURN, _OTHER = Rank


class Candidate(NamedTuple):
    """A ticket's place in order (rule 1): candidates compare by it, and never as far as the ticket itself."""

    rank: Rank
    turn: int
    score: int
    arrived_us: int
    sequence: int
    ticket: Ticket


_new = tuple.__new__  # a named tuple's own constructor is a call more


class Tier:
    """What the four rules ask of one tier.

    A score is an aged level times `promote_after`, a whole number; without aging one level scores 1. `score` is that of
    a ticket that has not aged. `latest_admission` is the number of its latest admission among all of the pool, 0 before
    its first. It has no turn before `owes_until_us`.
    """

    __slots__ = (
        "_ages",
        "_ceiling_score",
        "held_requests",
        "held_tokens",
        "latest_admission",
        "owes_until_us",
        "queue",
        "rules",
        "score",
    )

    def __init__(self, rules: TierRules, pool: PoolRules) -> None:
        self.queue = FairQueue()
        self.held_tokens = 0
        self.held_requests = 0
        self.latest_admission = 0
        self.owes_until_us = 0
        self.change_rules(rules, pool)

    def change_rules(self, rules: TierRules, pool: PoolRules) -> None:
        """Follows other rules from now on; what waits, is held or owed stays."""
        self.rules = rules
        self.score = rules.level * (pool.promote_after_us or 1)
        self._ages = pool.promote_after_us is not None and rules.level > pool.ceiling
        self._ceiling_score = pool.ceiling * (pool.promote_after_us or 1)
        self.queue.change_sizes(rules.reserve_tokens, rules.reserve_requests)

    def aged_score(self, ticket: Ticket, now_us: int) -> int:
        """Rule 4: what a waiting ticket scores now. It never falls below the ceiling's score."""
        if not self._ages:
            return self.score
        return max(self._ceiling_score, self.score - (now_us - ticket.arrived_us))

    def candidate(self, ticket: Ticket, now_us: int) -> Candidate:
        """Rules 1 and 4: the place in order of a ticket that waits. Every decision calls it: so all is in one place."""
        rules, held_tokens, held_requests = self.rules, self.held_tokens, self.held_requests
        turn = 0
        if rules.always_first:
            rank = _ALWAYS_FIRST
        elif (
            held_tokens + ticket.tokens <= rules.reserve_tokens
            and held_requests + ticket.requests <= rules.reserve_requests
        ):
            rank = _INSIDE
        elif (
            now_us >= self.owes_until_us
            and held_tokens < rules.reserve_tokens
            and held_requests < rules.reserve_requests
        ):
            rank, turn = _TURN, self.latest_admission
        else:
            rank = _OTHER
        score = self.score
        if self._ages:
            score = max(score - (now_us - ticket.arrived_us), self._ceiling_score)
        return _new(Candidate, (rank, turn, score, ticket.arrived_us, ticket.sequence, ticket))

    def heads(self, now_us: int) -> Sequence[Ticket]:
        """The tickets that may be next: the queue's head, and, while the tier owes and its head is larger than the
        reserve, the next that is not. None wait where it is empty.
        """
        head = self.queue.head()
        if head is None:
            return ()
        if now_us >= self.owes_until_us or self.queue.is_small(head):
            return (head,)
        small = self.queue.small_head()
        return (head,) if small is None else (head, small)

    def excess(self, ticket: Ticket) -> int:
        """How many whole reserves too much the tier, which is below its reserve, would hold with a ticket."""
        rules = self.rules
        tokens = (self.held_tokens + ticket.tokens - rules.reserve_tokens) // rules.reserve_tokens
        requests = (self.held_requests + ticket.requests - rules.reserve_requests) // rules.reserve_requests
        return min(MOST_EXCESS, max(0, tokens, requests))

    def owe(self, lease: Ticket, now_us: int) -> None:
        """A lease with an excess is over: the tier owes for it, in addition to what it owes already."""
        owed_us = lease.excess * max(0, now_us - lease.admitted_us)
        self.owes_until_us = min(LATEST_US, max(now_us, self.owes_until_us) + owed_us)
        lease.excess = 0

    def has_its_reserve_without(self, lease: Ticket) -> bool:
        """Whether it would still not be below its reserve if one of its leases were gone."""
        rules = self.rules
        return not rules.always_first and (
            self.held_tokens - lease.tokens >= rules.reserve_tokens
            or self.held_requests - lease.requests >= rules.reserve_requests
        )

    def is_at_limit(self, ticket: Ticket) -> bool:
        """Rule 2: whether its limit keeps the ticket from being a candidate."""
        rules = self.rules
        return rules.limited and (
            self.held_tokens + ticket.tokens > rules.limit_tokens
            or self.held_requests + ticket.requests > rules.limit_requests
        )
