"""What holds whatever happens, beside the answers of the reference: invariants 1 to 5 of the page, and the sizes."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sidecar.scheduling.amounts import NOTHING, UNBOUNDED, within
from sidecar.scheduling.scheduler import INSIDE, OTHER, TURN
from sidecar.scheduling.tickets import Ticket
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
        assert [*state.queue._lanes, *state.queue._returned, *state.queue._order, *state.queue.finish] == []
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
