"""The size limits of the tiers: a request larger than its tier's gets a 400 at once, and never waits."""

from __future__ import annotations

from sidecar.errors import QueueFull, RequestTooLarge
from sidecar.policy.model import Policy
from sidecar.policy.rules import PoolRules, largest_admissible, largest_request
from sidecar.pools.pool import Ask


class Sizes:
    """The size limit of every tier of `policy`, in a pool of the size that it has at present."""

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

    def limits(self, level: int) -> tuple[int, int]:
        """The most (tokens, requests) that a request of a tier may hold when it comes: its size limit."""
        most = self.policy.tiers[level].max_request_tokens
        tokens, requests = self.largest[level]
        return tokens if most is None else min(tokens, most), requests

    def too_large(self, ask: Ask) -> RequestTooLarge | None:
        """Why a request could never be admitted, with the figures; None where it could."""
        return self._exceeds(ask, *self.limits(ask.tier))

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
                f"tier {tier.name} allows {tokens}, {self.reason(ask.tier, tokens)}; "
                "shorten the prompt or ask for less output"
            )
        if ask.requests > requests:
            return RequestTooLarge(
                f"this request would start {ask.requests} sequences (prompts times choices); "
                f"tier {tier.name} allows {requests}, {self.reason(ask.tier, requests, tokens=False)}; ask for fewer"
            )
        return None

    def reason(self, level: int, allowed: int, *, tokens: bool = True) -> str:
        """What it is that allows a tier's requests so much of one dimension, as half a sentence."""
        tier = self.rules.tiers[level]
        limit, reserve, pool = (
            (tier.limit_tokens, tier.reserve_tokens, self.rules.tokens)
            if tokens
            else (tier.limit_requests, tier.reserve_requests, self.rules.requests)
        )
        if tokens and allowed == self.policy.tiers[level].max_request_tokens:
            return "its max_request_tokens"
        if tier.limited and allowed == limit:
            return "the tier's limit"
        if allowed == pool:
            return "the whole pool"
        if allowed == self._admissible[level][0 if tokens else 1]:
            return "the pool less what more important tiers keep free"
        return "the tier's reserve" if allowed == reserve else "the pool less what the other tiers reserve"

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
