"""What replicas see of a guarded tier and decide about it (rule 10): in the process and in a store, byte by byte."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from sidecar.pools import calls
from sidecar.pools.calls import PPM, Bid, Call, Cell, GuardDecided, Reply, SloSeen
from sidecar.pools.ledger import Ledger
from sidecar.pools.member import Member
from sidecar.pools.member_events import Entered, MemberMode
from sidecar.scheduling.guard import GuardedTier
from sidecar.scheduling.tickets import Ticket
from tests.ledger.stored_ledger import Both, StoredLedger

pytestmark = pytest.mark.hasty  # the time is the test's: replicas are as patient as they are
SECOND = 1_000_000


def rules(held: int, other: str = "batch", other_held: int = 0) -> calls.LedgerRules:
    """A tier that is held to so much of its SLO, in millionths, before another one."""
    named = (("chat", held), (other, other_held))
    tiers = [calls.LedgerTierRules(name, 0, PPM, PPM, False, False, None, hold) for name, hold in named]
    return calls.LedgerRules(tiers, None, 0, 0, 200, False, PPM)


RULES, UNGUARDED = rules(970_000), rules(0)
ENGINES = [calls.EngineView("e#1", 100, 100, 1000, 1000, is_reachable=True)]


class Talk:
    """Replicas that talk to one ledger; each says one thing after the other."""

    def __init__(self, ledger: Any) -> None:
        self.ledger, self.numbers, self.now = ledger, dict[str, int](), SECOND

    def say(self, who: str, kind: str = "call", *, after: float = 0.0, **news: Any) -> Reply:
        self.now += round(after * SECOND)
        self.numbers[who] = self.numbers.get(who, 0) + 1
        call = Call(calls.LAYOUT, who, self.numbers[who], kind, **news)
        reply, _ = self.ledger.execute(call, self.now)
        assert reply.kind == "ok", (who, reply)
        return reply

    def state(self, who: str, rules: calls.LedgerRules = RULES, **news: Any) -> Reply:
        return self.say(who, "state", whole=True, rules=rules, knew=1, engines=ENGINES, **news)

    def bid(self, who: str, number: int, tokens: int, **more: Any) -> Reply:
        bid = Bid(number, "batch", "t", tokens, 1, 0, 1, {}, [], 0, number)
        return self.say(who, bids=[bid], **more)


@pytest.fixture(params=["in the process", "in a store"])
def talk(request: pytest.FixtureRequest) -> Talk:
    if request.param == "in the process":
        return Talk(Ledger())
    server = request.getfixturevalue("server")
    server.flushdb()
    return Talk(Both(StoredLedger(server)))


def guard(reply: Reply) -> calls.GuardHeld:
    return reply.tiers[0].guard


def test_it_begins_with_a_tenth_and_only_for_a_tier_that_is_guarded(talk: Talk) -> None:
    reply = talk.state("a")
    assert guard(reply) == calls.GuardHeld(PPM // 10)
    assert reply.tiers[1].guard == calls.NO_GUARD
    assert talk.bid("a", 1, 11).grants[0].tokens == 11  # one enters beside nothing
    reply = talk.bid("a", 2, 1, cells=[Cell("batch", "e#1", 11, 1)], acks=[1])
    assert reply.grants == []
    assert guard(reply).has_kept_out
    assert reply.next_us == SECOND  # 2 s after the ledger's first moment


def test_what_replicas_saw_adds_up_and_is_heard_once(talk: Talk) -> None:
    talk.state("a")
    talk.state("b")
    talk.say("a", seen=[SloSeen("chat", 5, 1, 2)])
    talk.say("b", seen=[SloSeen("chat", 7, 0, 2), SloSeen("batch", 9, 9, 2), SloSeen("nobody", 1, 1, 2)])
    again = talk.state("a", seen=[SloSeen("chat", 5, 1, 2)])  # its answer was lost: it says all of it again
    assert (guard(again).met, guard(again).missed) == (12, 1)


def test_one_decision_counts_that_of_who_made_it_first(talk: Talk) -> None:
    talk.state("a")
    talk.state("b")
    talk.say("a", seen=[SloSeen("chat", 5, 6, 2)])
    talk.say("b", seen=[SloSeen("chat", 2, 1, 2)])  # after the reply by which the other one decides
    first = talk.say("a", guards=[GuardDecided("chat", 0, 300_000, 5, 6, [0.25, 3])])
    at = guard(first).decided_us
    assert guard(first) == calls.GuardHeld(300_000, at, 2, 1, False, [0.25, 3.0])
    assert guard(talk.say("b", guards=[GuardDecided("chat", 0, 900_000, 7, 7, [])])) == guard(first)
    assert guard(talk.say("b", after=1, guards=[GuardDecided("chat", at, 500_000, 2, 1, [])])).share_ppm == 500_000


def test_who_decides_may_die(talk: Talk) -> None:
    talk.state("a")
    talk.state("b")
    reply = talk.say("a", after=1)
    reply = talk.say("b", after=1)
    assert reply.now_us >= guard(reply).decided_us + 2 * SECOND  # both are asked; one of them falls silent
    assert guard(talk.say("b", guards=[GuardDecided("chat", 0, 200_000, 0, 0, [])])).share_ppm == 200_000


def test_room_that_opens_is_given_at_once(talk: Talk) -> None:
    talk.state("a")
    talk.bid("a", 1, 10)
    waiting = talk.bid("a", 2, 20, cells=[Cell("batch", "e#1", 10, 1)], acks=[1])
    assert waiting.grants == []
    opened = talk.say("a", guards=[GuardDecided("chat", 0, 300_000, 0, 0, [])])
    assert [grant.bid for grant in opened.grants] == [2]
    assert not guard(opened).has_kept_out


def test_a_waiting_one_has_it_decided_in_time(talk: Talk) -> None:
    talk.state("a")
    talk.bid("a", 1, 10)
    talk.say("a", guards=[GuardDecided("chat", 0, 100_000, 0, 0, [])], cells=[Cell("batch", "e#1", 10, 1)], acks=[1])
    reply = talk.bid("a", 2, 20, after=0.5)
    assert guard(reply).has_kept_out
    assert reply.next_us == 1.5 * SECOND


def test_an_empty_store_hears_what_was_in_force(talk: Talk) -> None:
    reply = talk.state("a", guards=[GuardDecided("chat", 0, 700_000, 0, 0, [1.5])])
    assert (guard(reply).share_ppm, guard(reply).state) == (700_000, [1.5])
    later = talk.state("b", guards=[GuardDecided("chat", 0, 100_000, 0, 0, [])])
    assert guard(later).share_ppm == 700_000


def test_a_tier_that_is_guarded_no_more_bounds_nobody(talk: Talk) -> None:
    talk.state("a")
    talk.bid("a", 1, 10)
    assert talk.bid("a", 2, 60, cells=[Cell("batch", "e#1", 10, 1)], acks=[1]).grants == []
    opened = talk.state("a", UNGUARDED, cells=[Cell("batch", "e#1", 10, 1)], replaces=True)
    assert guard(opened) == calls.NO_GUARD
    assert [grant.bid for grant in talk.bid("a", 3, 60).grants] == [3]
    closed = talk.state("a", RULES, cells=[Cell("batch", "e#1", 70, 2)], replaces=True)
    assert guard(closed) == calls.GuardHeld(PPM // 10)


class Pool:
    """Replicas of one store in virtual time. What a replica sees is told at once to whoever runs.

    While the store `is_lost` it answers nobody. `entered` has the names of what `submit` got in.
    """

    def __init__(self, *names: str, rules: calls.LedgerRules = RULES) -> None:
        self.store, self.now, self.members = Ledger(), 1000 * SECOND, dict[str, Member]()
        self.is_lost, self.entered = False, list[str]()
        for name in names:
            self.join(name, rules)

    def join(self, name: str, rules: calls.LedgerRules = RULES) -> Member:
        self.members[name] = member = Member(name, rules)
        member.view(ENGINES, self.now)
        return member

    def run(self, seconds: float, *names: str) -> None:
        """Those of these names run, in this order, at each tenth of a second; by default all."""
        end = self.now + round(seconds * SECOND)
        while self.now < end:
            self.now += SECOND // 10
            for member in [self.members[name] for name in names or self.members]:
                self.turn(member)

    def turn(self, member: Member) -> None:
        for _ in range(20):
            call = member.poll(self.now)
            self.entered += [it.lease.ticket.id for it in member.take_events() if isinstance(it, Entered)]
            if call is None:
                return
            if not self.is_lost:
                member.answered(self.store.execute(call, self.now)[0], self.now)
        raise AssertionError("it calls again and again")

    def submit(self, member: str, name: str, tokens: int) -> None:
        self.members[member].submit(Ticket(name, 1, "", tokens, number=self.now), self.now)

    def see(self, name: str, met: int, missed: int) -> None:
        for n in range(met + missed):
            self.members[name].note_slo(0, f"t{n}", is_missed=n < missed, now_us=self.now)

    def decided(self, share_ppm: int, state: list[float]) -> None:
        """The tier is as another version, or a replica that errs, has left it."""
        assert self.store.state is not None
        self.store.state.scheduler.guards.decide(self.guarded(), Fraction(share_ppm, PPM), self.now, state)

    def guarded(self) -> GuardedTier:
        """The tier as the store has it."""
        assert self.store.state is not None
        (guarded,) = self.store.state.scheduler.guards.tiers
        return guarded

    def shares(self) -> list[float]:
        return [member.guards(self.now)[0].share for member in self.members.values()]

    def are_in_vain(self) -> list[bool]:
        return [member.guards(self.now)[0].is_in_vain for member in self.members.values()]


def test_without_its_store_a_replica_goes_on_with_the_last_share_and_with_what_it_sees_itself() -> None:
    pool = Pool("a")
    pool.run(4)
    pool.submit("a", "first", 4)
    pool.submit("a", "second", 3)
    pool.submit("a", "third", 90)
    for _ in range(12):
        pool.see("a", met=5, missed=0)
        pool.run(2)
    assert pool.entered == ["first", "second"]
    assert (share := pool.shares()[0]) > 0.15
    pool.is_lost = True
    pool.run(8)
    assert pool.members["a"].mode is MemberMode.ALONE
    assert share <= pool.shares()[0] < share * 1.02  # while nobody asks, it grows slowly
    for _ in range(20):
        pool.see("a", met=5, missed=0)
        pool.run(2)
    assert pool.shares()[0] > share
    grown = pool.shares()[0]
    pool.see("a", met=0, missed=20)
    pool.run(5)
    assert pool.shares()[0] < grown
    pool.is_lost = False
    pool.run(5)
    assert pool.members["a"].mode is MemberMode.SHARED
    assert share <= pool.shares()[0] < share * 1.05  # that of the store, whatever it found alone


def test_a_replica_whose_policy_guards_another_tier_does_not_decide_for_those_that_are_guarded() -> None:
    pool = Pool("a", rules=rules(0, other_held=900_000))
    pool.members["a"]._replaces = False
    talk = Talk(pool.store)
    talk.now = pool.now
    talk.state("b")
    pool.run(10)  # and it does not call again and again
    pool.see("a", met=0, missed=20)
    pool.run(5)
    assert pool.store.state is not None
    assert pool.store.state.scheduler.guards.tiers[0].decided_us == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"guards": [GuardDecided("chat", -1, 1, 0, 0, [])]},
        {"guards": [GuardDecided("chat", 0, 0, 0, 0, [])]},
        {"guards": [GuardDecided("chat", 0, PPM + 1, 0, 0, [])]},
        {"guards": [GuardDecided("chat", 0, 1, 0, 0, [float("inf")])]},
        {"seen": [SloSeen("chat", -1, 0, 2)]},
        {"seen": [SloSeen("chat", 0, 2**60, 2)]},
    ],
)
def test_a_store_takes_no_bad_figures(bad: dict[str, Any], server: Any) -> None:
    server.flushdb()
    talk = Talk(StoredLedger(server))
    talk.state("a")
    with pytest.raises(Exception, match=r"no call of the ledger: field 2[56]"):
        talk.say("a", **bad)


def test_one_that_comes_to_an_empty_store_does_not_decide_before_the_others_have_said_what_was_in_force() -> None:
    pool = Pool("a")
    pool.run(4)
    pool.decided(700_000, [])
    pool.run(2)
    assert pool.shares() == [0.7]
    pool.store = Ledger()
    pool.join("new")
    pool.run(0.1, "new")
    pool.run(5)
    assert pool.shares() == [0.7, 0.7]


@pytest.mark.parametrize(
    "state",
    [[], [0.6], [0.6] * 20, [7.0, 1.0, 7.0, *[0.0] * 6], [0.6, -1.0, 0.6, *[0.0] * 6],
     [0.6, 1.0, 0.6, 1e300, -5.0, *[0.0] * 4], [0.6, 1.0, 1e-300, *[0.0] * 6]],
)  # fmt: skip
def test_a_state_of_another_version_or_out_of_bounds_is_begun_anew_from_the_share_in_force(state: list[float]) -> None:
    pool = Pool("a", "b")
    pool.run(4)
    pool.decided(600_000, state)
    for _ in range(5):
        pool.see("a", met=6, missed=0)
        pool.run(2)
    assert pool.shares() == [0.6, 0.6]


def test_a_replica_of_other_tiers_decides_nothing() -> None:
    pool = Pool("a", "b")
    pool.run(4)
    foreign = pool.join("foreign", rules(970_000, "bulk"))
    pool.run(4)
    assert foreign.is_foreign
    pool.decided(200_000, [])
    pool.see("a", met=0, missed=20)
    pool.run(1.5, "a")
    pool.run(5, "foreign")
    assert pool.guarded().missed == 20  # nothing was decided by it
    pool.run(2)
    assert pool.guarded().missed == 0


def test_every_replica_knows_whether_the_guard_is_in_vain_whoever_decided() -> None:
    pool = Pool("a", "b")
    pool.run(4)
    for _ in range(5):
        assert pool.are_in_vain() == [False, False]  # these may be of answers that ran beside less important work
        pool.see("a", met=0, missed=20)
        pool.run(1.5, "a")
        pool.run(5, "a", "b")
    assert pool.are_in_vain() == [True, True]
    pool.see("b", met=20, missed=0)
    pool.run(1.5, "b")
    pool.run(5, "b", "a")
    assert pool.are_in_vain() == [False, False]


def test_where_the_newest_rules_guard_nothing_no_replica_shows_a_bound() -> None:
    pool = Pool("a")
    pool.run(4)
    pool.join("new", UNGUARDED)
    pool.run(4)
    assert pool.members["new"].guards(pool.now) == []
    assert [guard.share for guard in pool.members["a"].guards(pool.now)] == [1.0]
    pool.members["a"].change_rules(RULES, pool.now)
    pool.run(1)
    assert [guard.share for guard in pool.members["a"].guards(pool.now)] == [0.1]
