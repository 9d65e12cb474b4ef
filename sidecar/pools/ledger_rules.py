"""A policy, the engines of a fleet and a request that comes, in the words of the ledger."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from sidecar.policy.model import Policy
from sidecar.pools.base import Ask
from sidecar.pools.calls import EngineView, LedgerRules
from sidecar.pools.engines import EngineOffer
from sidecar.scheduling.figures import Rules
from sidecar.scheduling.tickets import Ticket


def new_rules(policy: Policy, weight_percent: int) -> LedgerRules:
    """The rules of a policy."""
    rules = policy.rules
    stated = Rules(
        policy.tiers,
        rules.promote_after_us,
        rules.ceiling,
        rules.max_preemptions,
        weight_percent,
        rules.is_by_gain,
        policy.fair if rules.is_by_gain else Fraction(1),
    )
    return LedgerRules.of(stated)


def engine_views(offers: Iterable[EngineOffer], now_us: int) -> list[EngineView]:
    """The engines as this process sees them."""
    return [
        EngineView(
            offer.id,
            offer.tokens,
            offer.requests,
            offer.prefill,
            offer.speed,
            offer.takes_new,
            now_us - offer.since_us if offer.ramp_us else 0,
            offer.ramp_us,
        )
        for offer in offers
    ]


def new_ticket(ask: Ask, number: int, arrived_us: int) -> Ticket:
    """The ticket of a request that came as the `number`-th one."""
    return Ticket(
        str(number),
        ask.tier,
        ask.tenant,
        ask.tokens,
        ask.requests,
        ask.prompt,
        ask.weight,
        dict(ask.hits),
        frozenset(ask.barred),
        arrived_us,
        "",
        number,
        ask.gain,
        user=ask.user,
        cost=None if ask.cost is None else ask.cost.in_turns(ask.tokens),
    )
