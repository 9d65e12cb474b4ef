"""Reports of a pool of several engines: the sizes that bind, why a request waits, why it got its engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from sidecar.engines.view import Amount, EngineDocument
from sidecar.events import Grant, Obstacle, Placed
from sidecar.pools.base import Ask
from sidecar.pools.engines import EngineFigures, EngineOffer, name_and_incarnation, sum_offers
from sidecar.pools.size_limits import SizeLimits
from sidecar.pools.stats import ALONE, bounded
from sidecar.scheduling.amounts import minus
from sidecar.scheduling.reports import Found
from sidecar.scheduling.scheduler import Scheduler
from sidecar.scheduling.tickets import ScheduledLease

NO_ENGINE = "no engine takes new requests at present"
MOST_NAMED = 3
"""More engines than these are only counted in a sentence."""


def change_sizes(sizes: SizeLimits, offers: Sequence[EngineOffer]) -> None:
    """Sizes are judged by the whole capacity of all engines: a pool that shrinks for a while refuses no one."""
    if not offers:
        sizes.change_rules(sizes.policy.rules_for(None, None))
        return
    tokens, requests, _ = sum_offers(offers)
    largest = max(offer.tokens for offer in offers), max(offer.requests for offer in offers)
    sizes.change_rules(sizes.policy.rules_for(tokens, requests), largest)


def engine_figures(
    pool: Scheduler, claims: Mapping[str | None, int], now_us: int, offered: Collection[str]
) -> Sequence[EngineFigures]:
    """The engines of a pool, by name and incarnation; `claims` counts those in line for each.

    One that gets nothing new and holds nothing is there while it is `offered`.
    """
    return [
        EngineFigures(
            engine.id,
            engine.is_ready,
            now_us < engine.cap_until_us,
            engine.tokens,
            engine.requests,
            engine.prefill,
            *engine.size(now_us),
            *engine.held[:2],
            engine.sent,
            claims.get(engine.id, 0) if engine.is_ready else 0,
        )
        for engine in sorted(pool.engines.values(), key=lambda engine: engine.order)
        if engine.is_ready or engine.held[1] or engine.id in offered
    ]


def engine_obstacle(
    engines: Sequence[EngineFigures], ask: Ask, of_pool: tuple[Obstacle, str]
) -> tuple[Obstacle, str] | None:
    """Why no engine takes a request although the pool might; None where the obstacle is the pool's own."""
    taking = [engine for engine in engines if engine.takes_new]
    if not taking:
        return Obstacle.ENGINE, NO_ENGINE
    if not any(ask.tokens <= engine.tokens and ask.requests <= engine.requests for engine in taking):
        return Obstacle.ENGINE, "it is larger than every engine that takes new requests at present"
    if of_pool[0] is not Obstacle.BEHIND:
        return None  # there is no room for it in the pool
    with_room = [engine for engine in taking if _has_room(engine, ask)]
    if not with_room:
        return Obstacle.NO_ROOM, f"none of {len(taking)} engines has room for it, though all together have"
    open_ones = [engine for engine in with_room if not engine.unprefilled_tokens or _has_prefill(engine, ask)]
    if not open_ones:
        return Obstacle.NO_ROOM, f"{_have(with_room)} room for it, and no prefill beside the prompts sent there"
    unclaimed = [engine for engine in open_ones if not engine.claims]
    if not unclaimed:
        return Obstacle.BEHIND, f"{_have(open_ones)} room for it, and requests before it wait for room there"
    if of_pool[1] == ALONE or any(engine.claims for engine in taking):
        return Obstacle.CLAIM, f"it waits for the engine that suits it best, while {_have(unclaimed)} room for it"
    return None


def placed(grant: Grant, ask: Ask, engine: str, found: Found) -> Grant:
    """The grant names the engine, and says why, for people."""
    tokens, requests, held_tokens, held_requests, sent, lined_us = found
    sizes = bounded(tokens), bounded(requests)
    why = Placed(*sizes, held_tokens, held_requests, sent, ask.prompt, ask.hits, lined_us)
    return msgspec.structs.replace(grant, engine=engine, placed=why)


def found_by(lease: ScheduledLease, pool: Scheduler, now_us: int) -> Found:
    """The engine of a lease in its pool, as that has found it which has just entered."""
    engine = pool.engines[lease.engine]
    (tokens, requests, _), held = engine.size(now_us), minus(engine.held, lease.amount)
    return Found(tokens, requests, held[0], held[1], engine.sent - lease.sent, 0)


def _has_room(engine: EngineFigures, ask: Ask) -> bool:
    return (
        engine.held_tokens + ask.tokens <= engine.effective_tokens
        and engine.held_requests + ask.requests <= engine.effective_requests
    )


def _has_prefill(engine: EngineFigures, ask: Ask) -> bool:
    hit = dict(ask.hits).get(engine.id, 0)
    return engine.unprefilled_tokens + max(1, ask.prompt - hit) <= engine.effective_prefill


def _have(engines: Sequence[EngineFigures]) -> str:
    names = [engine.id.rpartition("#")[0] for engine in engines]
    if len(names) > MOST_NAMED:
        return f"{len(names)} engines have"
    return f"engine {names[0]} has" if len(names) == 1 else f"engines {', '.join(names[:-1])} and {names[-1]} have"


def engine_state(engine: EngineFigures) -> Mapping[str, object]:
    """One engine's ledger: JSON types only."""
    return {
        "engine": engine.id,
        "takes_new": engine.takes_new,
        "capped": engine.is_capped,
        "capacity": {"tokens": bounded(engine.tokens), "requests": bounded(engine.requests)},
        "effective": {"tokens": bounded(engine.effective_tokens), "requests": bounded(engine.effective_requests)},
        "prefill": bounded(engine.effective_prefill),
        "held": {"tokens": engine.held_tokens, "requests": engine.held_requests},
        "unprefilled_tokens": engine.unprefilled_tokens,
        "claims": engine.claims,
    }


def engine_document(engine: EngineFigures, **own: Any) -> EngineDocument:
    """An engine as its operator sees it: its ledger, and `own`, what a process that uses it knows of it."""
    takes_new = engine.takes_new
    of_pool: dict[str, Any] = {
        "name": name_and_incarnation(engine.id)[0],
        "id": engine.id,
        "url": None,
        "for_s": None,
        "takes_new": takes_new,
        "draining": False,
        "capacity": Amount(bounded(engine.tokens), bounded(engine.requests)) if takes_new else None,
        "effective": Amount(bounded(engine.effective_tokens), bounded(engine.effective_requests))
        if takes_new
        else Amount(0, 0),
        "prefill": bounded(engine.prefill),
        "speed": 1.0,
        "held": Amount(engine.held_tokens, engine.held_requests),
        "unprefilled_tokens": engine.unprefilled_tokens,
        "claims": engine.claims,
        "in_flight": 0,
    }
    return EngineDocument(**{**of_pool, **own})


def no_figures(engine_id: str) -> EngineFigures:
    """The figures of an engine that its pool does not know."""
    return EngineFigures(engine_id, False, False, *(0,) * 10)
