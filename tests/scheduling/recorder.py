"""A recorder beside a scheduler: it passes every operation on and keeps the decisions for the invariants.

The record is the oracle's list of requests, but the scheduler under test decides who is admitted: `Oracle.admit`
follows it. Just before it follows, the recorder notes the answers of the oracle about that decision.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import NamedTuple

from copies import copy_of
from oracle import INSIDE, TURN, Answer, Oracle, Policy, Request

from sidecar.scheduling import Admission, Scheduler


class Decision(NamedTuple):
    """One admission, as it was reported, beside the state of the record just before it."""

    request: Request
    reported: Answer
    recorded: Answer
    first_in_order: str
    fitted: bool
    order_class: int
    inside_and_first: tuple[str, ...]
    turns_before: tuple[str, ...]
    earlier_of_same_tenant: tuple[str, ...]
    said_to_overtake: dict[int, str]
    overtakes: dict[int, str]
    used_after: tuple[int, int]


class Choice(NamedTuple):
    """The victims of one call of `preempt`, beside the state of the record just before it.

    `served` is the first that may preempt. `unneeded` are those without whom it would have fitted all the same, with
    every ticket before it, once the others were released; `next_in` is the ticket that is admitted next if all of them
    are released at once, and `expected_next` the ticket that should be.
    """

    served: Request | None
    had_waited_long_enough: bool
    victims: tuple[Request, ...]
    not_allowed: tuple[str, ...]
    preempted_too_often: tuple[str, ...]
    below_their_reserve: tuple[int, ...]
    is_enough: bool
    unneeded: tuple[str, ...]
    next_in: str | None
    expected_next: str | None


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


class Recorder:
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
        self.charged_twice: set[int] = set()
        self.charged_since: Counter[tuple[int, str]] = Counter()  # the latest admission of a waiting tenant, by weight
        self.most_charged: Counter[tuple[int, str]] = Counter()
        self.granted_overtaken: dict[str, int | None] = {}  # as the grant said it to the lease

    def pass_time(self, by_us: int) -> None:
        self.now_us += by_us
        self._turn()
        self._keep_backlogs()

    def submit(self, id: str, **ticket) -> None:
        self._turn()
        self.scheduler.submit(id, now_us=self.now_us, **ticket)
        self.record.submit(id, now_us=self.now_us, **ticket)
        self._keep_backlogs()

    def settle(self, id: str) -> None:
        self._turn()
        self._compare("settle", id, self.scheduler.settle(id, self.now_us), self.record.settle(id, self.now_us))
        self._drain()

    def cancel(self, id: str) -> None:
        self._turn()
        self._compare("cancel", id, self.scheduler.cancel(id, self.now_us) is not None, self.record.cancel(id))
        self._keep_backlogs()

    def hold_back(self, for_us: int) -> None:
        self._turn()
        self.scheduler.hold_back(self.now_us + for_us)
        self.record.hold_back(self.now_us + for_us)

    def resize(self, id: str, tokens: int) -> None:
        self._turn()
        self._compare("resize", id, self.scheduler.resize(id, tokens), self.record.resize(id, tokens))
        self.outgrown = self.outgrown or self.over_the_pool()
        self._drain()

    def charge(self, tier: int, tenant: str, weight: int, tokens: int) -> None:
        self._turn()
        self.scheduler.charge(tier, tenant, weight, tokens)
        self.record.charge(tier, tenant, weight, tokens)
        if any(request.tenant == tenant for request in self.record.waiting(tier)):
            place, amount = (tier, tenant), Fraction(tokens, weight)
            self.charged_since[place] += amount
            self.most_charged[place] = max(self.most_charged[place], self.charged_since[place])
            self._book(tier, tenant, amount)

    def dispatch(self) -> list[str]:
        self._turn()
        for admission in self.scheduler.dispatch(self.now_us):
            self.latest.append(self._decision(admission))
        self.dispatched = True
        return [decision.request.id for decision in self.latest]

    def preempt(self) -> list[str]:
        """Call it after `dispatch`."""
        earlier = [request for request in self.record.held() if request.chosen]
        served = self.record.preempting(self.now_us)
        names = [ticket.id for ticket in self.scheduler.preempt(self.now_us)]
        if names:
            self.chosen.append(self._choice(served, names, earlier))
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
            self.charged_twice |= {r.tier for r in self.record.submitted if r.id == id}
        self._drain()
        self._keep_backlogs()

    def hand_back(self, id: str) -> None:
        self._turn()
        lease = self.scheduler._leases.get(id)
        overtaken_us = None if lease is None else self.granted_overtaken[id]
        did = self.scheduler.hand_back(id, self.now_us, overtaken_us)
        if did != self.record.hand_back(id, self.now_us):
            self.disagreements.append(f"hand back {id} at {self.now_us}: {did}")
        if did:
            self.charged_twice |= {r.tier for r in self.record.submitted if r.id == id}
        self._drain()
        self._keep_backlogs()

    def pause(self, *, is_paused: bool) -> None:
        self._turn()
        self.scheduler.is_paused = self.record.is_paused = is_paused

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
        self.granted_overtaken[admission.ticket.id] = admission.wait.overtaken_at_us
        request = next(r for r in record.waiting() if r.id == admission.ticket.id)
        following = record.next_admission(now_us)
        order = record.in_order(now_us)
        classes = {other.id: record.class_of(other, now_us) for other in order}
        mine = [r for r in record.waiting(request.tier) if r.tenant == request.tenant]
        turn = record.last_admission(request.tier)
        facts = {
            "first_in_order": following.id if following else "",
            "fitted": record.fits(request, now_us),
            "order_class": record.class_of(request, now_us),
            "inside_and_first": tuple(
                o.id
                for o in order
                if classes[o.id] == INSIDE and o is not request and record.holds_its_place(o, now_us)
            ),
            "turns_before": tuple(
                o.id
                for o in order
                if classes[o.id] == TURN and record.last_admission(o.tier) < turn and record.holds_its_place(o, now_us)
            ),
            "said_to_overtake": {tier: rule.value for tier, rule in admission.passed},
            "overtakes": record.overtakes(request, now_us),
            "earlier_of_same_tenant": tuple(
                r.id for r in mine if r.number < request.number and not self._may_be_passed(r, request)
            ),
        }
        self._serve(request)
        recorded = record.admit(request.id, now_us)
        self._keep_backlogs()
        return Decision(
            request=request, reported=as_answer(admission), recorded=recorded, used_after=record.used(), **facts
        )

    def _may_be_passed(self, earlier: Request, request: Request) -> bool:
        """Whether a ticket that returned waits before one of its tenant that may pass it, because the tier owes."""
        record = self.record
        may_pass = record.owes(request.tier, self.now_us) and record.is_within_a_reserve(request)
        return may_pass and bool(earlier.returns) and not record.is_within_a_reserve(earlier)

    def _choice(self, served: Request | None, names: list[str], earlier: list[Request]) -> Choice:
        record, now_us = self.record, self.now_us
        victims = [request for name in names for request in record.held() if request.id == name]
        all_of_them = [*earlier, *victims]
        tiers = record.policy.tiers
        order = record.in_order(now_us)
        before = [] if served is None else order[: order.index(served) + 1]
        choice = Choice(
            served=served,
            had_waited_long_enough=served is not None,
            victims=tuple(victims),
            not_allowed=tuple(
                victim.id
                for victim in victims
                if served is None or victim.tier <= served.tier or victim.kept or not tiers[victim.tier].preemptible
            ),
            preempted_too_often=tuple(v.id for v in victims if len(v.returns) >= record.policy.max_preemptions),
            below_their_reserve=tuple(v.tier for v in victims if record.gives_up_its_reserve(all_of_them, v.tier)),
            is_enough=bool(before) and record.would_fit_without(all_of_them, before, now_us),
            unneeded=tuple(
                victim.id
                for victim in victims
                if before and record.would_fit_without([r for r in all_of_them if r is not victim], before, now_us)
            ),
            next_in=None if earlier else self._next_in(names),
            expected_next=None if earlier else self._expected_next(all_of_them, before),
        )
        for victim in victims:
            victim.chosen = True
        return choice

    def _expected_next(self, gone: list[Request], before: list[Request]) -> str | None:
        with self.record._without(gone):
            return next((request.id for request in before if self.record.fits(request, self.now_us)), None)

    def _next_in(self, names: list[str]) -> str | None:
        """The ticket that the scheduler admits next if its victims are released now, and nothing else happens."""
        tried = copy_of(self.scheduler)
        for name in names:
            tried.requeue(name, self.now_us)
        return next((admission.ticket.id for admission in tried.dispatch(self.now_us)), "none")

    def _serve(self, request: Request) -> None:
        """Books an admission with every pair of backlogged tenants that it belongs to, before the ticket leaves."""
        self.charged_since[request.tier, request.tenant] = 0
        self._book(request.tier, request.tenant, Fraction(request.tokens, request.weight))

    def _book(self, of: int, tenant: str, amount: Fraction) -> None:
        """Between two admissions, at most the largest ticket and the most that was charged in such a time go ahead of
        the other tenant, and then once more what is charged before the next one.
        """
        for (tier, one, other), backlog in self.backlogs.items():
            if tier == of and tenant in (one, other):
                backlog.serve(amount if tenant == one else -amount)
                bound = sum(self._largest(tier, each) + 2 * self.most_charged[tier, each] for each in (one, other))
                if backlog.spread() > bound:
                    self.unfair.append(f"tier {tier}: {one!r} and {other!r} differ by {backlog.spread()} > {bound}")

    def _largest(self, tier: int, tenant: str) -> Fraction:
        mine = [r for r in self.record.submitted if (r.tier, r.tenant) == (tier, tenant)]
        return max(Fraction(r.tokens, r.weight) for r in mine)

    def _keep_backlogs(self) -> None:
        """Pairs of tenants that wait. A preemption ends the promise until the tier's tags start afresh; so does, while
        the tier owes, a first ticket larger than the reserve: the others go before it.
        """
        pairs = set()
        for tier in range(len(self.record.policy.tiers)):
            firsts = self.record.firsts(tier)
            if not firsts:
                self.charged_twice.discard(tier)
            elif tier not in self.charged_twice:
                owes = self.record.owes(tier, self.now_us)
                waits = [r.tenant for r in firsts if not owes or self.record.is_within_a_reserve(r)]
                tenants = sorted(set(waits))
                pairs |= {(tier, one, other) for one in tenants for other in tenants if one < other}
        self.backlogs = {pair: self.backlogs.get(pair) or Backlog() for pair in pairs}


def as_answer(admission: Admission) -> Answer:
    wait = admission.wait
    return Answer(
        admission.ticket.id, wait.queue_wait_us, wait.starvation_us, tuple(wait.served_ahead), admission.level
    )
