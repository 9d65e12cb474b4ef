"""A witness stands beside a scheduler, hands it every operation and writes down what it does, for others to judge.

The record is the oracle's list of requests, but the scheduler under test decides who is admitted: `Oracle.admit`
follows it. Just before it follows, the witness notes what the page says about that decision.
"""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from fractions import Fraction
from typing import NamedTuple

from oracle import Answer, Oracle, Policy, Request

from sidecar.scheduling import Admission, Scheduler


class Decision(NamedTuple):
    """One admission, as it was reported, beside what the record says of the moment just before it."""

    request: Request
    reported: Answer
    recorded: Answer
    first_in_order: str
    fitted: bool
    own_tier_is_below: bool
    tiers_below_with_a_candidate: tuple[int, ...]
    earlier_of_same_tenant: tuple[str, ...]
    said_to_overtake: dict[int, str]
    overtakes: dict[int, str]
    used_after: tuple[int, int]


class Choice(NamedTuple):
    """Whom one call of `preempt` chose, beside what the record says of the moment just before it.

    `unneeded` are those without whom the first in order would have fitted all the same, once the others let go, and
    `next_in` who is admitted next if all of them do so at once.
    """

    first: Request | None
    had_waited_long_enough: bool
    victims: tuple[Request, ...]
    not_allowed: tuple[str, ...]
    preempted_too_often: tuple[str, ...]
    below_their_reserve: tuple[int, ...]
    is_enough: bool
    unneeded: tuple[str, ...]
    next_in: str | None


class Backlog:
    """The service two tenants of one tier received while both waited, weighted, and the bound on its difference."""

    def __init__(self) -> None:
        self.difference = self.least = self.most = Fraction(0)

    def serve(self, amount: Fraction) -> None:
        self.difference += amount
        self.least = min(self.least, self.difference)
        self.most = max(self.most, self.difference)

    def spread(self) -> Fraction:
        """The greatest difference over any interval inside this backlog."""
        return self.most - self.least


class Witness:
    def __init__(self, scheduler: Scheduler, policy: Policy) -> None:
        self.scheduler = scheduler
        self.record = Oracle(policy, divide=lambda tokens, weight: tokens / weight)
        self.now_us = 0
        self.latest: list[Decision] = []
        self.chosen: list[Choice] = []
        self.dispatched = False
        self.outgrown = False
        self.ends: Counter[str] = Counter()
        self.disagreements: list[str] = []
        self.backlogs: dict[tuple[int, str, str], Backlog] = {}
        self.unfair: list[str] = []
        self.canceled_since_afresh: set[int] = set()

    def pass_time(self, by_us: int) -> None:
        self.now_us += by_us
        self._turn()

    def submit(self, id: str, **ticket) -> None:
        self._turn()
        self.scheduler.submit(id, now_us=self.now_us, **ticket)
        self.record.submit(id, now_us=self.now_us, **ticket)
        self._keep_backlogs()

    def settle(self, id: str) -> None:
        self._turn()
        self._compare("settle", id, self.scheduler.settle(id), self.record.settle(id))
        self._drain()

    def cancel(self, id: str) -> None:
        self._turn()
        self._compare("cancel", id, self.scheduler.cancel(id, self.now_us) is not None, self.record.cancel(id))
        self.canceled_since_afresh |= {r.tier for r in self.record.submitted if r.id == id}
        self._keep_backlogs()

    def resize(self, id: str, tokens: int) -> None:
        self._turn()
        self._compare("resize", id, self.scheduler.resize(id, tokens), self.record.resize(id, tokens))
        self.outgrown = self.outgrown or self.over_the_pool()
        self._drain()

    def dispatch(self) -> list[str]:
        self._turn()
        for admission in self.scheduler.dispatch(self.now_us):
            self.latest.append(self._decision(admission))
        self.dispatched = True
        return [decision.request.id for decision in self.latest]

    def preempt(self) -> list[str]:
        """Call it after `dispatch`."""
        earlier = [request for request in self.record.held() if request.chosen]
        first = self.record.first(self.now_us)
        names = [ticket.id for ticket in self.scheduler.preempt(self.now_us)]
        if names:
            self.chosen.append(self._choice(first, names, earlier))
        return names

    def keep(self, id: str) -> None:
        self._turn()
        if self.scheduler.keep(id) != self.record.keep(id):
            self.disagreements.append(f"keep {id} at {self.now_us}")

    def requeue(self, id: str) -> None:
        self._turn()
        did, should = self.scheduler.requeue(id, self.now_us), self.record.requeue(id, self.now_us)
        if did != should:
            self.disagreements.append(f"requeue {id} at {self.now_us}: {did}, the record says {should}")
        if did:  # its tenant has already received, by its tags, what it now gets once more
            self.canceled_since_afresh |= {r.tier for r in self.record.submitted if r.id == id}
        self._drain()
        self._keep_backlogs()

    def over_the_pool(self) -> bool:
        used = zip(self.record.used(), self.record.policy.capacity, strict=True)
        return any(capacity is not None and mine > capacity for mine, capacity in used)

    def _turn(self) -> None:
        self.latest, self.chosen, self.dispatched = [], [], False

    def _drain(self) -> None:
        self.outgrown = self.outgrown and self.over_the_pool()

    def _compare(self, verb: str, id: str, did: bool, should: bool) -> None:
        if did and verb != "resize":
            self.ends[id] += 1
        if did != should:
            self.disagreements.append(f"{verb} {id} at {self.now_us}: {did}, the record says {should}")

    def _decision(self, admission: Admission) -> Decision:
        record, now_us = self.record, self.now_us
        request = next(r for r in record.waiting() if r.id == admission.ticket.id)
        candidates = [head for head in record.heads() if record.is_candidate(head)]
        first = record.first(now_us)
        mine = [r for r in record.waiting(request.tier) if r.tenant == request.tenant]
        facts = {
            "first_in_order": first.id if first else "",
            "fitted": record.fits(request, now_us),
            "own_tier_is_below": record.is_below_its_reserve(request.tier),
            "tiers_below_with_a_candidate": tuple(h.tier for h in candidates if record.is_below_its_reserve(h.tier)),
            "said_to_overtake": {tier: rule.value for tier, rule in admission.passed},
            "overtakes": record.overtakes(request, now_us),
            "earlier_of_same_tenant": tuple(r.id for r in mine if r.number < request.number),
        }
        self._serve(request)
        recorded = record.admit(request.id, now_us)
        self._keep_backlogs()
        return Decision(
            request=request, reported=as_answer(admission), recorded=recorded, used_after=record.used(), **facts
        )

    def _choice(self, first: Request | None, names: list[str], earlier: list[Request]) -> Choice:
        record, now_us = self.record, self.now_us
        victims = [request for name in names for request in record.held() if request.id == name]
        all_of_them = [*earlier, *victims]
        tiers = record.policy.tiers
        choice = Choice(
            first=first,
            had_waited_long_enough=first is not None and record.has_waited_long_enough(first, now_us),
            victims=tuple(victims),
            not_allowed=tuple(
                victim.id
                for victim in victims
                if first is None or victim.tier <= first.tier or victim.kept or not tiers[victim.tier].preemptible
            ),
            preempted_too_often=tuple(v.id for v in victims if len(v.returns) >= record.policy.max_preemptions),
            below_their_reserve=tuple(v.tier for v in victims if record.is_below_without(all_of_them, v.tier)),
            is_enough=first is not None and record.fits_without(all_of_them, first, now_us),
            unneeded=tuple(
                victim.id
                for victim in victims
                if first is not None and record.fits_without([r for r in all_of_them if r is not victim], first, now_us)
            ),
            next_in=None if earlier else self._next_in(names),
        )
        for victim in victims:
            victim.chosen = True
        return choice

    def _next_in(self, names: list[str]) -> str | None:
        """Whom the scheduler admits next if its victims let go now, and nothing else happens."""
        tried = deepcopy(self.scheduler)
        for name in names:
            tried.requeue(name, self.now_us)
        return next((admission.ticket.id for admission in tried.dispatch(self.now_us)), "nobody")

    def _serve(self, request: Request) -> None:
        """Books an admission with every pair of backlogged tenants that it belongs to, before the ticket leaves."""
        amount = Fraction(request.tokens, request.weight)
        for (tier, one, other), backlog in self.backlogs.items():
            if tier == request.tier and request.tenant in (one, other):
                backlog.serve(amount if request.tenant == one else -amount)
                bound = self._largest(tier, one) + self._largest(tier, other)
                if backlog.spread() > bound:
                    self.unfair.append(f"tier {tier}: {one!r} and {other!r} differ by {backlog.spread()} > {bound}")

    def _largest(self, tier: int, tenant: str) -> Fraction:
        mine = [r for r in self.record.submitted if (r.tier, r.tenant) == (tier, tenant)]
        return max(Fraction(r.tokens, r.weight) for r in mine)

    def _keep_backlogs(self) -> None:
        """Pairs of tenants that wait. A cancellation ends the promise until the tier's tags start afresh."""
        pairs = set()
        for tier in range(len(self.record.policy.tiers)):
            tenants = sorted({request.tenant for request in self.record.waiting(tier)})
            if not tenants:
                self.canceled_since_afresh.discard(tier)
            elif tier not in self.canceled_since_afresh:
                pairs |= {(tier, one, other) for one in tenants for other in tenants if one < other}
        self.backlogs = {pair: self.backlogs.get(pair) or Backlog() for pair in pairs}


def as_answer(admission: Admission) -> Answer:
    wait = admission.wait
    return Answer(
        admission.ticket.id, wait.queue_wait_us, wait.starvation_us, tuple(wait.served_ahead), admission.level
    )
