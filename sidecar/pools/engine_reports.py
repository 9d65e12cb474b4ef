"""Reports of a pool of several engines: the sizes that bind, why a request waits, why it got its engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from sidecar.engines.pages import Pages
from sidecar.engines.view import Amount, EngineDocument
from sidecar.errors import CapacityUnknown
from sidecar.events import Grant, Obstacle, Placed
from sidecar.policy.choices import Mode
from sidecar.policy.model import Policy
from sidecar.policy.rules import PoolRules
from sidecar.policy.size_limits import SizeLimits
from sidecar.pools.base import Ask, Clock, monotonic_us
from sidecar.pools.engine_reader import HELD_BACK_S, READ_EVERY_S, EngineReader, Size, warn_of_unbounded
from sidecar.pools.engines import EngineFigures, EngineOffer, name_and_incarnation, sum_offers
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


# -- The size of a pool by its engine's own figures (`capacity: {from: engine}`).
#
# The engine is read once a second (`engine_reader`). The pool's size is the policy's fraction of the engine's, and
# follows its changes. A size that cannot be read any more is kept, with a warning. Before the first reading no
# request is admitted.
#
# While more requests wait inside the engine than the policy's `waiting`, it is capped at what it runs, and at least
# one: inside the engine no tier has a reserve. The cap ends by itself when the engine is not read any more.


class EngineSize:
    """Of one pool, which `follow` sets. `clock` is the pool's; `read_every_s` is for tests."""

    def __init__(
        self, policy: Policy, pages: Pages, clock: Clock = monotonic_us, read_every_s: float = READ_EVERY_S
    ) -> None:
        assert policy.engine_capacity is not None
        self._policy, self._capacity = policy, policy.engine_capacity
        self.reader = EngineReader(
            policy.engine,
            self._capacity,
            pages,
            clock,
            resized=self._resized,
            was_read=self._cap_if_crowded,
            read_every_s=read_every_s,
        )
        self.is_known = False

    def follow(self, change_rules: Callable[[PoolRules], None], cap: Callable[[float, int], None]) -> None:
        """Sets the functions that change the pool's size, and the `cap_engine` of its engine."""
        self._change_rules, self._cap = change_rules, cap

    async def open(self) -> None:
        """Reads the engine from now on. Returns when it was read, or could not be. Harmless when repeated."""
        if not self.reader.is_following():
            await self.reader.open()

    async def require(self) -> None:
        """Raises CapacityUnknown before the first reading. Where no server's start was seen, it is made now."""
        await self.open()
        if not self.is_known:
            trouble = f"the engine has not reported its capacity yet ({self.reader.trouble}); try again"
            raise CapacityUnknown(trouble, retry_after_s=1)

    def sized(self, policy: Policy) -> Policy:
        """Another policy, with what the engine last reported by its fraction and figures."""
        assert policy.engine_capacity is not None
        self._policy, self._capacity = policy, policy.engine_capacity
        self.reader.change_capacity(self._capacity)
        size = self.reader.size
        return policy if size is None else replace(policy, rules=policy.rules_for(*size))

    @property
    def is_held_back(self) -> bool:
        """True if too many requests wait inside the engine."""
        return self.reader.is_held_back

    def state(self) -> Mapping[str, object]:
        """The engine's latest figures: JSON types only."""
        reader, gauges = self.reader, self.reader.gauges
        return {
            "kv_tokens": gauges.kv_tokens,
            "max_running": gauges.max_running,
            "running": gauges.running,
            "waiting": gauges.waiting,
            "preemptions": gauges.preemptions,
            "read_s_ago": None if reader.age_s is None else round(reader.age_s, 3),
            "trouble": reader.trouble,
            "held_back": reader.is_held_back,
        }

    def readiness(self) -> Sequence[str]:
        """See `Pool.readiness`."""
        return () if self.is_known else (f"the engine has not reported its capacity yet: {self.reader.trouble}",)

    def notices(self) -> Sequence[str]:
        """See `Pool.notices`."""
        found, reader = list[str](), self.reader
        if reader.notice is not None:
            found.append(reader.notice)
        if reader.is_held_back:
            found.append(f"{reader.gauges.waiting} requests wait inside the engine, more than {self._capacity.waiting}")
        return found

    async def _resized(self, before: Size | None) -> None:
        size = self.reader.size
        assert size is not None
        self.is_known = True
        self._change_rules(self._policy.rules_for(*size))
        if before is None:
            warn_of_unbounded(self._policy.engine, size)

    def _cap_if_crowded(self) -> None:
        """Not while the policy observes: the engine then gets every request, and its queue is not what enforcing
        leaves.
        """
        reader = self.reader
        reader.is_held_back = reader.is_crowded and self._policy.mode is not Mode.OBSERVE
        if reader.is_held_back:
            self._cap(HELD_BACK_S, 0)
