"""What a pool over a ledger holds and has waiting, for people: of all processes, or of one without its store."""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.policy.model import Policy
from sidecar.policy.rules import PoolRules
from sidecar.policy.size_limits import SizeLimits
from sidecar.pools.member import Member
from sidecar.pools.stats import TierUsage
from sidecar.scheduling.amounts import NOTHING, UNBOUNDED
from sidecar.scheduling.scheduler import Scheduler


def usage_of_all(
    sizes: SizeLimits, pool: Scheduler, queued: Sequence[tuple[int, int]], *, is_of_engines: bool
) -> tuple[PoolRules, Sequence[TierUsage]]:
    """The rules of a pool's present size, and what its tiers hold in all processes and have waiting in this one."""
    rules = sizes.rules
    if is_of_engines:
        rules = sizes.policy.rules_of(*(None if size == UNBOUNDED else size for size in pool.capacity))
    held = [tier.used[:2] for tier in pool.tiers]
    return rules, [TierUsage(*figures, *waiting) for figures, waiting in zip(held, queued, strict=True)]


def usage_alone(
    policy: Policy, part: tuple[int | None, int | None], member: Member, queued: Sequence[tuple[int, int]]
) -> tuple[PoolRules, Sequence[TierUsage]]:
    """The same of a replica without its store: its `part`, and its own."""
    own = member.own()
    tiers = zip(policy.tiers, queued, strict=True)
    usage = [TierUsage(*own.get(tier.name, NOTHING)[:2], *waiting) for tier, waiting in tiers]
    return policy.rules_of(*part), usage
