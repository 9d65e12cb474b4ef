"""The state of one tier: its rules, its queue, what its leases hold and what it owes."""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.policy.rules import TierRules
from sidecar.scheduling.fair_queue import FairQueue
from sidecar.scheduling.ticket import Demand, Ticket

MOST_EXCESS = 1_000
"""The most whole reserves that one ticket counts as too much. What a tier owes then stays a whole number below 2^53
(exact in Lua) for every lease of less than 100 days."""

LATEST_US = 2**53 - 1


class TierState:
    """One tier of a pool. `latest_admission` numbers its latest admission among all of the pool, 0 before the first.

    The tier has no turn before `owes_until_us`.
    """

    __slots__ = ("held_requests", "held_tokens", "latest_admission", "owes_until_us", "queue", "rules")

    _queue_type: type[FairQueue] = FairQueue

    def __init__(self, rules: TierRules) -> None:
        self.queue = self._queue_type()
        self.held_tokens = 0
        self.held_requests = 0
        self.latest_admission = 0
        self.owes_until_us = 0
        self.change_rules(rules)

    def change_rules(self, rules: TierRules) -> None:
        """Applies other rules from now on. What waits, is held or is owed stays."""
        self.rules = rules
        self.queue.change_sizes(rules.reserve_tokens, rules.reserve_requests)

    def heads(self, now_us: int) -> Sequence[Ticket]:
        """The tickets that may be next: the head of the queue and, while the tier owes and its head is larger than the
        reserve, the next ticket that is not. Empty where no ticket waits.
        """
        head = self.queue.head()
        if head is None:
            return ()
        if now_us >= self.owes_until_us or self.queue.is_small(head):
            return (head,)
        small = self.queue.small_head()
        return (head,) if small is None else (head, small)

    def has_turn(self, demand: Demand, now_us: int) -> bool:
        """Rule 1: whether a request that is not inside the tier's reserve has a turn."""
        rules, tokens, requests = self.rules, self.held_tokens, self.held_requests
        if tokens + demand.tokens <= rules.reserve_tokens and requests + demand.requests <= rules.reserve_requests:
            return False  # it is inside
        is_below = tokens < rules.reserve_tokens and requests < rules.reserve_requests
        return is_below and not rules.always_first and now_us >= self.owes_until_us

    def excess(self, demand: Demand) -> int:
        """How many whole reserves too much the tier, which is below its reserve, would hold with a ticket."""
        rules = self.rules
        tokens = (self.held_tokens + demand.tokens - rules.reserve_tokens) // rules.reserve_tokens
        requests = (self.held_requests + demand.requests - rules.reserve_requests) // rules.reserve_requests
        return min(MOST_EXCESS, max(0, tokens, requests))

    def owe(self, lease: Ticket, now_us: int) -> None:
        """A lease with an excess has ended: the tier owes for it, in addition to what it owes already."""
        owed_us = lease.excess * max(0, now_us - lease.admitted_us)
        self.owes_until_us = min(LATEST_US, max(now_us, self.owes_until_us) + owed_us)
        lease.excess = 0

    def has_its_reserve_without(self, lease: Ticket) -> bool:
        """Whether the tier would still not be below its reserve without one of its leases."""
        rules = self.rules
        return not rules.always_first and (
            self.held_tokens - lease.tokens >= rules.reserve_tokens
            or self.held_requests - lease.requests >= rules.reserve_requests
        )

    def is_at_limit(self, ticket: Ticket) -> bool:
        """Rule 2: whether the limit of the tier keeps the ticket from being a candidate."""
        return self.rules.limited and self.would_exceed_limit(ticket)

    def would_exceed_limit(self, demand: Demand) -> bool:
        """Whether the tier, which has a limit, would hold more tokens or requests than that with a request."""
        rules = self.rules
        return (
            self.held_tokens + demand.tokens > rules.limit_tokens
            or self.held_requests + demand.requests > rules.limit_requests
        )
