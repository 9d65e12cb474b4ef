"""One tier at work: its rules, who waits in it and what its leases hold."""

from __future__ import annotations

from sidecar.policy.rules import PoolRules, TierRules
from sidecar.scheduling.fair_queue import FairQueue
from sidecar.scheduling.ticket import Ticket


class Tier:
    """What the four rules ask of one tier.

    A score is an aged level times `promote_after`, a whole number; without aging one level scores 1. `score` is that of
    a ticket that has not aged.
    """

    __slots__ = ("_ages", "_ceiling_score", "held_requests", "held_tokens", "queue", "rules", "score")

    def __init__(self, rules: TierRules, pool: PoolRules) -> None:
        self.queue = FairQueue()
        self.held_tokens = 0
        self.held_requests = 0
        self.change_rules(rules, pool)

    def change_rules(self, rules: TierRules, pool: PoolRules) -> None:
        """Goes by other rules from now on; who waits and what is held stays."""
        self.rules = rules
        self.score = rules.level * (pool.promote_after_us or 1)
        self._ages = pool.promote_after_us is not None and rules.level > pool.ceiling
        self._ceiling_score = pool.ceiling * (pool.promote_after_us or 1)

    def aged_score(self, ticket: Ticket, now_us: int) -> int:
        """Rule 4: what a waiting ticket scores now. It never falls below the ceiling's score."""
        if not self._ages:
            return self.score
        return max(self._ceiling_score, self.score - (now_us - ticket.arrived_us))

    def is_below_reserve(self) -> bool:
        """Rule 1: whether its tickets come before those of the tiers that have their floor."""
        rules = self.rules
        return rules.always_first or (
            self.held_tokens < rules.reserve_tokens and self.held_requests < rules.reserve_requests
        )

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
