"""Why a request has to wait, told from the pool's figures: what an operator asks first.

The figures may be a heartbeat old where the pool is shared; the decision itself is the scheduler's, or the script's.
"""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.events import Obstacle
from sidecar.policy.rules import UNLIMITED, PoolRules
from sidecar.pools.figures import TierFigures
from sidecar.pools.pool import Ask

HELD_BACK = (Obstacle.HELD_BACK, "the engine has more waiting inside it than it should: nobody is admitted")


def obstacle(rules: PoolRules, tiers: Sequence[TierFigures], ask: Ask) -> tuple[Obstacle, str]:
    """The first thing that kept `ask` from being admitted, by rule 2 and 3, and a sentence. `tiers` count it itself."""
    own, held = rules.tiers[ask.tier], tiers[ask.tier]
    if own.limited and (
        held.held_tokens + ask.tokens > own.limit_tokens or held.held_requests + ask.requests > own.limit_requests
    ):
        figures = _of(held.held_tokens, own.limit_tokens, held.held_requests, own.limit_requests)
        asked = _size(ask, own.limit_tokens, own.limit_requests)
        return Obstacle.LIMIT, f"tier {own.name} is at its limit: it holds {figures}, and it asks for {asked}"
    tokens, requests = sum(tier.held_tokens for tier in tiers), sum(tier.held_requests for tier in tiers)
    if tokens + ask.tokens > rules.tokens or requests + ask.requests > rules.requests:
        figures = _of(tokens, rules.tokens, requests, rules.requests)
        asked = _size(ask, rules.tokens, rules.requests)
        return Obstacle.NO_ROOM, f"the pool has no room: {figures} are held, and it asks for {asked}"
    kept = [
        tier.name
        for tier, figures in zip(rules.tiers[: ask.tier], tiers, strict=False)
        if figures.held_tokens < tier.headroom_tokens or figures.held_requests < tier.headroom_requests
    ]
    ahead = [tier.name for tier, figures in zip(rules.tiers, tiers, strict=True) if figures.queued_requests]
    others = sum(figures.queued_requests for figures in tiers) - 1
    if others > 0:
        wait = "other waits" if others == 1 else "others wait"
        return Obstacle.BEHIND, f"{others} {wait} already, in {_list(ahead)}: nobody goes past the first in order"
    return Obstacle.HEADROOM, f"what is free is kept for {_list(kept)}" if kept else "there is no room beside others"


def _of(tokens: int, most_tokens: int, requests: int, most_requests: int) -> str:
    parts = []
    if most_tokens < UNLIMITED:
        parts.append(f"{tokens:,} of {most_tokens:,} tokens")
    if most_requests < UNLIMITED:
        parts.append(f"{requests:,} of {most_requests:,} requests")
    return " and ".join(parts)


def _size(ask: Ask, most_tokens: int, most_requests: int) -> str:
    """The part of an ask that is bounded, in the order of `_of`; beside its tokens one request need not be said."""
    if most_tokens == UNLIMITED:
        return f"{ask.requests:,}"
    if ask.requests == 1 or most_requests == UNLIMITED:
        return f"{ask.tokens:,}"
    return f"{ask.tokens:,} and {ask.requests} requests"


def _list(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
