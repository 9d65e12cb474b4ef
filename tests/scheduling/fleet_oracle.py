"""A slow, literal reading of the rules for a pool with several engines: the oracle of the rules, with one dimension and
one choice more.

Nothing of `sidecar.scheduling` is used here but the form of an engine's offer. Every figure is computed anew from the
list of all requests: what an engine holds, how large the pool is, and who claims which engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from oracle import ALWAYS_FIRST, INSIDE, MOST_EXCESS, OTHER, TURN, Answer, Oracle, Policy, Request

from sidecar.policy.rules import UNLIMITED, PoolRules
from sidecar.pools.engines import EngineOffer

MOST_PLACED = 16
"""K: the tickets for which one walk chooses an engine."""
MOST_CLAIMANTS = 16
MOST_NEW_CLAIMANTS = 4
"""Tickets that claimed an engine and become claimants in one walk."""
PATIENCE_US, PATIENCE_US_PER_HIT = 5_000_000, 500


@dataclass
class FleetRequest(Request):
    """A request with a prompt of so many tokens. `hits` are what engines are predicted to have of it, by their ids.

    `claims` is so while it is a claimant; it first became one at `claimed_us`. `put_back` is so once it was one and had
    to go back to its queue. `charge` is the finish tag that its tenant was given for its claim, from the tag
    `charged_start`. `kept_engine` is the engine that it claimed first as one for its tier's floor.
    """

    prompt: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    barred: tuple[str, ...] = ()
    engine: str | None = None
    held_prefill: int = 0
    unprefilled: int = 0
    excess_prefill: int = 0
    claims: bool = False
    put_back: bool = False
    charge: float | None = None
    charged_start: float = 0.0
    claimed_us: int | None = None
    kept_engine: str | None = None


class Placed(NamedTuple):
    """The report of an admission, with the engine."""

    answer: Answer
    engine: str


class FleetOracle(Oracle):
    """The rules by the page. `weight_percent` is the weight of a predicted hit."""

    def __init__(self, policy: Policy, weight_percent: int = 200) -> None:
        super().__init__(policy, divide=lambda tokens, weight: tokens / weight)
        self.weight_percent = weight_percent
        self.offers: dict[str, EngineOffer] = {}
        self.caps: dict[str, tuple[int, int]] = {}
        self.now_us = 0
        self._capacity: tuple[int | None, ...] = (0, 0, 0)
        self._most_prefill = [0] * len(policy.tiers)
        self.for_floors: list[Request] = []
        self.is_walking = False
        self.new_claimants = 0
        self.was_full = False

    def rules_of(self, tokens: int | None, requests: int | None, prefill: int | None) -> PoolRules:
        return self.policy.rules_of(tokens, requests, prefill)

    # Operations.

    def set_engines(self, offers: Sequence[EngineOffer], now_us: int) -> None:
        self.offers = {offer.id: offer for offer in offers}
        self.refresh(now_us)

    def cap(self, engine: str, requests: int, until_us: int, now_us: int) -> None:
        if engine in self.known():
            before, since_us = self.caps.get(engine, (requests, 0))
            if now_us < since_us:
                requests, until_us = min(requests, before), max(until_us, since_us)
            self.caps[engine] = requests, until_us

    def raise_cap(self, engine: str, requests: int, now_us: int) -> None:
        capped, until_us = self.caps.get(engine, (0, 0))
        if now_us < until_us:
            self.caps[engine] = capped + requests, until_us

    def submit(
        self,
        id: str,
        *,
        tier: int,
        tokens: int,
        now_us: int,
        requests: int = 1,
        tenant: str = "",
        weight: int = 1,
        prompt: int = 0,
        hits: Sequence[tuple[str, int]] = (),
        barred: Sequence[str] = (),
    ) -> Request:
        number, before = len(self.submitted), len(self.admitted)
        request = FleetRequest(id, tier, tenant, weight, tokens, requests, now_us, number, before)
        request.prompt, request.hits, request.barred = prompt, dict(hits), tuple(barred)
        self.submitted.append(request)
        self._tag_firsts(tier)
        return request

    def cancel(self, id: str) -> bool:
        request = next((request for request in self.waiting() if request.id == id), None)
        if request is None:
            return False
        if request.charge is not None:
            self._refund(request)
        return super().cancel(id)

    def prefilled(self, id: str, now_us: int) -> bool:
        """The first byte: nothing of its prompt is un-prefilled any more."""
        for request in self.held():
            if request.id == id and request.unprefilled:
                self._owe(request, request.excess_prefill, now_us)
                request.held_prefill = request.unprefilled = request.excess_prefill = 0
                return True
        return False

    def hand_back(self, id: str, now_us: int, barred: Sequence[str] = ()) -> bool:
        for request in self.held():
            if request.id == id:
                request.barred += tuple(barred)
        return super().hand_back(id, now_us)

    def dispatch(self, now_us: int) -> list[Placed]:
        self.refresh(now_us)
        placed: list[Placed] = []
        while not self.is_paused and self.waiting() and self.has_any_room():
            found = self.walk(now_us)
            if found is None and not self.looks_further():
                break
            if found is None:
                continue
            placed.append(self.admit_to(*found, now_us))
        return placed

    # Engines.

    def known(self) -> list[str]:
        """Every engine that is offered or holds something, by name, then by incarnation."""
        ids = {*self.offers, *(request.engine for request in self.held() if request.engine)}
        return sorted(ids, key=name_and_incarnation)

    def takes_new(self) -> list[str]:
        return [engine for engine in self.known() if engine in self.offers and self.offers[engine].takes_new]

    def on(self, engine: str) -> list[Request]:
        return [request for request in self.held() if request.engine == engine]

    def effective(self, engine: str) -> tuple[int, int, int]:
        """Tokens, requests and prefill of an engine, a part of them while it starts slowly."""
        offer, step = self.offers[engine], 10
        if offer.ramp_us:
            step = min(10, 1 + max(0, self.now_us - offer.since_us) * 10 // offer.ramp_us)
        tokens, requests, prefill = (
            whole if whole == UNLIMITED else whole * step // 10
            for whole in (offer.tokens, offer.requests, offer.prefill)
        )
        return tokens, max(1, requests), prefill

    def refresh(self, now_us: int) -> None:
        self.now_us = now_us
        sizes = [self.effective(engine) for engine in self.takes_new()]
        for engine in self.known():
            if engine not in self.takes_new():
                mine = self.on(engine)
                sizes.append(tuple(sum(of) for of in zip((0, 0, 0), *map(self.holds, mine), strict=True)))
        columns = zip((0, 0, 0), *sizes, strict=True)
        self._capacity = tuple(None if UNLIMITED in column else sum(column) for column in columns)
        self._most_prefill = [self.most_prefill(tier) for tier in range(len(self.policy.tiers))]
        self.caps = {engine: cap for engine, cap in self.caps.items() if engine in self.known()}

    def capacity(self) -> tuple[int | None, ...]:
        return self._capacity

    def holds(self, request: Request) -> tuple[int, int, int]:
        return request.held_tokens, request.requests, request.held_prefill

    def used(self, tier: int | None = None) -> tuple[int, ...]:
        mine = [self.holds(request) for request in self.held() if tier in (None, request.tier)]
        return tuple(sum(column) for column in zip((0, 0, 0), *mine, strict=True))

    def sizes(self, request: Request) -> tuple[int, ...]:
        prompt = max(1, request.prompt - max(request.hits.values(), default=0))
        return request.tokens, request.requests, min(prompt, self._most_prefill[request.tier])

    def most_prefill(self, tier: int) -> int:
        """The most that a prompt counts for in the pool: none is too large for an empty engine."""
        largest = max((self.effective(engine)[2] for engine in self.takes_new()), default=0)
        limit = self.size_limit(tier)[2]
        return largest if limit is None else min(largest, limit)

    def unprefilled_on(self, engine: str, request: Request) -> int:
        return max(1, request.prompt - request.hits.get(engine, 0))

    def most_requests(self, engine: str) -> int:
        capped, until_us = self.caps.get(engine, (0, 0))
        most = self.effective(engine)[1]
        return min(most, capped) if self.now_us < until_us else most

    def has_room(self, engine: str, request: Request) -> bool:
        """R2'."""
        tokens, _, prefill = self.effective(engine)
        mine = self.on(engine)
        unprefilled = sum(other.unprefilled for other in mine)
        return (
            request.tokens <= tokens - sum(other.held_tokens for other in mine)
            and request.requests <= self.most_requests(engine) - sum(other.requests for other in mine)
            and (unprefilled == 0 or unprefilled + self.unprefilled_on(engine, request) <= prefill)
        )

    def has_room_at_all(self, engine: str) -> bool:
        tokens, _, prefill = self.effective(engine)
        mine = self.on(engine)
        unprefilled = sum(other.unprefilled for other in mine)
        return (
            sum(other.held_tokens for other in mine) < tokens
            and sum(other.requests for other in mine) < self.most_requests(engine)
            and (unprefilled == 0 or unprefilled < prefill)
        )

    def has_any_room(self) -> bool:
        """Whether the pool and some engine have room for anything."""
        used, capacity = self.used(), self.capacity()
        is_full = any(c is not None and u >= c for u, c in zip(used[:2], capacity[:2], strict=True))
        return not is_full and any(self.has_room_at_all(engine) for engine in self.takes_new())

    def usable(self, request: Request) -> list[str]:
        """The engines that could ever hold a ticket, but for those at their caps."""
        return [
            engine
            for engine in self.takes_new()
            if request.tokens <= self.offers[engine].tokens
            and request.requests <= self.offers[engine].requests
            and engine.rpartition("#")[0] not in request.barred
            and not self.is_at_cap(engine, request)
        ]

    def is_at_cap(self, engine: str, request: Request) -> bool:
        capped, until_us = self.caps.get(engine, (0, 0))
        return self.now_us < until_us and sum(other.requests for other in self.on(engine)) + request.requests > capped

    def best(self, request: Request, claims: Sequence[tuple[Request, str]]) -> str | None:
        """A ticket for a floor keeps the engine that was chosen for it first, as long as it could go there."""
        if request not in self.for_floors:
            return self.best_by_score(request, claims)
        is_kept = request.kept_engine in self.usable(request)
        found = request.kept_engine if is_kept else self.best_by_score(request, claims)
        if self.is_walking:
            request.kept_engine = found
        return found

    def best_by_score(self, request: Request, claims: Sequence[tuple[Request, str]]) -> str | None:
        """Placement: the engine with the smallest score; among equals the first by name, then by incarnation."""
        return min(self.usable(request), key=lambda engine: self.score(engine, request, claims), default=None)

    def score(self, engine: str, request: Request, claims: Sequence[tuple[Request, str]]) -> int:
        mine = self.on(engine)
        unprefilled = sum(other.unprefilled for other in mine)
        claimed = sum(other.prompt for other, of in claims if of == engine)
        gain = self.weight_percent * request.hits.get(engine, 0) // 100
        held = sum(other.held_tokens for other in mine)
        return ((unprefilled + claimed + request.prompt - gain) * 50 + held) * 1000 // self.offers[engine].speed

    # The walk.

    def claimants(self, tier: int | None = None) -> list[Request]:
        return [request for request in self.waiting(tier) if request.claims]

    def firsts(self, tier: int) -> list[Request]:
        """Claimants stand in no queue; what returned or was put back stands in no lane."""
        waiting = [request for request in self.waiting(tier) if not request.claims]
        back = [request for request in waiting if request.returns or request.put_back]
        lanes: dict[str, Request] = {}
        for request in waiting:
            if request not in back:
                lanes.setdefault(request.tenant, request)
        return back + list(lanes.values())

    def heads(self, now_us: int) -> list[Request]:
        """Claimants are candidates like the heads of the tiers."""
        return self.claimants() + super().heads(now_us)

    def floor_used(self, tier: int) -> tuple[int, ...]:
        """What counts in a tier's floor."""
        return self.used(tier)

    def in_fair_order(self, tier: int, now_us: int) -> list[Request]:
        """The heads of the tier, and the claimants that no head is before."""
        heads = [head for head in Oracle.heads(self, now_us) if head.tier == tier]
        both = sorted([*self.claimants(tier), *heads], key=lambda it: (it.start, it.number))
        return both[: max(map(both.index, heads), default=len(both)) + 1]

    def for_floor(self, tier: int, now_us: int) -> dict[str, int]:
        """The classes of the tickets that may be admitted for the floor: what each before them needs is filled."""
        owes = self.owes(tier, now_us)
        line = [it for it in self.in_fair_order(tier, now_us) if not owes or self.is_within_a_reserve(it)]
        found: dict[str, int] = {}
        needs = [self.floor_used(tier)]
        for request in line:
            needs.append(self.sizes(request))
            filled = map(sum, zip(*needs, strict=True))
            if all(most is None or used <= most for used, most in zip(filled, self.reserve(tier), strict=True)):
                found[request.id] = INSIDE
            else:
                if request is line[0] and not owes and self.is_below_its_reserve(tier):
                    found[request.id] = TURN
                break
        return found

    def class_of(self, request: Request, now_us: int) -> int:
        if request.state != "waiting" or self.policy.tiers[request.tier].always_first:
            return super().class_of(request, now_us)
        return self.for_floor(request.tier, now_us).get(request.id, OTHER)

    def would_pass_the_first(self, request: Request, now_us: int) -> bool:
        """Whether it is later in fair order than the first of its tier, which no one may pass beyond the floor: one no
        larger than the floor, that an engine could hold, and that is no claimant with patience. If no other tier has
        anything, its place in order is enough.
        """
        if not any(it.tier != request.tier for it in [*self.waiting(), *self.held()]):
            return False
        tier, owes = request.tier, self.owes(request.tier, now_us)
        line = [it for it in self.in_fair_order(tier, now_us) if not owes or self.is_within_a_reserve(it)]
        if not line or not self.is_within_a_reserve(line[0]) or not self.usable(line[0]):
            return False
        is_later = (request.start, request.number) > (line[0].start, line[0].number)
        return is_later and not (line[0].claims and self.is_patient(line[0], now_us))

    def is_patient(self, request: Request, now_us: int) -> bool:
        patience_us = PATIENCE_US + PATIENCE_US_PER_HIT * max(request.hits.values(), default=0)
        return request.claimed_us is None or now_us - request.claimed_us < patience_us

    def order(self, now_us: int) -> list[Request]:
        """Claimants for their tiers' floors come before all but those that are always first, the first claims first."""
        allowed = self._allowed(now_us)
        classes = {request.id: self.class_of(request, now_us) for request in allowed}
        allowed = [it for it in allowed if classes[it.id] != OTHER or not self.would_pass_the_first(it, now_us)]
        self.for_floors = [request for request in allowed if classes[request.id] in (INSIDE, TURN)]
        keep = sorted((r for r in self.for_floors if r.claims), key=lambda request: request.claimed_us)
        always = [request for request in allowed if classes[request.id] == ALWAYS_FIRST]
        return always + keep + [request for request in allowed if request not in always and request not in keep]

    def walk(self, now_us: int) -> tuple[Request, str] | None:
        """The ticket that is admitted next, and its engine. Who claims an engine is a claimant from now on."""
        self.is_walking, self.new_claimants = True, 0
        found: tuple[Request, str] | str | None = "again"
        while found == "again":
            found = self._walk_once(now_us)
        self.is_walking = False
        staying = [request for request in self.claimants() if not found or request is not found[0]]
        by_order = sorted(staying, key=lambda request: self.place(request, now_us))
        self.was_full = len(self.claimants()) > MOST_CLAIMANTS
        for request in by_order[MOST_CLAIMANTS:]:
            self.go_back(request)
        return found

    def looks_further(self) -> bool:
        """Whether another walk follows one that admitted none: it made all the claimants that it may."""
        return 0 < self.new_claimants == MOST_NEW_CLAIMANTS and not self.was_full

    def _walk_once(self, now_us: int) -> tuple[Request, str] | str | None:
        """`again` where a claim changed the candidates before the present one: the walk then begins anew.

        Once it has made 4 claimants that claimed an engine, a ticket that is none makes its claim for this walk alone.
        """
        looked: list[Request] = []
        claims: list[tuple[Request, str]] = []
        while True:
            order = self.order(now_us)
            if len(order) == len(looked):
                return None
            request = order[len(looked)]
            looked.append(request)
            if not self.fits(request, now_us):
                if self.holds_its_place(request, now_us):
                    return None
                continue
            engine = self.best(request, claims)
            if engine is not None:
                if (entered := self.entered(request, engine, claims, now_us)) is not None:
                    return request, entered
                claims.append((request, engine))
            if not request.claims and self.new_claimants == MOST_NEW_CLAIMANTS:
                request.kept_engine = None
            elif engine is not None or len(self.claimants()) < MOST_CLAIMANTS:
                self.new_claimants += engine is not None and not request.claims
                self.become_claimant(request, now_us)
            if self.order(now_us)[: len(looked)] != looked:
                return "again"
            if self.is_over(claims):
                return None

    def entered(self, request: Request, best: str, claims: Sequence[tuple[Request, str]], now_us: int) -> str | None:
        """The engine that a ticket enters: its best, or any without a claim once it has waited long enough for it.

        It waits only for an engine that has more of its prompt, or is faster. The last one that a walk places does not
        wait: the walk would end beside engines that have room for others.
        """
        free = [
            engine
            for engine in self.usable(request)
            if self.has_room(engine, request) and engine not in [of for _, of in claims]
        ]
        if best in free:
            return best
        found = min(free, key=lambda engine: self.score(engine, request, claims), default=None)
        if found is None or not self.is_patient(request, now_us) or len(claims) == MOST_PLACED - 1:
            return found
        has_more = request.hits.get(best, 0) > request.hits.get(found, 0)
        return None if has_more or self.offers[best].speed > self.offers[found].speed else found

    def is_over(self, claims: Sequence[tuple[Request, str]]) -> bool:
        """Whether every engine with any room is claimed, or K tickets were placed."""
        claimed = {engine for _, engine in claims}
        return len(claims) == MOST_PLACED or not any(
            self.has_room_at_all(engine) for engine in self.takes_new() if engine not in claimed
        )

    def become_claimant(self, request: Request, now_us: int) -> None:
        self.claim(request, now_us)

    def claim(self, request: Request, now_us: int) -> None:
        """Leaves the fair queue; the tenant is charged, as by an admission."""
        if request.claims:
            return
        request.claims = True
        if request.claimed_us is None:
            request.claimed_us = now_us
        virtual = self.virtual.get(request.tier, 0)
        self.virtual[request.tier] = max(virtual, request.start)
        if not request.returns and not request.put_back:
            request.charged_start = max(request.start, self.finish.get((request.tier, request.tenant), 0))
            request.charge = request.charged_start + request.tokens / request.weight
            self.finish[request.tier, request.tenant] = request.charge
        self._queue_changed(request.tier)

    def go_back(self, request: Request) -> None:
        """One claimant too many stands in its queue again, before all that came later, and is not charged again."""
        others = [other.start for other in self.firsts(request.tier)]
        request.claims, request.put_back, request.kept_engine = False, True, None
        request.start = min([self.virtual.get(request.tier, 0), *others])

    def _refund(self, request: Request) -> None:
        """Its tenant is not charged for a claim that came to nothing, unless it was charged for another since."""
        key = request.tier, request.tenant
        if self.finish.get(key) != request.charge:
            return
        self.finish[key] = request.charged_start
        for first in self.firsts(request.tier):
            if first.tenant == request.tenant and not first.returns and not first.put_back:
                first.start = min(first.start, max(self.virtual.get(request.tier, 0), request.charged_start))

    def admit_to(self, request: Request, engine: str, now_us: int) -> Placed:
        answer = self.answer(request, now_us)
        if self.class_of(request, now_us) == TURN:
            request.excess, request.excess_prefill = self._excesses(request)
        if self.is_held_back(now_us):
            self.went_while_held_back = request.id
        if not request.claims:
            self.claim(request, now_us)  # the same charge
        size = self.sizes(request)[2]
        request.state, request.held_tokens, request.admitted_us = "held", request.tokens, now_us
        request.engine, request.held_prefill = engine, size
        request.unprefilled = self.unprefilled_on(engine, request)
        request.claims, request.put_back, request.charge, request.claimed_us = False, False, None, None
        request.kept_engine = None
        self.admitted.append((request, now_us, request.tokens))
        self._queue_changed(request.tier)
        return Placed(answer, engine)

    def _excesses(self, request: Request) -> tuple[int, int]:
        """The whole reserves too much in tokens and requests, and how many more they are in un-prefilled tokens."""
        sizes = zip(self.used(request.tier), self.sizes(request), self.reserve(request.tier), strict=True)
        tokens, requests, prefill = (-1 if r is None else (u + t - r) // r for u, t, r in sizes)
        lasting = min(MOST_EXCESS, max(0, tokens, requests))
        return lasting, max(0, min(MOST_EXCESS, prefill) - lasting)

    def _ended(self, request: Request, now_us: int) -> None:
        self._owe(request, request.excess_prefill, now_us)
        self._owe(request, request.excess, now_us)
        request.excess = request.excess_prefill = request.held_prefill = request.unprefilled = 0
        request.engine = None

    def _owe(self, request: Request, excess: int, now_us: int) -> None:
        """What was too much in un-prefilled tokens alone is owed for the time up to the first byte."""
        owed_from_us = max(now_us, self.owes_until_us.get(request.tier, 0))
        self.owes_until_us[request.tier] = owed_from_us + excess * (now_us - request.admitted_us)

    # Reports.

    def overtakes(self, request: Request, now_us: int) -> dict[int, str]:
        before = (request.arrived_us, request.number)
        passed = {}
        for tier in range(len(self.policy.tiers)):
            mine = self.claimants(tier) + [head for head in super().heads(now_us) if head.tier == tier][:1]
            first = min(mine, key=lambda r: self.place(r, now_us), default=None)
            if first is not None and tier != request.tier and (first.arrived_us, first.number) < before:
                why = self._why_first(request, first, now_us)
                passed[tier] = "claim" if why == "passed_over" and self.fits(first, now_us) else why
        return passed

    # Preemption.

    def preempt(self, now_us: int) -> list[str]:
        """As in a pool of one engine, but room is taken on one engine: that which the first that may preempt claims."""
        self.refresh(now_us)
        order = self.order(now_us)
        asking = next((r for r in order if self.has_waited_long_enough(r, now_us)), None)
        if asking is None or self.is_held_back(now_us) or self.is_paused:
            return []
        before = order[: order.index(asking) + 1]
        leaving = [request for request in self.held() if request.chosen]
        with self._without(leaving):
            target = self.claimed_by_last(before, now_us)
            takeable = self.takeable_for(asking, now_us)
        chosen: list[Request] = []
        is_enough = self.would_fit_without(leaving, before, now_us)
        for lease in () if is_enough else takeable:
            if lease.engine == target and self.may_be_taken(lease, asking, [*leaving, *chosen], now_us):
                chosen.append(lease)
                if self.would_fit_without([*leaving, *chosen], before, now_us):
                    break
        if not self.would_fit_without([*leaving, *chosen], before, now_us):
            return []
        for lease in reversed(chosen):
            others = [other for other in chosen if other is not lease]
            if self.would_fit_without([*leaving, *others], before, now_us):
                chosen = others
        if self.policy.tiers[asking.tier].always_first:
            with self._without([*leaving, *chosen]):
                takeable = [it for it in self.takeable_for(asking, now_us) if it.engine == target is not None]
            chosen += self.taken_for_burst(asking, takeable, [*leaving, *chosen], now_us)
        for lease in chosen:
            lease.chosen = True
        return [lease.id for lease in chosen]

    def claimed_by_last(self, before: Sequence[Request], now_us: int) -> str | None:
        claims: list[tuple[Request, str]] = []
        for request in before[:-1]:
            engine = self.best(request, claims)
            if engine is not None and self.fits(request, now_us):
                claims.append((request, engine))
        return self.best(before[-1], claims)

    def would_fit_without(self, gone: list[Request], before: list[Request], now_us: int) -> bool:
        """Whether walks over these tickets alone, without the leases, would admit the last of them."""
        classes = {request.id: self.class_of(request, now_us) for request in before}
        with self._without(gone), self._undone(before):
            rest = list(before)
            while (found := self._first_of(rest, classes, now_us)) is not None:
                request, engine = found
                if request is before[-1]:
                    return True
                size = self.sizes(request)[2]
                request.state, request.held_tokens, request.engine = "held", request.tokens, engine
                request.held_prefill, request.unprefilled = size, self.unprefilled_on(engine, request)
                rest.remove(request)
        return False

    def _first_of(self, rest: list[Request], classes: dict[str, int], now_us: int) -> tuple[Request, str] | None:
        claims: list[tuple[Request, str]] = []
        for request in rest:
            if not self.fits(request, now_us):
                if self.holds_its_place(request, now_us, classes[request.id]):
                    return None
                continue
            engine = self.best(request, claims)
            if engine is None:
                continue
            if (entered := self.entered(request, engine, claims, now_us)) is not None:
                return request, entered
            claims.append((request, engine))
            if self.is_over(claims):
                return None
        return None

    @contextmanager
    def _undone(self, requests: list[Request]) -> Iterator[None]:
        before = [(r.state, r.held_tokens, r.engine, r.held_prefill, r.unprefilled) for r in requests]
        try:
            yield
        finally:
            for r, was in zip(requests, before, strict=True):
                r.state, r.held_tokens, r.engine, r.held_prefill, r.unprefilled = was

    def could_come_back(self, lease: Request) -> bool:
        sizes = zip((lease.held_tokens, lease.requests), self.admissible(lease.tier)[:2], strict=True)
        return all(most is None or size <= most for size, most in sizes)


def name_and_incarnation(engine: str) -> tuple[bytes, int]:
    name, _, incarnation = engine.rpartition("#")
    return name.encode(), int(incarnation)
