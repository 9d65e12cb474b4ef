"""What a tier could ever be given: more than that is refused at the door, and never waits."""

from __future__ import annotations

from sidecar.errors import QueueFull, RequestTooLarge
from sidecar.policy.policy import Policy
from sidecar.policy.rules import PoolRules, largest_admissible, largest_request
from sidecar.pools.pool import Ask


class Sizes:
    """The largest request of every tier of `policy`, in a pool of the size that it has at present."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.change_rules(policy.rules)

    def change_policy(self, policy: Policy) -> None:
        """Another policy with the same tiers."""
        self.policy = policy
        self.change_rules(policy.rules)

    def change_rules(self, rules: PoolRules) -> None:
        """The pool has another size."""
        self.rules = rules
        self.largest = tuple(largest_request(rules, tier.level) for tier in self.policy.tiers)
        self._admissible = tuple(largest_admissible(rules, tier.level) for tier in self.policy.tiers)

    def refuse_what_never_fits(self, ask: Ask) -> None:
        """Raises RequestTooLarge, with the figures, for what could never be admitted."""
        error = self.too_large(ask)
        if error is not None:
            raise error

    def most_tokens(self, level: int) -> int:
        """The most tokens that one request of a tier may hold."""
        most = self.policy.tiers[level].max_request_tokens
        return self.largest[level][0] if most is None else min(most, self.largest[level][0])

    def too_large(self, ask: Ask) -> RequestTooLarge | None:
        """Why a request could never be admitted, with the figures; None where it could."""
        return self._exceeds(ask, self.most_tokens(ask.tier), self.largest[ask.tier][1])

    def outgrown(self, ask: Ask) -> RequestTooLarge | None:
        """Why a request that waits could never be admitted now, None where it could.

        What a newcomer may hold at most, by the size limit or `max_request_tokens`, is no such reason.
        """
        return self._exceeds(ask, *self._admissible[ask.tier])

    def _exceeds(self, ask: Ask, tokens: int, requests: int) -> RequestTooLarge | None:
        tier = self.policy.tiers[ask.tier]
        if ask.tokens > tokens:
            return RequestTooLarge(
                f"this request would hold {ask.tokens} tokens (prompt and maximum output); "
                f"tier {tier.name} allows {tokens}; shorten the prompt or ask for less output"
            )
        if ask.requests > requests:
            return RequestTooLarge(
                f"this request would start {ask.requests} sequences (prompts times choices); "
                f"tier {tier.name} allows {requests}; ask for fewer"
            )
        return None

    def places(self, level: int) -> int | None:
        """The most requests that may wait in a tier's queue; None where it is unbounded."""
        return self.policy.tiers[level].max_waiting

    def queue_full(self, level: int, retry_after_s: float) -> QueueFull:
        """The refusal of one request more than a tier's queue may hold."""
        tier = self.policy.tiers[level]
        return QueueFull(
            f"tier {tier.name} has {tier.max_waiting} requests waiting, which is all it may have; try again later",
            retry_after_s=retry_after_s,
            level=level,
        )
