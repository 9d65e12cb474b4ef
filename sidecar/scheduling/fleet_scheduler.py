"""The scheduler of a pool with several engines: the rules of `scheduler`, and the engine that each ticket goes to.

The pool is as large as its engines together (`placement`). Its rules count a third dimension beside tokens and
requests: un-prefilled prompt tokens, from the admission to the first byte.

A walk decides which ticket is admitted next. It looks at the candidates, the heads of the tiers and the claimants, in
the order of rule 1; but a claimant that is inside its tier's floor or has a turn comes before all but those that are
always first, in the order of the first claims, and keeps the engine that it claimed first as long as it could go there.
So nothing that comes later enters that engine, neither while it drains nor once it has room: later tickets of other
floors would enter it in parts, again and again, and so would others while the ticket claims another. Each candidate
that does not fit the pool holds its place or is passed over by rule 3. For any other the best engine is chosen, busy or
not. Where that has room, and no ticket before it in this walk claimed it, the ticket is admitted. A ticket waits for
its best engine only where that has more of its prompt, or is faster, than the best of those with such room. If not, or
if it is a claimant without patience (`placement`), it is admitted there; so is the last ticket that a walk places, or
16 tickets that want busy engines would keep all others from idle ones. Otherwise the ticket claims its best engine:
nothing after it in this walk enters there.
Claims are forgotten with the walk. A ticket that made one is a claimant from then on (`claims`), so the next ticket of
its tier becomes a candidate. Where that changes the order up to the ticket, the walk begins anew. A walk makes no more
than 4 claimants of tickets that claimed an engine; after that a claim is for this walk alone. If it has admitted none
then, and there are at most 16 claimants, another walk looks further. A walk is over when every engine with any room is
claimed, or 16 tickets were placed.

A ticket that no engine could ever hold, of those that take new work now and are not at their caps, claims none, and
holds no other up. It is a claimant, too, if there are fewer than 16. After a walk the last beyond 16 return.

What a walk costs does not depend on how many tickets wait. Each time it places at most 16, and passes over at most two
heads of a tier and the claimants. It begins anew for 4 claims, and for each of at most 16 tickets that no engine could
hold. At most 4 walks more follow; a store may make them in its next calls. None begins while no engine has any room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from sidecar.policy.rules import PoolRules
from sidecar.scheduling.claims import MOST_CLAIMANTS, MOST_NEW_CLAIMANTS
from sidecar.scheduling.fleet_preemption import FleetPreemption
from sidecar.scheduling.fleet_tier import FleetOrder, FleetTier, place_in_walk
from sidecar.scheduling.order import Candidate, OrderClass
from sidecar.scheduling.placement import (
    MOST_HITS,
    NEVER_US,
    WEIGHT_PERCENT,
    EngineLedger,
    EngineOffer,
    EngineState,
    Placement,
    Placing,
)
from sidecar.scheduling.scheduler import Scheduler
from sidecar.scheduling.ticket import Admission, Rule, Ticket, Wait
from sidecar.scheduling.tier import LATEST_US

_ALWAYS_FIRST, _INSIDE, _TURN, _OTHER = OrderClass

RulesOf = Callable[[int | None, int | None, int | None], PoolRules]
"""The rules of a pool with so many tokens, requests and un-prefilled tokens; None is unbounded."""

Placed = tuple[Candidate, EngineLedger]

NO_SPARE = (0, 0, 0)
ASKED_OFTEN = 4
"""From so many tickets on that are looked at in one state of the pool, the room beside all headroom is computed."""


class FleetScheduler(Scheduler):
    """See `Scheduler`. Before the first `set_engines` the pool has no engine, and admits nothing.

    `weight_percent` is the weight of a predicted hit in the choice of an engine.
    """

    _tiers: tuple[FleetTier, ...]
    _order: FleetOrder
    _tier_type: type[FleetTier] = FleetTier
    _order_type: type[FleetOrder] = FleetOrder
    _preemption_type = FleetPreemption
    _prefill_in_reserve: attrgetter[int] = attrgetter("held_prefill")

    def __init__(self, rules_of: RulesOf, weight_percent: int = WEIGHT_PERCENT) -> None:
        super().__init__(rules_of(0, 0, 0))
        self.placement = Placement(weight_percent)
        self._rules_of = rules_of
        self._size = (self.placement.capacity, 0)
        self._all_prefill = 0
        self._blocked_since_us: int | None = None
        self._blocked_us = 0
        self._for_floors: set[str] = set()
        self._is_walking = False  # else an engine is only asked for
        self._new_claimants = 0  # of those that claimed an engine in the last walk
        self._has_too_many = False  # whether the last walk left too many claimants
        self._looks_further = False  # whether another walk follows where the last one admitted none
        self._failed_us: int | None = None  # a walk that admitted none ended then, and nothing has changed since
        self._same_until_us: int | None = None  # before that time alone changes nothing, where it was asked
        self._spare: tuple[int, int, int] | None = None
        self._asked = 0
        self._resize_pool()

    def set_engines(self, offers: Iterable[EngineOffer], now_us: int) -> None:
        """These are the pool's engines from now on. One that is left out keeps what it holds until it is empty."""
        self.placement.set_engines(offers, now_us)
        self._changed()  # an engine's speed alone leaves the pool's size as it was
        self._refresh(now_us)

    def change_rules_of(self, rules_of: RulesOf, weight_percent: int) -> None:
        """Applies the rules of another policy with the same tiers from now on. Otherwise as `change_rules`."""
        self._rules_of = rules_of
        self.placement.weight_percent = weight_percent
        self._resize_pool()

    def cap(self, engine: str, requests: int, until_us: int, now_us: int) -> None:
        """An engine runs no more than so many requests until then: it refused one. Unknown engines are ignored."""
        self.placement.cap(engine, requests, until_us, now_us)

    def raise_cap(self, engine: str, requests: int) -> None:
        """A capped engine may run so many requests more. Unknown engines are ignored."""
        self.placement.raise_cap(engine, requests)

    def engines(self, now_us: int) -> list[EngineState]:
        """Every engine's ledger, by name and incarnation; also of those that are gone and still hold something."""
        self._refresh(now_us)
        return self.placement.states(has_claimants=self._claimants() > 0)

    def submit(
        self,
        ticket_id: str,
        *,
        tier: int,
        tokens: int,
        now_us: int,
        requests: int = 1,
        tenant: str = "",
        weight: int = 1,
        returns: int = 0,
        prompt: int = 0,
        hits: Sequence[tuple[str, int]] = (),
        barred: Sequence[str] = (),
    ) -> Ticket:
        """See `Scheduler.submit`. `prompt` is a part of `tokens`. `hits` are tokens of it that engines, by their ids,
        are predicted to have; at most 8 count. `barred` are the names of engines that must not have the request.
        """
        if ticket_id in self._waiting or ticket_id in self._leases:
            raise ValueError(f"a ticket called {ticket_id!r} is already here")
        if tokens < 1 or requests < 1 or weight < 1:
            raise ValueError(f"tokens, requests and weight are at least 1, not {tokens}, {requests}, {weight}")
        self._sequence += 1
        ticket = self._ticket_type(
            ticket_id, tier, tenant, weight, tokens, requests, now_us, self._sequence, self._served_now
        )
        ticket.placing = Placing(prompt, dict(hits[:MOST_HITS]), tuple(barred))
        self._enqueue(ticket, returns)
        if ticket in self._tiers[tier].heads(now_us):
            self._changed()
        return ticket

    def register(
        self,
        ticket_id: str,
        *,
        tier: int,
        tokens: int,
        requests: int,
        engine: str | None = None,
        prefill: int = 0,
    ) -> None:
        """See `Scheduler.register`. The lease is on an engine, where `prefill` tokens are un-prefilled. An engine that
        is not known takes no new work. None: it holds room of the pool alone.
        """
        super().register(ticket_id, tier=tier, tokens=tokens, requests=requests)
        ticket = self._leases[ticket_id]
        ticket.placing = Placing(0)
        if engine is not None:
            placing, tier_state = ticket.placing, self._tiers[tier]
            placing.engine = self.placement.of_lease(engine)
            placing.prefill, placing.unprefilled = min(prefill, tier_state.most_prefill), prefill
            self._book_engine(ticket, 1)

    def dispatch(self, now_us: int, most: int | None = None) -> list[Admission]:
        """See `Scheduler.dispatch`."""
        self._refresh(now_us)
        if self._unsorted:
            self._changed()
            self._sort_some()
        admissions: list[Admission] = []
        if self.is_paused:
            self._note_blocked(now_us, is_blocked=False)
            return admissions
        if self._failed_us is not None and now_us < self._until_us():
            return admissions
        is_blocked = False
        while self._waiting and self._has_any_room():
            placed = self._walk(now_us)
            if placed is None:
                if self._looks_further:
                    continue
                if not self._has_too_many:  # else there are other candidates now
                    self._failed_us, self._same_until_us = now_us, None
                is_blocked = self.placement.has_claims
                break
            admissions.append(self._admit_to(*placed, now_us))
            if len(admissions) == most:
                break
        else:
            is_blocked = self._fits_without_walk(now_us)
        self._note_blocked(now_us, is_blocked=is_blocked)
        return admissions

    def blocked_us(self, now_us: int) -> int:
        """For how long, in all, a ticket has waited that fitted the pool, because the engine that it claimed had no
        room for it. As far as `dispatch` has seen it.
        """
        since_us = self._blocked_since_us
        return self._blocked_us + (0 if since_us is None else max(0, now_us - since_us))

    def _fits_without_walk(self, now_us: int) -> bool:
        """Whether a ticket fits the pool, where no walk began because no engine has any room. That is rare."""
        if not self._waiting or not super()._has_any_room() or not self.placement.taking:
            return False
        return self._all_prefill < self.rules.prefill and any(self.fits(it) for it in self._candidates(now_us))

    def _note_blocked(self, now_us: int, *, is_blocked: bool) -> None:
        if is_blocked is (self._blocked_since_us is None):
            self._blocked_us = self.blocked_us(now_us)
            self._blocked_since_us = now_us if is_blocked else None

    def prefilled(self, ticket_id: str, now_us: int) -> bool:
        """The first byte of a lease came: none of its prompt is un-prefilled any more. False where that was so before,
        or there is no such lease.
        """
        lease = self._leases.get(ticket_id)
        if lease is None or not lease.placing.unprefilled:
            return False
        self._give_prefill_back(lease, now_us)
        return True

    def resize(self, ticket_id: str, tokens: int) -> bool:
        """See `Scheduler.resize`."""
        lease = self._leases.get(ticket_id)
        before = 0 if lease is None else lease.tokens
        if not super().resize(ticket_id, tokens):
            return False
        if lease is not None and lease.placing.engine is not None:
            self.placement.book(lease.placing.engine, tokens - before, 0, 0, 0)
        return True

    def preempt(self, now_us: int) -> list[Ticket]:
        """See `Scheduler.preempt`. Room is taken on one engine: the one that the served ticket would claim."""
        self._refresh(now_us)
        if not self._preemption.leases or not self._waiting or self.is_paused or self.is_held_back(now_us):
            return []
        order = self.in_order_of_walk(now_us)
        for place, candidate in enumerate(order):
            preempt_after_us = self._tiers[candidate.ticket.tier].rules.preempt_after_us
            if preempt_after_us is not None and now_us - candidate.arrived_us >= preempt_after_us:
                return self._preemption.choose(order[: place + 1], self.rules, now_us)
        return []

    def bar(self, ticket_id: str, names: Sequence[str]) -> None:
        """The engines of these names must not have a lease's request any more, once it is handed back."""
        lease = self._leases.get(ticket_id)
        if lease is not None:
            lease.placing.barred = (*lease.placing.barred, *(it for it in names if it not in lease.placing.barred))

    def _return(self, ticket: Ticket, now_us: int) -> None:
        ticket.placing.patient_until_us = NEVER_US
        super()._return(ticket, now_us)

    def next_change_us(self, now_us: int) -> int | None:
        """See `Scheduler.next_change_us`. Engines that start slowly or are capped change with time, too, and claimants
        lose their patience.
        """
        self._refresh(now_us)
        change_us: int | None
        if self._failed_us is None or self.is_paused or self._until_us() <= now_us:
            change_us = self._next_change_us(now_us)
        else:
            change_us = self._until_us()
            change_us = None if change_us == LATEST_US else change_us
        engines_us = self.placement.changes_us
        if engines_us is None or not self._waiting or self.is_paused:
            return change_us
        return engines_us if change_us is None else min(change_us, engines_us)

    def _until_us(self) -> int:
        """When time alone first changes what the walk that failed decided."""
        assert self._failed_us is not None
        if self._same_until_us is None:
            change_us = self._next_change_us(self._failed_us)
            self._same_until_us = LATEST_US if change_us is None else change_us
        return self._same_until_us

    def _changed(self) -> None:
        """Something else than time may let a ticket in, or keep it out."""
        self._failed_us = self._spare = None
        self._asked = 0

    def _next_change_us(self, now_us: int) -> int | None:
        """When time alone changes what a walk decides, but for the engines."""
        change_us = super().next_change_us(now_us)
        if self.is_paused:
            return change_us
        for tier in self._tiers:
            for claimant in tier.queue.claimants.values():
                end_us = claimant.placing.patient_until_us
                if end_us > now_us and (change_us is None or end_us < change_us):
                    change_us = end_us
        return change_us

    def held_by(self, engine: str) -> int:
        """Requests that an engine, by its id, holds; 0 for one that is not known."""
        ledger = self.placement.ledgers.get(engine)
        return 0 if ledger is None else ledger.held_requests

    def held_prefill(self, tier: int) -> int:
        """Un-prefilled prompt tokens that a tier's leases count for."""
        return self._tiers[tier].held_prefill

    def fits(self, candidate: Candidate) -> bool:
        """Rule 2, in three dimensions."""
        ticket, rules = candidate.ticket, self.rules
        level = ticket.tier
        prefill, most_prefill = ticket.placing.uncached, self._tiers[level].most_prefill
        if prefill > most_prefill:  # noqa: PLR1730  # `min` is one call more
            prefill = most_prefill
        spare = self._spare
        if spare is None:
            self._asked += 1
            spare = NO_SPARE if self._asked < ASKED_OFTEN else self._find_spare()
        if ticket.tokens <= spare[0] and ticket.requests <= spare[1] and prefill <= spare[2]:
            return True
        tokens = rules.tokens - self._all_tokens - ticket.tokens
        requests = rules.requests - self._all_requests - ticket.requests
        prefill = rules.prefill - self._all_prefill - prefill
        if tokens < 0 or requests < 0 or prefill < 0:
            return False
        for tier in self._tiers[: candidate.headroom_level]:
            own = tier.rules
            if own.level != level:
                if tier.held_tokens < own.headroom_tokens:
                    tokens -= own.headroom_tokens - tier.held_tokens
                if tier.held_requests < own.headroom_requests:
                    requests -= own.headroom_requests - tier.held_requests
                if tier.held_prefill < own.headroom_prefill:
                    prefill -= own.headroom_prefill - tier.held_prefill
        return tokens >= 0 and requests >= 0 and prefill >= 0

    def _find_spare(self) -> tuple[int, int, int]:
        """The room beside the headroom of all tiers: a ticket that needs no more fits."""
        rules = self.rules
        tokens, requests = rules.tokens - self._all_tokens, rules.requests - self._all_requests
        prefill = rules.prefill - self._all_prefill
        for tier in self._tiers:
            own = tier.rules
            if tier.held_tokens < own.headroom_tokens:
                tokens -= own.headroom_tokens - tier.held_tokens
            if tier.held_requests < own.headroom_requests:
                requests -= own.headroom_requests - tier.held_requests
            if tier.held_prefill < own.headroom_prefill:
                prefill -= own.headroom_prefill - tier.held_prefill
        self._spare = tokens, requests, prefill
        return self._spare

    def holds_its_place(self, candidate: Candidate) -> bool:
        """Rule 3, in three dimensions."""
        if candidate.order_class is _ALWAYS_FIRST:
            return True
        if not super().holds_its_place(candidate):
            return False
        ticket = candidate.ticket
        prefill = self.rules.prefill - self._tiers[ticket.tier].prefill(ticket)
        for level, tier in enumerate(self._tiers):
            if level == ticket.tier:
                continue
            rules = tier.rules
            if rules.always_first or (candidate.order_class is _OTHER and level < candidate.yields_to):
                kept = tier.held_prefill
            else:
                kept = min(self._prefill_in_reserve(tier), rules.reserve_prefill)
            if level < candidate.headroom_level:
                kept = max(kept, rules.headroom_prefill)
            prefill -= kept
        return prefill >= 0

    def book_lease(self, lease: Ticket, sign: int) -> None:
        """Books a ticket with its tier and its engine, or takes it out. For `FleetPreemption`."""
        self.book(lease.tier, sign * lease.tokens, sign * lease.requests)
        if lease.placing.engine is not None:
            self._book_engine(lease, sign)

    def book(self, level: int, tokens: int, requests: int) -> None:
        """See `Scheduler.book`."""
        self._changed()
        super().book(level, tokens, requests)

    def hold_back(self, until_us: int) -> None:
        """See `Scheduler.hold_back`."""
        self._changed()
        super().hold_back(until_us)

    def cancel(self, ticket_id: str, now_us: int) -> Wait | None:
        """See `Scheduler.cancel`."""
        self._changed()
        wait = super().cancel(ticket_id, now_us)
        if not self._waiting:
            self._note_blocked(now_us, is_blocked=False)
        return wait

    def _book_engine(self, lease: Ticket, sign: int) -> None:
        placing = lease.placing
        assert placing.engine is not None
        self._changed()
        prefill, unprefilled = sign * placing.prefill, sign * placing.unprefilled
        self._tiers[lease.tier].held_prefill += prefill
        self._all_prefill += prefill
        self.placement.book(placing.engine, sign * lease.tokens, sign * lease.requests, prefill, unprefilled)

    def in_order_of_walk(self, now_us: int) -> list[Candidate]:
        """The candidates in the order in which a walk looks at them."""
        order = self._order.without_passing(self._candidates(now_us), self.placement, now_us)
        self._for_floors = for_floors = {it.ticket.id for it in order if it.order_class in (_INSIDE, _TURN)}
        if for_floors and any(candidate.ticket.placing.is_claimant for candidate in order):
            order.sort(key=place_in_walk)
        return order

    def _walk(self, now_us: int) -> Placed | None:
        """The ticket that is admitted next, and its engine."""
        placed: Placed | bool = True
        self._is_walking, self._new_claimants = True, 0
        while placed is True:
            self.placement.begin_walk()
            placed = self._walk_once(now_us)
            self.placement.end_walk()
        self._is_walking = False
        found = placed or None
        self._trim(None if found is None else found[0].ticket, now_us)
        return found

    def _walk_once(self, now_us: int) -> Placed | bool:
        """False where no ticket is admitted; True where the walk has to begin anew."""
        fits, best, claim = self.fits, self.place, self.placement.claim
        order, place = self.in_order_of_walk(now_us), 0
        while place < len(order):
            candidate = order[place]
            ticket = candidate.ticket
            placing = ticket.placing
            place += 1
            if not fits(candidate):
                if self.holds_its_place(candidate):
                    return False
                continue
            ledger, is_over = best(ticket), False
            if ledger is None:
                if placing.is_claimant or self._claimants() >= MOST_CLAIMANTS:
                    continue
            elif (taking := self.taken_by(ticket, ledger, now_us)) is not None:
                return candidate, taking
            else:
                is_over = claim(ledger, placing.prompt)
            if self._new_claimants == MOST_NEW_CLAIMANTS and not placing.is_claimant:
                placing.kept = None
            elif not placing.is_claimant:
                self._claim(ticket, now_us)
                self._new_claimants += ledger is not None
                looked = order[:place]
                order = self.in_order_of_walk(now_us)
                if [it.sequence for it in order[:place]] != [it.sequence for it in looked]:
                    return True
            if is_over:
                return False
        return False

    def _claim(self, ticket: Ticket, now_us: int) -> None:
        """A ticket becomes a claimant."""
        self._tiers[ticket.tier].queue.claim(ticket, now_us)

    def place(self, ticket: Ticket) -> EngineLedger | None:
        """The best engine of a ticket, busy or not; for its tier's floor the one that it keeps."""
        placement, placing = self.placement, ticket.placing
        if ticket.id not in self._for_floors:
            return placement.best(ticket.tokens, ticket.requests, placing)
        found = placing.kept
        if found is None or found not in placement.usable(ticket.tokens, ticket.requests, placing):
            found = placement.best(ticket.tokens, ticket.requests, placing)
        if self._is_walking:
            placing.kept = found
        return found

    def taken_by(self, ticket: Ticket, best: EngineLedger, now_us: int) -> EngineLedger | None:
        """The engine that a ticket enters now: its best, or another where that has no less of its prompt and is no
        slower, or where it has no patience, or is the last that the walk places. None: it claims its best.
        """
        placing = ticket.placing
        if not best.claims and best.is_open and best.has_room(ticket.tokens, ticket.requests, placing):
            return best
        placement, hits = self.placement, placing.hits
        if not placement.unclaimed:
            return None
        is_patient = now_us < placing.patient_until_us and not placement.is_last
        hit = hits.get(best.id, 0)
        if is_patient and hit and all(other < hit for engine, other in hits.items() if engine != best.id):
            return None
        found = placement.best_with_room(ticket.tokens, ticket.requests, placing)
        if found is None or not is_patient:
            return found
        return found if hits.get(found.id, 0) >= hit and found.offer.speed >= best.offer.speed else None

    def _claimants(self) -> int:
        return sum(len(tier.queue.claimants) for tier in self._tiers)

    def _trim(self, admitted: Ticket | None, now_us: int) -> None:
        """The claimants beyond the most that may be return to their queues, the last in order."""
        self._has_too_many = is_full = self._claimants() > MOST_CLAIMANTS
        self._looks_further = not is_full and 0 < self._new_claimants == MOST_NEW_CLAIMANTS
        if not is_full:
            return
        order: list[Candidate] = []
        for tier in self._tiers:
            staying = [claimant for claimant in tier.queue.claimants.values() if claimant is not admitted]
            order += self._order.candidates(tier, staying, now_us)
        order.sort()
        for candidate in order[MOST_CLAIMANTS:]:
            self._tiers[candidate.ticket.tier].queue.go_back(candidate.ticket)

    def _admit_to(self, candidate: Candidate, ledger: EngineLedger, now_us: int) -> Admission:
        ticket, placing = candidate.ticket, candidate.ticket.placing
        tier = self._tiers[ticket.tier]
        if candidate.order_class is _TURN:
            placing.excess_prefill = tier.excess_prefill(ticket)
        prefill = tier.prefill(ticket)
        admission = self._admit(candidate, now_us)
        placing.engine, placing.prefill, placing.unprefilled = ledger, prefill, placing.unprefilled_on(ledger.id)
        placing.kept = None
        placing.found = ledger.found()
        self._book_engine(ticket, 1)
        return admission._replace(engine=ledger.id)

    def _release(self, lease: Ticket, now_us: int) -> None:
        self._changed()
        placing = lease.placing
        self._give_prefill_back(lease, now_us)
        if placing.engine is not None:
            self._book_engine(lease, -1)
            placing.engine = None
        super()._release(lease, now_us)

    def _give_prefill_back(self, lease: Ticket, now_us: int) -> None:
        placing, tier = lease.placing, self._tiers[lease.tier]
        self._changed()
        if placing.engine is not None:
            tier.held_prefill -= placing.prefill
            self._all_prefill -= placing.prefill
            self.placement.book(placing.engine, 0, 0, -placing.prefill, -placing.unprefilled)
        placing.prefill = placing.unprefilled = 0
        if placing.excess_prefill:
            tier.owe_prefill(lease, now_us)

    def _refresh(self, now_us: int) -> None:
        """Applies the present size of the pool."""
        if self.placement.refresh(now_us):
            self._changed()
        if self._size != (self.placement.capacity, self.placement.largest_prefill):
            self._resize_pool()

    def _resize_pool(self) -> None:
        self._changed()
        capacity, largest = self.placement.capacity, self.placement.largest_prefill
        self._size = capacity, largest
        self.rules = rules = self._rules_of(*capacity)
        for tier in self._tiers:
            tier.change_pool(rules, largest)
        self._order.change_rules(rules)
        self._note_unsorted()

    def _has_any_room(self) -> bool:
        return self.placement.open > 0 and super()._has_any_room()

    def _passed(self, candidate: Candidate, now_us: int) -> Sequence[tuple[int, Rule]]:
        """The tiers whose first ticket in order arrived before the ticket, each with the rule."""
        passed: list[tuple[int, Rule]] = []
        for level, tier in enumerate(self._tiers):
            first = self._first_of(tier, now_us)
            if first is None or level == candidate.ticket.tier or first[3:5] > candidate[3:5]:
                continue
            rule = self._why_passed(candidate, tier, first.ticket, now_us)
            if rule is Rule.PASSED_OVER and self.fits(first):
                rule = Rule.CLAIM
            passed.append((level, rule))
        return passed

    def _why_passed(self, candidate: Candidate, tier: FleetTier, first: Ticket, now_us: int) -> Rule:
        if tier.is_at_limit(first):
            return Rule.LIMIT
        if now_us < self._held_back_until_us:
            return Rule.ALWAYS_FIRST if candidate.order_class is _ALWAYS_FIRST else Rule.TURN
        return self._order.rule(candidate, self._order.candidate(tier, first, now_us))

    def _first_of(self, tier: FleetTier, now_us: int) -> Candidate | None:
        head = tier.queue.head()
        heads = [*tier.queue.claimants.values(), *(() if head is None else (head,))]
        return min(self._order.candidates(tier, heads, now_us), default=None)
