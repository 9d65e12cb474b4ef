"""Pools with a long queue: what concerns very many requests at one time is done in slices, with the same decisions."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import count, islice, pairwise
from typing import Any

import pytest
import redis

from sidecar.errors import AdmissionError
from sidecar.policy.model import Policy
from sidecar.policy.rules import Shares, pool_rules
from sidecar.policy.size_limits import SizeLimits
from sidecar.pools.base import Ask, Grant, new_lease
from sidecar.pools.local import LocalPool
from sidecar.pools.outgrown import LOOKED_AT_ONCE, REFUSED_AT_ONCE, OutgrownRequests
from sidecar.pools.redis import protocol
from sidecar.pools.redis.batch import MOST_OPERATIONS, BatchQueue, operations_in_line
from sidecar.pools.redis.partition import TAKEN_OVER_AT_ONCE, Partition
from sidecar.pools.redis.protocol import Argument, Reply
from sidecar.pools.redis.script import joined
from sidecar.pools.runtime import MOST_ADMITTED
from sidecar.scheduling import Scheduler
from sidecar.scheduling.gain import GainFigures
from sidecar.scheduling.gain_scheduler import GainScheduler
from tests.pools.harness import Clock, ask, policy_of, simple
from tests.pools.redis_harness import clocked
from tests.pools.scripted import Scripted, entering
from tests.support.redis_servers import RedisServer

anyio = pytest.mark.anyio


def constant(name: str) -> int:
    """A constant of the script."""
    return int(joined().partition(f"local {name} = ")[2].split()[0])


SORTED, SOON_US, ADMIT_US = (constant(name) for name in ("SORTED", "SOON_US", "ADMIT_US"))


def most_admitted(**kind: bool) -> int:
    """How many requests a call of a script admits that has no operations."""
    return -(-ADMIT_US // int(re.findall(r"^local ADMISSION_US\b.*? = (\d+)", joined(**kind), re.MULTILINE)[-1]))


MOST_ADMITTED_BY_SCRIPT = most_admitted()
BROUGHT_BACK = int(joined(is_by_gain=True).partition("local BROUGHT_BACK = ")[2].split()[0])


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    """A synchronous client of an empty server."""
    with redis.Redis(host=redis_server.host, port=redis_server.port) as made:
        made.flushall()
        yield made


def scripted(client: Any, policy: Policy) -> Scripted:
    """A replica of a pool whose script is as it is, but for the test's time."""
    replica = Scripted(client, Clock(), policy)
    replica.source = clocked(joined(is_by_gain=policy.rules.is_by_gain))
    return replica


def granted(reply: Reply) -> list[int]:
    return [ticket for ticket, _ in reply.grants]


def in_calls(replica: Scripted, tickets: Sequence[tuple[Argument, ...]]) -> None:
    """Says many operations, as many at a time as a replica may."""
    for place in range(0, len(tickets), 64):
        replica.call(*(argument for operation in tickets[place : place + 64] for argument in operation))


# -- room for very many at one time


def ended_and_all_admitted(replica: Any) -> list[protocol.Reply]:
    """The first lease ends; then calls that each ask for the next soon, until none waits."""
    replies = [replica.call(protocol.END, 1)]
    while replies[-1].waiting:
        assert replies[-1].change_after_us is not None
        assert replies[-1].change_after_us <= SOON_US
        replies.append(replica.call())
    return replies


def test_room_for_very_many_goes_to_them_in_order_in_calls_of_bounded_length(client: Any) -> None:
    replica = scripted(client, simple(tokens=1_000))
    replica.sync()
    replica.enter(1, ask(tokens=1_000))
    in_calls(replica, [entering(number, ask(tier=number % 2, tokens=1)) for number in range(2, 302)])
    replies = ended_and_all_admitted(replica)
    assert max(len(granted(reply)) for reply in replies) == MOST_ADMITTED_BY_SCRIPT + 1
    assert len(replies) == -(-(300 - 1) // MOST_ADMITTED_BY_SCRIPT)
    found = [ticket for reply in replies for ticket in granted(reply)]
    assert found == [*range(2, 302, 2), *range(3, 302, 2)]
    assert replies[-1].change_after_us is None


def test_by_gain_a_call_admits_fewer_of_them_because_each_takes_longer(client: Any) -> None:
    most = most_admitted(is_by_gain=True)
    assert 1 < most < MOST_ADMITTED_BY_SCRIPT
    replica = scripted(client, shared_out(Fraction(1, 10), is_by_gain=True))
    replica.sync()
    replica.enter(1, ask(tier=1, tokens=1_000))
    in_calls(replica, [entering(number, ask(tokens=1)) for number in range(2, 102)])
    replies = ended_and_all_admitted(replica)
    assert max(len(granted(reply)) for reply in replies) == most + 1
    assert [ticket for reply in replies for ticket in granted(reply)] == [*range(2, 102)]


def test_tenants_that_are_not_ahead_any_more_come_back_in_calls_of_bounded_length(client: Any) -> None:
    replica = scripted(
        client, policy_of(pool_rules(tokens=1_000, requests=None, tiers=[Shares("only")], is_by_gain=True))
    )
    begins = "function pool.bring_back(level, tenant)\n"
    assert replica.source is not None
    assert begins in replica.source
    replica.source = replica.source.replace(begins, f"{begins}  call('INCR', 'brought-back')\n")
    replica.sync()
    replica.enter(1, ask(tokens=1_000))
    replica.enter(2, ask(tokens=1, tenant="holder"))
    urgent = GainFigures(1, 1, 1, 0, 10**9, 1)
    numbers = range(3, 403)
    asks = [Ask(0, f"t{number % 100}", 1, 1, 1, gain=urgent) for number in numbers]
    in_calls(replica, [entering(number, one) for number, one in zip(numbers, asks, strict=True)])
    replies, brought = [replica.call(protocol.END, 1)], [0]
    while replies[-1].waiting:
        assert replies[-1].change_after_us is not None
        assert replies[-1].change_after_us <= SOON_US
        replies.append(replica.call())
        brought.append(int(client.get("brought-back") or 0))
    assert max(after - before for before, after in pairwise(brought)) == BROUGHT_BACK
    assert brought[-1] == 100
    found = [ticket for reply in replies for ticket in granted(reply)]
    assert found[300] == 2, "all others were ahead"
    assert sorted(found) == [2, *numbers]


def test_a_tier_that_never_queues_is_judged_after_all_that_go_before_it(client: Any) -> None:
    rules = simple(("high", "low"), tokens=301).rules
    policy = policy_of(rules)
    policy = replace(policy, tiers=(policy.tiers[0], replace(policy.tiers[1], max_waiting=0)))
    replica = scripted(client, policy)
    replica.sync()
    replica.enter(1, ask(tokens=301))
    in_calls(replica, [entering(number, ask(tokens=1)) for number in range(2, 302)])
    fits, does_not = entering(500, ask(tier=1, tokens=1)), entering(501, ask(tier=1, tokens=1))
    reply = replica.call(protocol.END, 1, *fits, *does_not)
    assert granted(reply) == [*range(2, 302), 500]
    assert reply.refused == (501,) or list(reply.refused) == [501]


@anyio
async def test_a_grown_pool_admits_a_part_in_each_turn_of_the_event_loop() -> None:
    pool = LocalPool(simple(tokens=1), Clock())
    running = pool.enter_now(ask(tokens=1))
    waiting = [pool.enter_now(ask(tier=number % 2, tokens=1)) for number in range(10 * MOST_ADMITTED)]
    pool.change_policy(simple(tokens=10 * MOST_ADMITTED + 1))
    admitted = [sum(lease.grant is not None for lease in waiting)]
    while admitted[-1] < len(waiting):
        await asyncio.sleep(0)
        admitted.append(sum(lease.grant is not None for lease in waiting))
        by_tier = [[lease.grant is not None for lease in waiting[tier::2]] for tier in (0, 1)]
        assert all(found == sorted(found, reverse=True) for found in by_tier)
        assert not any(by_tier[1]) or all(by_tier[0]), "the better tier goes first"
    assert admitted == [MOST_ADMITTED * turn for turn in range(1, 11)]
    assert running.settle()
    await pool.close()


@anyio
async def test_a_request_that_never_queues_waits_for_no_turn() -> None:
    policy = simple(tokens=1)
    policy = replace(policy, tiers=(policy.tiers[0], replace(policy.tiers[1], max_waiting=0)))
    pool = LocalPool(policy, Clock())
    pool.enter_now(ask(tokens=1))
    waiting = [pool.enter_now(ask(tokens=1)) for _ in range(3 * MOST_ADMITTED)]
    larger = simple(tokens=3 * MOST_ADMITTED + 2)
    pool.change_policy(replace(policy, rules=larger.rules))
    assert pool.enter_now(ask(tier=1, tokens=1)).grant is not None
    assert all(lease.grant is not None for lease in waiting)
    with pytest.raises(AdmissionError):
        pool.enter_now(ask(tier=1, tokens=1))
    await pool.close()


# -- operations of one call


@pytest.mark.parametrize(("has_engines", "is_by_gain"), [(False, False), (False, True), (True, False), (True, True)])
def test_calls_have_fewer_operations_while_requests_wait(has_engines: bool, is_by_gain: bool) -> None:
    in_line = operations_in_line(has_engines=has_engines, is_by_gain=is_by_gain)
    most, queue, pool = in_line.most, BatchQueue(in_line), LocalPool(simple(), Clock())
    leases = (new_lease(pool, number, ask(), 0) for number in range(10_000))

    def sizes(count: int) -> list[int]:
        for lease in islice(leases, count):
            queue.enter(lease)
        found = [queue.take().operations]
        while queue.has_more:
            found.append(queue.take().operations)
        return [*found, queue.take().operations]

    assert sizes(2 * MOST_OPERATIONS + 1) == [MOST_OPERATIONS, MOST_OPERATIONS, 1]
    queue.note_line(in_line.after + 1)
    assert sizes(3 * most + 1) == [most, most, most, 1]
    queue.note_line(in_line.after)
    assert sizes(MOST_OPERATIONS + 1) == [MOST_OPERATIONS, 1]
    assert in_line.after == (0 if has_engines or is_by_gain else 1_000)
    assert most == {(False, False): 32, (True, True): 4}.get((has_engines, is_by_gain), 8)


# -- requests that are too large for a pool that has shrunk


@anyio
async def test_a_pool_that_has_shrunk_refuses_in_slices_and_admits_none_that_is_too_large() -> None:
    pool = LocalPool(simple(tokens=100), Clock())
    running = pool.enter_now(ask(tokens=100))
    many = 3 * REFUSED_AT_ONCE + 5
    too_large = [pool.enter_now(ask(tokens=50)) for _ in range(many)]
    waits = [asyncio.ensure_future(lease.wait()) for lease in too_large]
    fits = pool.enter_now(ask(tier=1, tokens=20))
    pool.change_policy(simple(tokens=20))
    left = [sum(not lease.is_over for lease in too_large)]
    assert running.settle()
    assert fits.grant is not None, "the others hold up no other tier meanwhile"
    while left[-1]:
        await asyncio.sleep(0)
        left.append(sum(not lease.is_over for lease in too_large))
        assert 0 < left[-2] - left[-1] <= REFUSED_AT_ONCE
    assert all(isinstance(error, AdmissionError) for error in await asyncio.gather(*waits, return_exceptions=True))
    assert not any(lease.grant for lease in too_large)
    await pool.close()


@anyio
async def test_no_more_than_a_slice_is_looked_at_and_nothing_where_no_tier_shrinks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, looked_at, refused = SizeLimits(simple(tokens=100)), [0], list[Any]()
    clock = Clock()
    pool = LocalPool(simple(tokens=100), clock)
    leases = [new_lease(pool, number, ask(tokens=90 if number % 1_000 == 7 else 10), 0) for number in range(5_000)]
    outgrown = sizes.outgrown

    def counted(of: Any) -> Any:
        looked_at[-1] += 1
        return outgrown(of)

    monkeypatch.setattr(sizes, "outgrown", counted)
    looks = OutgrownRequests(sizes, lambda lease, _: refused.append(lease.id))
    sizes.change_rules(simple(tokens=200).rules)
    looks.look(leases)
    assert looked_at == [0]
    sizes.change_rules(simple(tokens=50).rules)
    looks.look(leases)
    while looks._soon is not None:
        looked_at.append(0)
        await asyncio.sleep(0)
    assert looked_at == [0, *[LOOKED_AT_ONCE] * 5], "of so many none is looked at in the turn in which they are noted"
    assert refused == [7, 1_007, 2_007, 3_007, 4_007]
    looks.stop()


# -- other reserves


def shared_out(reserve: Fraction, *, is_by_gain: bool) -> Policy:
    tiers = (Shares("high", reserve=reserve), Shares("low", reserve=Fraction(1, 100)))
    return policy_of(pool_rules(tokens=1_000, requests=None, tiers=tiers, promote_after_us=None, is_by_gain=is_by_gain))


@pytest.mark.parametrize("is_by_gain", [False, True])
def test_other_reserves_sort_a_bounded_number_of_heads_in_a_call(client: Any, is_by_gain: bool) -> None:
    replica = scripted(client, shared_out(Fraction(1, 10), is_by_gain=is_by_gain))
    replica.sync()
    replica.enter(1, ask(tier=1, tokens=1_000))
    heads = 5 * SORTED
    in_calls(
        replica,
        [entering(number, ask(tokens=1 + number % 120, tenant=f"t{number}")) for number in range(2, heads + 2)],
    )
    replica.policy = shared_out(Fraction(1, 20), is_by_gain=is_by_gain)
    replica.fence += 1
    client.config_resetstat()
    answer = replica.answer(protocol.BEGIN, replica.name, replica.fence, 0, replica.rules_text(), protocol.REPLACES, 0)
    assert answer[0] == protocol.OK
    calls, moved = 1, [moved_by(client)]
    replica.call(protocol.LEASES_STATED)
    while client.hexists(replica.root, "sorts"):
        client.config_resetstat()
        reply = replica.call()
        moved.append(moved_by(client))
        calls += 1
        if client.hexists(replica.root, "sorts"):
            assert reply.change_after_us is not None
            assert reply.change_after_us <= SOON_US
    assert calls >= 4
    assert 0 < max(moved) <= 2 * (SORTED + 64)
    small, large = (sizes_at(client, replica, kind) for kind in ("q", "g"))
    assert len(small) + len(large) == heads
    assert max(small) <= 50 < min(large)


def moved_by(client: Any) -> int:
    return int(client.info("commandstats").get("cmdstat_zrem", {"calls": 0})["calls"])


def sizes_at(client: Any, replica: Scripted, kind: str) -> list[int]:
    (key,) = client.keys(f"{replica.root}:*:{kind}:0")
    return [int(member.split()[3]) for member in client.zrange(key, 0, -1)]


@pytest.mark.parametrize("is_by_gain", [False, True])
def test_heads_that_are_being_sorted_are_admitted_in_the_order_of_those_that_are(
    client: Any,
    is_by_gain: bool,
) -> None:
    replica = scripted(client, shared_out(Fraction(1, 10), is_by_gain=is_by_gain))
    replica.sync()
    replica.enter(1, ask(tier=1, tokens=900))
    replica.enter(2, ask(tier=1, tokens=100))
    heads = 3 * SORTED
    in_calls(
        replica,
        [entering(number, ask(tokens=60 + number % 41, tenant=f"t{number}")) for number in range(10, heads + 10)],
    )
    found: list[int] = []
    for turn in range(30):
        reserve = Fraction(1, 20 if turn % 3 else 12)
        replica.policy = shared_out(reserve, is_by_gain=is_by_gain)
        if turn % 3 < 2:
            replica.fence += 1
            answer = replica.answer(
                protocol.BEGIN, replica.name, replica.fence, 0, replica.rules_text(), protocol.REPLACES, 0
            )
            assert answer[0] == protocol.OK
            assert client.hexists(replica.root, "sorts")
            replica.call(protocol.LEASES_STATED)
        found += granted(replica.call(protocol.END, found[-1] if found else 2))
    assert found == list(range(10, 10 + len(found)))
    assert len(found) >= 25


# -- a full queue of very many tenants


@pytest.mark.parametrize("is_by_gain", [False, True])
@pytest.mark.parametrize("most_tickets", [1, 3])
def test_a_place_in_a_full_queue_is_found_without_a_look_at_every_tenant(
    client: Any, most_tickets: int, is_by_gain: bool
) -> None:
    """The tenant that gives its place is the scheduler's, for newcomers of any weight; and so is its ticket."""
    luck, weights = random.Random(3), [1, 2, 5]
    policy = shared_out(Fraction(1, 10), is_by_gain=is_by_gain)
    scheduler = (GainScheduler if is_by_gain else Scheduler)(policy.rules)
    tickets = [
        (tenant, weight)
        for tenant, weight in ((f"t{number}", luck.choice(weights)) for number in range(400))
        for _ in range(luck.randint(1, most_tickets))
    ]
    luck.shuffle(tickets)
    places = len(tickets) // 2  # there were more places before: so even a tenant with one ticket is above its share
    replica = scripted(client, policy)
    replica.sync()
    replica.enter(1, ask(tier=1, tokens=1_000))
    in_calls(
        replica,
        [
            entering(number, ask(tokens=10, tenant=tenant, weight=weight))
            for number, (tenant, weight) in enumerate(tickets, 2)
        ],
    )
    for number, (tenant, weight) in enumerate(tickets, 2):
        scheduler.submit(str(number), tier=0, tokens=10, tenant=tenant, weight=weight, now_us=number)
    high = replace(policy.tiers[0], max_waiting=places)
    other = Scripted(client, replica.clock, replace(policy, tiers=(high, *policy.tiers[1:])), "other")
    other.source = replica.source
    other.sync()
    for newcomer in range(50):
        number, tenant, weight = 10_000 + newcomer, f"new{newcomer}", luck.choice([1, 7, 100])
        displaced = scheduler.displaced(0, tenant, weight, places)
        client.config_resetstat()
        reply = replica.enter(number, ask(tokens=10, tenant=tenant, weight=weight))
        commands = {name: one["calls"] for name, one in client.info("commandstats").items()}
        assert "cmdstat_hgetall" not in commands, "no hash is read whole: the root is read by its fields"
        assert sum(commands.values()) < 100
        if displaced is None:
            assert list(reply.refused) == [number]
            continue
        assert list(reply.displaced) == [int(displaced.id)]
        scheduler.cancel(displaced.id, 0)
        scheduler.submit(str(number), tier=0, tokens=10, tenant=tenant, weight=weight, now_us=number)
    used = {text.split()[2].decode() for text in client.zrange(*client.keys(f"{replica.root}:*:t:0"), 0, -1)}
    assert used == {name for name, lane in scheduler._tiers[0].queue._lanes.items() if lane.waiting}
    assert len(used) > 350


# -- a replica's part, while the store is lost


@anyio
async def test_a_part_takes_over_a_bounded_number_of_requests_in_a_turn_and_admits_none_before_it_has_all() -> None:
    pool = LocalPool(simple(), Clock())
    number, turns = count(1), [0]
    held = new_lease(pool, next(number), ask(tokens=100), 0)
    held.granted(Grant(0, 0, 0, None, {}, 0))
    waiting = [
        new_lease(pool, next(number), ask(tokens=1, tier=place % 2), 0) for place in range(3 * TAKEN_OVER_AT_ONCE)
    ]
    partition = Partition(simple(tokens=200).rules, [held, *waiting], Clock())
    ended = [waiting[5], waiting[2 * TAKEN_OVER_AT_ONCE + 1]]
    for lease in ended:
        lease.is_over = True
        partition.end(lease, 0)
    late = new_lease(pool, next(number), ask(tokens=1), 0)
    partition.submit(late)
    running = waiting[-1]  # it was not taken over yet
    running.granted(Grant(0, 0, 0, None, {}, 0))
    running.waits_again()
    partition.requeue(running, 0)
    left = [lease for lease in [*waiting, late] if lease not in ended]
    while partition._left:
        assert not any(lease.grant for lease in left)
        assert [partition.queued(tier) for tier in (0, 1)] == [sum(it.tier == tier for it in left) for tier in (0, 1)]
        before = len(partition._left)
        await asyncio.sleep(0)
        turns.append(before - len(partition._left))
    assert max(turns) == TAKEN_OVER_AT_ONCE
    for _ in range(10):
        await asyncio.sleep(0)
    assert [lease for lease in left if lease.grant] == [lease for lease in left if lease.tier == 0][:100]
    partition.stop()


@anyio
async def test_a_part_that_is_asked_for_a_place_in_a_queue_has_all_requests_at_once_and_one_that_stops_none() -> None:
    pool = LocalPool(simple(), Clock())
    waiting = [new_lease(pool, place, ask(tokens=1), 0) for place in range(1, 3 * TAKEN_OVER_AT_ONCE)]
    partition = Partition(simple(tokens=10).rules, waiting, Clock(), is_paused=True)
    partition.take_over_all()
    assert not partition._left
    assert partition.scheduler.waiting() == len(waiting)
    assert not any(lease.grant for lease in waiting), "it is paused"
    partition.pause(is_paused=False)
    assert sum(lease.grant is not None for lease in waiting) == 10
    stopped = Partition(simple(tokens=10).rules, waiting[20:], Clock())
    stopped.stop()
    taken = stopped.scheduler.waiting()
    await asyncio.sleep(0)
    assert stopped.scheduler.waiting() == taken
    partition.stop()
