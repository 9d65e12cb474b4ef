"""The oracle is held to the recorded answers and to figures worked out by hand: only then may it judge others."""

from fractions import Fraction

from oracle import Oracle, Policy
from scenario_policy import SCENARIOS, policy_of

from sidecar.policy.rules import Shares

THREE = (Shares("high", Fraction(1, 4), lend=Fraction(0)), Shares("normal", Fraction(1, 4)), Shares("batch"))


def play(oracle: Oracle, step: dict) -> list[dict]:
    now_us = int(step["at"] * 1_000_000)
    names = [tier.name for tier in oracle.policy.tiers]
    match step["do"]:
        case "submit":
            optional = {name: step[name] for name in ("requests", "tenant", "weight") if name in step}
            tier = names.index(step["tier"])
            oracle.submit(step["id"], tier=tier, tokens=step["tokens"], now_us=now_us, **optional)
        case "settle":
            oracle.settle(step["id"], now_us)
        case "cancel":
            oracle.cancel(step["id"])
        case "resize":
            oracle.resize(step["id"], step["tokens"])
        case "hold_back":
            oracle.hold_back(int(step["until"] * 1_000_000))
    return [
        {
            "id": answer.id,
            "wait_s": answer.queue_wait_us / 1_000_000,
            "starvation_s": answer.starvation_us / 1_000_000,
            "served_ahead": {name: n for name, n in zip(names, answer.served_ahead, strict=True) if n},
        }
        for answer in oracle.dispatch(now_us)
    ]


def test_oracle_gives_exactly_the_recorded_answers():
    wrong = []
    for scenario in SCENARIOS:
        oracle = Oracle(policy_of(scenario))
        wrong += [
            f"{scenario['name']}, step {number}: {step}, not {answers}; {scenario['lesson']}"
            for number, step in enumerate(scenario["steps"])
            if (answers := play(oracle, step)) != step["admitted"]
        ]
    assert wrong == []


def test_floors_round_up_and_headroom_and_limits_round_down():
    shares = Shares("only", reserve=Fraction(1, 3), lend=Fraction(1, 2), limit=Fraction(2, 3))
    oracle = Oracle(Policy((100, 4), (shares,)))
    assert oracle.reserve(0) == (34, 2)
    assert oracle.headroom(0) == (16, 0)
    assert oracle.limit(0) == (66, 2)


def test_ten_percent_of_four_requests_is_below_with_none_in_flight_and_not_with_one():
    oracle = Oracle(Policy((100, 4), (Shares("only", Fraction(1, 10)),)))
    oracle.submit("a", tier=0, tokens=1, now_us=0)
    assert oracle.is_below_its_reserve(0)
    oracle.dispatch(0)
    assert not oracle.is_below_its_reserve(0)


def test_an_unbounded_dimension_has_no_room_to_run_out_of():
    oracle = Oracle(Policy((None, 2), THREE))
    request = oracle.submit("a", tier=2, tokens=10**9, now_us=0)
    assert oracle.room(request, 0) == (None, 2)
    assert oracle.fits(request, 0)


def test_a_ticket_rises_one_level_per_promote_after_and_never_past_the_ceiling():
    oracle = Oracle(Policy((100, None), THREE, promote_after_us=10, ceiling=1))
    batch = oracle.submit("b", tier=2, tokens=1, now_us=0)
    normal = oracle.submit("n", tier=1, tokens=1, now_us=0)
    high = oracle.submit("h", tier=0, tokens=1, now_us=0)
    assert [oracle.aged_level(batch, at) for at in (0, 5, 10, 99)] == [2, Fraction(3, 2), 1, 1]
    assert [oracle.aged_level(normal, at) for at in (0, 99)] == [1, 1]
    assert [oracle.aged_level(high, at) for at in (0, 99)] == [0, 0]


def test_room_is_what_leases_and_the_headroom_of_more_important_tiers_leave():
    oracle = Oracle(Policy((100, None), THREE))
    oracle.submit("h", tier=0, tokens=10, now_us=0)
    oracle.submit("n", tier=1, tokens=20, now_us=0)
    oracle.dispatch(0)
    batch = oracle.submit("b", tier=2, tokens=1, now_us=0)
    high = oracle.submit("h2", tier=0, tokens=1, now_us=0)
    assert oracle.room(batch, 0) == (100 - 30 - 15, None)
    assert oracle.room(high, 0) == (70, None)


def test_starvation_counts_from_the_first_admission_of_a_later_arrival():
    oracle = Oracle(Policy((100, None), THREE))
    for number, name in enumerate("abc"):
        oracle.submit(name, tier=2, tokens=1, now_us=number)
    oracle.admit("b", 5)
    oracle.admit("c", 7)
    answer = oracle.admit("a", 9)
    assert (answer.queue_wait_us, answer.starvation_us, answer.served_ahead) == (9, 4, (0, 0, 2))


def test_tags_follow_weights_and_start_afresh_when_no_ticket_of_the_tier_waits():
    oracle = Oracle(Policy((10, None), THREE))
    requests = [oracle.submit(str(n), tier=2, tokens=9, tenant="a", weight=2, now_us=0) for n in range(4)]
    for n in range(3):
        oracle.admit(str(n), 0)
    assert [request.start for request in requests] == [0, Fraction(9, 2), 9, Fraction(27, 2)]
    oracle.cancel("3")
    assert oracle.submit("x", tier=2, tokens=9, tenant="a", now_us=0).start == 0


def test_a_ticket_that_leaves_the_queue_costs_its_tenant_nothing():
    oracle = Oracle(Policy((10, None), THREE))
    for n in range(3):
        oracle.submit(str(n), tier=2, tokens=9, tenant="a", now_us=0)
    oracle.cancel("0")
    oracle.cancel("1")
    assert [request.start for request in oracle.waiting()] == [0]


def test_doubles_make_other_tags_than_fractions_where_a_weight_is_three():
    exact, double = Oracle(Policy((10, None), THREE)), Oracle(Policy((10, None), THREE), divide=lambda t, w: t / w)
    for oracle in (exact, double):
        for n in range(100):
            oracle.submit(str(n), tier=2, tokens=1, tenant="a", weight=3, now_us=0)
        for n in range(99):
            oracle.admit(str(n), 0)
    assert exact.submitted[-1].start == 33
    assert double.submitted[-1].start != 33


def test_what_a_turn_gives_beyond_the_reserve_is_owed_for_as_long_as_it_was_held():
    oracle = Oracle(Policy((100, None), (Shares("high"), Shares("batch", Fraction(1, 10)))))
    oracle.submit("b", tier=1, tokens=35, now_us=0)
    oracle.dispatch(0)
    assert oracle.submitted[0].excess == 2
    oracle.settle("b", 7)
    assert oracle.owes(1, 20)
    assert not oracle.owes(1, 21)


def test_the_size_limit_leaves_room_for_the_reserves_of_all_other_tiers():
    tiers = (
        Shares("critical", Fraction(1, 10), Fraction(0), Fraction(1, 2), always_first=True),
        Shares("high", Fraction(2, 10)),
        Shares("normal", Fraction(6, 10)),
        Shares("batch"),
    )
    oracle = Oracle(Policy((100, None), tiers))
    assert [oracle.size_limit(tier) for tier in range(4)] == [(20, None), (30, None), (70, None), (90, None)]
