"""Schedulers that are wrong on purpose, one mistake each. A check that lets its scheduler pass proves nothing."""

from __future__ import annotations

from dataclasses import replace

from sidecar.policy.rules import PoolRules
from sidecar.scheduling import Admission, Rule, Scheduler, Ticket


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
