"""The size limits of the tiers, which refuse a request before it waits."""

from __future__ import annotations

from typing import Protocol

from sidecar.errors import QueueFull, RequestTooLarge
from sidecar.policy.model import Policy
from sidecar.policy.rules import UNLIMITED, PoolRules, largest_admissible, largest_request


class SizedAsk(Protocol):
    """The fields of a `pools.base.Ask` that count."""

    @property
    def tier(self) -> int:
        """Its level."""

    @property
    def charged_tokens(self) -> int:
        """The tokens that it may use in all."""

    @property
    def requests(self) -> int:
        """The requests that it counts for."""


class SizeLimits:
    """The size limit of every tier of `policy`, in a pool of its present size. It counts the most that a request may
    use.

    A larger request is refused with status 400 at once: it could never be admitted. In a pool of several engines it
    must fit the largest of them, too.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.has_shrunk = False
        self._admissible: tuple[tuple[int, int], ...] = ()
        self.change_rules(policy.rules, policy.largest_engine)

    def change_rules(self, rules: PoolRules, engine: tuple[int, int] = (UNLIMITED, UNLIMITED)) -> None:
        """The pool has another size. The largest of several engines holds so many tokens and requests.

        `has_shrunk` says whether a request that waited may be too large now.
        """
        self.rules = rules
        tokens, requests = engine
        sizes = [
            (largest_request(rules, tier.level), largest_admissible(rules, tier.level)) for tier in self.policy.tiers
        ]
        self.largest = tuple((min(tokens, limit[0]), min(requests, limit[1])) for limit, _ in sizes)
        # What waits already is not refused while the only engine that could hold it is away for a moment.
        admissible = tuple(most for _, most in sizes)
        self.has_shrunk = any(
            tokens < before[0] or requests < before[1]
            for (tokens, requests), before in zip(admissible, self._admissible, strict=False)
        )
        self._admissible = admissible
        self._engine = engine
        self._limits = tuple(
            (tokens if tier.max_request_tokens is None else min(tokens, tier.max_request_tokens), requests)
            for tier, (tokens, requests) in zip(self.policy.tiers, self.largest, strict=True)
        )

    def refuse_what_never_fits(self, ask: SizedAsk) -> None:
        """Raises RequestTooLarge, with the figures, for a request that could never be admitted."""
        if error := self.too_large(ask):
            raise error

    def most_tokens(self, level: int) -> int:
        """See `Pool.most_tokens`."""
        return self.limits(level)[0]

    def most_requests(self, level: int) -> int:
        """See `Pool.most_requests`."""
        return self.limits(level)[1]

    def limits(self, level: int) -> tuple[int, int]:
        """The most (tokens, requests) that a request of a tier may hold when it comes: its size limit."""
        return self._limits[level]

    def too_large(self, ask: SizedAsk) -> RequestTooLarge | None:
        """The refusal of a request that could never be admitted, with the figures; None where it could."""
        return self._exceeds(ask, *self._limits[ask.tier])

    def outgrown(self, ask: SizedAsk) -> RequestTooLarge | None:
        """The refusal of a waiting request that could never be admitted any more, None where it could.

        The size limit and `max_request_tokens` do not count: they are for new requests.
        """
        return self._exceeds(ask, *self._admissible[ask.tier])

    def _exceeds(self, ask: SizedAsk, tokens: int, requests: int) -> RequestTooLarge | None:
        tier = self.policy.tiers[ask.tier]
        if (most := ask.charged_tokens) > tokens:
            return RequestTooLarge(
                f"this request would hold {most} tokens (prompt and maximum output); "
                f"tier {tier.name} allows {tokens}, {self.reason(ask.tier, tokens)}; "
                "shorten the prompt or ask for less output"
            )
        if ask.requests > requests:
            return RequestTooLarge(
                f"this request would start {ask.requests} sequences; "
                f"tier {tier.name} allows {requests}, {self.reason(ask.tier, requests, tokens=False)}; "
                "ask for fewer (n or best_of)"
            )
        return None

    def reason(self, level: int, allowed: int, *, tokens: bool = True) -> str:
        """The limit by which a tier's requests may hold so much of one dimension, as half a sentence."""
        tier, d = self.rules.tiers[level], int(not tokens)
        if tokens and allowed == self.policy.tiers[level].max_request_tokens:
            return "its max_request_tokens"
        if tier.limited and allowed == tier.limit[d]:
            return "the tier's limit"
        if allowed == self.rules.capacity[d]:
            return "the whole pool"
        if allowed == self._engine[d]:
            return "the largest engine"
        if allowed == self._admissible[level][d]:
            return "the pool less what more important tiers keep free"
        return "the tier's reserve" if allowed == tier.reserve[d] else "the pool less what the other tiers reserve"

    def places(self, level: int) -> int | None:
        """The most requests that may wait in a tier's queue; None where it is unbounded."""
        return self.policy.tiers[level].queue.max_requests

    def queue_full(self, level: int, retry_after_s: float) -> QueueFull:
        """The refusal of one request more than a tier's queue may hold."""
        tier = self.policy.tiers[level]
        return QueueFull(
            f"tier {tier.name} has {requests_text(tier.queue.max_requests)} waiting, the most that it may have; "
            "try again later",
            retry_after_s=retry_after_s,
            level=level,
        )


def requests_text(number: int | None) -> str:
    """A number of requests, for a message."""
    return "1 request" if number == 1 else f"{number or 0:,} requests"
