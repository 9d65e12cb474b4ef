"""Whose room is taken back for a more important ticket that has waited long enough.

Only the first ticket in order preempts, since nobody may pass it: when it does not fit and has waited `preempt_after`
of its own tier. What it lacks is what it lacks once everybody who was already chosen has let go. A lease is takeable
for it while all of this holds.

1. Its tier is `preemptible` and less important than the ticket's own; its first byte has not gone out (it was not
   kept), and it was preempted fewer than `max_preemptions` times.
2. Without it, and without those chosen before it, its tier is not below its reserve (rule 1): a floor stays a floor.
3. Back in the queue it would not stand before the ticket, nor does whoever is next in its tier: else the room that it
   gave would be taken from the ticket again.
4. It could be admitted again at all: a pool may have shrunk since.

They are taken from the least important tier first, the latest admitted first, until the ticket fits; then whoever
turned out not to be needed is spared, the last chosen first. Where all of them together would not do, nobody is taken.

No thrashing. A victim comes back to the front of its tier, and its tier is not below its reserve; by 3 the ticket
stands before it and before everybody else of its tier. So, if nothing else happens meanwhile, the ticket is the next
one that is admitted. Otherwise whoever is admitted first came to stand before it: by its importance, its floor, or its
age. However that goes, nobody is preempted more than `max_preemptions` times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sidecar.policy.rules import PoolRules, largest_request
from sidecar.scheduling.ticket import Ticket
from sidecar.scheduling.tier import Tier


class Preemption:
    """The leases that may be taken back, and those that were chosen: they hold their room until they let go.

    `hold` books tokens and requests (of either sign) with a tier.
    """

    def __init__(self, tiers: Sequence[Tier], hold: Callable[[int, int, int], None]) -> None:
        self._tiers = tiers
        self._hold = hold
        self.leases: dict[str, Ticket] = {}  # in order of admission
        self._victims: dict[str, Ticket] = {}  # those of them that were chosen

    def admitted(self, lease: Ticket) -> None:
        """A lease of a preemptible tier begins."""
        self.leases[lease.id] = lease

    def keep(self, lease_id: str) -> bool:
        """A lease is over, or is never to be taken. Whether it had been chosen."""
        self.leases.pop(lease_id, None)
        return self._victims.pop(lease_id, None) is not None

    def let_go(self, lease_id: str) -> Ticket | None:
        """A victim's engine has let go. None where no such lease was chosen."""
        victim = self._victims.pop(lease_id, None)
        if victim is not None:
            del self.leases[lease_id]
        return victim

    def choose(
        self, first: Ticket, score: int, rules: PoolRules, fits: Callable[[Ticket, int], bool], now_us: int
    ) -> list[Ticket]:
        """Whom the first in order takes room from, beside those chosen before. Empty where that is of no use."""
        leaving = list(self._victims.values())
        self._book(leaving, -1)
        chosen = [] if fits(first, score) else self._enough(first, score, rules, fits, now_us)
        self._book(leaving, 1)
        self._victims.update((victim.id, victim) for victim in chosen)
        return chosen

    def _enough(
        self, first: Ticket, score: int, rules: PoolRules, fits: Callable[[Ticket, int], bool], now_us: int
    ) -> list[Ticket]:
        chosen: list[Ticket] = []
        for lease in self._candidates(first, score, rules, now_us):
            if self._tiers[lease.tier].has_its_reserve_without(lease):
                chosen.append(lease)
                self._book((lease,), -1)
                if fits(first, score):
                    break
        found = self._needed(first, score, chosen, fits) if fits(first, score) else []
        self._book(found or chosen, 1)
        return found

    def _needed(
        self, first: Ticket, score: int, chosen: Sequence[Ticket], fits: Callable[[Ticket, int], bool]
    ) -> list[Ticket]:
        """Spares whom the ticket fits without, and books back what they hold."""
        needed = list(chosen)
        for lease in reversed(chosen):
            self._book((lease,), 1)
            if fits(first, score):
                needed.remove(lease)
            else:
                self._book((lease,), -1)
        return needed

    def _candidates(self, first: Ticket, score: int, rules: PoolRules, now_us: int) -> list[Ticket]:
        """The leases that satisfy 1, 3 and 4, in the order in which they are taken."""
        place = (not self._tiers[first.tier].is_below_reserve(), score, first.arrived_us, first.sequence)
        largest: dict[int, tuple[int, int]] = {}
        for level in range(first.tier + 1, len(self._tiers)):
            tier = self._tiers[level]
            head = tier.queue.head()
            if tier.rules.preemptible and (head is None or not self._stands_before(head, place, now_us)):
                largest[level] = largest_request(rules, level)
        found = [
            lease
            for lease in reversed(self.leases.values())
            if lease.id not in self._victims
            and (most := largest.get(lease.tier)) is not None
            and lease.preemptions < rules.max_preemptions
            and lease.tokens <= most[0]
            and lease.requests <= most[1]
            and not self._stands_before(lease, place, now_us)
        ]
        return sorted(found, key=lambda lease: -lease.tier)  # stable: the latest admitted stay first

    def _stands_before(self, other: Ticket, place: tuple[bool, int, int, int], now_us: int) -> bool:
        """Whether a ticket of a tier that has its reserve comes before the place of another (rule 1)."""
        score = self._tiers[other.tier].aged_score(other, now_us)
        return (True, score, other.arrived_us, other.sequence) < place

    def _book(self, leases: Sequence[Ticket], sign: int) -> None:
        for lease in leases:
            self._hold(lease.tier, sign * lease.tokens, sign * lease.requests)
