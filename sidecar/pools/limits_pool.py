"""The pool of a process whose models have pools of their own."""

from __future__ import annotations

from dataclasses import replace

from sidecar.policy.model import Policy
from sidecar.pools.pool import Pool
from sidecar.scheduling.rate_limit import RateLimiter


class LimitsPool(Pool):
    """Base of those pools: the clock, and the tenants' limits. It has no bound, and no request enters it."""

    def __init__(self, policy: Policy, allowances: RateLimiter) -> None:
        super().__init__(_unbounded(policy), allowances=allowances)

    def change_policy(self, policy: Policy) -> None:
        """See `Pool.change_policy`."""
        super().change_policy(_unbounded(policy))


def _unbounded(policy: Policy) -> Policy:
    return replace(policy, rules=policy.rules_for(None, None))
