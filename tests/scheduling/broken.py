"""Schedulers that are wrong on purpose, one mistake each. A check that lets its scheduler pass proves nothing."""

from __future__ import annotations

from dataclasses import replace

from sidecar.policy.rules import PoolRules
from sidecar.scheduling import Admission, Rule, Scheduler, Ticket
from sidecar.scheduling.preemption import Preemption
from sidecar.scheduling.tier import Tier


class DoNothing(Scheduler):
    """Admits nobody."""

    def dispatch(self, now_us: int) -> list[Admission]:
        return []


class FirstComeFirstServed(Scheduler):
    """Knows no tiers: the oldest ticket goes first."""

    def _first(self, now_us: int) -> tuple[Ticket, int] | None:
        heads = [head for tier in self._tiers if (head := tier.queue.head()) is not None]
        oldest = min(heads, key=lambda head: head.sequence, default=None)
        return None if oldest is None else (oldest, 0)


class SmallOnesSlipPast(Scheduler):
    """Admits whoever fits while the first in order does not (rule 3 is missing)."""

    def _first(self, now_us: int) -> tuple[Ticket, int] | None:
        first = super()._first(now_us)
        if first is None or self._fits(*first):
            return first
        for tier in self._tiers:
            head = tier.queue.head()
            if head and not tier.is_at_limit(head) and self._fits(head, tier.aged_score(head, now_us)):
                return head, tier.aged_score(head, now_us)
        return first


class IgnoresHeadroom(Scheduler):
    """Lets everybody into the room that more important tiers keep."""

    def _fits(self, ticket: Ticket, score: int) -> bool:
        return super()._fits(ticket, 0)


class HasNoFloors(Scheduler):
    """Orders by aged level alone: holding less than the reserve counts for nothing."""

    def __init__(self, rules: PoolRules) -> None:
        super().__init__(rules)
        for tier in self._tiers:
            tier.rules = replace(tier.rules, reserve_tokens=0, reserve_requests=0, always_first=False)


class AgesPastTheCeiling(Scheduler):
    """Linear aging up to the top, whatever the ceiling says."""

    def __init__(self, rules: PoolRules) -> None:
        super().__init__(rules)
        for tier in self._tiers:
            tier._ceiling_score = 0
            tier._ages = rules.promote_after_us is not None


class LastInFirstOut(Scheduler):
    """Takes a tier's newest ticket instead of its head: a tenant overtakes itself."""

    def _first(self, now_us: int) -> tuple[Ticket, int] | None:
        first = super()._first(now_us)
        if first is None:
            return None
        mine = [ticket for ticket in self._waiting.values() if ticket.tier == first[0].tier]
        return max(mine, key=lambda ticket: ticket.sequence), first[1]


class KnowsNoWeights(Scheduler):
    """Gives every tenant the same, in order of arrival."""

    def submit(self, ticket_id: str, **ticket) -> Ticket:
        return super().submit(ticket_id, **(ticket | {"tenant": "", "weight": 1}))


class ForgetsTheSecondDimension(Scheduler):
    """Counts tokens only."""

    def _fits(self, ticket: Ticket, score: int) -> bool:
        wanted, ticket.requests = ticket.requests, -(2**40)
        fits = super()._fits(ticket, score)
        ticket.requests = wanted
        return fits

    def _has_any_room(self) -> bool:
        return True


class SettlesTwice(Scheduler):
    """Says yes to every settle."""

    def settle(self, ticket_id: str) -> bool:
        super().settle(ticket_id)
        return True


class LeaksTokens(Scheduler):
    """Gives a settled lease's requests back, and not its tokens."""

    def settle(self, ticket_id: str) -> bool:
        lease = self._leases.get(ticket_id)
        if lease is not None:
            self._hold(lease.tier, lease.tokens, 0)
        return super().settle(ticket_id)


class CallsEveryWaitStarvation(Scheduler):
    """Reports the whole queue wait as starvation."""

    def dispatch(self, now_us: int) -> list[Admission]:
        return [
            admission._replace(wait=admission.wait._replace(starvation_us=admission.wait.queue_wait_us))
            for admission in super().dispatch(now_us)
        ]


class CallsEveryOvertakingTheReserve(Scheduler):
    """Says whom a ticket overtook, and always the same reason."""

    def _passed(self, ticket: Ticket) -> list[tuple[int, Rule]]:
        return [(tier, Rule.RESERVE) for tier, _ in super()._passed(ticket)]


class PreemptsAtOnce(Scheduler):
    """Does not wait `preempt_after`."""

    def __init__(self, rules: PoolRules) -> None:
        super().__init__(rules)
        for tier in self._tiers:
            tier.rules = replace(tier.rules, preempt_after_us=0)


class PreemptsWhatWasKept(Scheduler):
    """Preempts what has sent its first byte."""

    def keep(self, ticket_id: str) -> bool:
        return self._preemption._victims.pop(ticket_id, None) is not None


class Preempting(Scheduler):
    """Preempts by rules of its own."""

    Rules = Preemption

    def __init__(self, rules: PoolRules) -> None:
        super().__init__(rules)
        self._preemption = self.Rules(self._tiers, self._hold)


class PreemptsEveryTier(Preempting):
    """Takes from the ticket's own tier, and from more important ones, too."""

    class Rules(Preemption):
        def _candidates(self, first: Ticket, score: int, rules: PoolRules, now_us: int) -> list[Ticket]:
            return [lease for lease in self.leases.values() if lease.id not in self._victims]


class PreemptsForEver(Preempting):
    """Takes from the same request as often as it likes."""

    class Rules(Preemption):
        def _candidates(self, first: Ticket, score: int, rules: PoolRules, now_us: int) -> list[Ticket]:
            return super()._candidates(first, score, replace(rules, max_preemptions=10**6), now_us)


class PreemptsFloors(Scheduler):
    """Takes a tier's reserve away."""

    def __init__(self, rules: PoolRules) -> None:
        super().__init__(rules)
        self._preemption = Preemption([Floorless(tier.rules, rules) for tier in self._tiers], self._hold)
        for real, floorless in zip(self._tiers, self._preemption._tiers, strict=True):
            floorless.queue = real.queue


class Floorless(Tier):
    def has_its_reserve_without(self, lease: Ticket) -> bool:
        return True


class PreemptsMoreThanIsNeeded(Preempting):
    """Spares nobody who turned out not to be needed."""

    class Rules(Preemption):
        def _needed(self, first, score, chosen, fits):
            return list(chosen)


class PreemptsInVain(Preempting):
    """Takes what there is, though the ticket will not fit."""

    class Rules(Preemption):
        def _enough(self, first, score, rules, fits, now_us):
            return (
                super()._enough(first, score, rules, fits, now_us) or self._candidates(first, score, rules, now_us)[:1]
            )


class PreemptsWhoComesBackFirst(Preempting):
    """Takes from those who stand before the ticket once they are back."""

    class Rules(Preemption):
        def _stands_before(self, other, place, now_us):
            return False
