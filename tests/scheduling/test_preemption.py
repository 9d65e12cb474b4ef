"""Preemption rule by rule, and random runs in which much is preempted against the page."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import pytest
from oracle import Oracle, Policy
from recorder import Recorder
from strategies import WEIGHTS, preempting_policy

from sidecar.policy.rules import Shares
from sidecar.scheduling import Scheduler
from tests.support.walks import random_walks

HIGH, LOW, BATCH = 0, 1, 2
TIERS = (Shares("high", preempt_after_us=10), Shares("low", preemptible=True), Shares("batch", preemptible=True))


def pool(*tiers: Shares, capacity: int = 100, **more) -> Scheduler:
    return Scheduler(Policy((capacity, None), tiers or TIERS, **({"max_preemptions": 2} | more)).rules())


def enter(scheduler: Scheduler, name: str, tier: int, tokens: int, now_us: int = 0) -> bool:
    """Whether it was admitted as it came."""
    scheduler.submit(name, tier=tier, tokens=tokens, now_us=now_us)
    return [admission.ticket.id for admission in scheduler.dispatch(now_us)] == [name]


def preempted(scheduler: Scheduler, now_us: int) -> list[str]:
    return [victim.id for victim in scheduler.preempt(now_us)]


def back(scheduler: Scheduler, name: str, now_us: int) -> list[str]:
    """Who is admitted when a victim's engine has let go."""
    assert scheduler.requeue(name, now_us)
    return [admission.ticket.id for admission in scheduler.dispatch(now_us)]


def test_the_least_important_tier_gives_first_and_in_it_the_latest_admitted():
    scheduler = pool()
    for name, tier in (("batch-1", BATCH), ("batch-2", BATCH), ("low-1", LOW), ("low-2", LOW)):
        assert enter(scheduler, name, tier, 25)
    enter(scheduler, "high", HIGH, 70)
    assert preempted(scheduler, 9) == []
    assert scheduler.next_change_us(9) == 10
    assert preempted(scheduler, 10) == ["batch-2", "batch-1", "low-2"]
    assert preempted(scheduler, 11) == []  # they are on their way out


def test_one_that_another_makes_needless_is_spared():
    scheduler = pool()
    for name, tokens in (("large", 80), ("small", 20)):
        enter(scheduler, name, LOW, tokens)
    enter(scheduler, "high", HIGH, 50)
    assert preempted(scheduler, 10) == ["large"]  # with `small` chosen first, `large` alone does


def test_what_it_lacks_includes_the_headroom_of_more_important_tiers():
    tiers = (Shares("top", reserve=Fraction(1, 5), lend=Fraction(0)), *(replace(tier) for tier in TIERS))
    scheduler = pool(*tiers)
    for name in ("a", "b", "c", "d"):
        assert enter(scheduler, name, 2, 20)
    enter(scheduler, "high", 1, 30)
    assert preempted(scheduler, 10) == ["d", "c"]  # 20 of the 100 are kept for `top`


def test_a_ticket_in_between_takes_from_below_it_alone():
    tiers = (Shares("high"), Shares("mid", preempt_after_us=0, preemptible=True), Shares("low", preemptible=True))
    scheduler = pool(*tiers)
    for name, tier in (("high", 0), ("mid", 1), ("low", 2)):
        enter(scheduler, name, tier, 30)
    enter(scheduler, "mine", 1, 70)
    assert preempted(scheduler, 0) == []  # `low` alone is not enough
    scheduler.settle("high", 0)
    assert scheduler.dispatch(0) == []
    assert preempted(scheduler, 0) == ["low"]


def test_a_floor_is_kept_in_the_sense_of_rule_one():
    """Below its reserve is who is so in both dimensions: a tier that holds its tokens, or its requests, is not."""
    low = Shares("low", reserve=Fraction(1, 2), preemptible=True)
    scheduler = Scheduler(Policy((100, 4), (TIERS[0], low), max_preemptions=1).rules())
    for name, tokens in (("a", 10), ("b", 10), ("c", 80)):
        enter(scheduler, name, LOW, tokens)
    enter(scheduler, "high", HIGH, 60)
    assert preempted(scheduler, 10) == ["c"]  # 20 of 50 tokens are left to it, but 2 of 2 requests


def test_the_more_important_and_the_older_of_the_needless_are_spared_first():
    scheduler = pool()
    for name, tokens in (("c", 80), ("b", 10), ("a", 10)):
        enter(scheduler, name, LOW, tokens)
    enter(scheduler, "high", HIGH, 85)
    assert preempted(scheduler, 10) == ["a", "c"]


AGED = (Shares("high"), replace(TIERS[0], name="normal"), Shares("low", preemptible=True))


@pytest.mark.parametrize(("tokens", "victims"), [(30, ["young"]), (50, [])])
def test_a_lease_that_would_stand_before_the_ticket_once_it_is_back_is_no_victim(tokens: int, victims: list[str]):
    """Aged to the level of the ticket, and older: it would take the room right back."""
    scheduler = pool(*AGED, promote_after_us=100, ceiling=1)
    assert enter(scheduler, "old", 2, 60)
    assert enter(scheduler, "young", 2, 40, now_us=90)
    enter(scheduler, "normal", 1, tokens, now_us=95)
    assert preempted(scheduler, 105) == victims


def test_the_ticket_of_a_tier_below_its_reserve_stands_before_older_ones():
    tiers = (AGED[0], replace(AGED[1], reserve=Fraction(1, 2)), AGED[2])
    scheduler = pool(*tiers, promote_after_us=100, ceiling=1)
    assert enter(scheduler, "old", 2, 100)
    enter(scheduler, "normal", 1, 50, now_us=95)
    assert preempted(scheduler, 105) == ["old"]
    assert back(scheduler, "old", 106) == ["normal"]


def test_a_tier_whose_next_in_line_waits_at_its_limit_and_is_older_gives_nothing():
    """With room below the limit it would be a candidate, and stand before the ticket for which the room was freed."""
    scheduler = pool(AGED[0], AGED[1], replace(AGED[2], limit=Fraction(1, 2)), promote_after_us=100, ceiling=1)
    enter(scheduler, "kept", 0, 50)
    for name, tokens in (("first", 10), ("older", 50)):  # `older` is at the limit
        scheduler.submit(name, tier=2, tokens=tokens, tenant="b", now_us=0)
    assert len(scheduler.dispatch(0)) == 1
    scheduler.submit("running", tier=2, tokens=30, tenant="c", now_us=60)
    assert len(scheduler.dispatch(60)) == 1
    scheduler.submit("normal", tier=1, tokens=30, now_us=90)
    scheduler.settle("first", 0)
    assert scheduler.dispatch(95) == []
    assert preempted(scheduler, 100) == []


def test_a_pool_held_back_preempts_no_one():
    scheduler = pool()
    enter(scheduler, "low", LOW, 100)
    enter(scheduler, "high", HIGH, 50)
    scheduler.hold_back(30)
    assert preempted(scheduler, 20) == []
    assert preempted(scheduler, 30) == ["low"]


FIRST = Shares("first", limit=Fraction(1, 2), always_first=True, preempt_after_us=10)
EMERGENCY = (FIRST, *TIERS[1:])


def filled(scheduler: Scheduler, leases: int = 10, tokens: int = 10, tier: int = BATCH) -> None:
    for number in range(leases):
        assert enter(scheduler, f"bulk-{number}", tier, tokens)


def test_a_burst_of_an_always_first_tier_takes_the_room_of_all_of_it_at_once():
    scheduler = pool(*EMERGENCY)
    filled(scheduler)
    for number in range(4):
        enter(scheduler, f"first-{number}", 0, 10, now_us=number)
    assert preempted(scheduler, 9) == []
    assert preempted(scheduler, 10) == ["bulk-9", "bulk-8", "bulk-7", "bulk-6"]  # three of them have waited less
    assert preempted(scheduler, 11) == []
    admitted = [back(scheduler, f"bulk-{number}", 12) for number in (9, 8, 7, 6)]
    assert admitted == [["first-0"], ["first-1"], ["first-2"], ["first-3"]]


def test_a_burst_of_another_tier_takes_room_for_one_after_the_other():
    scheduler = pool()
    filled(scheduler)
    for number in range(4):
        enter(scheduler, f"high-{number}", HIGH, 10)
    assert preempted(scheduler, 10) == ["bulk-9"]
    assert preempted(scheduler, 11) == []
    assert back(scheduler, "bulk-9", 12) == ["high-0"]
    assert preempted(scheduler, 12) == ["bulk-8"]


def test_a_burst_takes_no_more_than_its_limit_admits():
    scheduler = pool(*EMERGENCY)
    filled(scheduler)
    for number in range(8):
        enter(scheduler, f"first-{number}", 0, 10)
    assert len(preempted(scheduler, 10)) == 5


def test_a_burst_takes_what_is_there_and_no_lease_that_lets_no_further_ticket_in():
    scheduler = pool(*EMERGENCY)
    assert enter(scheduler, "streams", LOW, 65)
    scheduler.keep("streams")
    filled(scheduler, 7, 5)
    for number in range(3):
        enter(scheduler, f"first-{number}", 0, 15)
    assert preempted(scheduler, 10) == [f"bulk-{number}" for number in (6, 5, 4, 3, 2, 1)]  # `bulk-0` lets no third in


def test_a_burst_counts_the_sequences_of_its_tickets():
    """Of requests with n=4 each needs the places of four, and not the tokens of its neighbors."""
    scheduler = Scheduler(Policy((1000, 40), EMERGENCY, max_preemptions=2).rules())
    for number in range(40):
        assert enter(scheduler, f"bulk-{number}", LOW, 1)
    for number in range(3):
        scheduler.submit(f"first-{number}", tier=0, tokens=1, requests=4, now_us=0)
    enter(scheduler, "one", 0, 1)
    assert preempted(scheduler, 10) == [f"bulk-{number}" for number in range(39, 26, -1)]  # 3 * 4 + 1
    for number in range(39, 26, -1):
        back(scheduler, f"bulk-{number}", 12)
    assert scheduler.queued(0)[1] == 0


def test_a_burst_that_grows_takes_more_beside_what_is_on_its_way():
    scheduler = pool(*EMERGENCY)
    filled(scheduler)
    enter(scheduler, "first-0", 0, 10)
    assert preempted(scheduler, 10) == ["bulk-9"]
    for number in (1, 2):
        enter(scheduler, f"first-{number}", 0, 10, now_us=11)
    assert preempted(scheduler, 11) == ["bulk-8", "bulk-7"]


def test_a_burst_leaves_a_floor_as_it_is():
    scheduler = pool(FIRST, TIERS[1], replace(TIERS[2], reserve=Fraction(7, 10)))
    filled(scheduler)
    for number in range(5):
        enter(scheduler, f"first-{number}", 0, 10)
    assert len(preempted(scheduler, 10)) == 3


def test_what_was_registered_is_never_a_victim():
    scheduler = pool()
    scheduler.register("elsewhere", tier=LOW, tokens=100, requests=1)
    enter(scheduler, "high", HIGH, 50)
    assert preempted(scheduler, 10) == []


def test_what_could_not_come_back_to_a_pool_that_shrank_is_no_victim():
    scheduler = pool()
    for name, tokens in (("large", 70), ("small", 30)):
        enter(scheduler, name, LOW, tokens)
    enter(scheduler, "high", HIGH, 20)
    scheduler.change_rules(Policy((60, None), TIERS, max_preemptions=2).rules())
    assert preempted(scheduler, 10) == []  # `small` does not make it fit, and `large` fits 60 never again


def test_a_ticket_before_it_that_may_not_preempt_does_not_switch_preemption_off():
    scheduler = pool(replace(TIERS[0], preempt_after_us=None), replace(TIERS[1], preempt_after_us=0), TIERS[2])
    enter(scheduler, "batch", BATCH, 100)
    enter(scheduler, "high", HIGH, 10)
    enter(scheduler, "low", LOW, 10)
    assert preempted(scheduler, 10) == ["batch"]
    assert back(scheduler, "batch", 10) == ["high", "low"]


def test_room_is_taken_for_those_before_it_too_or_for_none():
    """`high` holds its place before `low`: what would do for `low` alone is of no use to it."""
    scheduler = pool(replace(TIERS[0], preempt_after_us=None), replace(TIERS[1], preempt_after_us=0), TIERS[2])
    scheduler.register("kept", tier=HIGH, tokens=40, requests=1)
    for name, tokens in (("batch-1", 20), ("batch-2", 40)):
        enter(scheduler, name, BATCH, tokens)
    enter(scheduler, "high", HIGH, 60)
    enter(scheduler, "low", LOW, 10)
    assert preempted(scheduler, 10) == []
    scheduler.cancel("high", 10)
    assert [admission.ticket.id for admission in scheduler.dispatch(10)] == []
    assert preempted(scheduler, 10) == ["batch-2"]


def test_a_ticket_before_it_that_would_not_fit_for_long_needs_no_room():
    """`giant` does not fit beside what `top` holds, so rule 3 passes it over."""
    tiers = (Shares("top"), replace(TIERS[1], name="old"), replace(TIERS[0], name="high"), TIERS[2])
    scheduler = pool(tiers[0], replace(tiers[1], preemptible=False), tiers[2], tiers[3])
    enter(scheduler, "top", 0, 50)
    enter(scheduler, "batch", 3, 50)
    enter(scheduler, "giant", 1, 60)
    enter(scheduler, "high", 2, 20)
    assert preempted(scheduler, 10) == ["batch"]
    assert back(scheduler, "batch", 10) == ["high"]


def test_a_victim_comes_back_before_its_tiers_backlog_and_its_tenant_is_not_charged_twice():
    scheduler = pool()
    enter(scheduler, "victim", LOW, 100)
    for number in range(3):
        scheduler.submit(f"behind-{number}", tier=LOW, tokens=100, now_us=1)
    enter(scheduler, "high", HIGH, 100, now_us=2)
    assert preempted(scheduler, 12) == ["victim"]
    assert back(scheduler, "victim", 15) == ["high"]
    scheduler.settle("high", 0)
    (again,) = scheduler.dispatch(20)
    assert again.ticket.id == "victim"
    assert (again.wait.queue_wait_us, again.wait.starvation_us) == (20, 5)
    assert list(again.wait.served_ahead) == [100, 0, 0]  # not itself


def test_the_oldest_of_a_tier_is_the_victim_that_came_back():
    scheduler = pool()
    enter(scheduler, "victim", LOW, 100)
    scheduler.submit("behind", tier=LOW, tokens=100, now_us=5)
    enter(scheduler, "high", HIGH, 100, now_us=6)
    assert preempted(scheduler, 16) == ["victim"]
    scheduler.requeue("victim", 17)
    oldest = scheduler.oldest(20)[LOW]
    assert oldest is not None
    assert oldest.queue_wait_us == 20


def test_a_victim_leaves_like_anybody_who_waits():
    scheduler = pool()
    enter(scheduler, "victim", LOW, 100)
    enter(scheduler, "high", HIGH, 50)
    assert preempted(scheduler, 10) == ["victim"]
    scheduler.requeue("victim", 11)
    wait = scheduler.cancel("victim", 15)
    assert wait is not None
    assert (wait.queue_wait_us, wait.overtaken_at_us) == (15, 11)
    assert not scheduler.requeue("victim", 16)
    assert scheduler.waiting() == 1


@random_walks(6)
def test_random_runs_in_which_much_is_preempted_go_as_the_page_says(seed: int):
    luck = random.Random(seed)
    policy = preempting_policy(luck)
    oracle = Oracle(policy, divide=lambda tokens, weight: tokens / weight)
    recorder = Recorder(Scheduler(policy.rules()), policy)
    for number in range(120):
        step(luck, number, recorder, oracle)
        recorder.dispatch()
        assert [decision.reported for decision in recorder.latest] == oracle.dispatch(recorder.now_us)
        assert recorder.preempt() == oracle.preempt(recorder.now_us)
        assert recorder.disagreements == []


def step(luck: random.Random, number: int, recorder: Recorder, oracle: Oracle) -> None:
    """One random operation on both: the important ones come, and end soon; victims let go soon."""
    tiers = len(oracle.policy.tiers)
    important = [request for request in oracle.held() if request.tier < tiers - 1]
    victims = [request for request in oracle.held() if request.chosen]
    what = luck.choice(["low", "important", "important", "end", "end", "end", "back", "back", "keep", "resize", "pass"])
    if what in ("low", "important"):
        tier = tiers - 1 if what == "low" else luck.randrange(tiers - 1)
        tenant, tokens = luck.choice("abc"), luck.randint(3, 25)
        ticket = {"tier": tier, "tokens": tokens, "tenant": tenant, "weight": WEIGHTS[tenant]}
        recorder.submit(str(number), **ticket)
        oracle.submit(str(number), now_us=recorder.now_us, **ticket)
    elif what == "end" and (ending := important or (oracle.held() if luck.random() < 0.2 else [])):
        name = luck.choice(ending).id
        recorder.settle(name)
        oracle.settle(name, recorder.now_us)
    elif what == "back" and victims:
        name = luck.choice(victims).id
        recorder.requeue(name)
        oracle.requeue(name, recorder.now_us)
    elif what == "keep" and oracle.held() and luck.random() < 0.3:
        name = luck.choice(oracle.held()).id
        recorder.keep(name)
        oracle.keep(name)
    elif what == "resize" and oracle.held():
        name, tokens = luck.choice(oracle.held()).id, luck.choice([1, 5, 20, 60])
        recorder.resize(name, tokens)
        oracle.resize(name, tokens)
    elif what == "pass":
        recorder.pass_time(luck.choice([1, 5]))
