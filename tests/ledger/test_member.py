"""One replica over a ledger decides as the literal reference, whatever it shows of what waits."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sidecar.pools import ledger, member
from sidecar.pools.calls import Cap, EngineView, LedgerRules
from sidecar.pools.member_events import MemberMode
from sidecar.scheduling.tickets import ScheduledLease, Ticket
from tests.ledger.one_replica import OneReplica
from tests.ledger.replica import pool_rules
from tests.ledger.stored_ledger import Both, StoredLedger
from tests.scheduling import reference
from tests.scheduling.programs import programs, random_program
from tests.support.examples import examples

BEAT_US = 1_000_000


def first_difference(program: dict[str, Any], most_bids: int, near: type[member.Member] | None = None) -> str | None:
    """The first step whose answer is not the reference's. Both decide every second between two steps, too."""
    judge, one = reference.new(program), OneReplica(program, most_bids, near=near)
    judge.divide = lambda tokens, weight: tokens / weight
    last = 0
    for number, step in enumerate(program["steps"], 1):
        at = round(step["at"] * 1e6)
        for now in [*range(last + BEAT_US, at, BEAT_US), at]:
            if now == at:
                _play(judge, one, step, now)
            expected, found = (judge.dispatch(now), judge.preempt(now)), one.pump(now)
            if (found[0], sorted(found[1])) != (expected[0], sorted(expected[1])):
                return f"{program['name']}, step {number} {step} at {now}: {found}, not {expected}"
        last = at
    return None


def _play(judge: reference.Reference, one: OneReplica, step: dict[str, Any], now: int) -> bool:
    """One step of both; False where a replica has none: it cancels what stands in line, and charges with growth."""
    what, found = step["do"], judge.find(step.get("id", ""), "line", "running")
    if what == "charge" or (found is not None and found.state == "line" and what in ("settle", "resize")):
        return False
    growth = step["tokens"] - found.tokens if what == "resize" and found is not None else 0
    judge.do(step, now)
    if growth > 0 and found is not None:
        tier = judge.tiers[found.tier]["name"]
        charge = {"do": "charge", "tier": tier, "tenant": found.tenant, "weight": found.weight, "tokens": growth}
        judge.do({**charge, "user": found.user}, now)
    one.do(step, now)
    return True


def test_in_the_process_it_gives_the_same_with_four_bids() -> None:
    assert [found for program in programs(range(16)) if (found := first_difference(program, 4, member.Member))] == []


def test_what_is_shown_of_a_tenant_with_users_counts_by_its_cost_for_what_comes_after_it() -> None:
    assert first_difference(random_program(483, several=True, by_gain=True), 4) is None


@settings(max_examples=examples(20))
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_it_answers_random_programs_as_the_reference(seed: int, several: bool, by_gain: bool) -> None:
    assert first_difference(random_program(seed, several=several, by_gain=by_gain), 32) is None


def test_in_the_process_what_waits_after_the_bids_is_not_passed() -> None:
    """Two of a tier are shown at a time, and ten enter at once: all of the first tier before any of the other."""
    submits = [("t0", "a", 4)] * 3 + [("t0", "b", 4)] * 5 + [("t1", "c", 4)] * 4
    program = {
        "name": "all that waits is let in at once",
        "tiers": [{"name": "t0"}, {"name": "t1"}],
        "capacity": {"tokens": 40},
        "steps": [
            {"at": 0, "do": "submit", "id": "all", "tier": "t0", "tokens": 40},
            *(
                {"at": 0, "do": "submit", "id": f"r{n}", "tier": tier, "tenant": tenant, "tokens": tokens}
                for n, (tier, tenant, tokens) in enumerate(submits)
            ),
            {"at": 1, "do": "settle", "id": "all"},
        ],
    }
    assert first_difference(program, 2, member.Member) is None
    by_gain = {"gain": {"weight": 1, "tokens": 10, "cost": 1, "start_by": 100, "slack": 1}}
    program = {**program, "order": "gain", "steps": [{**step, **by_gain} for step in program["steps"]]}
    for number, step in enumerate(program["steps"]):
        step["gain"] = {**by_gain["gain"], "weight": 1 + number * 5 % 7}
    assert first_difference(program, 2, member.Member) is None


def test_in_the_process_a_call_a_millisecond_later_lets_in_what_one_call_leaves() -> None:
    one = OneReplica({"tiers": [{"name": f"t{n}"} for n in range(3)], "capacity": {"tokens": 96}}, near=member.Member)
    one.do({"do": "submit", "id": "all", "tier": "t0", "tokens": 96}, 0)
    for number in range(96):
        one.do({"do": "submit", "id": f"r{number}", "tier": f"t{number % 3}", "tokens": 1}, 0)
    one.pump(0)
    one.do({"do": "settle", "id": "all"}, 1_000)
    assert (len(one.pump(1_000)[0]), one.member.due_us(), len(one.call(2_000)[0])) == (64, 2_000, 32)


def test_growth_is_charged_for_bids_that_were_shown_before() -> None:
    """Three of the tenant that pays for growth are shown, and one of the other, which has all that is free then."""
    steps = [{"at": 0, "do": "submit", "id": name, "tier": "t0", "tenant": "a", "tokens": 10} for name in ("x", "y")]
    steps += [{"at": 0, "do": "submit", "id": f"a{n}", "tier": "t0", "tenant": "a", "tokens": 1} for n in range(6)]
    steps += [{"at": 0, "do": "submit", "id": f"b{n}", "tier": "t0", "tenant": "b", "tokens": 3} for n in range(6)]
    steps += [{"at": 1, "do": "resize", "id": "x", "tokens": 20}, {"at": 1, "do": "settle", "id": "y"}]
    steps += [{"at": 2, "do": "settle", "id": "x"}]
    program = {"name": "growth", "tiers": [{"name": "t0"}], "capacity": {"tokens": 20}, "steps": steps}
    assert first_difference(program, 4, member.Member) is None


def test_a_newcomer_loses_nothing_where_the_last_that_was_not_shown_is_given_up() -> None:
    """Two are shown. The newcomer comes before the second of them."""
    program = {
        "name": "given up before a newcomer",
        "tiers": [{"name": "t0"}],
        "capacity": {"tokens": 20},
        "steps": [
            *(
                {"at": 0, "do": "submit", "id": f"a{n}", "tier": "t0", "tenant": "a", "tokens": tokens}
                for n, tokens in enumerate((20, 10, 10, 10))
            ),
            {"at": 1, "do": "cancel", "id": "a3"},
            {"at": 1, "do": "submit", "id": "b", "tier": "t0", "tenant": "b", "tokens": 10},
            {"at": 2, "do": "settle", "id": "a0"},
        ],
    }
    for near in (None, member.Member):
        assert first_difference(program, 2, near) is None


def test_of_one_tenant_nothing_passes_where_a_bid_before_it_is_given_up() -> None:
    """Three are shown, and the first is given up: the next is not shown in place of those before it."""
    steps = [{"at": 0, "do": "submit", "id": f"r{n}", "tier": "t0", "tokens": 10 if n < 2 else 4} for n in range(7)]
    steps += [{"at": 1, "do": "cancel", "id": "r1"}, {"at": 2, "do": "settle", "id": "r0"}]
    program = {"name": "given up", "tiers": [{"name": "t0"}], "capacity": {"tokens": 10}, "steps": steps}
    for near in (None, member.Member):
        assert first_difference(program, 3, near) is None


def test_what_grows_while_it_is_taken_back_gives_all_of_that_back() -> None:
    program = {
        "name": "the second is taken back, and grows",
        "tiers": [{"name": "t0", "preempt_after_s": 0}, {"name": "t1", "preemptible": True}],
        "max_preemptions": 1,
        "capacity": {"tokens": 20},
        "steps": [
            *(
                {"at": 0, "do": "submit", "id": f"r{n}", "tier": tier, "tokens": tokens}
                for n, (tier, tokens) in enumerate([("t1", 8), ("t1", 9), ("t0", 4)])
            ),
            {"at": 1, "do": "resize", "id": "r1", "tokens": 20},
        ],
    }
    assert first_difference(program, 32) is None


class Slow(member.Member):
    """One that makes a call for each request."""

    def enter(self, *_: Any) -> None:
        return None


class Counting(member.Member):
    """One that counts the requests that entered without a call."""

    entered = 0

    def enter(self, *args: Any) -> ScheduledLease | None:
        held = super().enter(*args)
        Counting.entered += held is not None
        return held


def _sums(one: OneReplica) -> list[Any]:
    scheduler = one.ledger.state.scheduler
    tiers = [
        (tier.used, tier.on_floor, tier.owes_until_us, tier.latest, tier.lined, tier.queue.virtual, tier.queue.afresh)
        for tier in scheduler.tiers
    ]
    engines = [(engine.id, engine.held, engine.sent, engine.lined) for engine in scheduler.engines.values()]
    of_leases = [
        (name, lease.engine, lease.entered, lease.sent, lease.ticket.amount, lease.ticket.excess, lease.ticket.on_floor)
        for name, lease in one.member.leases.items()
    ]
    of_bids = one.member._bids.virtual() if one.member.waiting() else None
    return [scheduler.admissions, tiers, sorted(engines), of_leases, of_bids]


def _difference_of_the_fast_path(program: dict[str, Any], luck: random.Random) -> str | None:
    """Most that runs ends soon, so that many find the pool idle."""
    judge, fast, slow = reference.new(program), OneReplica(program, near=Counting), OneReplica(program, near=Slow)
    judge.divide = lambda tokens, weight: tokens / weight
    steps = []
    for step in program["steps"]:
        steps += [step, *({"at": step["at"], "do": "settle", "id": f"r{n}"} for n in range(40) if luck.random() < 0.2)]
    for number, step in enumerate(steps, 1):
        now = round(step["at"] * 1e6)
        if _play(judge, fast, step, now):
            slow.do(step, now)
        answers = [(judge.dispatch(now), sorted(judge.preempt(now)))]
        is_decided = step["do"] == "guard"  # by the program: no replica knows that its next call has that to say
        called = [one.pump(now) if is_decided else one.call(now) for one in (fast, slow)]
        answers += [(admitted, sorted(chosen)) for admitted, chosen in called]
        if answers[0] != answers[1] or answers[1] != answers[2] or _sums(fast) != _sums(slow):
            return f"{program['name']}, step {number} {step} at {now}: {answers}, {_sums(fast)}, {_sums(slow)}"
    return None


@settings(max_examples=examples(20))
@example(171, True, False)
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_who_enters_without_a_call_enters_as_with_one(seed: int, several: bool, by_gain: bool) -> None:
    program = random_program(seed, several=several, by_gain=by_gain)
    assert _difference_of_the_fast_path(program, random.Random(seed)) is None


def test_of_an_idle_pool_most_enter_without_a_call() -> None:
    Counting.entered = 0
    for program in programs(range(12)):
        _difference_of_the_fast_path(program, random.Random(1))
    assert Counting.entered > 20


LOOK_US = 100_000


def _history(program: dict[str, Any], calls_always: bool) -> list[tuple[int, str]]:
    """What entered or was taken back, and when. All times of the program are whole tenths of a second."""
    one, found, now = OneReplica(program, 32), [], 0
    for step in [*program["steps"], {"do": "wait", "at": program["steps"][-1]["at"] + 30}]:
        at = round(step["at"] * 10) * LOOK_US
        while now < at:
            due = one.member.due_us()
            now = min(at, now + LOOK_US if calls_always else at if due is None else max(due, now + 1))
            if now < at:
                admitted, chosen = one.pump(now) if calls_always else one.call(now)
                found += [(now, f"{ticket} enters {engine}") for ticket, engine in admitted]
                found += [(now, f"{ticket} is taken back") for ticket in sorted(chosen)]
        one.do(_in_tenths(step), at)
        admitted, chosen = one.pump(at)
        found += [(now, f"{ticket} enters {engine}") for ticket, engine in admitted]
        found += [(now, f"{ticket} is taken back") for ticket in sorted(chosen)]
    return found


def _in_tenths(step: dict[str, Any]) -> dict[str, Any]:
    """A cap ends, and a slow start begins, when the one that calls all the time looks."""
    engines = [{**engine, "since_s": round(engine.get("since_s", 0), 1)} for engine in step.get("engines", ())]
    return {**step, "until": math.ceil(step.get("until", 0) * 10) / 10, "engines": engines}


def _calls_only_when_it_is_told(program: dict[str, Any]) -> str | None:
    expected, found = _history(program, True), _history(program, False)
    if expected == found:
        return None
    return f"{program['name']}: {sorted(set(found) ^ set(expected))[:3]}"


AGES = {
    "name": "the idle headroom of a tier is for a ticket that reached its level",
    "tiers": [{"name": "t0", "reserve": 0.5, "lend": 0}, {"name": "t1"}],
    "aging": {"promote_after_s": 2, "ceiling": "t0"},
    "capacity": {"tokens": 10},
    "steps": [{"at": 0, "do": "submit", "id": f"r{n}", "tier": "t1", "tokens": 5} for n in range(2)],
}

PASSES_IN_LINE = {
    "name": "of two in line for an engine the first earns nothing any more: the other, which has room there, passes it",
    "order": "gain",
    "tiers": [{"name": "t0"}],
    "engines": [{"id": "a#1", "tokens": 10}, {"id": "b#1", "tokens": 10}],
    "steps": [
        {
            "at": 0,
            "do": "submit",
            "id": name,
            "tier": "t0",
            "tokens": tokens,
            "gain": {"weight": weight, "tokens": 1, "cost": 1, "start_by": start_by, "slack": 1},
        }
        for name, tokens, weight, start_by in [
            ("on a", 6, 1, 9),
            ("on b", 8, 1, 9),
            ("first", 6, 4, 1),
            ("other", 4, 1, 9),
        ]
    ],
}


@pytest.fixture
def no_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "HEARTBEAT_US", 10**12)
    monkeypatch.setattr(ledger, "LOST_US", 10**12)
    monkeypatch.setattr(ledger, "DEAD_US", 10**12)


@pytest.mark.usefixtures("no_heartbeats")
def test_calls_at_next_are_as_good_as_calls_all_the_time() -> None:
    assert [
        found
        for program in [AGES, PASSES_IN_LINE, *programs(range(16))]
        if (found := _calls_only_when_it_is_told(program))
    ] == []


@pytest.mark.soak
@pytest.mark.usefixtures("no_heartbeats")
def test_calls_at_next_are_as_good_in_100_programs() -> None:
    assert [found for program in programs(range(100)) if (found := _calls_only_when_it_is_told(program))] == []


def test_by_gain_the_best_is_shown_too() -> None:
    def submit(number: int, tokens: int, cost: float) -> dict[str, Any]:
        gain = {"weight": 1, "tokens": 10, "cost": cost, "start_by": 100, "slack": 1}
        return {
            "at": 0,
            "do": "submit",
            "id": f"r{number}",
            "tier": "t0",
            "tenant": "a",
            "tokens": tokens,
            "gain": gain,
        }

    program = {
        "name": "a small gain, many of them, the largest",
        "order": "gain",
        "tiers": [{"name": "t0"}],
        "capacity": {"tokens": 10},
        "steps": [*(submit(n, 10, 9) for n in range(9)), submit(9, 10, 3), submit(10, 10, 1)],
    }
    program["steps"] += [{"at": 1, "do": "settle", "id": f"r{n}"} for n in (0, 10, 9, 1)]
    assert first_difference(program, 2) is None


SECOND = 1_000_000
RULES = pool_rules([("t0", 0.2)])
ENGINE = EngineView("e#1", 10, 100, 100, 1_000, True)


def _call(store: ledger.Ledger, of: member.Member, now: int) -> None:
    while (asked := of.poll(now)) is not None:
        of.answered(store.execute(asked, now)[0], now)


def _joined(store: ledger.Ledger, *names: str, rules: LedgerRules = RULES, **more: Any) -> list[member.Member]:
    """Replicas that have shared the store for three seconds."""
    members = [member.Member(name, rules, **more) for name in names]
    for at in (0, 3 * SECOND):
        for of in members:
            of.view([ENGINE], at)
            _call(store, of, at)
    return members


def test_alone_it_admits_its_part_of_what_was_free_from_all_tiers_and_not_too_early() -> None:
    """Three tokens, `min(10 // 2, 0 + (10 - 4) // 2)`. More than the bids of one call are too large for that."""
    store, second = ledger.Ledger(), SECOND
    one, other = _joined(store, "one", "other", rules=pool_rules([("t0", 0.2), ("t1", 0.2)]))
    other.submit(Ticket("big", 0, "", 4), 3 * second)
    _call(store, other, 3 * second)
    _call(store, one, 5 * second)
    large: list[Ticket] = []
    for number in range(40):
        large.append(Ticket(f"large {number}", 0, "", 4, number=number))
        one.submit(large[-1], 5 * second)
        one.submit(Ticket(f"small {number}", 1, "", 1, number=100 + number), 5 * second)
    found = {}
    for now in range(5 * second, 9 * second, second // 2):
        if one.poll(now) is not None:
            one.unanswered(now)
        found[now / second] = len(one.leases)
        assert one.due_us() is not None
    assert [at for at, leases in found.items() if leases == 0] == [5, 5.5, 6, 6.5, 7]
    assert [sorted(one.leases), found[8.5]] == [["small 0", "small 1", "small 2"], 3]
    for ticket in large:  # they would hold their place in a pool of five
        one.cancel(ticket, 9 * second)
    for now in range(9 * second, 16 * second, second // 2):  # the other has been silent for so long that it is dead
        if one.poll(now) is not None:
            one.unanswered(now)
    assert sorted(one.leases) == [f"small {number}" for number in range(5)]
    due = one.due_us()
    assert due is not None  # it asks again, and not at once
    assert due > now


@pytest.mark.parametrize(("shares_engines", "sizes"), [(False, {"e#2": 10}), (True, {"e#2": 5})])
def test_alone_it_uses_an_engine_that_the_ledger_has_not_heard_of(shares_engines: bool, sizes: dict[str, int]) -> None:
    """It began anew just before the store was lost: nobody holds anything there, so its part of all of it is free."""
    store, second = ledger.Ledger(), SECOND
    one, _ = _joined(store, "one", "other", shares_engines=shares_engines)
    _call(store, one, 4 * second)
    one.submit(Ticket("before", 0, "", 10), 4 * second)
    _call(store, one, 4 * second)
    assert list(one.leases) == ["before"]
    one.view([EngineView("e#2", 10, 100, 100, 1_000, True)], 4 * second)
    one.submit(Ticket("after", 0, "", 5), 4 * second)
    for now in range(5 * second, 20 * second, second // 2):
        if one.poll(now) is not None:
            one.unanswered(now)
    assert {part.id: part.tokens for part in one.parts(20 * second)} == sizes
    assert sorted(one.leases) == ["after", "before"]


def test_a_grant_that_was_published_counts_from_its_moment_by_the_replicas_own_clock() -> None:
    store, second, ahead = ledger.Ledger(), SECOND, 50_000_000
    one, other = (member.Member(who, RULES) for who in ("one", "other"))
    woken = []

    def call(of: member.Member, now: int) -> None:
        while (asked := of.poll(now)) is not None:
            reply, wake_ups = store.execute(asked, now + ahead)
            woken.extend(wake_ups)
            of.answered(reply, now)

    for at in (0, 3 * second):
        for of in (one, other):
            of.view([ENGINE], at)
            call(of, at)
    other.submit(Ticket("first", 0, "", 10), 3 * second)
    call(other, 3 * second)
    one.submit(Ticket("second", 0, "", 10), 3 * second)
    call(one, 3 * second)
    other.end(other.leases["first"], 4 * second)
    call(other, 4 * second)
    one.woken(woken[-1], 4 * second)
    assert one.leases["second"].ticket.counted_us == 4 * second


def test_what_ended_while_a_call_was_on_its_way_is_free_in_the_figures_of_its_reply() -> None:
    store, second = ledger.Ledger(), SECOND
    (one,) = _joined(store, "one")

    def held(now: int) -> int:
        return one.mirror(now).engines["e#1"].held[0]

    one.submit(Ticket("ends", 0, "", 4), 3 * second)
    _call(store, one, 3 * second)
    assert held(3 * second) == 4
    one.submit(Ticket("second", 0, "", 1, number=1), 4 * second)
    asked = one.poll(4 * second)
    assert asked is not None
    one.end(one.leases["ends"], 4 * second)
    assert held(4 * second) == 0
    one.answered(store.execute(asked, 4 * second)[0], 4 * second)
    assert held(4 * second) == 1, "of the reply's five, four have ended since"


def test_what_runs_counts_in_a_pool_whose_tiers_are_others_from_now_on() -> None:
    store, second = ledger.Ledger(), SECOND
    (old,) = _joined(store, "old")
    new = member.Member("new", pool_rules([("before", 0.2), ("t0", 0.2)]), takes_over=True)
    old.submit(Ticket("runs", 0, "", 6), 3 * second)
    _call(store, old, 3 * second)
    _call(store, old, 4 * second)  # it states the lease
    new.view([ENGINE], 4 * second)
    _call(store, new, 4 * second)
    assert store.state is not None
    scheduler = store.state.scheduler
    assert [tier.used[0] for tier in scheduler.tiers] == [0, 6]
    assert scheduler.engines["e#1"].held[0] == 6


@pytest.mark.parametrize("kind", ["state", "call"])
def test_rules_that_change_while_a_call_is_on_its_way_are_stated_after_it(kind: str) -> None:
    store, second, kinds = ledger.Ledger(), SECOND, []
    one = member.Member("one", RULES)
    for now in range(0, 5 * second, second):
        while (asked := one.poll(now)) is not None:
            if asked.kind == kind and kind not in kinds:
                one.change_rules(pool_rules([("t0", 0.5)]), now)
            kinds.append(asked.kind)
            one.answered(store.execute(asked, now)[0], now)
    assert kinds.count("state") == 2
    assert store.state is not None
    assert store.state.scheduler.rules.tiers[0].reserve == 0.5


def test_alone_it_caps_an_engine_that_refuses_and_shows_its_own_line() -> None:
    store, second, late = ledger.Ledger(), SECOND, 10_000_000
    (one,) = _joined(store, "one")

    def enters(ticket: str, at: int) -> bool:
        one.submit(Ticket(ticket, 0, "", 1, number=at), at)
        return look(at, ticket)

    def look(at: int, ticket: str = "") -> bool:
        if one.poll(at) is not None:
            one.unanswered(at)
        return ticket in one.leases

    for at in range(5 * second, late, second // 2):
        look(at)
    assert enters("first", late)
    one.tell(Cap("e#1", 1, 3 * second), late)
    assert not enters("second", late)
    line = one.mirror(late).line
    assert [ticket.engine for ticket in line] == [None], "for no engine until the cap is over"
    assert one.mirror(late).engines["e#1"].cap(late) == 1
    assert look(late + 3 * second, "second")
    assert one.mirror(late).line == []


def test_what_a_lease_grew_and_owes_counts_once_where_the_answer_was_lost(server: Any) -> None:
    server.flushdb()
    store, second = Both(StoredLedger(server)), SECOND
    one, other = _joined(store, "one", "other")
    one.submit(Ticket("grows", 0, "a", 4), 3 * second)
    one.submit(Ticket("owes", 0, "b", 6), 3 * second)
    _call(store, one, 3 * second)
    other.submit(Ticket("waits", 0, "c", 10), 3 * second)
    _call(store, other, 3 * second)
    assert store.state is not None
    tier = store.state.scheduler.tiers[0]
    one.charge(one.leases["grows"], 5, 4 * second)
    one.leases["owes"].ticket.excess = 1
    one.end(one.leases["owes"], 4 * second)
    lost = one.poll(5 * second)
    assert lost is not None
    store.execute(lost, 5 * second)
    charged, owed = tier.queue.finish["a"], tier.owes_until_us
    assert (charged - tier.queue.virtual, owed > 5 * second) == (5, True)
    one.unanswered(5 * second)
    _call(store, one, 5 * second)
    assert one.mode is MemberMode.SHARED
    assert (tier.queue.finish["a"], tier.owes_until_us) == (charged, owed)
