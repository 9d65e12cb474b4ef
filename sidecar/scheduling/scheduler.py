"""The four admission rules, without I/O and without a clock: time is an argument, in whole microseconds.

For every tier q: U its leases, C the pool; R = ceil(reserve * C) its floor, H = floor((1 - lend) * reserve * C) its
headroom, L = floor(limit * C), each in tokens and in requests.

1. Order. Tiers holding less than their reserve (U < R in both dimensions, or `always_first`) come first; inside each of
   the two classes by aged level, then by arrival.
2. Room. A ticket t at aged level e fits when, in each dimension,
   t <= C - sum(U) - sum over tiers q more important than e, other than its own, of max(0, H_q - U_q).
   A tier with a limit is a candidate only while U + t <= L.
3. No overtaking. The first ticket in that order that does not fit holds its place: nothing behind it is admitted.
4. Aging. A waiting ticket rises one level per `promote_after`, never past the ceiling; usage stays with its own tier.

Preemption (`preemption`). The first ticket in order that does not fit and has waited `preempt_after` of its own tier
may take room back from less important tiers. It bends none of the four rules: a victim's room is free only once it has
let go, and is then given away by them. A victim waits again with its original arrival, at the front of its tier.

Inside a tier the head is chosen by fair queueing over tenants (`fair_queue`). A decision looks at one head per tier:
O(tiers + log n), whatever waits.

Bounded wait. Let D be the longest time a lease is held, t_max the largest request, R > t_max the tier's reserve, no
tier `always_first` or limited, and let the floors have room to overshoot: the sum of all reserves plus t_max - 1 for
each is at most C. A ticket of t tokens that finds B tokens of its own tier ahead of it is admitted within
(ceil((B + t) / (R - t_max)) + 1) * D, whatever the other tiers send.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import sub

from sidecar.policy.rules import PoolRules
from sidecar.scheduling.overtaking import Overtaking
from sidecar.scheduling.preemption import Preemption
from sidecar.scheduling.ticket import Admission, Rule, Ticket, Wait
from sidecar.scheduling.tier import Tier


class Scheduler:
    """Decides who is admitted. Not thread-safe; every method returns at once.

    `submit`, `register`, `settle`, `cancel`, `resize`, `keep` and `requeue` change what waits and what is held; none
    admits anybody. Call `dispatch` afterwards, and again at `next_change_us`: it returns what became a lease, in order.
    Call `preempt` after it: it returns whose engine is to let go.
    """

    def __init__(self, rules: PoolRules) -> None:
        self.rules = rules
        self._promote_after_us = rules.promote_after_us or 1  # without aging, a level's score is the level itself
        self._tiers = tuple(Tier(tier, rules) for tier in rules.tiers)
        self._all_tokens = 0
        self._all_requests = 0
        self._served = (0,) * len(rules.tiers)
        self._waiting: dict[str, Ticket] = {}  # in order of arrival, where nobody came back
        self._has_returned = False
        self._leases: dict[str, Ticket] = {}
        self._preemption = Preemption(self._tiers, self._hold)
        self._overtaking = Overtaking()
        self._sequence = 0
        self._held_back_until_us = 0

    def change_rules(self, rules: PoolRules) -> None:
        """Other rules for the same tiers, from now on. What is held, or waits, stays; what waits ages by the new ones.

        What is held may be more than the new pool: admission then stops until it drains. Whoever waits for more than
        the new pool could ever give must be canceled by the caller, or holds up everybody behind it.
        """
        self.rules = rules
        self._promote_after_us = rules.promote_after_us or 1
        for tier, tier_rules in zip(self._tiers, rules.tiers, strict=True):
            tier.change_rules(tier_rules, rules)

    def hold_back(self, until_us: int) -> None:
        """Admits nobody before `until_us` while anything is held; with nothing held, one ticket still goes.

        That is for a pool whose engine has more waiting inside it than it should. The one ticket sees to it that a
        figure which stands still, because nothing moves, does not stop the pool for good.
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
        preemptions: int = 0,
    ) -> Ticket:
        """Puts a request in its tier's queue, to the front where it was preempted so often by another scheduler.

        Raises ValueError where the id is taken or a size is not positive.
        """
        if ticket_id in self._waiting or ticket_id in self._leases:
            raise ValueError(f"a ticket called {ticket_id!r} is already here")
        if tokens < 1 or requests < 1 or weight < 1:
            raise ValueError(f"tokens, requests and weight are at least 1, not {tokens}, {requests}, {weight}")
        self._sequence += 1
        ticket = Ticket(ticket_id, tier, tenant, weight, tokens, requests, now_us, self._sequence, self._served)
        self._waiting[ticket_id] = ticket
        if preemptions:
            ticket.preemptions = preemptions
            self._tiers[tier].queue.put_back(ticket)
        else:
            self._tiers[tier].queue.push(ticket)
        return ticket

    def register(self, ticket_id: str, *, tier: int, tokens: int, requests: int) -> None:
        """Takes over a lease that was granted elsewhere. It may outgrow the pool: admission then stops until it drains.

        It is never preempted: whether its first byte has gone out is not known here.

        Raises ValueError where the id is taken.
        """
        if ticket_id in self._waiting or ticket_id in self._leases:
            raise ValueError(f"a ticket called {ticket_id!r} is already here")
        self._leases[ticket_id] = Ticket(ticket_id, tier, "", 1, tokens, requests, 0, 0, self._served)
        self._hold(tier, tokens, requests)

    def dispatch(self, now_us: int) -> list[Admission]:
        """Admits everybody whom the rules let in now, in order."""
        admissions: list[Admission] = []
        while self._waiting and self._has_any_room() and not self.is_held_back(now_us):
            first = self._first(now_us)
            if first is None or not self._fits(*first):
                break
            admissions.append(self._admit(*first, now_us))
        return admissions

    def settle(self, ticket_id: str) -> bool:
        """Gives a lease back. False, and nothing changes, where there is no such lease: settling twice is harmless."""
        lease = self._leases.pop(ticket_id, None)
        if lease is None:
            return False
        self._hold(lease.tier, -lease.tokens, -lease.requests)
        if self._preemption.leases:
            self._preemption.keep(ticket_id)
        return True

    def preempt(self, now_us: int) -> list[Ticket]:
        """The leases newly chosen to give their room to the first in order. Call it after `dispatch`.

        Nothing is free yet: each of them holds its room until `requeue` or `settle`.
        """
        if not self._preemption.leases or not self._waiting or self.is_held_back(now_us):
            return []
        first = self._first(now_us)
        if first is None:
            return []
        preempt_after_us = self._tiers[first[0].tier].rules.preempt_after_us
        if preempt_after_us is None or now_us - first[0].arrived_us < preempt_after_us:
            return []
        return self._preemption.choose(*first, self.rules, self._fits, now_us)

    def keep(self, ticket_id: str) -> bool:
        """A lease's first byte goes out: it is never preempted any more. Whether it had been chosen."""
        return self._preemption.keep(ticket_id)

    def requeue(self, ticket_id: str, now_us: int) -> bool:
        """A chosen lease's engine has let go: it gives its room back and waits as before, by its original arrival.

        From now on it counts as overtaken, if it was not before. False, and nothing changes, where it was not chosen,
        or is over.
        """
        ticket = self._preemption.let_go(ticket_id)
        if ticket is None:
            return False
        del self._leases[ticket_id]
        self._hold(ticket.tier, -ticket.tokens, -ticket.requests)
        ticket.preemptions += 1
        if ticket.overtaken_us is None:
            ticket.overtaken_us = now_us
        self._waiting[ticket_id] = ticket
        self._has_returned = True
        self._tiers[ticket.tier].queue.put_back(ticket)
        return True

    def cancel(self, ticket_id: str, now_us: int) -> Wait | None:
        """Takes a waiting ticket out and says how it had waited. None, and nothing changes, where none waits."""
        ticket = self._waiting.pop(ticket_id, None)
        if ticket is None:
            return None
        self._tiers[ticket.tier].queue.remove(ticket)
        wait = self._wait(ticket, now_us)
        self._forget_overtaking()
        return wait

    def resize(self, ticket_id: str, tokens: int) -> bool:
        """Sets what a lease holds. It may outgrow the pool, which stops admission until it drains.

        False, and nothing changes, where there is no such lease. Raises ValueError for a size below 1.
        """
        if tokens < 1:
            raise ValueError(f"a lease holds at least 1 token, not {tokens}")
        lease = self._leases.get(ticket_id)
        if lease is None:
            return False
        self._hold(lease.tier, tokens - lease.tokens, 0)
        lease.tokens = tokens
        return True

    def next_change_us(self, now_us: int) -> int | None:
        """When `dispatch` could next admit somebody though nothing else happens, None where time changes nothing.

        Time matters when the pool is held back no longer, and through aging when a head reaches a whole level: it then
        stops owing a tier its headroom, or, at the ceiling, joins the tickets that rank by arrival. `preempt` could
        choose somebody when a head has waited `preempt_after`.
        """
        if not self._waiting:
            return None
        changes = list(self._promotions_us(now_us))
        if any(tier.rules.preemptible for tier in self._tiers) and self.rules.max_preemptions:
            changes += self._preemptions_us(now_us)
        if self._held_back_until_us > now_us:
            changes.append(self._held_back_until_us)
        return min(changes, default=None)

    def _promotions_us(self, now_us: int) -> Iterator[int]:
        promote_after_us = self.rules.promote_after_us
        if promote_after_us is None:
            return iter(())
        return (
            head.arrived_us + rise * promote_after_us
            for level, tier in enumerate(self._tiers)
            if level > self.rules.ceiling and (head := tier.queue.head()) is not None
            if (rise := (now_us - head.arrived_us) // promote_after_us + 1) <= level - self.rules.ceiling
        )

    def _preemptions_us(self, now_us: int) -> Iterator[int]:
        return (
            due_us
            for tier in self._tiers
            if tier.rules.preempt_after_us is not None and (head := tier.queue.head()) is not None
            if (due_us := head.arrived_us + tier.rules.preempt_after_us) > now_us
        )

    def held(self, tier: int) -> tuple[int, int]:
        """Tokens and requests that a tier's leases hold."""
        return self._tiers[tier].held_tokens, self._tiers[tier].held_requests

    def oldest(self, now_us: int) -> Sequence[Wait | None]:
        """How the oldest ticket of every tier has waited so far, None for a tier in which nobody waits."""
        found: list[Wait | None] = [None] * len(self._tiers)
        missing = sum(tier.queue.count > 0 for tier in self._tiers)
        for ticket in self._in_order():
            if not missing:
                break
            if found[ticket.tier] is None:
                found[ticket.tier] = self._wait(ticket, now_us)
                missing -= 1
        return found

    def queued(self, tier: int) -> tuple[int, int]:
        """Tokens and requests that wait in a tier."""
        return self._tiers[tier].queue.tokens, self._tiers[tier].queue.count

    def waiting(self) -> int:
        """How many tickets wait, in all tiers."""
        return len(self._waiting)

    def leases(self) -> int:
        """How many leases are held, in all tiers."""
        return len(self._leases)

    def is_held_back(self, now_us: int) -> bool:
        """Whether nobody is admitted because of `hold_back`."""
        return now_us < self._held_back_until_us and self._all_requests > 0

    def _has_any_room(self) -> bool:
        return self._all_tokens < self.rules.tokens and self._all_requests < self.rules.requests

    def _first(self, now_us: int) -> tuple[Ticket, int] | None:
        """Rules 1 and 4: the first candidate in order, with its score (aged level times `promote_after`)."""
        best: tuple[bool, int, int, int] | None = None
        found: tuple[Ticket, int] | None = None
        for tier in self._tiers:
            head = tier.queue.head()
            if head is None or tier.is_at_limit(head):
                continue
            score = tier.aged_score(head, now_us)
            order = (not tier.is_below_reserve(), score, head.arrived_us, head.sequence)
            if best is None or order < best:
                best, found = order, (head, score)
        return found

    def _fits(self, ticket: Ticket, score: int) -> bool:
        """Rule 2: room for the ticket beside the leases and the headroom of every more important tier."""
        tokens = self.rules.tokens - self._all_tokens - ticket.tokens
        requests = self.rules.requests - self._all_requests - ticket.requests
        for tier in self._tiers:
            if tier.score >= score:
                break
            if tier.rules.level != ticket.tier:
                if tier.held_tokens < tier.rules.headroom_tokens:
                    tokens -= tier.rules.headroom_tokens - tier.held_tokens
                if tier.held_requests < tier.rules.headroom_requests:
                    requests -= tier.rules.headroom_requests - tier.held_requests
        return tokens >= 0 and requests >= 0

    def _admit(self, ticket: Ticket, score: int, now_us: int) -> Admission:
        wait = self._wait(ticket, now_us)
        passed = self._passed(ticket) if len(self._waiting) > 1 else ()
        self._tiers[ticket.tier].queue.admit(ticket)
        del self._waiting[ticket.id]
        self._leases[ticket.id] = ticket
        self._hold(ticket.tier, ticket.tokens, ticket.requests)
        if self._tiers[ticket.tier].rules.preemptible:
            self._may_return(ticket, wait)
        served = list(self._served)
        served[ticket.tier] += ticket.tokens
        self._served = tuple(served)
        self._overtaking.admitted(ticket.sequence, now_us)
        self._forget_overtaking()
        return Admission(ticket, wait, -(-score // self._promote_after_us), passed)

    def _may_return(self, ticket: Ticket, wait: Wait) -> None:
        """A lease that may be preempted: its wait then goes on where it was, and it was not served before itself."""
        self._preemption.admitted(ticket)
        ticket.overtaken_us = wait.overtaken_at_us
        served = list(ticket.served_before)
        served[ticket.tier] += ticket.tokens
        ticket.served_before = tuple(served)

    def _passed(self, ticket: Ticket) -> Sequence[tuple[int, Rule]]:
        """Whom the first in order overtakes, and by which rule; what is held is as it was decided on."""
        own = self._tiers[ticket.tier]
        passed: list[tuple[int, Rule]] = []
        for level, tier in enumerate(self._tiers):
            head = tier.queue.head()
            if tier is own or head is None or not _came_before(head, ticket):
                continue
            if tier.is_at_limit(head):
                rule = Rule.LIMIT
            elif own.is_below_reserve() and not tier.is_below_reserve():
                rule = Rule.ALWAYS_FIRST if own.rules.always_first else Rule.RESERVE
            else:  # in one class and at one score it would have been theirs
                rule = Rule.LEVEL
            passed.append((level, rule))
        return passed

    def _wait(self, ticket: Ticket, now_us: int) -> Wait:
        overtaken_at_us = ticket.overtaken_us
        if overtaken_at_us is None:
            overtaken_at_us = self._overtaking.first_after(ticket.sequence)
        return Wait(
            queue_wait_us=now_us - ticket.arrived_us,
            starvation_us=0 if overtaken_at_us is None else now_us - overtaken_at_us,
            overtaken_at_us=overtaken_at_us,
            served_ahead=tuple(map(sub, self._served, ticket.served_before)),
        )

    def _forget_overtaking(self) -> None:
        """Keeps the record of overtaking in proportion to the tickets that can still ask for it."""
        if not self._waiting:
            self._overtaking.forget()
        elif self._overtaking.is_long(len(self._waiting)):
            self._overtaking.forget_all_but(waiting.sequence for waiting in self._in_order())

    def _in_order(self) -> Iterable[Ticket]:
        """Who waits, in order of arrival."""
        if self._has_returned:
            self._waiting = dict(sorted(self._waiting.items(), key=lambda item: item[1].sequence))
            self._has_returned = False
        return self._waiting.values()

    def _hold(self, level: int, tokens: int, requests: int) -> None:
        tier = self._tiers[level]
        tier.held_tokens += tokens
        tier.held_requests += requests
        self._all_tokens += tokens
        self._all_requests += requests


def _came_before(ticket: Ticket, other: Ticket) -> bool:
    return (ticket.arrived_us, ticket.sequence) < (other.arrived_us, other.sequence)
