"""The script on the wire: calls that come twice, late, from replicas that are gone, to a store that lost things."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import redis

from sidecar.policy.model import Policy
from sidecar.policy.rules import Shares, pool_rules
from sidecar.pools.redis import protocol
from sidecar.pools.redis.protocol import BEAT_S, SILENCE_S, Reply, TierReply
from sidecar.pools.redis.script import folded, joined, source
from tests.pools.harness import Clock, ask, policy_of, simple
from tests.pools.scripted import Scripted, entering
from tests.support.redis_servers import RedisServer


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    """A synchronous client of an empty server."""
    with redis.Redis(host=redis_server.host, port=redis_server.port) as made:
        made.flushall()
        yield made


class Replicas:
    """Some replicas of one pool, on one clock."""

    def __init__(self, client: Any, policy: Policy | None = None) -> None:
        self.client = client
        self.clock = Clock()
        self.policy = policy or simple(tokens=100)

    def one(self, name: str, policy: Policy | None = None) -> Scripted:
        replica = Scripted(self.client, self.clock, policy or self.policy, name)
        replica.sync()
        return replica


@pytest.fixture
def replicas(client: Any) -> Replicas:
    return Replicas(client)


def granted(reply: Reply) -> list[int]:
    return [ticket for ticket, _ in reply.grants]


# -- twice, and late


def test_entering_twice_under_one_id_is_entering_once(replicas: Replicas) -> None:
    one = replicas.one("a")
    assert granted(one.enter(1, ask(tokens=60))) == [1]
    again = one.enter(1, ask(tokens=60))
    assert granted(again) == []
    assert (again.held_tokens, again.leases) == (60, 1)
    waiting = one.call(*entering(2, ask(tokens=60)), *entering(2, ask(tokens=60)))
    assert waiting.waiting == 1


def test_ending_twice_changes_nothing_and_is_counted(replicas: Replicas) -> None:
    one = replicas.one("a")
    one.enter(1, ask(tokens=60))
    reply = one.call(protocol.END, 1, protocol.END, 1, protocol.END, 77)
    assert (reply.held_tokens, reply.leases, reply.late) == (0, 0, 2)


def test_a_late_call_of_an_older_fence_does_nothing(replicas: Replicas) -> None:
    """A call that timed out may still run, after the replica has stated what it has."""
    one = replicas.one("a")
    late = [protocol.CALL, one.name, one.fence, 0, *entering(9, ask(tokens=60))]
    one.sync()
    assert one.answer(*late) == [protocol.STALE]
    assert one.call().leases == 0


def test_a_late_sync_does_nothing(replicas: Replicas) -> None:
    one = replicas.one("a")
    text = protocol.rules_text(replicas.policy, replicas.policy.rules)
    late = [protocol.SYNC, one.name, one.fence, 0, text, 0, 0, protocol.LEASE, 5, 0, 50, 1, 0]
    one.sync()
    assert one.answer(*late) == [protocol.STALE]
    assert one.call().held_tokens == 0


def test_a_call_of_a_replica_that_the_store_does_not_know_does_nothing(replicas: Replicas) -> None:
    replicas.one("a")
    stranger = Scripted(replicas.client, replicas.clock, replicas.policy, "b")
    assert stranger.answer(protocol.CALL, "b", 1, 0, *entering(1, ask())) == [protocol.UNKNOWN]


# -- what one replica's call means for another


def test_a_grant_for_another_replica_is_listed_for_it_until_it_says_that_it_has_read_it(replicas: Replicas) -> None:
    one, two = replicas.one("a"), replicas.one("b")
    one.enter(1, ask(tokens=100))
    two.enter(1, ask(tokens=40))
    two.enter(2, ask(tokens=40))
    assert granted(one.call(protocol.END, 1)) == []
    first = two.call()
    assert granted(first) == [1, 2]
    two.listed = 0  # the answer was lost: it is given again
    assert granted(two.call()) == [1, 2]
    assert granted(two.call()) == []


def test_a_grant_for_another_replica_is_published(replicas: Replicas) -> None:
    one, two = replicas.one("a"), replicas.one("b")
    subscription = replicas.client.pubsub(ignore_subscribe_messages=True)
    subscription.subscribe(protocol.grants_channel(replicas.policy.pool, "b"))
    subscription.get_message(timeout=1)
    one.enter(1, ask(tokens=100))
    two.enter(7, ask(tokens=40))
    replicas.clock.advance(1)
    one.call(protocol.END, 1)
    message = subscription.get_message(timeout=2)
    assert protocol.read_wait(message["data"]) == (7, protocol.WaitReply(1_000_000, None, 0, [0, 0]))
    two.call(kind=protocol.BEAT)
    assert subscription.get_message(timeout=2)["data"] == b""  # its own beat
    subscription.close()


@pytest.mark.long
def test_many_grants_at_once_for_another_replica_all_arrive(replicas: Replicas) -> None:
    pool = Replicas(replicas.client, simple(tokens=5000))
    one, two = pool.one("a"), pool.one("b")
    one.enter(0, ask(tokens=5000))
    for start in range(0, 5000, 500):
        two.call(*(part for ticket in range(start, start + 500) for part in entering(ticket, ask(tokens=1))))
    assert one.call(protocol.END, 0).leases == 5000
    assert granted(two.call()) == list(range(5000))


# -- replicas that are gone


def test_what_a_silent_replica_had_is_freed_by_the_next_call(replicas: Replicas) -> None:
    one, two = replicas.one("a"), replicas.one("b")
    two.enter(1, ask(tokens=60))
    two.enter(2, ask(tokens=60))
    one.enter(1, ask(tokens=60))
    for _ in range(5):
        replicas.clock.advance(BEAT_S - 0.01)
        reply = one.call(kind=protocol.BEAT)
        assert (granted(reply), reply.replicas) == ([], 2)
    replicas.clock.advance(0.1)
    reply = one.call()
    assert (granted(reply), reply.replicas, reply.waiting, reply.held_tokens) == ([1], 1, 0, 60)
    assert two.answer(protocol.CALL, "b", two.fence, 0, protocol.END, 1) == [protocol.UNKNOWN]


def test_a_waiting_replica_calls_again_as_soon_as_a_silent_one_is_known_to_be_dead(replicas: Replicas) -> None:
    one, two = replicas.one("a"), replicas.one("b")
    two.enter(1, ask(tokens=60))
    replicas.clock.advance(1)
    reply = one.enter(1, ask(tokens=60))
    assert reply.change_after_us == (SILENCE_S - 1) * 1e6
    for _ in range(4):
        replicas.clock.advance(BEAT_S)
        one.call(kind=protocol.BEAT)
    replicas.clock.advance(SILENCE_S - 1 - 4 * BEAT_S)
    assert granted(one.call()) == [1]


CONSTANTS = """\
local ONE, TWO,
  THREE = 1, 2, 3 -- TWO is no more than this
local SUM = TWO + THREE
local TEXT = 'TWO'
local found = {TWO, "ONE", one.TWO_MORE, SUM} -- ONE
local TWO = 22
return TWO
"""


def test_constants_become_numbers_but_not_in_texts_and_comments() -> None:
    assert folded(CONSTANTS).splitlines() == [
        "",
        " -- TWO is no more than this",
        "",
        "local TEXT = 'TWO'",
        'local found = {2, "ONE", one.TWO_MORE, 5} -- ONE',
        "",
        "return 22",
    ]


@pytest.mark.parametrize("has_engines", [False, True])
@pytest.mark.parametrize("is_by_gain", [False, True])
def test_no_script_assigns_a_constant_or_has_one_left(has_engines: bool, is_by_gain: bool) -> None:
    kind = {"has_engines": has_engines, "is_by_gain": is_by_gain}
    code = re.sub(r"--[^\n]*|'[^'\n]*'", "", source(**kind))
    assert re.findall(r"^ *\d[\d, ]* = ", code, re.MULTILINE) == []
    declared = set(re.findall(r"^local ([A-Z][A-Z0-9_, ]*) =", code, re.MULTILINE))
    left = set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", code)) - {"KEYS", "ARGV"}
    assert left == {name for names in declared for name in names.split(", ")}
    assert len(source(**kind).splitlines()) == len(joined(**kind).splitlines())


def test_the_script_and_its_callers_mean_the_same_times() -> None:
    assert f"local BEAT_US = {BEAT_S * 1e6:.0f} " in joined()
    assert f"local SILENCE_US = {SILENCE_S * 1e6:.0f} " in joined()


def test_one_that_comes_back_registers_what_it_still_runs_and_the_pool_may_be_overfull(replicas: Replicas) -> None:
    one, two = replicas.one("a"), replicas.one("b")
    two.enter(1, ask(tokens=60))
    for _ in range(6):
        replicas.clock.advance(BEAT_S)
        one.call(kind=protocol.BEAT)
    assert granted(one.enter(1, ask(tokens=100))) == [1]
    back = two.sync(protocol.LEASE, 1, 0, 60, 1, 0, protocol.TICKET, 2, 1, "t", 1, 10, 1, 15_000_000, 0, unsaid=3)
    assert (back.held_tokens, back.leases, back.waiting, back.late) == (160, 2, 1, 3)
    assert granted(two.call(protocol.END, 1)) == []
    one.call(protocol.END, 1)
    (ticket, wait), *_ = two.call().grants
    assert ticket == 2
    assert wait is not None
    assert wait.wait_us == 15_000_000  # from its first arrival, not from its return


def test_a_good_bye_frees_everything_at_once(replicas: Replicas) -> None:
    one, two = replicas.one("a"), replicas.one("b")
    two.enter(1, ask(tokens=100))
    one.enter(5, ask(tokens=100))
    reply = two.call(kind=protocol.BYE)
    assert reply.replicas == 1
    assert granted(one.call()) == [5]


def test_a_pool_whose_last_replica_said_good_bye_holds_nothing_but_its_root(replicas: Replicas) -> None:
    one = replicas.one("a")
    one.enter(1, ask(tokens=100))
    one.enter(2, ask(tokens=100))
    one.call(kind=protocol.BYE)
    assert [*replicas.client.scan_iter("admission:*")] == [one.root.encode()]
    assert 0 < replicas.client.pttl(one.root) <= 3_600_000


def test_a_pool_that_no_one_calls_any_more_vanishes(replicas: Replicas) -> None:
    one = replicas.one("a")
    one.enter(1, ask(tokens=100))
    one.call(*entering(2, ask(tokens=100)), *entering(3, ask(tier=1, tokens=100)))
    one.call(kind=protocol.BEAT)
    keys = [*replicas.client.scan_iter("admission:*")]
    assert len(keys) > 5
    assert all(0 < replicas.client.pttl(key) <= 3_600_000 for key in keys)


# -- a sync says what there is


def test_a_sync_keeps_the_places_of_those_that_the_store_knows(replicas: Replicas) -> None:
    one = replicas.one("a")
    one.enter(1, ask(tokens=100))
    for ticket in (2, 3, 4):
        one.enter(ticket, ask(tokens=10))
    replicas.clock.advance(1)
    statements = [part for ticket in (4, 2, 3) for part in protocol.statement(ticket, ask(tokens=10), 1_000_000)]
    one.sync(protocol.LEASE, 1, 0, 100, 1, 0, *statements)
    assert granted(one.call(protocol.END, 1)) == [2, 3, 4]


def test_a_sync_ends_what_it_does_not_name(replicas: Replicas) -> None:
    one = replicas.one("a")
    one.enter(1, ask(tokens=60))
    one.enter(2, ask(tokens=30))
    one.enter(3, ask(tokens=60))
    one.enter(4, ask(tokens=60))
    reply = one.sync(*protocol.statement(2, ask(tokens=30), None), *protocol.statement(4, ask(tokens=60), 0))
    assert (granted(reply), reply.held_tokens, reply.waiting) == ([4], 90, 0)


def test_a_sync_brings_the_grant_whose_answer_was_lost(replicas: Replicas) -> None:
    one = replicas.one("a")
    one.enter(1, ask(tokens=60))
    one.enter(2, ask(tokens=60))
    one.enter(3, ask(tokens=40))
    replicas.clock.advance(2)
    one.call(protocol.END, 1)  # grants 2 and 3, and the answer is lost
    reply = one.sync(
        *protocol.statement(2, ask(tokens=60), 2_000_000), *protocol.statement(3, ask(tokens=40), 2_000_000)
    )
    waits = dict(reply.grants)
    assert sorted(waits) == [2, 3]
    assert waits[2] == protocol.WaitReply(2_000_000, None, 0, [0, 0])
    assert reply.leases == 2


def test_a_ticket_that_was_admitted_without_the_store_is_a_lease_afterwards(replicas: Replicas) -> None:
    one = replicas.one("a")
    one.enter(1, ask(tokens=60))
    one.enter(2, ask(tokens=60))
    reply = one.sync(*protocol.statement(1, ask(tokens=60), None), *protocol.statement(2, ask(tokens=60), None))
    assert (reply.waiting, reply.held_tokens, granted(reply)) == (0, 120, [])


# -- a store that lost something


def test_an_empty_store_admits_no_one_before_the_others_had_time_to_say_what_they_hold(replicas: Replicas) -> None:
    one, two = replicas.one("a"), replicas.one("b")
    two.enter(1, ask(tokens=80))
    replicas.client.flushall()
    waiting = one.sync(*protocol.statement(5, ask(tokens=50), 0), known=2, installs=False)
    assert (granted(waiting), waiting.change_after_us) == ([], BEAT_S * 1e6)
    assert granted(one.enter(6, ask(tokens=10))) == []
    reply = two.sync(*protocol.statement(1, ask(tokens=80), None), known=2, installs=False)
    assert (reply.held_tokens, granted(one.call())) == (
        80,
        [],
    )  # 5 does not fit beside what b holds, and 6 is behind it
    two.call(protocol.END, 1)
    assert granted(one.call()) == [5, 6]


def test_an_empty_store_waits_for_one_heartbeat_and_no_longer(replicas: Replicas) -> None:
    one = replicas.one("a")
    replicas.client.flushall()
    assert granted(one.sync(*protocol.statement(5, ask(), 0), known=3, installs=False)) == []
    replicas.clock.advance(BEAT_S)
    assert granted(one.call()) == [5]


def test_a_pool_that_is_new_does_not_wait_for_anybody(replicas: Replicas) -> None:
    assert granted(replicas.one("a").enter(1, ask())) == [1]


def test_the_silence_of_the_store_is_not_the_replicas(replicas: Replicas) -> None:
    """No one could call while it was paused: the first caller must not take the others for dead."""
    one, two = replicas.one("a"), replicas.one("b")
    two.enter(1, ask(tokens=80))
    one.enter(1, ask(tokens=80))
    replicas.clock.advance(3 * SILENCE_S)
    reply = one.call()
    assert (granted(reply), reply.replicas) == ([], 2)
    replicas.clock.advance(1.5 * BEAT_S)
    assert two.call(kind=protocol.BEAT).held_tokens == 80
    replicas.clock.advance(BEAT_S)
    assert one.call(kind=protocol.BEAT).held_tokens == 80


def test_behind_such_a_silence_the_dead_are_still_found(replicas: Replicas) -> None:
    one, two = replicas.one("a"), replicas.one("b")
    two.enter(1, ask(tokens=80))
    one.enter(1, ask(tokens=80))
    replicas.clock.advance(3 * SILENCE_S)
    one.call()
    for _ in range(2):
        replicas.clock.advance(BEAT_S)
        reply = one.call(kind=protocol.BEAT)
    assert (granted(reply), reply.replicas) == ([1], 1)


@pytest.mark.parametrize("lost", ["g", "r", "beats"])
def test_what_was_lost_in_part_is_made_anew(replicas: Replicas, lost: str) -> None:
    one = replicas.one("a")
    one.enter(1, ask(tokens=60))
    one.enter(2, ask(tokens=60))
    one.enter(3, ask(tier=1, tokens=60))
    for key in one.keys()[lost]:
        replicas.client.delete(key)
    answer = one.answer(protocol.CALL, one.name, one.fence, 0, protocol.END, 1)
    if lost != "beats":
        assert answer == [protocol.UNKNOWN]
    replicas.clock.us += 1
    reply = one.sync(*protocol.statement(2, ask(tokens=60), 0), *protocol.statement(3, ask(tier=1, tokens=60), 0))
    assert (granted(reply), reply.held_tokens, reply.waiting) == ([2], 60, 1)


def test_time_never_runs_backwards(replicas: Replicas) -> None:
    """A replica that was promoted may have an earlier clock."""
    one = replicas.one("a")
    one.enter(1, ask(tokens=100))
    one.enter(2, ask(tokens=100))
    replicas.clock.advance(-3600)
    one.call()
    replicas.clock.advance(1.5)
    ((_, wait),) = one.call(protocol.END, 1).grants
    assert wait is not None
    assert wait.wait_us == 1_500_000


# -- whose rules


def test_a_new_process_brings_its_rules_and_an_older_one_does_not_bring_them_back(replicas: Replicas) -> None:
    old = replicas.one("a")
    new = replicas.one("b", simple(tokens=500))
    assert granted(old.enter(1, ask(tokens=400))) == [1]
    old.sync(*protocol.statement(1, ask(tokens=400), None), installs=False)
    assert granted(new.enter(1, ask(tokens=100))) == [1]


OTHER = simple(("urgent", "rest"), tokens=500)


def test_a_replica_with_other_tiers_is_refused_and_changes_nothing(replicas: Replicas) -> None:
    one = replicas.one("a")
    one.enter(1, ask(tokens=10))
    replicas.clock.us += 1
    new = Scripted(replicas.client, replicas.clock, OTHER, "b")
    for brings in (protocol.JOINS, protocol.KEEPS, protocol.REPLACES):
        assert new.statement(protocol.SYNC, 0, brings, 0) == [protocol.FOREIGN, b"high low"]
    reply = one.call(kind=protocol.BEAT)
    assert (reply.held_tokens, reply.leases, reply.replicas) == (10, 1, 1)


def test_a_pool_without_living_replicas_is_made_anew_by_the_next_one(replicas: Replicas) -> None:
    one, two = replicas.one("a"), replicas.one("b")
    one.call(kind=protocol.BYE)
    new = Scripted(replicas.client, replicas.clock, OTHER, "c")
    assert new.statement(protocol.SYNC, 0, protocol.REPLACES, 0)[0] == protocol.FOREIGN
    two.call(kind=protocol.BYE)
    replicas.clock.us += 1
    assert granted(replicas.one("c", OTHER).enter(1, ask(tokens=500))) == [1]


def test_replicas_that_were_killed_keep_their_pool_until_their_silence_says_so(replicas: Replicas) -> None:
    replicas.one("a")
    new = Scripted(replicas.client, replicas.clock, OTHER, "b")
    waited_s = 0
    while new.statement(protocol.SYNC, 0, protocol.REPLACES, 0)[0] == protocol.FOREIGN:
        replicas.clock.advance(0.5)
        waited_s += 1
    assert SILENCE_S <= waited_s * 0.5 <= SILENCE_S + 1
    assert granted(new.enter(1, ask(tokens=500))) == [1]


def test_the_silence_of_the_store_does_not_give_the_pool_to_others(replicas: Replicas) -> None:
    one = replicas.one("a")
    replicas.clock.advance(3 * SILENCE_S)  # no one could call
    new = Scripted(replicas.client, replicas.clock, OTHER, "b")
    assert new.statement(protocol.SYNC, 0, protocol.REPLACES, 0)[0] == protocol.FOREIGN
    replicas.clock.advance(BEAT_S)
    assert one.call(kind=protocol.BEAT).replicas == 1
    replicas.clock.advance(BEAT_S)
    assert new.statement(protocol.SYNC, 0, protocol.REPLACES, 0)[0] == protocol.FOREIGN


def test_one_that_was_refused_does_not_make_the_pool_that_others_have_lost(replicas: Replicas) -> None:
    one = replicas.one("a")
    new = Scripted(replicas.client, replicas.clock, OTHER, "b")
    replicas.client.flushall()
    assert new.statement(protocol.SYNC, 0, protocol.JOINS, 0) == [protocol.ABSENT]
    one.sync(known=1, installs=False)
    assert new.statement(protocol.SYNC, 0, protocol.JOINS, 0) == [protocol.FOREIGN, b"high low"]


def test_taking_a_pool_over_is_said_on_purpose_and_refuses_those_that_had_it(replicas: Replicas) -> None:
    one = replicas.one("a")
    one.enter(1, ask(tokens=100))
    replicas.clock.us += 1
    new = Scripted(replicas.client, replicas.clock, OTHER, "b")
    assert new.stated(protocol.SYNC, 0, protocol.TAKES_OVER, 0).leases == 0
    assert one.answer(protocol.CALL, "a", one.fence, 0) == [protocol.UNKNOWN]
    assert one.statement(protocol.SYNC, 1, protocol.KEEPS, 0) == [protocol.FOREIGN, b"urgent rest"]
    assert granted(new.enter(1, ask(tokens=250))) == []  # what "a" runs ends in its time: see `spare_parts`
    replicas.clock.advance(BEAT_S)
    assert granted(new.call()) == [1]


# -- what it tells


def test_a_beat_tells_of_every_tier_and_a_call_of_those_that_changed(replicas: Replicas) -> None:
    one = replicas.one("a")
    assert one.enter(1, ask(tier=1, tokens=60)).tiers == [(1, TierReply(60, 1, 0, 0, 0, 60, 1))]
    assert [level for level, _ in one.call(kind=protocol.BEAT).tiers] == [0, 1]
    assert one.call().tiers == []


def test_times_and_counts_beyond_fourteen_digits_are_exact(replicas: Replicas) -> None:
    """Lua writes numbers with fourteen digits; microseconds of our time have sixteen."""
    pool = Replicas(replicas.client, policy_of(pool_rules(tokens=None, requests=1, tiers=(Shares("t", Fraction(0)),))))
    pool.clock.us = 1_999_999_999_999_999
    one = pool.one("a")
    large = 2**50 + 1
    one.enter(1, ask(tokens=large))
    one.enter(2, ask(tokens=large))
    pool.clock.us += 1
    reply = one.call(protocol.END, 1)
    assert reply.grants == [(2, protocol.WaitReply(1, None, 0, [0]))]
    assert reply.held_tokens == large
    one.enter(3, ask(tokens=1))
    assert one.call(kind=protocol.BEAT).tiers[0][1].served == 2 * large
