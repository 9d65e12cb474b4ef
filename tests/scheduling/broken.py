"""Schedulers that are wrong on purpose, one mistake each. A check that passes its scheduler proves nothing."""

from __future__ import annotations

from dataclasses import replace

from sidecar.policy.rules import PoolRules
from sidecar.scheduling import Admission, Rule, Scheduler, Ticket, Wait
from sidecar.scheduling.fair_queue import FairQueue, Lane
from sidecar.scheduling.order import Candidate, LevelOrder, OrderClass
from sidecar.scheduling.preemption import Preemption
from sidecar.scheduling.tier import TierState


class OtherOrder(Scheduler):
    """Orders its candidates by a mistaken order."""

    Order = LevelOrder

    def __init__(self, rules: PoolRules) -> None:
        super().__init__(rules)
        self._order = self._preemption._order = self.Order(rules, self._tiers)


class DoNothing(Scheduler):
    """Admits nothing."""

    def dispatch(self, now_us: int) -> list[Admission]:
        return []


class FirstComeFirstServed(OtherOrder):
    """Ignores tiers: the oldest ticket comes first."""

    class Order(LevelOrder):
        def in_order(self, now_us: int) -> list[Candidate]:
            heads = [head for tier in self._tiers if (head := tier.queue.head()) is not None]
            places = [(OrderClass.ALWAYS_FIRST, 0, 0, head.arrived_us, head.sequence, head) for head in heads]
            return sorted(Candidate(*place, 0, 0, 0) for place in places)


class SmallOnesSlipPast(Scheduler):
    """Admits whatever fits while the first in order does not (rule 3 is missing)."""

    def holds_its_place(self, candidate: Candidate) -> bool:
        return False


class HoldsEveryPlace(Scheduler):
    """Lets no ticket pass one that cannot fit for long."""

    def holds_its_place(self, candidate: Candidate) -> bool:
        return True


class OwesNothing(Scheduler):
    """Gives a tier a turn whenever it is below its reserve."""

    def _release(self, lease: Ticket, now_us: int) -> None:
        lease.excess = 0
        super()._release(lease, now_us)


class GivesTurnsByLevel(OtherOrder):
    """Gives every turn to the more important tier."""

    class Order(LevelOrder):
        def in_order(self, now_us: int) -> list[Candidate]:
            return sorted(candidate._replace(turn=0) for candidate in super().in_order(now_us))


class CountsAFloorWhenTheTierIsEmpty(OtherOrder):
    """Counts a turn as being inside the reserve, which was an earlier rule."""

    class Order(LevelOrder):
        def in_order(self, now_us: int) -> list[Candidate]:
            return sorted(
                candidate._replace(order_class=OrderClass.INSIDE, turn=0)
                if candidate.order_class is OrderClass.TURN
                else candidate
                for candidate in super().in_order(now_us)
            )


class AdmitsNothingWhileHeldBack(Scheduler):
    """Floors are void while the engine's queue is too long."""

    def dispatch(self, now_us: int) -> list[Admission]:
        return [] if self.is_held_back(now_us) else super().dispatch(now_us)


class ChargesTicketsThatLeave(Scheduler):
    """Charges a tenant for tickets that are canceled."""

    def cancel(self, ticket_id: str, now_us: int) -> Wait | None:
        ticket = self._waiting.get(ticket_id)
        if ticket is not None and not ticket.returns:
            lane = self._tiers[ticket.tier].queue._lanes[ticket.tenant]
            lane.finish = max(lane.finish, ticket.start) + ticket.tokens / ticket.weight
        return super().cancel(ticket_id, now_us)


class LargerOnesPassNothing(OtherOrder):
    """Lets a tier that owes wait for a head that is larger than its reserve."""

    class Order(LevelOrder):
        def in_order(self, now_us: int) -> list[Candidate]:
            heads = [tier.queue.head() for tier in self._tiers]
            return [it for it in super().in_order(now_us) if it.ticket is heads[it.ticket.tier]]


class PutsATierLastAfterATurnOnly(Scheduler):
    """A tier that is admitted inside its reserve keeps its place among the turns."""

    def _admit(self, candidate: Candidate, now_us: int) -> Admission:
        tier = self._tiers[candidate.ticket.tier]
        before = tier.latest_admission
        admission = super()._admit(candidate, now_us)
        if candidate.order_class is not OrderClass.TURN:
            tier.latest_admission = before
        return admission


class IgnoresHeadroom(Scheduler):
    """Admits tickets to the headroom of more important tiers."""

    def fits(self, candidate: Candidate) -> bool:
        return super().fits(candidate._replace(headroom_level=0))


class HasNoFloors(Scheduler):
    """Orders by aged level alone: holding less than the reserve counts for nothing."""

    def __init__(self, rules: PoolRules) -> None:
        super().__init__(rules)
        for tier in self._tiers:
            tier.rules = replace(tier.rules, reserve_tokens=0, reserve_requests=0, always_first=False)


class AgesPastTheCeiling(OtherOrder):
    """Ages linearly up to the top, whatever the ceiling says."""

    class Order(LevelOrder):
        def change_rules(self, rules: PoolRules) -> None:
            super().change_rules(replace(rules, ceiling=0))


class LastInFirstOut(Scheduler):
    """Takes a tier's newest ticket instead of its head: a tenant overtakes itself."""

    def _next_admission(self, now_us: int) -> Candidate | None:
        found = super()._next_admission(now_us)
        if found is None:
            return None
        mine = [ticket for ticket in self._waiting.values() if ticket.tier == found.ticket.tier]
        return found._replace(ticket=max(mine, key=lambda ticket: ticket.sequence))


class KnowsNoWeights(Scheduler):
    """Gives every tenant the same, in order of arrival."""

    def submit(self, ticket_id: str, **ticket) -> Ticket:
        return super().submit(ticket_id, **(ticket | {"tenant": "", "weight": 1}))


class ServesTenantsByArrival(Scheduler):
    """Charges no tenant: the oldest ticket of a tier is its head."""

    class Queue(FairQueue):
        def _tag(self, first: Ticket, lane: Lane) -> None:
            first.start = 0.0
            self._enter_heap(first)

    def __init__(self, rules: PoolRules) -> None:
        super().__init__(rules)
        for tier in self._tiers:
            tier.queue = self.Queue(tier.queue.small_tokens, tier.queue.small_requests)


class ChargesNoGrowth(Scheduler):
    """Charges a tenant for what its leases were admitted with, whatever they come to use."""

    def charge(self, tier: int, tenant: str, weight: int, tokens: int) -> None:
        pass


class ForgetsChargesAtTheNextAdmission(Scheduler):
    """Charges an admission from the start of its ticket, though the tenant was charged since that was tagged."""

    class Queue(FairQueue):
        def admit(self, ticket: Ticket) -> None:
            lane = self._lanes.get(ticket.tenant)
            if lane is not None and not ticket.returns:
                lane.finish = min(lane.finish, ticket.start)
            super().admit(ticket)

    def __init__(self, rules: PoolRules) -> None:
        super().__init__(rules)
        for tier in self._tiers:
            tier.queue = self.Queue(tier.rules.reserve_tokens, tier.rules.reserve_requests)


class ForgetsTheSecondDimension(Scheduler):
    """Counts tokens only."""

    def fits(self, candidate: Candidate) -> bool:
        wanted, candidate.ticket.requests = candidate.ticket.requests, -(2**40)
        fits = super().fits(candidate)
        candidate.ticket.requests = wanted
        return fits

    def _has_any_room(self) -> bool:
        return True


class SettlesTwice(Scheduler):
    """Returns True for every settle."""

    def settle(self, ticket_id: str, now_us: int) -> bool:
        super().settle(ticket_id, now_us)
        return True


class LeaksTokens(Scheduler):
    """Gives a settled lease's requests back, and not its tokens."""

    def settle(self, ticket_id: str, now_us: int) -> bool:
        lease = self._leases.get(ticket_id)
        if lease is not None:
            self.book(lease.tier, lease.tokens, 0)
        return super().settle(ticket_id, now_us)


class CallsEveryWaitStarvation(Scheduler):
    """Reports the whole queue wait as starvation."""

    def dispatch(self, now_us: int) -> list[Admission]:
        return [
            admission._replace(wait=admission.wait._replace(starvation_us=admission.wait.queue_wait_us))
            for admission in super().dispatch(now_us)
        ]


class CallsEveryOvertakingTheReserve(Scheduler):
    """Reports the tiers that a ticket passed, always with the same rule."""

    def _passed(self, candidate: Candidate, now_us: int) -> list[tuple[int, Rule]]:
        return [(tier, Rule.RESERVE) for tier, _ in super()._passed(candidate, now_us)]


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
        self._preemption = self.Rules(self._tiers, self._order, self)


class PreemptsEveryTier(Preempting):
    """Takes from the ticket's own tier, and from more important ones, too."""

    class Rules(Preemption):
        def _eligible(self, served: Candidate, rules: PoolRules, now_us: int) -> list[Ticket]:
            return [lease for lease in self.leases.values() if lease.id not in self._victims]


class PreemptsForEver(Preempting):
    """Takes from the same request as often as it likes."""

    class Rules(Preemption):
        def _eligible(self, served: Candidate, rules: PoolRules, now_us: int) -> list[Ticket]:
            return super()._eligible(served, replace(rules, max_preemptions=10**6), now_us)


class PreemptsFloors(Scheduler):
    """Takes a tier's reserve away."""

    def __init__(self, rules: PoolRules) -> None:
        super().__init__(rules)
        self._preemption = Preemption([Floorless(tier.rules) for tier in self._tiers], self._order, self)
        for real, floorless in zip(self._tiers, self._preemption._tiers, strict=True):
            floorless.queue = real.queue


class Floorless(TierState):
    def has_its_reserve_without(self, lease: Ticket) -> bool:
        return True


class PreemptsMoreThanIsNeeded(Preempting):
    """Spares no lease, needed or not."""

    class Rules(Preemption):
        def _needed(self, order, chosen):
            return list(chosen)


class PreemptsInVain(Preempting):
    """Chooses a lease even though the ticket will not fit."""

    class Rules(Preemption):
        def _enough(self, order, rules, now_us):
            return super()._enough(order, rules, now_us) or self._eligible(order[-1], rules, now_us)[:1]


class PreemptsWhatComesBackFirst(Preempting):
    """Takes from leases that would come before the ticket once they are back."""

    def __init__(self, rules: PoolRules) -> None:
        super().__init__(rules)
        self._preemption._order = self.Order(rules, self._tiers)

    class Order(LevelOrder):
        def comes_before(self, ticket: Ticket, candidate: Candidate, now_us: int) -> bool:
            return False
