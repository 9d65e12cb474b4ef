"""Placement: the choice of an engine for a ticket. Whole numbers, without I/O; its twin is `lua/placement.lua`.

A pool of several engines keeps a ledger of each: what its leases hold, and how many prompt tokens were sent to it
without an answer yet (*un-prefilled*). An engine is named by its *id*, `name#incarnation`: a restarted engine is a new
incarnation with a ledger of its own, so what is settled late never makes a ledger negative.

Room (R2'). A ticket of t tokens fits an engine when t <= capacity - held, its requests likewise, and nothing is
un-prefilled there or `unprefilled + max(1, prompt - hit) <= prefill`. So one prompt larger than `prefill` enters an
engine that has none. While an engine starts slowly, a tenth more of its capacity counts with each tenth of its ramp.

Score. The best engine of a ticket is the one with the smallest

    floor(((unprefilled + claimed + prompt - floor(weight_percent * hit / 100)) * 50 + held) * 1000 / speed)

over all engines that take new work and could ever hold the ticket, busy ones too, but for those that refused a request
lately and run as many as they did then (their cap). `claimed` counts the prompts of the
tickets that claimed the engine before it. Equal scores go by name (in byte order), then by incarnation. All figures
stay below 2^53: doubles compute the same.

Patience. Beside engines with room a ticket waits for its best engine only where that has more of its prompt, or is
faster (`fleet_scheduler`), and for at most `PATIENCE_US` and `PATIENCE_US_PER_HIT` for each token of its largest hit,
from its first claim on. After that the engine with the smallest score of those with room takes it. So a stuck engine,
or a wrong prediction, costs a ticket no more than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from operator import attrgetter

from sidecar.policy.rules import UNLIMITED
from sidecar.pools.engines import (
    NORMAL_SPEED,
    WEIGHT_PERCENT,
    Capacity,
    EngineOffer,
    EngineState,
    Found,
    name_and_incarnation,
    sum_of,
    sum_of_offers,
)

__all__ = [
    "NORMAL_SPEED",
    "WEIGHT_PERCENT",
    "Capacity",
    "EngineOffer",
    "EngineState",
    "Found",
    "name_and_incarnation",
    "sum_of",
    "sum_of_offers",
]

HELD_PER_PREFILL = 50
"""So many tokens held (mostly decoding, side by side) delay a request as much as one un-prefilled token before it."""
NEVER_US = 2**53 - 1
RAMP_STEPS = 10
MOST_PLACED = 16
"""The most tickets for which one walk chooses an engine: the work of a decision is bounded, whatever waits."""
MOST_HITS = 8
PATIENCE_US = 5_000_000
PATIENCE_US_PER_HIT = 500
"""A hit saves less than that even on slow engines: they prefill 2,000 tokens a second. If tickets had less patience
than claimants need under usual loads, every prefix would spread over all engines."""


@dataclass(slots=True, eq=False)
class Placing:
    """The part of a ticket that is about its engine.

    `hits` are predicted tokens by the engine's id, `barred` the names of engines that must not have it. `uncached` are
    the tokens of its prompt that no engine is predicted to have, at least 1: what it counts for in the pool, up to a
    maximum. A lease holds its `engine`; until its first byte it counts `prefill` tokens in its tier and `unprefilled`
    on the engine. `excess_prefill` is how many more whole reserves too much its tier held with it until then. `found`
    is the engine's ledger as the lease found it, for people.

    `is_claimant` and `is_back` (it was one, and had to return to its queue) are of a waiting ticket. Its tenant was
    charged then up to the finish tag `charge`, from the start tag `charged_from`; 0 where it was not. Its patience ends
    `patience_us` after it first became one, at `patient_until_us`. As one for its tier's floor it keeps the engine
    `kept`.
    """

    prompt: int
    hits: dict[str, int] = field(default_factory=dict)
    barred: tuple[str, ...] = ()
    uncached: int = field(init=False)
    patience_us: int = field(init=False)
    engine: EngineLedger | None = None
    prefill: int = 0
    unprefilled: int = 0
    excess_prefill: int = 0
    is_claimant: bool = False
    is_back: bool = False
    charge: float = 0.0
    charged_from: float = 0.0
    found: Found | None = None
    patient_until_us: int = NEVER_US
    kept: EngineLedger | None = None

    @property
    def claimed_us(self) -> int | None:
        """When it first became a claimant; None where it never did."""
        return None if self.patient_until_us == NEVER_US else self.patient_until_us - self.patience_us

    def __post_init__(self) -> None:
        largest = max(self.hits.values(), default=0)
        self.uncached = max(1, self.prompt - largest)
        self.patience_us = PATIENCE_US + PATIENCE_US_PER_HIT * largest

    def unprefilled_on(self, engine_id: str) -> int:
        """The tokens of the prompt that an engine would have to prefill, at least 1."""
        return max(1, self.prompt - self.hits.get(engine_id, 0))


class EngineLedger:
    """One engine: its offer, its effective capacity and what its leases hold.

    `open_requests` are its effective requests, or the cap while that is lower. `load` is the part of the score that
    does not depend on the ticket, before speed: during a walk with what was claimed in it. `place` is that by name.
    """

    __slots__ = (
        "capped_requests",
        "capped_until_us",
        "claims",
        "effective_prefill",
        "effective_requests",
        "effective_tokens",
        "held_prefill",
        "held_requests",
        "held_tokens",
        "id",
        "is_capped",
        "is_known",
        "is_open",
        "is_taking",
        "load",
        "name",
        "offer",
        "open_requests",
        "place",
        "unprefilled",
    )

    def __init__(self, offer: EngineOffer) -> None:
        self.id = offer.id
        self.name = offer.id.rpartition("#")[0]
        self.offer = offer
        self.is_known = True  # whether the latest set of engines has it
        self.is_open = self.is_taking = self.is_capped = False
        self.effective_tokens = self.effective_requests = self.effective_prefill = self.open_requests = 0
        self.held_tokens = self.held_requests = self.held_prefill = self.unprefilled = 0
        self.capped_requests = self.capped_until_us = 0
        self.load = self.claims = self.place = 0

    def ramp(self, now_us: int) -> int | None:
        """Sets the effective capacity. Returns when it changes next by time alone, None where it does not."""
        offer, step, change_us = self.offer, RAMP_STEPS, None
        if offer.ramp_us:
            step = min(RAMP_STEPS, 1 + max(0, now_us - offer.since_us) * RAMP_STEPS // offer.ramp_us)
            if step < RAMP_STEPS:
                change_us = offer.since_us - -step * offer.ramp_us // RAMP_STEPS
        self.effective_tokens, requests, self.effective_prefill = (
            whole if whole == UNLIMITED else whole * step // RAMP_STEPS
            for whole in (offer.tokens, offer.requests, offer.prefill)
        )
        self.effective_requests = self.open_requests = max(1, requests)
        self.is_capped = now_us < self.capped_until_us
        if self.is_capped:
            self.open_requests = min(self.open_requests, self.capped_requests)
            return self.capped_until_us if change_us is None else min(change_us, self.capped_until_us)
        return change_us

    def has_room(self, tokens: int, requests: int, placing: Placing) -> bool:
        """R2': whether a ticket fits. A walk asks this for every ticket, so it calls nothing where it need not."""
        if self.held_tokens + tokens > self.effective_tokens or self.held_requests + requests > self.open_requests:
            return False
        unprefilled = self.unprefilled
        if not unprefilled:
            return True
        left = self.effective_prefill - unprefilled
        return placing.uncached <= left and placing.unprefilled_on(self.id) <= left

    def has_any_room(self) -> bool:
        """Whether it has room for the smallest ticket."""
        return (
            self.held_tokens < self.effective_tokens
            and self.held_requests < self.open_requests
            and (not self.unprefilled or self.unprefilled < self.effective_prefill)
        )

    def found(self) -> Found:
        """The ledger as a ticket finds it."""
        return Found(
            self.effective_tokens, self.effective_requests, self.held_tokens, self.held_requests, self.unprefilled
        )

    def state(self, *, has_claimants: bool) -> EngineState:
        """The ledger, for people."""
        offer = self.offer
        return EngineState(
            id=self.id,
            takes_new=self.is_taking,
            is_capped=self.is_capped,
            tokens=offer.tokens,
            requests=offer.requests,
            prefill=offer.prefill,
            effective_tokens=self.effective_tokens,
            effective_requests=self.effective_requests,
            effective_prefill=self.effective_prefill,
            held_tokens=self.held_tokens,
            held_requests=self.held_requests,
            unprefilled_tokens=self.unprefilled,
            claims=self.claims if has_claimants and self.is_taking else 0,
        )


_load = attrgetter("load")


class Placement:
    """The engines of one pool. `taking` are those that take new work, in order of name and incarnation.

    `open` counts those of them with any room. `capacity` is the size of the pool: the effective capacity of those that
    take new work, and what the others still hold. `largest_prefill` is the most of one engine. `refresh` brings all of
    it up to date.

    `claim` and `end_walk` belong to one walk over the waiting tickets (`fleet_scheduler`): `unclaimed` counts the
    engines with any room that were not claimed in it, `placed` the tickets for which it chose an engine.
    """

    def __init__(self, weight_percent: int = WEIGHT_PERCENT) -> None:
        self.weight_percent = weight_percent
        self.ledgers: dict[str, EngineLedger] = {}
        self.taking: list[EngineLedger] = []
        self.open = self.unclaimed = self.placed = 0
        self.capacity = Capacity(0, 0, 0)
        self.largest_prefill = 0
        self.changes_us: int | None = None
        self._is_stale = False
        self._least_tokens = self._least_requests = 0
        self._is_uniform = True
        self._claimed: list[EngineLedger] = []
        self._by_load: list[tuple[int, int, EngineLedger]] | None = None

    def set_engines(self, offers: Iterable[EngineOffer], now_us: int) -> None:
        """These are the engines now. One that is left out keeps what it holds, and takes no new work."""
        for ledger in self.ledgers.values():
            ledger.is_known = False
        for offer in offers:
            ledger = self.ledgers.get(offer.id) or EngineLedger(offer)
            self.ledgers[offer.id] = ledger
            ledger.offer, ledger.is_known = offer, True
        self._is_stale = True
        self.refresh(now_us)

    def of_lease(self, engine_id: str) -> EngineLedger:
        """The ledger of an engine that a lease names, made where there is none: it takes no new work."""
        found = self.ledgers.get(engine_id)
        if found is None:
            found = self.ledgers[engine_id] = EngineLedger(EngineOffer(engine_id, 0, 0, takes_new=False))
            found.is_known = False
        return found

    def cap(self, engine_id: str, requests: int, until_us: int, now_us: int) -> None:
        """An engine runs no more than so many requests until then. A cap that is in force only falls, and lasts on."""
        ledger = self.ledgers.get(engine_id)
        if ledger is not None:
            if now_us < ledger.capped_until_us:
                requests, until_us = min(requests, ledger.capped_requests), max(until_us, ledger.capped_until_us)
            ledger.capped_requests, ledger.capped_until_us = requests, until_us
            self._is_stale = True

    def raise_cap(self, engine_id: str, requests: int) -> None:
        """A capped engine may run so many requests more: it has answered one that it got since."""
        ledger = self.ledgers.get(engine_id)
        if ledger is not None and ledger.is_capped:
            ledger.capped_requests += requests
            self._is_stale = True

    def book(self, ledger: EngineLedger, tokens: int, requests: int, prefill: int, unprefilled: int) -> None:
        """Books amounts of either sign with an engine. `prefill` is what the lease counts for in its tier."""
        ledger.held_tokens += tokens
        ledger.held_requests += requests
        ledger.held_prefill += prefill
        ledger.unprefilled += unprefilled
        ledger.load += unprefilled * HELD_PER_PREFILL + tokens
        if not ledger.is_taking:
            self._is_stale = True  # the pool's size is what it holds
        elif ledger.is_open != ledger.has_any_room():
            ledger.is_open = not ledger.is_open
            self.open += 1 if ledger.is_open else -1

    def refresh(self, now_us: int) -> bool:
        """Applies what has changed by time, by new offers, or in an engine that takes no new work. Whether any has."""
        if not self._is_stale and (self.changes_us is None or now_us < self.changes_us):
            return False
        self._is_stale = False
        changes = []
        for ledger in list(self.ledgers.values()):
            ledger.is_taking = ledger.is_known and ledger.offer.takes_new
            if not ledger.is_known and not ledger.held_requests:
                del self.ledgers[ledger.id]
            elif (change_us := ledger.ramp(now_us)) is not None:
                changes.append(change_us)
        self.changes_us = min(changes, default=None)
        self.taking = sorted((it for it in self.ledgers.values() if it.is_taking), key=_by_name)
        self._summarize()
        return True

    def _summarize(self) -> None:
        taking = self.taking
        sizes = [(it.effective_tokens, it.effective_requests, it.effective_prefill) for it in taking]
        others = (it for it in self.ledgers.values() if not it.is_taking)
        sizes += [(it.held_tokens, it.held_requests, it.held_prefill) for it in others]
        columns = zip((0, 0, 0), *sizes, strict=True)
        self.capacity = Capacity(*map(sum_of, columns))
        for place, ledger in enumerate(taking):
            ledger.place, ledger.is_open = place, ledger.has_any_room()
        self.open = sum(it.is_open for it in taking)
        self.largest_prefill = max((it.effective_prefill for it in taking), default=0)
        self._least_tokens = min((it.offer.tokens for it in taking), default=0)
        self._least_requests = min((it.offer.requests for it in taking), default=0)
        self._is_uniform = all(it.offer.speed == NORMAL_SPEED and not it.is_capped for it in taking)

    def states(self, *, has_claimants: bool) -> list[EngineState]:
        """All ledgers, by name and incarnation."""
        ledgers = sorted(self.ledgers.values(), key=_by_name)
        return [ledger.state(has_claimants=has_claimants) for ledger in ledgers]

    def best(self, tokens: int, requests: int, placing: Placing) -> EngineLedger | None:
        """The engine with the smallest score, busy or not; None where none that takes new work could ever hold this."""
        if (
            not self._is_uniform
            or placing.barred
            or tokens > self._least_tokens
            or requests > self._least_requests
            or not self.taking
        ):
            return self._best_of(self.usable(tokens, requests, placing), placing)
        # The scores of all engines but the hit ones have the same distance to their loads.
        found = self._least_loaded()
        if placing.hits:
            least, weight = found.load, self.weight_percent
            for engine_id, hit in placing.hits.items():
                ledger = self.ledgers.get(engine_id)
                if ledger is not None and ledger.is_taking:
                    load = ledger.load - weight * hit // 100 * HELD_PER_PREFILL
                    if load < least or (load == least and ledger.place < found.place):
                        found, least = ledger, load
        return found

    def _least_loaded(self) -> EngineLedger:
        """The first of the engines with the least load. From the second time on in a walk it costs O(log engines):
        loads only rise in it.
        """
        by_load = self._by_load
        if by_load is None:
            if not self.placed:
                return min(self.taking, key=_load)
            by_load = self._by_load = [(it.load, it.place, it) for it in self.taking]
            heapify(by_load)
        load, place, found = by_load[0]
        while found.load != load:
            heapreplace(by_load, (found.load, place, found))
            load, place, found = by_load[0]
        return found

    def best_with_room(self, tokens: int, requests: int, placing: Placing) -> EngineLedger | None:
        """The engine with the smallest score of those that have room for a ticket and were not claimed in this walk."""
        with_room = [
            it
            for it in self.taking
            if it.is_open
            and not it.claims
            and requests <= it.offer.requests
            and it.has_room(tokens, requests, placing)  # so it could hold its tokens, and is not at its cap
            and it.name not in placing.barred
        ]
        return self._best_of(with_room, placing)

    def usable(self, tokens: int, requests: int, placing: Placing) -> list[EngineLedger]:
        """The engines that could ever hold a ticket and are not at their caps, in order of name and incarnation."""
        return [
            it
            for it in self.taking
            if tokens <= it.offer.tokens
            and requests <= it.offer.requests
            and it.name not in placing.barred
            and not (it.is_capped and it.held_requests + requests > it.capped_requests)
        ]

    def _best_of(self, usable: Sequence[EngineLedger], placing: Placing) -> EngineLedger | None:
        found, least = None, 0
        for ledger in usable:
            gain = self.weight_percent * placing.hits.get(ledger.id, 0) // 100
            score = (ledger.load + (placing.prompt - gain) * HELD_PER_PREFILL) * NORMAL_SPEED // ledger.offer.speed
            if found is None or score < least:
                found, least = ledger, score
        return found

    def begin_walk(self) -> None:
        """Forgets the claims of the walk before."""
        for ledger in self._claimed:
            ledger.claims = 0
        self._claimed.clear()
        self.unclaimed, self.placed = self.open, 0

    def claim(self, ledger: EngineLedger, prompt: int) -> bool:
        """A ticket claims an engine in this walk. Whether the walk is over with that."""
        ledger.load += prompt * HELD_PER_PREFILL
        self.placed += 1
        if not ledger.claims:
            self._claimed.append(ledger)
            if ledger.is_open:
                self.unclaimed -= 1
        ledger.claims += 1
        return self.placed == MOST_PLACED or not self.unclaimed

    @property
    def is_last(self) -> bool:
        """Whether the walk places one more ticket, and then no other."""
        return self.placed == MOST_PLACED - 1

    @property
    def has_claims(self) -> bool:
        """Whether a ticket claimed an engine in the last walk."""
        return bool(self._claimed)

    def end_walk(self) -> None:
        """What was claimed counts in no score any more."""
        for ledger in self._claimed:
            ledger.load = ledger.unprefilled * HELD_PER_PREFILL + ledger.held_tokens
        self.placed, self._by_load = 0, None


def _by_name(ledger: EngineLedger) -> tuple[bytes, int]:
    return name_and_incarnation(ledger.id)
