"""Statistics of a pool for people: the tiers as JSON, loans between tiers, the cause of a wait.

Loans. A reserve that its tier does not use is lent to any tier. Tokens have no color, so it is a matter of accounting
which tier borrowed from which. Tokens that tiers hold above their own reserves come first out of the unreserved ones.
The rest is borrowed: it is split among the borrowers in proportion to what each holds above its reserve, and among the
lenders in proportion to the idle part of its reserve that each lends. Headroom is lent last: only more important tiers
may use it. Both sides add up to the same total exactly. The scheduler does not know these figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sidecar.events import Obstacle
from sidecar.policy.rules import UNLIMITED, PoolRules, TierRules
from sidecar.pools.base import Ask
from sidecar.pools.guards import GuardFigures


class TierUsage(NamedTuple):
    """Amounts that one tier holds and has waiting, in tokens and requests."""

    held_tokens: int
    held_requests: int
    queued_tokens: int
    queued_requests: int


def pool_state(
    rules: PoolRules, tiers: Sequence[TierUsage], guards: Sequence[GuardFigures], *, leases: int, waiting: int
) -> dict[str, object]:
    """The pool's present state, in JSON types; an unbounded figure is null. `borrowed` and `lent` are tokens.

    A tier whose SLO is held has `guard`.
    """
    held, reserves = [tier.held_tokens for tier in tiers], [tier.reserve[0] for tier in rules.tiers]
    lending = loans(held, reserves, [tier.headroom[0] for tier in rules.tiers], rules.tokens)
    guard_states = {guard.tier: {"guard": _guard_state(guard)} for guard in guards}
    return {
        "capacity": {"tokens": bounded(rules.tokens), "requests": bounded(rules.requests)},
        "leases": leases,
        "waiting": waiting,
        "tiers": [
            _tier_state(tier, usage, loan) | guard_states.get(tier.name, {})
            for tier, usage, loan in zip(rules.tiers, tiers, lending, strict=True)
        ],
    }


def _tier_state(rules: TierRules, figures: TierUsage, loan: Loan) -> dict[str, object]:
    return {
        "tier": rules.name,
        "held": {"tokens": figures.held_tokens, "requests": figures.held_requests},
        "queued": {"tokens": figures.queued_tokens, "requests": figures.queued_requests},
        "reserve": {"tokens": bounded(rules.reserve[0]), "requests": bounded(rules.reserve[1])},
        "limit": {"tokens": bounded(rules.limit[0]), "requests": bounded(rules.limit[1])},
        "borrowed": loan.borrowed,
        "lent": loan.lent,
    }


def _guard_state(figures: GuardFigures) -> Mapping[str, object]:
    return {
        "share": figures.share,
        "held": figures.below,
        "total": figures.total,
        "requests": {"met": figures.met, "missed": figures.missed},
        "is_in_vain": figures.is_in_vain,
    }


def part_in_words(part: PoolRules, whole: PoolRules) -> str:
    """A part of a pool in its bounded dimensions: `250 of 1,000 tokens and 2 of 4 requests`."""
    pairs = ((part.tokens, whole.tokens, "tokens"), (part.requests, whole.requests, "requests"))
    return " and ".join(f"{mine:,} of {most:,} {name}" for mine, most, name in pairs if most != UNLIMITED)


def bounded(figure: int) -> int | None:
    """A figure for people: None where it has no bounds."""
    return None if figure == UNLIMITED else figure


class Loan(NamedTuple):
    """One tier's tokens: those it holds out of other tiers' reserves, and those of its own reserve that others hold."""

    borrowed: int
    lent: int


def loans(held: Sequence[int], reserves: Sequence[int], headrooms: Sequence[int], capacity: int) -> Sequence[Loan]:
    """The loan of each tier, in the order given. `headrooms` are the parts of reserves that are not lent.

    The pool may hold more than its capacity, as when it has shrunk. The excess came out of no reserve.
    """
    above = [max(0, mine - reserve) for mine, reserve in zip(held, reserves, strict=True)]
    idle = [max(0, reserve - mine) for mine, reserve in zip(held, reserves, strict=True)]
    unreserved = max(0, capacity - sum(reserves))
    kept = [max(0, headroom - mine) for mine, headroom in zip(held, headrooms, strict=True)]
    lent = [whole - part for whole, part in zip(idle, kept, strict=True)]
    total = min(max(0, sum(above) - unreserved), sum(idle))
    of_lent = min(total, sum(lent))
    parts = [sum(pair) for pair in zip(_split(of_lent, lent), _split(total - of_lent, kept), strict=True)]
    return [Loan(*loan) for loan in zip(_split(total, above), parts, strict=True)]


def _split(total: int, weights: Sequence[int]) -> Sequence[int]:
    """Whole parts in proportion to the weights, none above its weight; the largest fractions are rounded up."""
    whole = sum(weights)
    if total == 0:
        return [0] * len(weights)
    parts = [total * weight // whole for weight in weights]
    by_fraction = sorted(range(len(weights)), key=lambda at: (-(total * weights[at] % whole), at))
    for at in by_fraction[: total - sum(parts)]:
        parts[at] += 1
    return parts


NO_BOUND = (UNLIMITED, UNLIMITED)
ALONE = "there is no room beside others"
HELD_BACK = (Obstacle.HELD_BACK, "too many requests wait inside the engine: the pool is held back")


def obstacle(rules: PoolRules, tiers: Sequence[TierUsage], ask: Ask) -> tuple[Obstacle, str]:
    """The first cause that kept `ask` from being admitted, by rules 2 and 3, and a sentence. `tiers` include `ask`.

    The figures may be a heartbeat old where the pool is shared; the decision is the scheduler's, or the script's.
    """
    own, held = rules.tiers[ask.tier], tiers[ask.tier]
    of_tier = _shortage(ask, (held.held_tokens, held.held_requests), own.limit[:2] if own.limited else NO_BOUND)
    if of_tier is not None:
        return Obstacle.LIMIT, f"tier {own.name} is at its limit: it holds {of_tier[0]}, and it asks for {of_tier[1]}"
    of_pool = no_room(rules, tiers, ask)
    if of_pool is not None:
        return Obstacle.NO_ROOM, f"the pool has no room: {of_pool}"
    if kept := _kept(rules, tiers, ask):
        return Obstacle.HEADROOM, f"what is free is kept for {_list(kept)}"
    waiting = [figures.queued_requests - (level == ask.tier) for level, figures in enumerate(tiers)]  # without `ask`
    ahead = [tier.name for tier, count in zip(rules.tiers, waiting, strict=True) if count > 0]
    others = sum(waiting)
    if others > 0:
        wait = "other request waits" if others == 1 else "other requests wait"
        return (
            Obstacle.BEHIND,
            f"{others} {wait} already, in {_list(ahead)}: none goes before the first in order",
        )
    return Obstacle.BEHIND, ALONE


def alone(part: PoolRules, tiers: Sequence[TierUsage], ask: Ask) -> tuple[Obstacle, str]:
    """Obstacle of a replica without its store."""
    found = no_room(part, tiers, ask)
    figures = "" if found is None else f": {found}"
    return Obstacle.STORE, f"the store is lost, and this replica's part of the pool has no room{figures}"


def _kept(rules: PoolRules, tiers: Sequence[TierUsage], ask: Ask) -> Sequence[str]:
    """The more important tiers whose headroom leaves no room for `ask`; none where there is room beside it."""
    tokens = rules.tokens - sum(tier.held_tokens for tier in tiers) - ask.tokens
    requests = rules.requests - sum(tier.held_requests for tier in tiers) - ask.requests
    kept = [
        (tier.name, max(0, tier.headroom[0] - it.held_tokens), max(0, tier.headroom[1] - it.held_requests))
        for tier, it in zip(rules.tiers[: ask.tier], tiers, strict=False)
    ]
    if sum(each[1] for each in kept) <= tokens and sum(each[2] for each in kept) <= requests:
        return ()
    return [name for name, *headroom in kept if any(headroom)]


def no_room(rules: PoolRules, tiers: Sequence[TierUsage], ask: Ask) -> str | None:
    """Sentence on what is held and what `ask` needs, in the dimensions that are short; None where there is room in
    both.
    """
    held = sum(tier.held_tokens for tier in tiers), sum(tier.held_requests for tier in tiers)
    short = _shortage(ask, held, (rules.tokens, rules.requests))
    return None if short is None else f"{short[0]} are held, and it asks for {short[1]}"


def _shortage(ask: Ask, held: tuple[int, int], most: tuple[int, int]) -> tuple[str, str] | None:
    """The held part of the most, and the ask, in the dimensions that bind; None where neither does."""
    binding = [
        (f"{has:,} of {bound:,} {name}s", f"{asked:,} {name if asked == 1 else f'{name}s'}")
        for name, has, bound, asked in zip(("token", "request"), held, most, (ask.tokens, ask.requests), strict=True)
        if has + asked > bound
    ]
    if not binding:
        return None
    figures, needs = zip(*binding, strict=True)
    return " and ".join(figures), " and ".join(needs)


def _list(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


# -- How many times the room of a pool is wanted, for those that scale its engines.
#
# In tokens and in requests it is what the tiers hold and what waits beyond their floors, over the room of the
# engines that are ready; the larger counts. A request inside its tier's floor waits for a borrower to end: an engine
# that takes minutes to start comes too late for it. What a tier's own limit keeps out wants nothing, so that a limit
# bounds the engines that a backlog can ask for. Headroom is wanted also while it is idle, because nothing else may
# use it. Where a guarded tier bounds how full less important work may make the pool, its room is that part of it.
#
# The wanted room is smoothed, and not the ratio: one more engine halves the ratio at once, where a smoothed ratio
# would ask for a third engine meanwhile.

SMOOTHED_OVER_US = 60_000_000
"""Time constant of the mean. A new engine takes minutes, so that a burst which is shorter is over before it serves.
Longer ones would add to these minutes."""

Room = tuple[float, float]
"""Tokens and requests."""


class Demand(NamedTuple):
    """Room that is wanted, and `has`: that of the engines that are ready, None without any.

    `is_used`: something is held or waits.
    """

    wanted: Room
    has: Room | None
    is_used: bool


def demand(rules: PoolRules | None, tiers: Sequence[TierUsage], guards: Sequence[GuardFigures] = ()) -> Demand:
    """Demand of tiers that hold and have waiting so much; `rules` are those of the ready engines, None without any."""
    is_used = any(map(any, tiers))
    if rules is None:
        tokens = sum(tier.held_tokens + tier.queued_tokens for tier in tiers)
        return Demand((tokens, sum(tier.held_requests + tier.queued_requests for tier in tiers)), None, is_used)
    of_tiers = [_wanted_by(own, tier) for own, tier in zip(rules.tiers, tiers, strict=True)]
    share = _usable_share(rules, tiers, guards)
    tokens, requests = (sum(amounts) / share for amounts in zip(*of_tiers, strict=True))
    return Demand((tokens, requests), (rules.tokens, rules.requests), is_used)


def _usable_share(rules: PoolRules, tiers: Sequence[TierUsage], guards: Sequence[GuardFigures]) -> float:
    """The share to which the pool may be filled: all of it, unless a guarded tier bounds work beyond its floor."""
    usable = {guard.tier: guard.usable for guard in guards if not guard.is_in_vain}
    found = of_guards = 1.0
    for own, tier in zip(rules.tiers, tiers, strict=True):
        tokens, requests = tier.held_tokens + tier.queued_tokens, tier.held_requests + tier.queued_requests
        if tokens > own.reserve[0] or requests > own.reserve[1]:
            found = of_guards
        of_guards = min(of_guards, usable.get(own.name, 1.0))
    return found


def _wanted_by(own: TierRules, tier: TierUsage) -> Room:
    limit_tokens, limit_requests = own.limit[:2] if own.limited else NO_BOUND
    tokens = _beyond_floor(tier.held_tokens, tier.queued_tokens, own.reserve[0], limit_tokens)
    requests = _beyond_floor(tier.held_requests, tier.queued_requests, own.reserve[1], limit_requests)
    return max(own.headroom[0], tokens), max(own.headroom[1], requests)


def _beyond_floor(held: int, waiting: int, floor: int, limit: int) -> int:
    """The amount that is held, and that waits beyond the floor and within the limit."""
    return held + max(0, min(held + waiting, limit) - max(held, floor))


class SmoothedDemand:
    """The demand of one pool, as an exponential mean over time: it may be noted at any moments."""

    def __init__(self) -> None:
        self._wanted: Room = (0.0, 0.0)
        self._noted_us = self._used_us = -math.inf

    def note(self, demand: Demand, now_us: int) -> float:
        """Notes the present demand. Returns how many times the present room is wanted.

        0 after a minute in which nothing was held and nothing waited: that pool needs no engine. Else 1 where no engine
        is ready.
        """
        before = math.exp(min(0.0, self._noted_us - now_us) / SMOOTHED_OVER_US)
        tokens, requests = (new + (old - new) * before for old, new in zip(self._wanted, demand.wanted, strict=True))
        self._wanted, self._noted_us = (tokens, requests), now_us
        if demand.is_used:
            self._used_us = now_us
        if now_us - self._used_us > SMOOTHED_OVER_US:
            return 0.0
        if demand.has is None:
            return 1.0
        return max(
            (wanted / has for wanted, has in zip(self._wanted, demand.has, strict=True) if 0 < has < UNLIMITED),
            default=1.0,
        )
