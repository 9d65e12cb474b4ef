"""Preemption: room is taken back from leases for a more important ticket that has waited long enough.

The served ticket is the first in order that has waited `preempt_after` of its own tier. It is not served alone: room is
taken until it, and every ticket before it that fits or holds its place, would fit one after the other. So a ticket
before it that may not preempt does not switch preemption off, and every rule stays in force. Room of leases that were
chosen earlier counts as free. A lease may be chosen while all of this holds.

1. Its tier is `preemptible` and less important than the served ticket's; its first byte has not gone out (it was not
   kept), and it returned to the queue fewer than `max_preemptions` times.
2. Without it, and without those chosen before it, its tier is not below its reserve (rule 1).
3. Back in the queue it would not come before the served ticket, nor does a head of its tier. Else its room would go
   back to it or to that head.
4. It could be admitted again at all: the pool may have shrunk since.

Leases are chosen from the least important tier first, the latest admitted first, until the tickets fit. Then those that
are not needed are spared, the last chosen first. Where all of them together are not enough, none is chosen.

A burst. An `always_first` tier takes room for all that waits in it, as soon as its served ticket has its room: each
ticket would else wait for an abort of its own. What waits counts as tickets of the mean size, in both dimensions,
within the tier's limit. Leases are chosen in the same order, and kept out only as far as one ticket more would fit: a
rest that is too small for one is not taken. All tickets of such a tier come before every victim, so rule 3 above holds
for each of them.

No thrashing. The tier of a victim is not below its reserve, and by 3 the served ticket comes before the victim and
before every head of that tier. So, if nothing else happens meanwhile, the tickets that room was taken for are admitted
next, in order. Another ticket is admitted first only if it has come before them meanwhile: by its level, its floor or
its age. In any case no request is preempted more than `max_preemptions` times.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Protocol

from sidecar.policy.rules import PoolRules, largest_admissible
from sidecar.scheduling.order import Candidate, LevelOrder, OrderClass
from sidecar.scheduling.ticket import Ticket
from sidecar.scheduling.tier import TierState


class Room(Protocol):
    """The room of the pool, as preemption needs it from the scheduler."""

    def book(self, level: int, tokens: int, requests: int) -> None:
        """Books tokens and requests, of either sign, with a tier."""

    def fits(self, candidate: Candidate) -> bool:
        """Rule 2."""

    def holds_its_place(self, candidate: Candidate) -> bool:
        """Rule 3."""


class Burst:
    """What waits in the tier of an `always_first` ticket: how many tickets of the mean size fit, the served one too."""

    def __init__(self, served: Candidate, tier: TierState, room: Room) -> None:
        self._tier = tier
        self._room = room
        self._ticket = copy(served.ticket)
        self._candidate = served._replace(ticket=self._ticket)
        self._number = 1

    @property
    def is_whole(self) -> bool:
        """Whether all fit that wait, or all that the tier's limit admits."""
        return self._number >= self._tier.queue.count or self._tier.is_at_limit(self._with_one_more())

    def grow(self) -> bool:
        """Counts the tickets that fit beside what is booked now. Whether they are more than before."""
        before = self._number
        while not self.is_whole and self._room.fits(self._candidate):
            self._number += 1
        return self._number > before

    def _with_one_more(self) -> Ticket:
        queue, number = self._tier.queue, self._number + 1
        self._ticket.tokens = -(-queue.tokens * number // queue.count)
        self._ticket.requests = -(-queue.requests * number // queue.count)
        return self._ticket


class Preemption:
    """The leases that may be preempted, and the victims among them. A victim holds its room until it is released."""

    def __init__(self, tiers: Sequence[TierState], order: LevelOrder, room: Room) -> None:
        self._tiers = tiers
        self._order = order
        self._room = room
        self.leases: dict[str, Ticket] = {}  # in order of admission
        self._victims: dict[str, Ticket] = {}  # those of them that were chosen

    def admitted(self, lease: Ticket) -> None:
        """A lease of a preemptible tier begins."""
        self.leases[lease.id] = lease

    def keep(self, lease_id: str) -> bool:
        """A lease has ended, or must never be preempted. Returns whether it had been chosen."""
        self.leases.pop(lease_id, None)
        return self._victims.pop(lease_id, None) is not None

    def released(self, lease_id: str) -> Ticket | None:
        """The engine has released a victim. None where no such lease was chosen."""
        victim = self._victims.pop(lease_id, None)
        if victim is not None:
            del self.leases[lease_id]
        return victim

    def choose(self, order: Sequence[Candidate], rules: PoolRules, now_us: int) -> list[Ticket]:
        """Chooses the leases whose room the last of `order` needs, beside those chosen before. Empty where none help.

        `order` has the candidates up to the served ticket, the first in order first.
        """
        victims = list(self._victims.values())
        self._book(victims, -1)
        fits = self._all_fit(order)
        chosen = [] if fits else self._enough(order, rules, now_us)
        if (fits or chosen) and order[-1].order_class is OrderClass.ALWAYS_FIRST:
            chosen += self._for_the_burst(order, chosen, rules, now_us)
        self._book(victims, 1)
        self._victims.update((victim.id, victim) for victim in chosen)
        return chosen

    def _all_fit(self, order: Sequence[Candidate]) -> bool:
        """Whether the last of the candidates is admitted, and none before it holds its place without fitting."""
        admitted: list[Ticket] = []
        is_in = False
        for candidate in order:
            is_in = self._room.fits(candidate)
            if is_in:
                admitted.append(candidate.ticket)
                self._book((candidate.ticket,), 1)
            elif self._room.holds_its_place(candidate):
                break
        self._book(admitted, -1)
        return is_in and admitted[-1] is order[-1].ticket

    def _enough(self, order: Sequence[Candidate], rules: PoolRules, now_us: int) -> list[Ticket]:
        chosen: list[Ticket] = []
        is_enough = False
        for lease in self._eligible(order[-1], rules, now_us):
            if self._may_be_taken(lease, order[-1], now_us):
                chosen.append(lease)
                self._book((lease,), -1)
                is_enough = self._all_fit(order)
                if is_enough:
                    break
        found = self._needed(order, chosen) if is_enough else []
        self._book(found or chosen, 1)
        return found

    def _needed(self, order: Sequence[Candidate], chosen: Sequence[Ticket]) -> list[Ticket]:
        """Spares the leases without which the tickets fit as well, and books them in again."""
        needed = list(chosen)
        for lease in reversed(chosen):
            self._book((lease,), 1)
            if self._all_fit(order):
                needed.remove(lease)
            else:
                self._book((lease,), -1)
        return needed

    def _for_the_burst(
        self, order: Sequence[Candidate], taken: Sequence[Ticket], rules: PoolRules, now_us: int
    ) -> list[Ticket]:
        """More leases than `taken`, for the other tickets that wait in the tier of the last of `order`."""
        served = order[-1]
        self._book(taken, -1)
        burst = Burst(served, self._tiers[served.ticket.tier], self._room)
        chosen: list[Ticket] = []
        spare: list[Ticket] = []  # of no use until one ticket more fits
        burst.grow()
        for lease in () if burst.is_whole else self._eligible(served, rules, now_us):
            if lease in taken or not self._may_be_taken(lease, served, now_us):
                continue
            spare.append(lease)
            self._book((lease,), -1)
            if burst.grow():
                chosen += spare
                spare = []
            if burst.is_whole:
                break
        self._book([*taken, *chosen, *spare], 1)
        return chosen

    def _eligible(self, served: Candidate, rules: PoolRules, now_us: int) -> list[Ticket]:
        """The leases of tiers that satisfy 1, 3 and 4, in the order in which they are chosen."""
        largest: dict[int, tuple[int, int]] = {}
        for level in range(served.ticket.tier + 1, len(self._tiers)):
            tier = self._tiers[level]
            if tier.rules.preemptible and not any(
                self._order.comes_before(head, served, now_us) for head in tier.heads(now_us)
            ):
                largest[level] = largest_admissible(rules, level)
        found = [
            lease
            for lease in reversed(self.leases.values())
            if lease.id not in self._victims
            and (most := largest.get(lease.tier)) is not None
            and lease.returns < rules.max_preemptions
            and lease.tokens <= most[0]
            and lease.requests <= most[1]
        ]
        return sorted(found, key=lambda lease: -lease.tier)  # stable: the latest admitted stay first

    def _may_be_taken(self, lease: Ticket, served: Candidate, now_us: int) -> bool:
        """Whether a lease satisfies 2 and the rest of 3, beside those that were taken before it."""
        return self._tiers[lease.tier].has_its_reserve_without(lease) and not self._order.comes_before(
            lease, served, now_us
        )

    def _book(self, leases: Sequence[Ticket], sign: int) -> None:
        for lease in leases:
            self._room.book(lease.tier, sign * lease.tokens, sign * lease.requests)
