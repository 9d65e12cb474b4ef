"""The scheduler: four admission rules, without I/O and without a clock. Time is an argument, in whole microseconds.

For every tier q: U its leases, C the pool; R = ceil(reserve * C) its floor, H = floor((1 - lend) * reserve * C) its
headroom, L = floor(limit * C), each in tokens and in requests.

1. Order (`order`). Four classes: tickets of an `always_first` tier; tickets inside their tier's reserve
   (U + t <= R in both dimensions); tickets that have a turn, because their tier is below its reserve (U < R in both
   dimensions) and owes nothing; all others. Among turns the tier whose last admission is longest ago comes first;
   then, and in the other classes, by aged level, then by arrival. A ticket admitted by a turn may make its tier hold
   x whole reserves too much. The tier then owes: when the lease ends after a time h, the tier has no turn for x * h.
   While a tier owes, its tickets of t <= R may go before a larger one at its head.
2. Room. A ticket t at aged level e fits when, in each dimension,
   t <= C - sum(U) - sum over tiers q more important than e, other than its own, of max(0, H_q - U_q).
   A tier with a limit is a candidate only while U + t <= L.
3. No overtaking, where it helps. The first ticket in order that does not fit holds its place, and nothing after it is
   admitted, if it would fit once all after it had released what they hold beyond their reserves. Otherwise the ticket
   is passed over: it is admitted as soon as there is room.
4. Aging. A waiting ticket rises one level per `promote_after`, never past the ceiling; usage stays with its own tier.

Preemption (`preemption`) takes room back for the first ticket in order that has waited `preempt_after` of its own tier.
The four rules stay in force. The room of a victim is free only once it is released, and the rules then decide on it. A
victim waits again with its original arrival.

Held back (the engine's own queue is too long): one ticket at a time is admitted, the next when the one before has
ended. An `always_first` tier comes first. Tiers with a ticket inside the reserve or with a turn then take it in turn.
Other tickets are admitted only while nothing is held.

Inside a tier fair queueing over tenants chooses the head (`fair_queue`). A decision reads at most two heads per tier:
O(tiers * log tiers), O(tiers) for each ticket that is passed over, and O(log n) for the queue, whatever waits.

Bounded wait. Let D be the longest time a lease is held, with the reserves at most C in sum, sizes within the size limit
(`policy.rules.largest_request`), every limit at least its tier's reserve, every `always_first` tier within its reserve,
and the pool not held back; k tiers have a reserve. As the head of its tier a ticket is admitted
(a) within D of the moment at which it is inside its reserve;
(b) within 2 D if it is no larger than the reserve;
(c) within (k + 1) D of becoming head and of its tier owing nothing more, if it is larger. A tier owes at most
    D * t_max / R for each of its leases by a turn that run at once. More than one of them run only where leases shrink.
`tests/scheduling/wait_bounds.py` states all clauses, for a whole wait and for several tenants, too, and measures them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, sub

from sidecar.policy.rules import PoolRules
from sidecar.scheduling.fair_queue import FairQueue
from sidecar.scheduling.order import Candidate, LevelOrder, OrderClass
from sidecar.scheduling.overtaking import TicketOvertaking
from sidecar.scheduling.preemption import Preemption
from sidecar.scheduling.ticket import Admission, Demand, Rule, Ticket, Wait
from sidecar.scheduling.tier import TierState

_ALWAYS_FIRST, _, _TURN, _OTHER = OrderClass

SORTS_AGAIN_US = 1_000
"""The pause between two parts of the work that other reserves make: requests have their turn meanwhile."""


class Scheduler:
    """Decides which tickets are admitted. Not thread-safe; every method returns at once.

    `submit`, `register`, `settle`, `cancel`, `resize`, `keep`, `requeue` and `hand_back` change what waits and what is
    held; none admits a ticket. While it `is_paused` nothing is admitted and no lease is chosen; tickets come, age and
    leave as always. Call `dispatch` afterwards, and again at `next_change_us`: it returns what became a lease, in
    order. Call `preempt` after it: it returns the leases that the engine is to release.
    """

    # What a scheduler is made of: each kind has its own.
    _ticket_type: type[Ticket] = Ticket
    _tier_type: type[TierState] = TierState
    _order_type: type[LevelOrder] = LevelOrder
    _preemption_type: type[Preemption] = Preemption

    # What of a tier's tokens and requests is kept for it, up to its reserve, by rule 3.
    _in_reserve: attrgetter[tuple[int, int]] = attrgetter("held_tokens", "held_requests")

    def __init__(self, rules: PoolRules) -> None:
        self.rules = rules
        self.is_paused = False
        self._tiers = tuple(self._tier_type(tier) for tier in rules.tiers)
        self._unsorted: Sequence[FairQueue] = ()
        self._keeping = self._tiers_with_headroom()
        self._order = self._order_type(rules, self._tiers)
        self._is_by_level = type(self._order) is LevelOrder
        self._all_tokens = 0
        self._all_requests = 0
        self._none_served = (0,) * len(rules.tiers)
        self._served = [*self._none_served]
        self._served_now = self._none_served  # the same, shared by all tickets that come before the next admission
        self._waiting: dict[str, Ticket] = {}  # in order of arrival, unless a victim has returned
        self._has_returned = False
        self._leases: dict[str, Ticket] = {}
        self._preemption = self._preemption_type(self._tiers, self._order, self)
        self._overtaking = TicketOvertaking()
        self._sequence = 0
        self._admissions = 0
        self._latest_admitted = 0
        self._held_back_until_us = 0
        self._admitted_while_held_back: str | None = None

    def change_rules(self, rules: PoolRules) -> None:
        """Applies other rules for the same tiers from now on. All leases and tickets stay. Tickets age by the new
        rules.

        The leases may hold more than the new pool: admission then stops until they end. A ticket that the new pool
        could never hold waits until the caller cancels it. By rule 3 it does not hold the others up.
        """
        self.rules = rules
        for tier, tier_rules in zip(self._tiers, rules.tiers, strict=True):
            tier.change_rules(tier_rules)
        self._keeping = self._tiers_with_headroom()
        self._order.change_rules(rules)
        self._note_unsorted()

    def _note_unsorted(self) -> None:
        """The queues whose tickets are being sorted by other reserves. Each dispatch sorts a part."""
        self._unsorted = [tier.queue for tier in self._tiers if tier.queue.is_unsorted]

    def _sort_some(self) -> None:
        for queue in self._unsorted:
            queue.sort_some()
        self._note_unsorted()

    def hold_back(self, until_us: int) -> None:
        """Admits one ticket at a time before `until_us`, the next when the one before has ended.

        This is for a pool whose engine has too many requests waiting inside. The one ticket keeps the floors in force.
        It also keeps the pool from stopping for good where the engine's figure no longer changes.
        """
        self._held_back_until_us = until_us

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
    ) -> Ticket:
        """Puts a request in the queue of its tier; at the front where another scheduler had admitted it so often.

        Raises ValueError where the id is taken or a size is not positive.
        """
        if ticket_id in self._waiting or ticket_id in self._leases:
            raise ValueError(f"a ticket called {ticket_id!r} is already here")
        if tokens < 1 or requests < 1 or weight < 1:
            raise ValueError(f"tokens, requests and weight are at least 1, not {tokens}, {requests}, {weight}")
        self._sequence += 1
        ticket = self._ticket_type(
            ticket_id, tier, tenant, weight, tokens, requests, now_us, self._sequence, self._served_now
        )
        self._enqueue(ticket, returns)
        return ticket

    def _enqueue(self, ticket: Ticket, returns: int) -> None:
        self._waiting[ticket.id] = ticket
        self._overtaking.came(ticket)
        if returns:
            ticket.returns = returns
            self._tiers[ticket.tier].queue.put_back(ticket)
        else:
            self._tiers[ticket.tier].queue.push(ticket)

    def admit_at_once(self, ticket_id: str, demand: Demand, now_us: int) -> bool:
        """Admits a request that comes while none waits, just as `submit` and `dispatch` would, without the queue.

        False, and nothing changes, where another waits or where this one would, and in another order, which may give a
        ticket other levels than its tier's. Raises ValueError where the id is taken.
        """
        if self._waiting or self.is_paused or not self._is_by_level or now_us < self._held_back_until_us:
            return False
        if ticket_id in self._leases:
            raise ValueError(f"a ticket called {ticket_id!r} is already here")
        tier, tokens, requests = demand.tier, demand.tokens, demand.requests
        state = self._tiers[tier]
        if not self._has_room(demand, tier) or (state.rules.limited and state.would_exceed_limit(demand)):
            return False
        self._sequence = sequence = self._sequence + 1
        excess = state.excess(demand) if state.has_turn(demand, now_us) else 0
        served = self._served_now
        place = now_us, sequence, served, now_us, tokens, excess
        ticket = self._ticket_type(ticket_id, tier, demand.tenant, demand.weight, tokens, requests, *place)
        self._begin(ticket, state)
        return True

    def register(self, ticket_id: str, *, tier: int, tokens: int, requests: int) -> None:
        """Registers a lease that was granted elsewhere. It may outgrow the pool: admission then stops until leases end.

        It is never preempted: its first byte may have gone out already.

        Raises ValueError where the id is taken.
        """
        if ticket_id in self._waiting or ticket_id in self._leases:
            raise ValueError(f"a ticket called {ticket_id!r} is already here")
        self._leases[ticket_id] = self._ticket_type(ticket_id, tier, "", 1, tokens, requests, 0, 0, self._served_now)
        self.book(tier, tokens, requests)

    def dispatch(self, now_us: int, most: int | None = None) -> list[Admission]:
        """Admits every ticket that the rules let in now, in order; at most so many. Call it again for the others."""
        admissions: list[Admission] = []
        if self._unsorted:
            self._sort_some()
        if self.is_paused:
            return admissions
        while self._waiting and self._has_any_room() and len(admissions) != most:
            candidate = self._next_admission(now_us)
            if candidate is None:
                break
            admissions.append(self._admit(candidate, now_us))
        return admissions

    def settle(self, ticket_id: str, now_us: int) -> bool:
        """Ends a lease. False, and nothing changes, where there is no such lease: settling twice is harmless."""
        lease = self._leases.pop(ticket_id, None)
        if lease is None:
            return False
        self._release(lease, now_us)
        if self._preemption.leases:
            self._preemption.keep(ticket_id)
        return True

    def preempt(self, now_us: int) -> list[Ticket]:
        """The leases newly chosen as victims for the first ticket that may preempt. Call it after `dispatch`.

        No room is free yet: each of them holds its room until `requeue` or `settle`.
        """
        if not self._preemption.leases or not self._waiting or self.is_paused or self.is_held_back(now_us):
            return []
        order = self._order.in_order(now_us)
        for place, candidate in enumerate(order):
            preempt_after_us = self._tiers[candidate.ticket.tier].rules.preempt_after_us
            if preempt_after_us is not None and now_us - candidate.arrived_us >= preempt_after_us:
                return self._preemption.choose(order[: place + 1], self.rules, now_us)
        return []

    def keep(self, ticket_id: str) -> bool:
        """The first byte of a lease goes out, so it is never preempted. Returns whether it had been chosen."""
        return self._preemption.keep(ticket_id)

    def requeue(self, ticket_id: str, now_us: int) -> bool:
        """The engine has released a victim: it gives its room back and waits again, by its original arrival.

        From now on it counts as overtaken, if it was not before. False, and nothing changes, where it was not chosen or
        has ended.
        """
        ticket = self._preemption.released(ticket_id)
        if ticket is None:
            return False
        if ticket.overtaken_us is None:
            ticket.overtaken_us = now_us
        self._return(ticket, now_us)
        return True

    def hand_back(self, ticket_id: str, now_us: int, overtaken_us: int | None) -> bool:
        """No engine has taken the request of a lease: it waits again, as if it had not been admitted.

        It keeps its arrival, and its tenant is not charged a second time. `overtaken_us` is its first overtaking before
        the admission; admissions of that time do not count as more. False, and nothing changes, where there is no such
        lease, or it was registered. Not for a lease that was kept.
        """
        ticket = self._leases.get(ticket_id)
        if ticket is None or not ticket.sequence:
            return False
        self._preemption.keep(ticket_id)
        ticket.overtaken_us = overtaken_us
        ticket.overtaken_after = max(ticket.sequence, self._latest_admitted)
        self._return(ticket, now_us)
        if overtaken_us is None:
            self._overtaking.hand_back(ticket)
        else:
            self._overtaking.part(ticket.overtaken_after)
        return True

    def _return(self, ticket: Ticket, now_us: int) -> None:
        del self._leases[ticket.id]
        self._release(ticket, now_us)
        if ticket.id == self._admitted_while_held_back:
            self._admitted_while_held_back = None
        ticket.returns += 1
        served = list(ticket.served_before)
        served[ticket.tier] += ticket.admitted_tokens  # no ticket is served ahead of itself
        ticket.served_before = tuple(served)
        self._waiting[ticket.id] = ticket
        self._has_returned = True
        self._tiers[ticket.tier].queue.put_back(ticket)

    def cancel(self, ticket_id: str, now_us: int) -> Wait | None:
        """Takes a waiting ticket out and returns its wait. None, and nothing changes, where no such ticket waits."""
        ticket = self._waiting.pop(ticket_id, None)
        if ticket is None:
            return None
        self._tiers[ticket.tier].queue.remove(ticket)
        wait = self._wait(ticket, now_us)
        self._overtaking.look(ticket, self._waiting)
        return wait

    def resize(self, ticket_id: str, tokens: int) -> bool:
        """Sets the tokens that a lease holds. It may outgrow the pool: admission then stops until leases end.

        False, and nothing changes, where there is no such lease. Raises ValueError for a size below 1.
        """
        if tokens < 1:
            raise ValueError(f"a lease holds at least 1 token, not {tokens}")
        lease = self._leases.get(ticket_id)
        if lease is None:
            return False
        self.book(lease.tier, tokens - lease.tokens, 0)
        lease.tokens = tokens
        return True

    def charge(self, tier: int, tenant: str, weight: int, tokens: int) -> None:
        """Charges a tenant for what a lease came to use beyond what it was charged for: see `FairQueue.charge`."""
        self._tiers[tier].queue.charge(tenant, weight, tokens)

    def next_change_us(self, now_us: int) -> int | None:
        """When `dispatch` could next admit a ticket though nothing else happens, None where time changes nothing.

        Time matters when the pool is held back no longer, when a tier owes nothing more, and when the order changes
        (`order.changes_us`). `preempt` could choose a lease when a head has waited `preempt_after`.
        """
        if not self._waiting or self.is_paused:
            return None
        changes = [tier.owes_until_us for tier in self._tiers if tier.queue.count and tier.owes_until_us > now_us]
        heads = self._firsts(now_us)
        changes += self._order.changes_us(heads, now_us)
        if any(tier.rules.preemptible for tier in self._tiers) and self.rules.max_preemptions:
            changes += self._preemptions_us(heads, now_us)
        if self._held_back_until_us > now_us:
            changes.append(self._held_back_until_us)
        if self._unsorted:
            changes.append(now_us + SORTS_AGAIN_US)
        return min(changes, default=None)

    def _firsts(self, now_us: int) -> list[Ticket]:
        """The tickets that may be next."""
        return [head for tier in self._tiers if tier.queue.count for head in tier.heads(now_us)]

    def _preemptions_us(self, heads: Iterable[Ticket], now_us: int) -> Iterator[int]:
        return (
            due_us
            for head in heads
            if (preempt_after_us := self._tiers[head.tier].rules.preempt_after_us) is not None
            if (due_us := head.arrived_us + preempt_after_us) > now_us
        )

    def held(self, tier: int) -> tuple[int, int]:
        """Tokens and requests that a tier's leases hold."""
        return self._tiers[tier].held_tokens, self._tiers[tier].held_requests

    def oldest(self, now_us: int) -> Sequence[Wait | None]:
        """How the oldest ticket of every tier has waited so far, None for a tier without waiting tickets."""
        found: list[Wait | None] = [None] * len(self._tiers)
        missing = sum(tier.queue.count > 0 for tier in self._tiers)
        for ticket in self._in_order():
            if not missing:
                break
            if found[ticket.tier] is None:
                found[ticket.tier] = self._wait(ticket, now_us)
                missing -= 1
        return found

    def use_of(self, tenant: str) -> tuple[int, int, int]:
        """A tenant's waiting tickets, its leases, and the tokens that these hold. Costs O(tickets)."""
        waiting = sum(ticket.tenant == tenant for ticket in self._waiting.values())
        held = [ticket.tokens for ticket in self._leases.values() if ticket.tenant == tenant]
        return waiting, len(held), sum(held)

    def queued(self, tier: int) -> tuple[int, int]:
        """Tokens and requests that wait in a tier."""
        return self._tiers[tier].queue.tokens, self._tiers[tier].queue.count

    def is_within_share(self, tier: int, tenant: str, weight: int, places: int, *, promised: int = 0) -> bool:
        """Whether one more ticket of a tenant, with the places `promised` to it, is within its share of the queue."""
        return self._tiers[tier].queue.is_within_share(tenant, weight, places, promised)

    def displaced(self, tier: int, tenant: str, weight: int, places: int) -> Ticket | None:
        """The ticket whose place in a full queue a newcomer within its tenant's share takes: see `fair_queue`.

        Nothing changes: the caller cancels it. None where the newcomer's tenant would be above its share, or no other
        is.
        """
        return self._tiers[tier].queue.displaced(tenant, weight, places)

    def waiting(self) -> int:
        """How many tickets wait, in all tiers."""
        return len(self._waiting)

    def leases(self) -> int:
        """How many leases are held, in all tiers."""
        return len(self._leases)

    def is_held_back(self, now_us: int) -> bool:
        """Whether `hold_back` is in force, and something is held."""
        return now_us < self._held_back_until_us and self._all_requests > 0

    def book(self, level: int, tokens: int, requests: int) -> None:
        """Books tokens and requests, of either sign, with a tier. For `Preemption`."""
        tier = self._tiers[level]
        tier.held_tokens += tokens
        tier.held_requests += requests
        self._all_tokens += tokens
        self._all_requests += requests

    def fits(self, candidate: Candidate) -> bool:
        """Rule 2: room for the ticket beside the leases and the headroom of every more important tier."""
        return self._has_room(candidate.ticket, candidate.headroom_level)

    def _has_room(self, demand: Demand, headroom_level: int) -> bool:
        tokens = self.rules.tokens - self._all_tokens - demand.tokens
        requests = self.rules.requests - self._all_requests - demand.requests
        for tier in self._keeping[headroom_level]:
            rules = tier.rules
            if rules.level != demand.tier:
                if tier.held_tokens < rules.headroom_tokens:
                    tokens -= rules.headroom_tokens - tier.held_tokens
                if tier.held_requests < rules.headroom_requests:
                    requests -= rules.headroom_requests - tier.held_requests
        return tokens >= 0 and requests >= 0

    def holds_its_place(self, candidate: Candidate) -> bool:
        """Rule 3: whether the ticket would fit once all after it had released what they hold beyond their reserves."""
        ticket, order_class = candidate.ticket, candidate.order_class
        if order_class is _ALWAYS_FIRST:
            return True
        tokens, requests = self.rules.tokens - ticket.tokens, self.rules.requests - ticket.requests
        for level, tier in enumerate(self._tiers):
            if level == ticket.tier:
                continue
            rules = tier.rules
            if rules.always_first or (order_class is _OTHER and level < candidate.yields_to):
                kept_tokens, kept_requests = tier.held_tokens, tier.held_requests
            else:
                kept_tokens, kept_requests = self._in_reserve(tier)
                if kept_tokens > rules.reserve_tokens:  # noqa: PLR1730  # `min` is one call more
                    kept_tokens = rules.reserve_tokens
                if kept_requests > rules.reserve_requests:  # noqa: PLR1730
                    kept_requests = rules.reserve_requests
            if level < candidate.headroom_level:
                if kept_tokens < rules.headroom_tokens:  # noqa: PLR1730
                    kept_tokens = rules.headroom_tokens
                if kept_requests < rules.headroom_requests:  # noqa: PLR1730
                    kept_requests = rules.headroom_requests
            tokens -= kept_tokens
            requests -= kept_requests
        return tokens >= 0 and requests >= 0

    def _tiers_with_headroom(self) -> Sequence[Sequence[TierState]]:
        """By level: the tiers that are more important, and keep room free that is not lent."""
        keeping = [tier for tier in self._tiers if tier.rules.headroom_tokens or tier.rules.headroom_requests]
        levels = range(len(self._tiers) + 1)
        return tuple(tuple(tier for tier in keeping if tier.rules.level < level) for level in levels)

    def _has_any_room(self) -> bool:
        return self._all_tokens < self.rules.tokens and self._all_requests < self.rules.requests

    def _next_admission(self, now_us: int) -> Candidate | None:
        """The ticket that is admitted next: the first in order that fits, unless one before it holds its place."""
        for candidate in self._candidates(now_us):
            if self.fits(candidate):
                return candidate
            if self.holds_its_place(candidate):
                return None
        return None

    def _candidates(self, now_us: int) -> list[Candidate]:
        """The candidates in order. While the pool is held back, none until the ticket that was admitted has ended."""
        if now_us >= self._held_back_until_us:
            return self._order.in_order(now_us)
        if self._admitted_while_held_back in self._leases:
            return []
        return self._order.in_turn(now_us, is_idle=not self._all_requests)

    def _admit(self, candidate: Candidate, now_us: int) -> Admission:
        ticket = candidate.ticket
        tier = self._tiers[ticket.tier]
        wait = self._wait(ticket, now_us)
        passed = self._passed(candidate, now_us) if len(self._waiting) > 1 else ()
        if candidate.order_class is _TURN:
            ticket.excess = tier.excess(ticket)
        if now_us < self._held_back_until_us:
            self._admitted_while_held_back = ticket.id
        tier.queue.admit(ticket)
        del self._waiting[ticket.id]
        ticket.admitted_us, ticket.admitted_tokens = now_us, ticket.tokens
        self._begin(ticket, tier)
        ticket.overtaken_us = wait.overtaken_at_us  # its wait goes on if it is preempted
        if self._waiting:
            self._overtaking.admitted(ticket.sequence, now_us)
        self._overtaking.look(ticket, self._waiting)
        return Admission(ticket, wait, candidate.engine_level, passed)

    def _begin(self, ticket: Ticket, tier: TierState) -> None:
        """A ticket becomes a lease."""
        tokens, level = ticket.tokens, ticket.tier
        self._admissions = tier.latest_admission = self._admissions + 1
        self._leases[ticket.id] = ticket
        # As `book`, in line: every request comes by here and by `_release`.
        requests = ticket.requests
        tier.held_tokens += tokens
        tier.held_requests += requests
        self._all_tokens += tokens
        self._all_requests += requests
        if tier.rules.preemptible:
            self._preemption.admitted(ticket)
        served = self._served
        served[level] += tokens
        self._served_now = tuple(served)
        if ticket.sequence > self._latest_admitted:  # noqa: PLR1730  # `max` is one call more
            self._latest_admitted = ticket.sequence

    def _release(self, lease: Ticket, now_us: int) -> None:
        tier, tokens, requests = self._tiers[lease.tier], lease.tokens, lease.requests
        tier.held_tokens -= tokens
        tier.held_requests -= requests
        self._all_tokens -= tokens
        self._all_requests -= requests
        if lease.excess:
            tier.owe(lease, now_us)

    def _passed(self, candidate: Candidate, now_us: int) -> Sequence[tuple[int, Rule]]:
        """The tiers whose head arrived before the ticket, each with the rule. The amounts held are those of the
        decision.
        """
        passed: list[tuple[int, Rule]] = []
        for level, tier in enumerate(self._tiers):
            head = tier.queue.head()
            if head is None or level == candidate.ticket.tier or not _arrived_before(head, candidate.ticket):
                continue
            if tier.is_at_limit(head):
                rule = Rule.LIMIT
            elif now_us < self._held_back_until_us:
                rule = Rule.ALWAYS_FIRST if candidate.order_class is _ALWAYS_FIRST else Rule.TURN
            else:
                rule = self._order.rule(candidate, self._order.candidate(tier, head, now_us))
            passed.append((level, rule))
        return passed

    def _wait(self, ticket: Ticket, now_us: int) -> Wait:
        overtaken_at_us = ticket.overtaken_us
        if overtaken_at_us is None:
            overtaken_at_us = self._overtaking.first_after(ticket.overtaken_after or ticket.sequence)
        served, before = self._served_now, ticket.served_before
        starvation_us = 0 if overtaken_at_us is None else now_us - overtaken_at_us
        served_ahead = self._none_served if served is before else tuple(map(sub, served, before))
        return Wait(now_us - ticket.arrived_us, starvation_us, overtaken_at_us, served_ahead)

    def _in_order(self) -> Iterable[Ticket]:
        """The waiting tickets, in order of arrival."""
        if self._has_returned:
            self._waiting = dict(sorted(self._waiting.items(), key=lambda item: item[1].sequence))
            self._has_returned = False
        return self._waiting.values()


def _arrived_before(ticket: Ticket, other: Ticket) -> bool:
    return (ticket.arrived_us, ticket.sequence) < (other.arrived_us, other.sequence)
