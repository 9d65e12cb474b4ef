"""Invariant 7: a ticket of a tier with a reserve is admitted within a bound that its own tier decides.

`wait_bounds` states every clause and measures it, `floods` draws the policies and the floods. The last tests show why
four clauses are not as they were first stated: each holds the smallest flood found that breaks the first form.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from fractions import Fraction

import broken
import pytest
from floods import LONGEST_LEASE_US as D
from floods import Kind, Request, random_flood, random_policy
from oracle import Policy
from wait_bounds import CLAUSES, Measured, measure

from sidecar.policy.rules import Shares
from sidecar.scheduling import Scheduler

KINDS = [
    Kind(over=over, tenants=tenants, both=both, cancels=cancels, shrinks=shrinks)
    for over in (False, True)
    for tenants in (1, 4)
    for both, cancels, shrinks in (
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (True, True, True),
    )
]
UP_TO_THE_RESERVE = {"inside": 0.4, "small": 0.4, "any_small": 0.4, "all_of_tier": 0.35, "share": 0.6}
"""The part of each bound that a flood has to reach, or else it proves nothing."""
UP_TO_THE_LIMIT = UP_TO_THE_RESERVE | {"large": 0.5, "any_large": 0.5, "owes": 0.7}


def campaign(kind: Kind, seeds: range, scheduler: type[Scheduler] = Scheduler) -> Measured:
    """Plays a flood of each seed, on a policy of that seed."""
    measured = Measured()
    for seed in seeds:
        luck = random.Random(f"{kind}-{seed}")
        rules = random_policy(luck, both=kind.both).rules()
        measured.add(measure(scheduler(rules), random_flood(luck, rules, kind), D))
    return measured


def strong_campaign(campaign: Callable[[Kind, range], Measured], kind: Kind, strong: dict[str, float]) -> Measured:
    """Floods until they are strong: each clause comes as near to its bound as `strong` says, as a part of it."""
    measured = Measured()
    for seed in range(0, 40, 8):
        measured.add(campaign(kind, range(seed, seed + 8)))
        if all(measured.worst[clause] >= least for clause, least in strong.items()):
            return measured
    raise AssertionError(f"floods too weak to prove anything: {measured.worst}, not {strong}")


def beyond(measured: Measured) -> dict[str, float]:
    """The clauses that do not hold, with what was measured as a part of their bound."""
    return {clause: measured.worst[clause] for clause in CLAUSES if measured.worst[clause] > 1}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_clause_of_the_bounded_wait_holds(kind):
    measured = strong_campaign(campaign, kind, UP_TO_THE_LIMIT if kind.over else UP_TO_THE_RESERVE)
    assert beyond(measured) == {}
    assert measured.left == 0


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_clause_of_the_bounded_wait_holds_for_long(kind):
    measured = campaign(kind, range(1_000, 1_400))
    show(f"400 policies: {kind}", measured)
    assert beyond(measured) == {}
    assert measured.left == 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", [3, 4, 5, 11])  # four and five tiers; 4: an always_first tier at its limit, flooded
def test_every_clause_of_the_bounded_wait_holds_for_50_000_tickets(seed):
    luck = random.Random(f"long-{seed}")
    kind = Kind(over=True, tenants=4, both=True, cancels=True, shrinks=True, scale=250)
    rules = random_policy(luck, both=True).rules()
    while len(rules.tiers) < 4:
        rules = random_policy(luck, both=True).rules()
    flood = random_flood(luck, rules, kind)
    measured = measure(Scheduler(rules), flood, D)
    show("1 policy", measured)
    assert measured.submitted >= 50_000
    assert beyond(measured) == {}
    assert measured.left == 0


def show(what: str, measured: Measured) -> None:
    """With `pytest -s`: the worst part of each bound, then of each clause as it was first stated."""
    parts = " ".join(f"{clause} {part:.2f}" for clause, part in measured.worst.items() if part)
    played = f"{measured.submitted} tickets, {measured.admitted} admitted, {measured.canceled} canceled"
    sys.stdout.write(f"\n{what}: {played}: {parts}\n")


@pytest.mark.parametrize(
    ("scheduler", "clauses"),
    [
        (broken.HasNoFloors, {"inside", "small", "large", "all_of_tier"}),
        (broken.SmallOnesSlipPast, {"inside", "small", "large"}),
        (broken.FirstComeFirstServed, {"inside", "small", "large", "all_of_tier"}),
        (broken.CountsAFloorWhenTheTierIsEmpty, {"inside", "small", "large"}),
        (broken.GivesTurnsByLevel, {"large", "any_large"}),
        (broken.LastInFirstOut, {"small", "large"}),
        (broken.LargerOnesPassNothing, {"inside"}),
    ],
)
def test_a_scheduler_that_is_wrong_on_purpose_breaks_the_bound(scheduler, clauses):
    """HoldsEveryPlace and OwesNothing break none of it: they waste the pool, and give a tier more than its reserve."""
    kind = Kind(over=True, tenants=4, both=True)
    measured = Measured()
    for seed in range(0, 200, 10):
        measured.add(campaign(kind, range(seed, seed + 10), scheduler))
        if clauses <= set(beyond(measured)):
            return
    assert clauses <= set(beyond(measured))


@pytest.mark.parametrize(
    ("scheduler", "patience_us", "holds"),
    [
        (Scheduler, 0, True),
        (Scheduler, None, True),
        (broken.ChargesTicketsThatLeave, 0, False),
        (broken.ServesTenantsByArrival, None, False),
    ],
)
def test_what_other_tenants_sent_or_what_has_left_does_not_delay_a_tenant(scheduler, patience_us, holds):
    """100 tickets of b wait, then a sends one. With patience 0, a had sent 100 before that and taken them back."""
    policy = Policy((20, None), (Shares("q", reserve=Fraction(1, 2)),))
    flood = [Request(0, 0, 10, 1, D, "b") for _ in range(100)]
    if patience_us is not None:
        flood += [Request(1, 0, 10, 1, D, "a", patience_us=patience_us) for _ in range(100)]
    flood.append(Request(2, 0, 10, 1, D, "a"))
    measured = measure(scheduler(policy.rules()), flood, D)
    assert (measured.worst["share"] <= 1) is holds


@pytest.mark.parametrize(("scheduler", "holds"), [(Scheduler, True), (broken.PutsATierLastAfterATurnOnly, False)])
def test_any_admission_puts_a_tier_last_among_the_turns(scheduler, holds):
    """Or else p is admitted inside its reserve just before its turn, and q waits for that lease, too: 4 D of 3 D."""
    policy = Policy(
        (100, None), (Shares("filler"), Shares("p", reserve=Fraction(1, 2)), Shares("q", reserve=Fraction(1, 10)))
    )
    flood = [
        Request(0, 2, 10, 1, D),
        Request(0, 0, 90, 1, D - 1),
        Request(1, 2, 50, 1, D),
        Request(D - 1, 0, 80, 1, D),
        Request(2 * D - 2, 1, 20, 1, D),
        Request(2 * D - 2, 1, 90, 1, D),
    ]
    assert (beyond(measure(scheduler(policy.rules()), flood, D)) == {}) is holds


# The clauses as they were first stated, and what breaks them.


def test_one_tenant_waits_for_tokens_and_for_requests_one_after_the_other():
    """(d) counted the larger of both dimensions.

    A batch of five that fills the tier's tokens, then one that fills its requests, and so on. Each batch finds the
    other dimension lent out until almost 2 D after the one before: nothing keeps it free while the tier is at its
    reserve.
    """
    policy = Policy((200, 200), (Shares("filler"), Shares("one", reserve=Fraction(1, 2))))
    sizes = [(20, 1), (1, 20)]
    fills = [(190, 10), (10, 190)]
    flood = []
    for batch in range(12):
        flood += [Request(0, 1, *sizes[batch % 2], D) for _ in range(5)]
        at_us = batch * (2 * D - 1)
        flood.append(Request(at_us, 0, *fills[(batch + 1) % 2], D - 1))
        flood.append(Request(at_us + D - 1, 0, *fills[(batch + 1) % 2], D))
    measured = measure(Scheduler(policy.rules()), flood, D)
    assert measured.worst["one_tenant_page"] > 1.3
    assert 0.6 < measured.worst["one_tenant"] <= 1


def test_a_larger_ticket_that_leaves_as_the_head_costs_what_one_costs_that_is_admitted():
    """(e) counted what was admitted. A newcomer that leaves just before its turn holds its tier up every time, too."""
    policy = Policy(
        (100, None), (Shares("filler"), Shares("p", reserve=Fraction(1, 2)), Shares("q", reserve=Fraction(1, 10)))
    )
    flood = [Request(0, 2, 10, 1, D, "a") for _ in range(14)]
    for between in range(13):
        at_us = between * (3 * D - 2)
        flood += [
            Request(at_us + 1, 0, 90, 1, D - 2) if between else Request(0, 0, 90, 1, D - 1),
            Request(at_us + 1, 2, 11, 1, D, "b", patience_us=3 * D - 3),
            Request(at_us + D - 1, 0, 90, 1, D),
            Request(at_us + D, 1, 90, 1, D),
        ]
    measured = measure(Scheduler(policy.rules()), flood, D)
    assert measured.canceled == 13
    assert measured.worst["all_of_tier_page"] > 1.2
    assert 0.5 < measured.worst["all_of_tier"] <= 1
    assert measured.worst["any_large"] > 0.99


def test_a_tier_owes_for_each_of_its_leases_that_has_shrunk_below_the_reserve():
    """A tier has its next turn while the lease of the turn before still runs, and owes for all of them at once."""
    policy = Policy((100, None), (Shares("filler"), Shares("q", reserve=Fraction(1, 10))))
    flood = [Request(n, 1, 60, 1, D - n, shrinks_after_us=1, shrinks_to=1) for n in range(5)]
    flood += [Request(6, 0, 45, 1, D // 2), *(Request(6, 0, 45, 1, D) for _ in range(60))]
    flood.append(Request(7, 1, 60, 1, D))
    measured = measure(Scheduler(policy.rules()), flood, D)
    assert measured.worst["owes_page"] > 2
    assert measured.worst["all_of_tier_page"] > 1
    assert 0.4 < measured.worst["owes"] <= 1
    assert beyond(measured) == {}


def test_a_large_ticket_loses_its_place_among_the_tenants_while_its_tier_owes():
    """The closed form for several tenants: small ones pass, and the virtual time moves on without the large one."""
    policy = Policy((100, None), (Shares("filler"), Shares("q", reserve=Fraction(1, 10))))
    flood = [Request(0, 1, 60, 1, D, "a"), Request(1, 1, 60, 1, D, "a")]
    flood += [Request(1, 0, 30, 1, D) for _ in range(40)]
    flood += [Request(D + 1, 1, 10, 1, D // 100, f"small-{n % 2}") for n in range(120)]
    measured = measure(Scheduler(policy.rules()), flood, D)
    assert measured.worst["share_page"] > 1
    assert beyond(measured) == {}
