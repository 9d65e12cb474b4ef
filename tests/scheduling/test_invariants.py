"""What holds whatever happens, beside the answers of the reference: invariants 1 to 5 of the page, and the sizes."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sidecar.scheduling.amounts import NOTHING, UNBOUNDED, within
from sidecar.scheduling.scheduler import INSIDE, OTHER, TURN
from sidecar.scheduling.tickets import Ticket
from sidecar.scheduling.user_turns import MOST_AHEAD
from tests.scheduling import reference
from tests.scheduling.player import SchedulerPlayer
from tests.scheduling.programs import expected, programs, random_header, random_program
from tests.support.walks import random_walks


class Watched(SchedulerPlayer):
    """Looks at each admission: invariants 1 to 3."""

    def __init__(self, program: dict[str, Any]) -> None:
        super().__init__(program)
        self.enter, self.scheduler._enter = self.scheduler._enter, self.watched

    def watched(self, ticket: Ticket, engine: str, order_class: int, over: Any) -> Any:
        pool = self.scheduler
        if order_class in (TURN, OTHER):
            inside = [c.ticket for c in pool.in_order() if c.order_class == INSIDE]
            assert all(map(pool.fits, inside)), "a floor is a floor"
        grant = self.enter(ticket, engine, order_class, over)
        of = pool.engines[engine]
        # Not in prompts: a count is fixed when it begins, and slow start or a loss may lower the largest
        # `prefill` after that. As growth, it is an exception of invariant 1.
        assert within((*of.held[:2], 0), of.size(pool._now))
        assert within((*pool._total[:2], 0), pool.capacity)
        return grant

    def dispatch(self, now: int) -> Any:
        found = super().dispatch(now)
        assert self.scheduler.decide(now) == [], "who waits after a decision waits for something to change"
        sums = [NOTHING] * len(self.names)
        for lease in self.leases.values():
            sums[lease.ticket.tier] = tuple(map(sum, zip(sums[lease.ticket.tier], lease.amount, strict=True)))
        assert [state.on_engines for state in self.scheduler.tiers] == sums
        lined = [ticket.tier for ticket in self.scheduler.line]
        assert [state.lined for state in self.scheduler.tiers] == [lined.count(n) for n in range(len(self.names))]
        return found


@random_walks(25)
def test_an_admission_fits_and_is_next_and_nobody_waits_in_vain(seed: int) -> None:
    program = random_program(seed, several=bool(seed & 1), by_gain=bool(seed & 2))
    player = Watched(program)
    for step in program["steps"]:
        now = round(step["at"] * 1e6)
        player.do(step, now)
        player.dispatch(now)
        player.preempt(now)
    end(player, program, now)


def end(player: SchedulerPlayer, program: dict[str, Any], now: int) -> None:
    """All that came ends, each exactly once, and nothing is remembered."""
    ended: set[str] = set()
    engine = {"id": "z#1", "tokens": 1000, "requests": 100, "prefill": 500}
    player.do({"do": "engines", "engines": [engine]}, now)
    for _ in range(len(player.arrivals) + 1):
        player.dispatch(now)
        for name in list(player.leases):
            assert name not in ended
            ended.add(name)
            for _ in range(2):
                player.do({"do": "settle", "id": name}, now)
        now += 5_000_000
    player.do({"do": "engines", "engines": [engine]}, now)  # those that are gone hold nothing now
    pool = player.scheduler
    assert player.tickets == player.leases == {}
    assert pool.line == []
    for state in pool.tiers:
        assert len(state.queue) == 0
        assert (state.used, state.on_floor, state.in_line_on_floor) == (NOTHING, NOTHING, NOTHING)
        assert [
            *state.queue._lanes,
            *state.queue._returned,
            *state.queue._order,
            *state.queue.finish,
            *state.queue.users,
        ] == []
    assert [(it.held, it.sent, it.lined) for it in pool.engines.values()] == [(NOTHING, 0, 0)]


SIZES = st.lists(st.integers(1, 40), min_size=5, max_size=30)
COSTS = st.sampled_from([1, 1, 4, 1000])
TENANTS = st.lists(st.tuples(st.sampled_from([1, 2, 3, 7]), COSTS, SIZES), min_size=2, max_size=4)


@given(tenants=TENANTS, seed=st.integers(0, 99))
def test_backlogged_tenants_differ_by_at_most_one_largest_request_each(tenants: Any, seed: int) -> None:
    """Invariant 4: of their service as it is charged, scaled by weight, as long as both wait.

    A token costs each tenant something else, and half of the leases give a part back: what is more than the tenant's
    lead is no service that others owe it.
    """
    luck = random.Random(seed)
    player = SchedulerPlayer({"tiers": [{"name": "t"}], "capacity": {"tokens": 40}})
    asks = [(name, weight, each, tokens) for name, (weight, each, sizes) in enumerate(tenants) for tokens in sizes]
    luck.shuffle(asks)
    left = [len(sizes) for *_, sizes in tenants]
    of_tier = {"tier": "t"}
    for number, (name, weight, each, tokens) in enumerate(asks):
        size = {"tokens": tokens} | ({"cost": tokens * each} if each > 1 else {})
        step = {"do": "submit", "id": f"{number}", "tenant": f"{name}", "weight": weight, **of_tier, **size}
        player.do(step, number)
    queue = player.scheduler.tiers[0].queue
    served = [0.0] * len(tenants)
    while all(left):
        for name, _ in player.dispatch(1_000):
            tenant, weight, each, tokens = asks[int(name)]
            served[tenant] += tokens * each / weight
            left[tenant] -= 1
            if not all(left):
                return
            for other, (its_weight, its_each, sizes) in enumerate(tenants):
                most = max(tenants[tenant][2]) * each / weight + max(sizes) * its_each / its_weight
                assert abs(served[tenant] - served[other]) <= most + 1e-6
        ended = luck.choice(list(player.leases))
        player.do({"do": "settle", "id": ended}, 1_000)
        tenant, weight, each, tokens = asks[int(ended)]
        if luck.random() < 0.5:
            before = queue._lanes[f"{tenant}"][0].start
            unused = {"tokens": -luck.randint(1, tokens * each), "weight": weight}
            player.do({"do": "charge", "tenant": f"{tenant}", **of_tier, **unused}, 1_000)
            given_back = before - queue._lanes[f"{tenant}"][0].start
            assert 0 <= given_back <= -unused["tokens"] / weight + 1e-6
            served[tenant] -= given_back


USERS = st.lists(SIZES, min_size=2, max_size=4)


@given(users=USERS, seed=st.integers(0, 99))
def test_backlogged_users_of_a_tenant_differ_by_at_most_one_largest_request_each(users: Any, seed: int) -> None:
    """Invariant 4, one level down: also while a user floods and cancels, others come new, and one's leases grow."""
    luck, count = random.Random(seed), iter(range(10**6))
    player = SchedulerPlayer({"tiers": [{"name": "t"}], "capacity": {"tokens": 40}})
    served, left, noise = [0] * len(users), [len(sizes) for sizes in users], list[str]()

    def submit(user: str, tokens: int, tenant: str = "a") -> str:
        name = f"{user} {next(count)}"
        player.do({"do": "submit", "id": name, "tier": "t", "tenant": tenant, "user": user, "tokens": tokens}, 0)
        return name

    asks = [(user, tokens) for user, sizes in enumerate(users) for tokens in sizes]
    luck.shuffle(asks)
    for user, tokens in asks:
        submit(str(user), tokens)
    while all(left):
        noise = [name for name in noise if name in player.tickets]
        if len(noise) < 10:
            noise += [submit(luck.choice(["flood", f"new {next(count)}"]), luck.randint(1, 40)) for _ in range(3)]
            noise += [submit("0", luck.randint(1, 40), tenant="b")]
        player.do({"do": "cancel", "id": noise.pop(luck.randrange(len(noise)))}, 0)
        player.do({"do": "charge", "tier": "t", "tenant": "a", "user": "flood", "tokens": luck.randint(1, 20)}, 0)
        for name, _ in player.dispatch(1_000):
            ticket = player.leases[name].ticket
            if ticket.tenant == "b" or not ticket.user.isdigit():
                continue
            user = int(ticket.user)
            served[user] += ticket.tokens
            left[user] -= 1
            if not all(left):
                return
            for other, sizes in enumerate(users):
                assert abs(served[user] - served[other]) <= max(users[user]) + max(sizes)
        player.do({"do": "settle", "id": luck.choice(list(player.leases))}, 1_000)


def test_new_users_keep_nobody_out_who_was_served_before() -> None:
    """A client makes up a user for each of its requests, of which 50 always wait: a known user gets one in 51."""
    player, waits = SchedulerPlayer({"tiers": [{"name": "t"}], "capacity": {"tokens": 10}}), list[int]()
    ask = {"do": "submit", "tier": "t", "tenant": "a", "tokens": 10}
    for number in range(1_000):
        if not any(name.startswith("known") for name in player.tickets):
            player.do({**ask, "id": f"known{number}", "user": "known"}, 0)
        for new in range(51 - len(player.tickets)):
            player.do({**ask, "id": f"{number} {new}", "user": f"{number} {new}"}, 0)
        ((name, _),) = player.dispatch(0)
        waits += [number - int(name.removeprefix("known"))] if name.startswith("known") else []
        player.do({"do": "settle", "id": name}, 0)
    assert len(waits) > 15
    assert max(waits) <= 51


def test_who_waits_by_turns_is_served_where_a_reload_ends_the_turns_of_users() -> None:
    """Others of its tenant come all the time, and name no user: they count as one."""
    player, served = SchedulerPlayer({"tiers": [{"name": "t"}], "capacity": {"tokens": 10}}), list[str]()
    ask = {"do": "submit", "tier": "t", "tenant": "a", "tokens": 10}
    for number in range(5):
        player.do({**ask, "id": f"user{number}", "user": "u"}, 0)
    for number in range(12):
        for more in range(2):
            player.do({**ask, "id": f"{number} {more}"}, 0)
        ((name, _),) = player.dispatch(0)
        served.append(name)
        player.do({"do": "settle", "id": name}, 0)
    assert [name for name in served if name.startswith("user")] == [f"user{number}" for number in range(5)]


def test_of_users_nothing_is_remembered_but_who_waits_and_some_that_are_ahead() -> None:
    queue = SchedulerPlayer({"tiers": [{"name": "t"}]}).scheduler.tiers[0].queue
    first, last = (Ticket(id="", tier=0, tenant="a", tokens=1, number=n, user="u") for n in range(2))
    queue.add(first)
    queue.add(last)
    for number in range(100_000):
        queue.charge("a", 1, 1, f"{number}")
    users = queue.users["a"]
    assert len(users._finish) <= MOST_AHEAD
    for number in range(2, 10_000):
        queue.add(Ticket(id="", tier=0, tenant="a", tokens=1, number=number, user=f"{number}"))
        queue.leave(queue.next() or last)
    assert (len(users._finish), len(users._firsts)) < (MOST_AHEAD, 10)


@random_walks(30)
def test_the_largest_request_gets_into_an_idle_pool_and_one_more_never(seed: int) -> None:
    program = random_header(random.Random(seed), "sizes", several=False, by_gain=bool(seed & 1))
    idle = SchedulerPlayer(program).scheduler
    idle.look(0)
    for tier, size in enumerate(idle._figures.returnable):
        most = [8 if part == UNBOUNDED else part for part in size]
        if min(most[:2]) < 1:
            continue
        assert enters(program, tier, most[0], most[1])
        assert not enters(program, tier, most[0] + 1, 1)
        assert size[1] == UNBOUNDED or not enters(program, tier, 1, most[1] + 1)


def enters(program: dict[str, Any], tier: int, tokens: int, requests: int) -> bool:
    """Once it has aged as far as it can."""
    player = SchedulerPlayer(program)
    step = {"do": "submit", "id": "only", "tier": f"t{tier}", "tokens": tokens, "requests": requests}
    player.do(step, 0)
    return bool(player.dispatch(10**9))


def test_fractions_and_doubles_give_the_same_answers() -> None:
    for program in programs(range(8)):
        exact = reference.new(program)
        for step in program["steps"]:
            now = round(step["at"] * 1e6)
            exact.do(step, now)
            assert (exact.dispatch(now), exact.preempt(now)) == expected(step)
