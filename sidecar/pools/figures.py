"""How a pool tells what it did: a wait as a grant, and its tiers as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sidecar.policy.rules import UNLIMITED, PoolRules, TierRules
from sidecar.pools.lending import Loan, loans
from sidecar.pools.pool import Grant
from sidecar.scheduling import Rule, Wait

_NONE: Mapping[str, str] = {}
_NOTHING: Mapping[str, int] = {}


class TierFigures(NamedTuple):
    """One tier at work, in tokens and requests."""

    held_tokens: int
    held_requests: int
    queued_tokens: int
    queued_requests: int


def grant_of(
    names: Sequence[str], wait: Wait, at_us: int, level: int, passed: Sequence[tuple[int, Rule]] = ()
) -> Grant:
    """A wait that ended at `at_us` at an aged `level`. `names` are the tiers', most important first."""
    ahead = served_by_name(names, wait.served_ahead) if any(wait.served_ahead) else _NOTHING
    overtaken = {names[tier]: rule.value for tier, rule in passed} if passed else _NONE
    return Grant(at_us, wait.queue_wait_us, wait.starvation_us, wait.overtaken_at_us, ahead, level, overtaken)


def served_by_name(names: Sequence[str], served: Sequence[int]) -> Mapping[str, int]:
    """Tokens by the tier's name; tiers with none are left out."""
    return {name: tokens for name, tokens in zip(names, served, strict=True) if tokens}


def pool_state(rules: PoolRules, tiers: Sequence[TierFigures], *, leases: int, waiting: int) -> dict[str, object]:
    """The pool as it stands, in JSON types; what is unbounded is null. `borrowed` and `lent` are tokens."""
    held, reserves = [tier.held_tokens for tier in tiers], [tier.reserve_tokens for tier in rules.tiers]
    lending = loans(held, reserves, [tier.headroom_tokens for tier in rules.tiers], rules.tokens)
    return {
        "capacity": {"tokens": bounded(rules.tokens), "requests": bounded(rules.requests)},
        "leases": leases,
        "waiting": waiting,
        "tiers": [_tier_state(*tier) for tier in zip(rules.tiers, tiers, lending, strict=True)],
    }


def _tier_state(rules: TierRules, figures: TierFigures, loan: Loan) -> Mapping[str, object]:
    return {
        "tier": rules.name,
        "held": {"tokens": figures.held_tokens, "requests": figures.held_requests},
        "queued": {"tokens": figures.queued_tokens, "requests": figures.queued_requests},
        "reserve": {"tokens": bounded(rules.reserve_tokens), "requests": bounded(rules.reserve_requests)},
        "limit": {"tokens": bounded(rules.limit_tokens), "requests": bounded(rules.limit_requests)},
        "borrowed": loan.borrowed,
        "lent": loan.lent,
    }


def bounded(figure: int) -> int | None:
    """A figure for people: None for what has no bounds."""
    return None if figure == UNLIMITED else figure
