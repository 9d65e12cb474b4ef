"""The leases whose room is taken back for a more important ticket that has waited long enough.

The ticket that is served is the first in order that has waited `preempt_after` of its own tier. It is not served alone:
room is taken until it, and every ticket before it that fits or holds its place, would fit one after the other. So a
ticket before it that may not preempt does not switch preemption off, and no rule is bent for it. What they lack is what
they lack once every lease that was already chosen has been released. A lease may be taken while all of this holds.

1. Its tier is `preemptible` and less important than the served ticket's; its first byte has not gone out (it was not
   kept), and it was preempted fewer than `max_preemptions` times.
2. Without it, and without those chosen before it, its tier is not below its reserve (rule 1): a floor stays a floor.
3. Back in the queue it would not stand before the served ticket, nor does a head of its tier: else the room that it
   gave would be taken from the ticket again.
4. It could be admitted again at all: a pool may have shrunk since.

They are taken from the least important tier first, the latest admitted first, until the tickets fit; then those that
turned out not to be needed are spared, the last chosen first. Where all of them together would not do, none is taken.

No thrashing. A victim's tier is not below its reserve, and by 3 the served ticket stands before the victim and before
every head of its tier. So, if nothing else happens meanwhile, the tickets that room was taken for are the next that are
admitted, in order. A ticket that is admitted first all the same came to stand before them: by its importance, its floor
or its age. However that goes, no request is preempted more than `max_preemptions` times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sidecar.policy.rules import PoolRules, largest_admissible
from sidecar.scheduling.ticket import Ticket
from sidecar.scheduling.tier import Candidate, Rank, Tier


class Room(Protocol):
    """What preemption asks the scheduler."""

    def book(self, level: int, tokens: int, requests: int) -> None:
        """Books tokens and requests, of either sign, with a tier."""

    def fits(self, candidate: Candidate) -> bool:
        """Rule 2."""

    def holds_its_place(self, candidate: Candidate) -> bool:
        """Rule 3."""


class Preemption:
    """The leases that may be taken back, and those that were chosen: they hold their room until they are released."""

    def __init__(self, tiers: Sequence[Tier], room: Room) -> None:
        self._tiers = tiers
        self._room = room
        self.leases: dict[str, Ticket] = {}  # in order of admission
        self._victims: dict[str, Ticket] = {}  # those of them that were chosen

    def admitted(self, lease: Ticket) -> None:
        """A lease of a preemptible tier begins."""
        self.leases[lease.id] = lease

    def keep(self, lease_id: str) -> bool:
        """A lease is over, or is never to be taken. Whether it had been chosen."""
        self.leases.pop(lease_id, None)
        return self._victims.pop(lease_id, None) is not None

    def released(self, lease_id: str) -> Ticket | None:
        """A victim's engine has released it. None where no such lease was chosen."""
        victim = self._victims.pop(lease_id, None)
        if victim is not None:
            del self.leases[lease_id]
        return victim

    def choose(self, order: Sequence[Candidate], rules: PoolRules, now_us: int) -> list[Ticket]:
        """The leases whose room the last of `order` takes, beside those chosen before. Empty where that is of no use.

        `order` has the candidates up to the served ticket, the first in order first.
        """
        leaving = list(self._victims.values())
        self._book(leaving, -1)
        chosen = [] if self._all_fit(order) else self._enough(order, rules, now_us)
        self._book(leaving, 1)
        self._victims.update((victim.id, victim) for victim in chosen)
        return chosen

    def _all_fit(self, order: Sequence[Candidate]) -> bool:
        """Whether the last of the candidates is admitted, and those before it that are not hold nobody up."""
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
        for lease in self._candidates(order[-1], rules, now_us):
            if self._tiers[lease.tier].has_its_reserve_without(lease):
                chosen.append(lease)
                self._book((lease,), -1)
                is_enough = self._all_fit(order)
                if is_enough:
                    break
        found = self._needed(order, chosen) if is_enough else []
        self._book(found or chosen, 1)
        return found

    def _needed(self, order: Sequence[Candidate], chosen: Sequence[Ticket]) -> list[Ticket]:
        """Spares those without whom the tickets fit as well, and books back what they hold."""
        needed = list(chosen)
        for lease in reversed(chosen):
            self._book((lease,), 1)
            if self._all_fit(order):
                needed.remove(lease)
            else:
                self._book((lease,), -1)
        return needed

    def _candidates(self, served: Candidate, rules: PoolRules, now_us: int) -> list[Ticket]:
        """The leases that satisfy 1, 3 and 4, in the order in which they are taken."""
        largest: dict[int, tuple[int, int]] = {}
        for level in range(served.ticket.tier + 1, len(self._tiers)):
            tier = self._tiers[level]
            if tier.rules.preemptible and not any(
                self._stands_before(head, served, now_us) for head in tier.heads(now_us)
            ):
                largest[level] = largest_admissible(rules, level)
        found = [
            lease
            for lease in reversed(self.leases.values())
            if lease.id not in self._victims
            and (most := largest.get(lease.tier)) is not None
            and lease.preemptions < rules.max_preemptions
            and lease.tokens <= most[0]
            and lease.requests <= most[1]
            and not self._stands_before(lease, served, now_us)
        ]
        return sorted(found, key=lambda lease: -lease.tier)  # stable: the latest admitted stay first

    def _stands_before(self, other: Ticket, served: Candidate, now_us: int) -> bool:
        """Whether a ticket of a tier that has its reserve comes before the place of another (rule 1)."""
        score = self._tiers[other.tier].aged_score(other, now_us)
        return (Rank.OTHER, 0, score, other.arrived_us, other.sequence) < served[:5]

    def _book(self, leases: Sequence[Ticket], sign: int) -> None:
        for lease in leases:
            self._room.book(lease.tier, sign * lease.tokens, sign * lease.requests)
