"""A replica without its store: what its part of the pool is, and what becomes of requests meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sidecar.pools.redis.outage import Outage
from sidecar.pools.redis.partition import LastKnown, Partition, equal_part, first_part, fits_into
from sidecar.pools.redis.protocol import BEAT_S

from sidecar.errors import AdmissionError, QueueFull, StoreUnavailable
from sidecar.policy.model import Policy, StoreLoss
from sidecar.policy.rules import UNLIMITED, PoolRules, Shares, TierRules, largest_admissible, pool_rules
from sidecar.policy.size_limits import SizeLimits
from sidecar.pools import Ask, Grant
from sidecar.pools.base import Lease, WaitOutcome
from sidecar.pools.clock import monotonic_us
from sidecar.pools.redis import outage as outage_module
from sidecar.scheduling import Admission, Scheduler
from tests.pools.harness import Clock, ask, policy_of, simple
from tests.pools.load import until
from tests.support.examples import examples

SHARES = [Fraction(0), Fraction(1, 10), Fraction(1, 3), Fraction(1, 2), Fraction(1)]
WEIGHTS = {"a": 1, "b": 2, "c": 3}
PATIENCE_S = 0.1
AGING_S = 0.05


# -- the part


@dataclass(frozen=True)
class Moment:
    """A pool that loses its store: what each replica holds, and what all of them know of it."""

    rules: PoolRules
    own: tuple[tuple[int, int], ...]

    @property
    def held(self) -> tuple[int, int]:
        return sum(tokens for tokens, _ in self.own), sum(requests for _, requests in self.own)

    @property
    def known(self) -> list[LastKnown]:
        """The figures of each replica, all of the same moment."""
        return [LastKnown(len(self.own), *self.held, *own) for own in self.own]


@st.composite
def rules(draw: st.DrawFn, most: int = 10_000) -> PoolRules:
    """Pools of every shape; each dimension bounded or not, one of them at least."""
    cuts = draw(st.lists(st.integers(0, 100), min_size=1, max_size=4))
    whole = max(100, sum(cuts))
    tiers = tuple(
        Shares(
            f"t{level}",
            reserve=Fraction(cut, whole),
            lend=draw(st.sampled_from(SHARES)),
            limit=draw(st.sampled_from([Fraction(1), Fraction(1), Fraction(4, 5), Fraction(1, 3)])),
            always_first=draw(st.booleans()) and level == 0,
        )
        for level, cut in enumerate(cuts)
    )
    tokens, requests = draw(st.one_of(st.none(), st.integers(1, most))), draw(st.one_of(st.none(), st.integers(1, 200)))
    return pool_rules(
        tokens=tokens,
        requests=200 if tokens is None and requests is None else requests,
        tiers=tiers,
        promote_after_us=draw(st.sampled_from([None, 1, 1_000])),
        ceiling=draw(st.integers(0, len(cuts) - 1)),
    )


@st.composite
def moments(draw: st.DrawFn, most_replicas: int = 6) -> Moment:
    """Any number of replicas, which together hold no more than the pool."""
    of_pool = draw(rules())
    replicas = draw(st.integers(1, most_replicas))
    tokens = draw(shares_of(of_pool.tokens, replicas))
    return Moment(of_pool, tuple(zip(tokens, draw(shares_of(of_pool.requests, replicas)), strict=True)))


@st.composite
def shares_of(draw: st.DrawFn, capacity: int, replicas: int) -> list[int]:
    """What each of `replicas` holds of a pool; of an unbounded one anything."""
    whole = 100_000 if capacity == UNLIMITED else capacity
    cuts = sorted(draw(st.lists(st.integers(0, whole), min_size=replicas, max_size=replicas)))
    return [cut - before for before, cut in zip([0, *cuts], cuts, strict=False)]


def dimensions(pool: PoolRules) -> list[int]:
    return [pool.tokens, pool.requests]


@given(moments())
@example(Moment(simple(tokens=100).rules, ((80, 0), (0, 0))))
def test_parts_of_one_moment_never_hold_more_than_the_pool_together(moment: Moment) -> None:
    """A replica that holds more than its part keeps that, and one that holds less may fill it: no more can be held."""
    parts = [first_part(moment.rules, known) for known in moment.known]
    for dimension, capacity in enumerate(dimensions(moment.rules)):
        if capacity != UNLIMITED:
            most = [
                max(own[dimension], dimensions(part)[dimension]) for own, part in zip(moment.own, parts, strict=True)
            ]
            assert sum(most) <= capacity
            assert sum(dimensions(part)[dimension] for part in parts) <= capacity


def test_equal_parts_at_once_would_hold_more_than_the_pool() -> None:
    """The property above can fail: dividing by the number of replicas is not enough while others still run more."""
    moment = Moment(simple(tokens=100).rules, ((80, 0), (0, 0)))
    parts = [equal_part(moment.rules, 2).tokens for _ in moment.own]
    assert sum(max(own, part) for (own, _), part in zip(moment.own, parts, strict=True)) == 130


@given(moments())
def test_a_first_part_is_what_it_held_and_its_share_of_what_was_free_but_never_more_than_its_share(
    moment: Moment,
) -> None:
    replicas = len(moment.own)
    for own, known in zip(moment.own, moment.known, strict=True):
        part = dimensions(first_part(moment.rules, known))
        for dimension, capacity in enumerate(dimensions(moment.rules)):
            if capacity != UNLIMITED:
                free = capacity - moment.held[dimension]
                assert part[dimension] == min(capacity // replicas, own[dimension] + free // replicas)


@given(rules(), st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 400)), min_size=1, max_size=6))
def test_a_pool_that_was_outgrown_is_not_outgrown_further(of_pool: PoolRules, own: list[tuple[int, int]]) -> None:
    """Leases that were registered again, or resized, may hold more than there is: then no one gets anything new."""
    moment = Moment(of_pool, tuple(own))
    parts = [first_part(of_pool, known) for known in moment.known]
    for dimension, capacity in enumerate(dimensions(of_pool)):
        if capacity != UNLIMITED:
            most = [max(mine[dimension], dimensions(part)[dimension]) for mine, part in zip(own, parts, strict=True)]
            assert sum(most) <= max(capacity, moment.held[dimension])
            if moment.held[dimension] >= capacity:
                shares = [min(capacity // len(own), mine[dimension]) for mine in own]
                assert [dimensions(part)[dimension] for part in parts] == shares


@given(rules(), st.integers(1, 20))
def test_equal_parts_are_the_pool_but_for_rounding(of_pool: PoolRules, replicas: int) -> None:
    for whole, part in zip(dimensions(of_pool), dimensions(equal_part(of_pool, replicas)), strict=True):
        if whole != UNLIMITED:
            assert whole - replicas < part * replicas <= whole


@given(moments())
def test_every_tier_has_the_same_share_of_a_part_as_of_the_pool(moment: Moment) -> None:
    whole = moment.rules
    for part in [equal_part(whole, len(moment.own)), *(first_part(whole, known) for known in moment.known)]:
        assert (part.promote_after_us, part.ceiling) == (whole.promote_after_us, whole.ceiling)
        for of_part, of_pool in zip(part.tiers, whole.tiers, strict=True):
            assert as_stated(of_part) == as_stated(of_pool)
            for dimension, capacity in enumerate(dimensions(whole)):
                if capacity != UNLIMITED:
                    size = dimensions(part)[dimension]
                    exact = [Fraction(share * size, capacity) for share in figures(of_pool)[dimension]]
                    floor, headroom, limit = figures(of_part)[dimension]
                    assert exact[0] <= floor < exact[0] + 1  # rounded up: one of a single request must not vanish
                    assert exact[1] - 1 < headroom <= exact[1]
                    assert exact[2] <= limit < exact[2] + 1


@given(moments())
def test_the_floors_of_all_parts_are_at_most_the_pools_but_for_rounding(moment: Moment) -> None:
    parts = [first_part(moment.rules, known) for known in moment.known]
    for level, of_pool in enumerate(moment.rules.tiers):
        if moment.rules.tokens != UNLIMITED:
            assert sum(part.tiers[level].reserve_tokens for part in parts) < of_pool.reserve_tokens + len(parts)
            assert sum(part.tiers[level].limit_tokens for part in parts) < of_pool.limit_tokens + len(parts)
        if moment.rules.requests != UNLIMITED:
            assert sum(part.tiers[level].reserve_requests for part in parts) < of_pool.reserve_requests + len(parts)
            assert sum(part.tiers[level].limit_requests for part in parts) < of_pool.limit_requests + len(parts)


@given(moments())
def test_a_dimension_without_bounds_stays_without_bounds(moment: Moment) -> None:
    whole = moment.rules
    for part in [equal_part(whole, len(moment.own)), *(first_part(whole, known) for known in moment.known)]:
        for dimension, capacity in enumerate(dimensions(whole)):
            if capacity == UNLIMITED:
                assert dimensions(part)[dimension] == UNLIMITED
                for of_part, of_pool in zip(part.tiers, whole.tiers, strict=True):
                    assert figures(of_part)[dimension] == figures(of_pool)[dimension]


def as_stated(tier: TierRules) -> tuple[Any, ...]:
    """What does not depend on the size of the pool."""
    return tier.name, tier.level, tier.limited, tier.always_first


def figures(tier: TierRules) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Floor, headroom and limit, in tokens and in requests."""
    return (
        (tier.reserve_tokens, tier.headroom_tokens, tier.limit_tokens),
        (tier.reserve_requests, tier.headroom_requests, tier.limit_requests),
    )


# -- the part at work


class _Recorded(Lease):
    """Notes with its replica every grant that a part gives."""

    def granted(self, grant: Grant) -> None:
        if isinstance(self._owner, Replica) and self._owner.is_alone:
            self._owner.granted.append((self.id, grant))
        super().granted(grant)


@dataclass
class Replica:
    """Stands in for the pool around a part: it has the leases, and passes on what they do."""

    clock: Any = field(default_factory=Clock)
    leases: dict[int, Lease] = field(default_factory=dict)
    decides: Partition | Outage | None = None
    is_alone: bool = False
    granted: list[tuple[int, Grant]] = field(default_factory=list)
    _ids: int = 0

    def lease(self, wanted: Ask) -> Lease:
        """A new one, which no one has looked at."""
        self._ids += 1
        answered = asyncio.get_running_loop().create_future()
        number, entered_us = self._ids, self.clock()
        return _Recorded(self, number, wanted, entered_us, str(number), wanted.tokens, answered)

    def held(self, wanted: Ask) -> Lease:
        """One that the store had granted."""
        lease = self.waiting(wanted)
        lease.granted(Grant(self.clock(), 0, 0, None, {}, wanted.tier))
        return lease

    def waiting(self, wanted: Ask) -> Lease:
        """One that the store had let wait."""
        lease = self.entering(wanted)
        lease.waits()
        return lease

    def entering(self, wanted: Ask) -> Lease:
        """One that the store was still to look at."""
        lease = self.lease(wanted)
        self.leases[lease.id] = lease
        return lease

    def goes_alone(self, part: PoolRules) -> Partition:
        """From now on `part` decides."""
        if isinstance(self.decides, Partition):
            self.decides.stop()
        self.is_alone = True
        self.decides = Partition(part, self.leases.values(), self.clock)
        return self.decides

    def enter(self, wanted: Ask) -> Lease:
        """A request that comes while a part decides."""
        assert isinstance(self.decides, Partition)
        lease = self.entering(wanted)
        self.decides.submit(lease)
        self.decides.dispatch(self.clock())
        lease.waits()
        return lease

    def holds(self) -> tuple[int, int]:
        """Tokens and requests of the leases that run."""
        running = [lease.ask for lease in self.leases.values() if lease.grant is not None]
        return sum(running_ask.tokens for running_ask in running), sum(running_ask.requests for running_ask in running)

    def end(self, lease: Lease, outcome: WaitOutcome | None, used_tokens: int | None = 0) -> None:
        del self.leases[lease.id]
        assert self.decides is not None
        if isinstance(self.decides, Outage):
            self.decides.limits.ended(lease, used_tokens, self.clock())
        partition = self.decides if isinstance(self.decides, Partition) else self.decides.partition
        wait = None if partition is None else partition.end(lease, self.clock())
        if outcome is not None:
            outcome.set_result(wait)

    def change_size(self, lease: Lease, freed_tokens: int) -> None:
        assert self.decides is not None
        partition = self.decides if isinstance(self.decides, Partition) else self.decides.partition
        if partition is not None:
            partition.resize(lease, freed_tokens)


def part_of(tokens: int, *, requests: int | None = None, **more: Any) -> PoolRules:
    return simple(tokens=tokens, requests=requests, **more).rules


def aging(promote_after_s: float = AGING_S) -> PoolRules:
    """Half of it is kept idle for the more important tier, until who waits in the other has aged."""
    shares = (Shares("high", reserve=Fraction(1, 2), lend=Fraction(0)), Shares("low"))
    return pool_rules(tokens=100, requests=None, tiers=shares, promote_after_us=round(promote_after_s * 1e6))


@pytest.mark.anyio
async def test_what_is_held_counts_and_who_waits_gets_in_by_order_of_arrival() -> None:
    replica = Replica()
    running = replica.held(ask(1, 30))
    queue = []
    for _ in range(4):
        queue.append(replica.waiting(ask(1, 20)))
        replica.clock.advance(1)
    alone = replica.goes_alone(part_of(70))
    assert [lease_id for lease_id, _ in replica.granted] == [queue[0].id, queue[1].id]
    assert [grant.queue_wait_us for _, grant in replica.granted] == [4_000_000, 3_000_000]
    assert alone.queued(1) == 2
    assert running.settle()
    assert [lease_id for lease_id, _ in replica.granted] == [queue[index].id for index in range(3)]


@pytest.mark.anyio
async def test_the_more_important_tier_goes_first_in_any_order_of_arrival() -> None:
    replica = Replica()
    running = replica.held(ask(1, 40))
    low, high = replica.waiting(ask(1, 40)), replica.waiting(ask(0, 40))
    replica.goes_alone(part_of(40))
    assert running.settle()
    assert (high.grant is not None, low.grant is not None) == (True, False)


@pytest.mark.anyio
async def test_a_waiting_request_keeps_its_age() -> None:
    """Another tier's headroom is not owed by who has aged to it, and its wait began when it came."""
    replica = Replica()
    old = replica.waiting(ask(1, 60))
    replica.clock.advance(10)
    young = replica.waiting(ask(1, 60))
    replica.goes_alone(aging(promote_after_s=10))
    assert old.grant is not None
    assert (old.grant.level, old.grant.queue_wait_us) == (0, 10_000_000)
    assert young.grant is None


@pytest.mark.anyio
async def test_who_holds_more_than_the_part_admits_no_one_before_it_is_below() -> None:
    replica = Replica()
    first, second = replica.held(ask(0, 30)), replica.held(ask(0, 30))
    replica.goes_alone(part_of(40))
    new = replica.enter(ask(0, 1))
    assert new.grant is None
    assert first.settle()
    assert new.grant is not None
    assert second.settle()


@pytest.mark.anyio
async def test_what_does_not_fit_is_kept_for_a_larger_part_and_stands_in_no_ones_way() -> None:
    replica = Replica()
    large = replica.waiting(ask(0, 41))
    alone = replica.goes_alone(part_of(40))
    assert not fits_into(alone.part, large.ask)
    assert fits_into(alone.part, ask(0, 40))
    small, later = replica.enter(ask(0, 40)), replica.enter(ask(0, 42))
    assert small.grant is not None
    assert (large.grant, later.grant) == (None, None)
    assert small.settle()
    assert (large.grant, later.grant) == (None, None)

    replica.clock.advance(3)
    replica.goes_alone(part_of(83))
    assert large.grant is not None
    assert large.grant.queue_wait_us == 3_000_000
    assert later.grant is not None


@pytest.mark.anyio
@pytest.mark.parametrize(("tokens", "requests", "fits"), [(40, 4, True), (41, 4, False), (40, 5, False)])
async def test_what_fits_is_what_the_rules_could_ever_give(tokens: int, requests: int, *, fits: bool) -> None:
    replica = Replica()
    alone = replica.goes_alone(part_of(40, requests=4))
    wanted = ask(1, tokens, requests=requests)
    assert fits_into(alone.part, wanted) is fits
    assert (replica.enter(wanted).grant is not None) is fits


@pytest.mark.anyio
async def test_a_request_that_leaves_hears_how_its_wait_had_gone_and_makes_room_for_the_next() -> None:
    replica = Replica()
    replica.held(ask(0, 30))
    replica.goes_alone(part_of(40))
    ahead, behind, parked = replica.enter(ask(0, 20)), replica.enter(ask(0, 10)), replica.enter(ask(0, 50))
    replica.clock.advance(2)
    assert behind.grant is None
    left = await ahead.leave()
    assert left is not None
    assert (left.queue_wait_us, left.starvation_us, left.level) == (2_000_000, 0, 0)
    assert behind.grant is not None
    assert await parked.leave() is None  # it was in no queue
    assert await behind.leave() is None  # it is held
    assert behind.settle()
    assert not behind.settle()


@pytest.mark.anyio
async def test_a_lease_that_shrinks_lets_others_in_and_one_that_grows_keeps_them_out() -> None:
    replica = Replica()
    running = replica.held(ask(0, 40))
    alone = replica.goes_alone(part_of(40))
    first, second = replica.enter(ask(0, 10)), replica.enter(ask(0, 10))
    assert running.resize(30)
    assert first.grant is None
    await asyncio.sleep(0)
    assert (first.grant is not None, second.grant) == (True, None)
    assert running.resize(200)
    assert first.settle()
    assert second.grant is None
    assert alone.queued(0) == 1
    assert running.settle()
    assert second.grant is not None


@pytest.mark.anyio
@pytest.mark.parametrize("is_stopped", [False, True])
async def test_time_alone_admits_who_has_aged_until_the_store_is_back(*, is_stopped: bool) -> None:
    replica = Replica(clock=monotonic_us)
    alone = replica.goes_alone(aging())
    waiting = replica.enter(ask(1, 60))
    assert waiting.grant is None
    if is_stopped:
        alone.stop()
        await asyncio.sleep(3 * AGING_S)
        assert waiting.grant is None
    else:
        await asyncio.wait_for(waiting.wait(), 60)
        alone.stop()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("enter"), st.integers(0, 3), st.sampled_from(sorted(WEIGHTS)), st.integers(1, 40), st.integers(1, 3)
        ),
        st.tuples(
            st.just("enter"), st.integers(0, 3), st.sampled_from(sorted(WEIGHTS)), st.integers(1, 40), st.integers(1, 3)
        ),
        st.tuples(st.sampled_from(["end", "end", "shrink"]), st.integers(0, 50)),
        st.tuples(st.just("pass"), st.integers(1, 2_000)),
    ),
    min_size=20,
    max_size=80,
)


class Model:
    """The scheduler itself, driven by hand."""

    def __init__(self, part: PoolRules, replica: Replica) -> None:
        self.granted: list[tuple[int, tuple[int, ...]]] = []
        self._scheduler = Scheduler(part)
        self._largest = [largest_admissible(part, tier.level) for tier in part.tiers]
        for lease in replica.leases.values():
            if lease.grant is not None:
                wanted = lease.ask
                name = str(lease.id)
                self._scheduler.register(name, tier=wanted.tier, tokens=wanted.tokens, requests=wanted.requests)
            else:
                self.enter(lease, lease.entered_us)
        self.dispatch(replica.clock())

    def enter(self, lease: Lease, now_us: int) -> None:
        tokens, requests = self._largest[lease.ask.tier]
        if lease.ask.tokens <= tokens and lease.ask.requests <= requests:
            wanted = lease.ask
            size = {"tokens": wanted.tokens, "requests": wanted.requests}
            self._scheduler.submit(
                str(lease.id), tier=wanted.tier, tenant=wanted.tenant, weight=wanted.weight, now_us=now_us, **size
            )

    def end(self, lease: Lease, now_us: int) -> None:
        if not self._scheduler.settle(str(lease.id), now_us):
            self._scheduler.cancel(str(lease.id), now_us)

    def resize(self, lease: Lease) -> None:
        self._scheduler.resize(str(lease.id), lease.ask.tokens)

    def dispatch(self, now_us: int) -> None:
        self.granted += [self._figures(admission, now_us) for admission in self._scheduler.dispatch(now_us)]

    @staticmethod
    def _figures(admission: Admission, now_us: int) -> tuple[int, tuple[int, ...]]:
        wait = admission.wait
        return int(admission.ticket.id), (now_us, wait.queue_wait_us, wait.starvation_us, admission.level)


@pytest.mark.anyio
@given(part=rules(most=150), before=ACTIONS, after=ACTIONS)
@settings(max_examples=examples(20))
@patch("sidecar.pools.runtime.MOST_ADMITTED", 1_000_000)  # as the model: `test_long_queues` has the tests of the bound
async def test_a_part_admits_as_the_scheduler_does(part: PoolRules, before: Any, after: Any) -> None:
    """What runs and waits at the loss is random too: held or waiting, of any age, larger than the part or not."""
    replica = Replica()
    for index, action in enumerate(before):
        if action[0] == "enter":
            (replica.held if index % 3 == 0 else replica.waiting)(wanted_of(action, part))
        elif action[0] == "pass":
            replica.clock.us += action[1]
    model = Model(part, replica)
    alone = replica.goes_alone(part)
    alone._wake_in_time = lambda now_us: None  # type: ignore[method-assign]  # here the test moves the time
    alone.stop()
    for action in after:
        play(action, replica, part, model)
        model.dispatch(replica.clock())
        assert granted_by(replica) == model.granted
    assert granted_by(replica) == model.granted


def granted_by(replica: Replica) -> list[tuple[int, tuple[int, ...]]]:
    return [
        (lease_id, (grant.at_us, grant.queue_wait_us, grant.starvation_us, grant.level))
        for lease_id, grant in replica.granted
    ]


def wanted_of(action: Any, part: PoolRules) -> Ask:
    _, tier, tenant, tokens, requests = action
    weight = WEIGHTS[tenant]
    return ask(min(tier, len(part.tiers) - 1), tokens, requests=requests, tenant=tenant, weight=weight)


def play(action: Any, replica: Replica, part: PoolRules, model: Model | None = None) -> None:
    """One step, of a replica that goes alone, and of its model."""
    match action:
        case ("enter", *_):
            lease = replica.enter(wanted_of(action, part))
            if model:
                model.enter(lease, replica.clock())
        case ("end", which) if lease := chosen(replica, which):
            if not lease.settle():
                lease.leave()
            if model:
                model.end(lease, replica.clock())
        case ("shrink", which) if lease := chosen(replica, which):
            if lease.resize(max(1, lease.ask.tokens // 2)) and model:
                model.resize(lease)
            assert isinstance(replica.decides, Partition)
            replica.decides.dispatch(replica.clock())  # as it does at the end of this tick
        case ("pass", us):
            replica.clock.us += us
            assert isinstance(replica.decides, Partition)
            replica.decides.dispatch(replica.clock())


def chosen(replica: Replica, which: int) -> Lease | None:
    leases = list(replica.leases.values())
    return leases[which % len(leases)] if leases else None


@pytest.mark.long
@pytest.mark.anyio
@given(
    of_pool=rules(most=150),
    before=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 60), st.integers(1, 3)), max_size=20
    ),
    after=st.lists(st.tuples(st.integers(0, 3), ACTIONS), min_size=1, max_size=4),
    replicas=st.integers(1, 4),
)
@settings(max_examples=examples(20))
async def test_replicas_that_lost_their_store_in_one_moment_never_hold_more_than_the_pool(
    of_pool: PoolRules, before: Any, after: Any, replicas: int
) -> None:
    group = [Replica() for _ in range(replicas)]
    for which, tier, tokens, requests in before:
        held = total(group)
        if held[0] + tokens <= of_pool.tokens and held[1] + requests <= of_pool.requests:
            group[which % replicas].held(ask(min(tier, len(of_pool.tiers) - 1), tokens, requests=requests))
        else:
            group[which % replicas].waiting(ask(min(tier, len(of_pool.tiers) - 1), tokens, requests=requests))
    known = [LastKnown(replicas, *total(group), *replica.holds()) for replica in group]
    for replica, figures_known in zip(group, known, strict=True):
        alone = replica.goes_alone(first_part(of_pool, figures_known))
        alone._wake_in_time = lambda now_us: None  # type: ignore[method-assign]
        alone.stop()
    for which, actions in after:
        for action in actions:
            play(action, group[which % replicas], of_pool)
            tokens, requests = total(group)
            assert tokens <= of_pool.tokens
            assert requests <= of_pool.requests


def total(group: list[Replica]) -> tuple[int, int]:
    held = [replica.holds() for replica in group]
    return sum(tokens for tokens, _ in held), sum(requests for _, requests in held)


# -- a loss


@pytest.fixture
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage_module, "SILENCE_S", PATIENCE_S)


def losing(replica: Replica, policy: Policy, known: LastKnown | None, on_loss: StoreLoss = StoreLoss.DIVIDE) -> Outage:
    """The store is lost: from now on nothing but this decides."""
    policy = replace(policy, on_store_loss=on_loss)
    loss = replica.decides = Outage(SizeLimits(policy), replica.leases, known, replica.clock)
    loss.begin(known)
    return loss


def idle(replicas: int = 2) -> LastKnown:
    """No replica held anything."""
    return LastKnown(replicas, 0, 0, 0, 0)


def busy(others: int, own: int = 0, replicas: int = 2) -> LastKnown:
    """The others held `others` tokens, this replica `own`."""
    return LastKnown(replicas, others + own, (others + own) // 10, own, own // 10)


def new(replica: Replica, loss: Outage, wanted: Ask) -> Lease:
    """A request that comes now; raises what it is refused with."""
    lease = replica.lease(wanted)
    loss.enter(lease)
    assert not lease.is_entering, "no one has looked at it"
    if error := lease._answered.exception():
        raise error
    return lease


def refusal(lease: Lease) -> AdmissionError:
    """What a request that waited was refused with, by now."""
    error = lease.wait().exception()
    assert isinstance(error, AdmissionError)
    return error


@pytest.mark.anyio
async def test_a_request_gets_in_waits_or_is_refused_by_the_part() -> None:
    replica = Replica()
    loss = losing(replica, simple(tokens=100), idle())
    assert loss.part()["tokens"] == 50
    first, second = new(replica, loss, ask(0, 30)), new(replica, loss, ask(0, 30))
    assert (first.grant is not None, second.grant) == (True, None)
    with pytest.raises(StoreUnavailable, match=r"51 tokens, 1 sequences.*does not fit into this replica's part"):
        new(replica, loss, ask(0, 51))
    with pytest.raises(StoreUnavailable, match="ask for less output") as refused:
        new(replica, loss, ask(1, 1_000))
    assert (refused.value.status, refused.value.code) == (503, "store_unavailable")
    assert refused.value.retry_after_s is not None
    assert BEAT_S <= refused.value.retry_after_s <= 2 * BEAT_S
    assert len(replica.leases) == 2
    assert first.resize(21)
    await asyncio.sleep(0)
    assert second.grant is None
    assert first.resize(20)
    await asyncio.sleep(0)
    assert second.grant is not None
    assert first.settle()
    assert second.settle()
    loss.end()


@pytest.mark.anyio
async def test_sequences_are_divided_like_tokens() -> None:
    replica = Replica()
    loss = losing(replica, simple(tokens=None, requests=8), idle())
    with pytest.raises(StoreUnavailable, match="5 sequences"):
        new(replica, loss, ask(0, requests=5))
    assert new(replica, loss, ask(0, tokens=10**9, requests=4)).grant is not None
    loss.end()


@pytest.mark.anyio
async def test_the_part_is_reported_with_null_for_what_has_no_bounds() -> None:
    replica = Replica()
    loss = losing(replica, simple(tokens=None, requests=8), busy(others=40))
    assert loss.part() == {"tokens": None, "requests": 2}
    loss.end()


@pytest.mark.anyio
async def test_a_tier_that_never_queues_gets_in_at_once_or_not_at_all() -> None:
    replica = Replica()
    policy = simple(tokens=100, max_waiting=0)
    fits, does_not, never = (replica.entering(ask(0, tokens)) for tokens in (30, 30, 51))
    loss = losing(replica, policy, idle())
    assert fits.grant is not None
    assert isinstance(does_not._answered.exception(), QueueFull)
    assert isinstance(never._answered.exception(), StoreUnavailable)
    with pytest.raises(QueueFull, match="0 requests waiting") as refused:
        new(replica, loss, ask(0, 30))
    assert refused.value.retry_after_s == BEAT_S
    assert new(replica, loss, ask(0, 20)).grant is not None
    assert list(replica.leases) == [1, 5]
    assert loss.partition is not None
    assert loss.partition.queued(0) == 0
    loss.end()


@pytest.mark.anyio
async def test_a_queue_that_is_full_refuses_the_next() -> None:
    replica = Replica()
    loss = losing(replica, simple(tokens=100, max_waiting=2), idle())
    running = new(replica, loss, ask(0, 50))
    queue = [new(replica, loss, ask(0, 20)) for _ in range(2)]
    with pytest.raises(QueueFull, match="2 requests waiting") as refused:
        new(replica, loss, ask(0, 20))
    assert refused.value.retry_after_s == BEAT_S
    other_tier = new(replica, loss, ask(1, 20))
    assert other_tier.grant is None
    left = await queue.pop().leave()
    assert left is not None
    assert (left.queue_wait_us, left.level) == (0, 0)
    queue.append(new(replica, loss, ask(0, 20)))
    assert running.settle()
    assert all(lease.grant is not None for lease in queue)
    loss.end()


@pytest.mark.anyio
async def test_who_waits_for_the_part_to_grow_takes_a_place_in_its_queue() -> None:
    """Others hold nearly everything: a request that will fit into the whole part waits, and so it counts."""
    replica = Replica()
    loss = losing(replica, simple(tokens=100, max_waiting=2), busy(others=100))
    queue = [new(replica, loss, ask(0, 20)) for _ in range(2)]
    assert [lease.grant for lease in queue] == [None, None]
    for _ in range(2):
        with pytest.raises(QueueFull):
            new(replica, loss, ask(0, 20))
        await queue.pop().leave()
        queue.append(new(replica, loss, ask(0, 20)))
    loss.end()


@pytest.mark.anyio
@pytest.mark.usefixtures("_short_patience")
async def test_the_whole_part_is_there_when_what_others_ran_must_be_over() -> None:
    replica = Replica()
    running = replica.held(ask(0, 10))
    loss = losing(replica, simple(tokens=100), busy(others=80, own=10))
    assert loss.part()["tokens"] == 15
    small, large = new(replica, loss, ask(0, 5)), new(replica, loss, ask(0, 30))
    assert (small.grant is not None, large.grant) == (True, None)
    await until(lambda: large.grant is not None, 60, "the part grows")
    assert loss.part()["tokens"] == 50
    assert replica.holds() == (45, 3)
    assert running.settle()
    loss.end()


@pytest.mark.anyio
@pytest.mark.usefixtures("_short_patience")
async def test_who_waited_and_can_never_fit_is_refused_when_patience_is_over_and_no_one_else() -> None:
    replica = Replica()
    running = replica.held(ask(0, 50))
    too_large, fits, entering = replica.waiting(ask(0, 60)), replica.waiting(ask(0, 40)), replica.entering(ask(1, 60))
    loss = losing(replica, simple(tokens=100), busy(others=0, own=50))
    assert isinstance(entering._answered.exception(), StoreUnavailable)  # a new one need not be patient
    assert (too_large.is_over, fits.is_over) == (False, False)
    granted = too_large.wait()
    with pytest.raises(StoreUnavailable, match=r"60 tokens.*does not fit into this replica's part"):
        await asyncio.wait_for(granted, 60)
    assert not too_large.settle()
    assert await too_large.leave() is None
    assert list(replica.leases) == [running.id, fits.id]
    assert fits.grant is None
    assert running.settle()
    assert fits.grant is not None
    loss.end()


@pytest.mark.anyio
@pytest.mark.usefixtures("_short_patience")
async def test_closed_refuses_new_requests_at_once_and_those_that_waited_when_patience_is_over() -> None:
    replica = Replica()
    running, waiting, entering = replica.held(ask()), replica.waiting(ask()), replica.entering(ask())
    loss = losing(replica, simple(tokens=100), busy(others=0, own=10), StoreLoss.CLOSED)
    assert isinstance(entering._answered.exception(), StoreUnavailable)
    with pytest.raises(StoreUnavailable, match="cannot be reached; try again") as refused:
        new(replica, loss, ask())
    assert refused.value.retry_after_s is not None
    assert loss.part() == {}
    assert not waiting.is_over
    await until(lambda: waiting.is_over, 60, "who waits is refused")
    assert isinstance(refusal(waiting), StoreUnavailable)
    assert list(replica.leases) == [running.id]
    assert running.resize(20)
    assert running.settle()
    loss.end()


@pytest.mark.anyio
@pytest.mark.parametrize("on_loss", list(StoreLoss))
async def test_a_store_that_was_never_reached_admits_no_one_and_lets_no_one_wait(on_loss: StoreLoss) -> None:
    replica = Replica()
    entering, waiting = replica.entering(ask()), replica.waiting(ask())
    loss = losing(replica, simple(tokens=100), None, on_loss)
    assert isinstance(entering._answered.exception(), StoreUnavailable)
    assert isinstance(refusal(waiting), StoreUnavailable)
    with pytest.raises(StoreUnavailable):
        new(replica, loss, ask())
    assert replica.leases == {}
    assert loss.part() == {}
    loss.end()


@pytest.mark.anyio
@pytest.mark.usefixtures("_short_patience")
async def test_nothing_is_decided_while_the_store_gets_everything_stated() -> None:
    replica = Replica()
    running = replica.held(ask(0, 50))
    loss = losing(replica, simple(tokens=100), busy(others=0, own=50))
    waiting, too_large = new(replica, loss, ask(0, 20)), replica.waiting(ask(0, 90))
    loss.suspend()
    assert loss.partition is None
    assert loss.part() == {}
    await asyncio.sleep(2 * PATIENCE_S)
    assert not too_large.is_over
    assert running.settle()  # what ends meanwhile is reported to the store
    assert waiting.grant is None

    loss.begin(busy(others=0, own=50))  # it could not be reported
    assert loss.partition is not None
    assert waiting.grant is not None
    assert isinstance(refusal(too_large), StoreUnavailable)
    loss.end()


@pytest.mark.anyio
@pytest.mark.usefixtures("_short_patience")
async def test_with_the_end_of_the_loss_no_one_is_refused_or_admitted_here_any_more() -> None:
    replica = Replica()
    too_large, waiting = replica.waiting(ask(0, 60)), replica.waiting(ask(0, 40))
    loss = losing(replica, simple(tokens=100), busy(others=100))
    loss.end()
    await asyncio.sleep(2 * PATIENCE_S)
    assert (too_large.is_over, too_large.grant, waiting.grant) == (False, None, None)
    assert loss.partition is None
    assert await waiting.leave() is None


@pytest.mark.anyio
async def test_who_ages_behind_the_end_of_a_loss_waits_for_the_store() -> None:
    replica = Replica(clock=monotonic_us)
    waiting = replica.waiting(ask(1, 60))
    loss = losing(replica, policy_of(aging()), idle(replicas=1))
    assert waiting.grant is None
    loss.end()
    await asyncio.sleep(3 * AGING_S)
    assert waiting.grant is None


@pytest.mark.anyio
async def test_who_came_first_is_admitted_first_whether_the_store_had_looked_at_it_or_not() -> None:
    replica = Replica()
    running = replica.held(ask(0, 50))
    queue = [replica.waiting(ask(1, 25)), replica.entering(ask(1, 25)), replica.entering(ask(1, 25))]
    loss = losing(replica, policy_of(simple(tokens=100).rules), busy(others=0, own=50))
    assert not any(lease.is_entering for lease in queue)
    assert running.settle()
    assert [lease.grant is not None for lease in queue] == [True, True, False]
    loss.end()
