"""Random operations on a pool of several engines: small engines, so that everything collides."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from fleet_oracle import FleetOracle, Placed
from oracle import Answer, Policy

from sidecar.policy.rules import UNLIMITED
from sidecar.pools.engines import EngineOffer
from sidecar.scheduling import Admission
from sidecar.scheduling.fleet_scheduler import FleetScheduler

NAMES = ("a", "b", "c", "d", "e")
MOMENTS = (1, 3, 7, 20, 60)
PATIENCE_US = 5_004_000
"""The patience of a claimant with a hit of 8 tokens."""


def scheduler_of(
    policy: Policy, weight_percent: int = 200, kind: type[FleetScheduler] = FleetScheduler
) -> FleetScheduler:
    return kind(FleetOracle(policy).rules_of, weight_percent)


def as_placed(admission: Admission) -> Placed:
    wait = admission.wait
    answer = Answer(
        admission.ticket.id, wait.queue_wait_us, wait.starvation_us, tuple(wait.served_ahead), admission.level
    )
    return Placed(answer, admission.engine)


@dataclass
class Twins:
    """A scheduler beside the oracle: every operation goes to both, and every answer must be the same."""

    policy: Policy
    kind: type[FleetScheduler] = FleetScheduler
    now_us: int = 0
    count: int = 0
    offers: dict[str, EngineOffer] = field(default_factory=dict)
    incarnations: dict[str, int] = field(default_factory=dict)
    admitted: list[Placed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.oracle = FleetOracle(self.policy)
        self.scheduler = scheduler_of(self.policy, kind=self.kind)

    def set_engine(self, name: str, **changes) -> None:
        """Another engine, or one that changes; a new incarnation where it was not there."""
        if name not in self.offers:
            self.incarnations[name] = self.incarnations.get(name, 0) + 1
            fresh = {"tokens": 30, "requests": 4, "prefill": 10, "since_us": self.now_us}
            self.offers[name] = EngineOffer(f"{name}#{self.incarnations[name]}", **fresh)
        self.offers[name] = self.offers[name]._replace(**changes)
        self._set_engines()

    def remove_engine(self, name: str) -> None:
        self.offers.pop(name, None)
        self._set_engines()

    def _set_engines(self) -> None:
        self.scheduler.set_engines(list(self.offers.values()), self.now_us)
        self.oracle.set_engines(list(self.offers.values()), self.now_us)

    def cap(self, engine: str, requests: int, for_us: int) -> None:
        until_us = self.now_us + for_us
        self.scheduler.cap(engine, requests, until_us, self.now_us)
        self.oracle.cap(engine, requests, until_us, self.now_us)

    def raise_cap(self, engine: str, requests: int) -> None:
        self.scheduler.engines(self.now_us)  # a pool decides after each cap, so it is in force
        self.scheduler.raise_cap(engine, requests)
        self.oracle.raise_cap(engine, requests, self.now_us)

    def submit(self, **ticket) -> str:
        name = str(self.count)
        self.count += 1
        self.scheduler.submit(name, now_us=self.now_us, **ticket)
        self.oracle.submit(name, now_us=self.now_us, **ticket)
        return name

    def dispatch(self) -> list[Placed]:
        overtakes = []
        placed = [as_placed(admission) for admission in self._noting(overtakes)]
        assert placed == self.oracle.dispatch(self.now_us)
        assert self.oracle.preempt(self.now_us) == [victim.id for victim in self.scheduler.preempt(self.now_us)]
        self.admitted += placed
        return placed

    def _noting(self, overtakes: list) -> list[Admission]:
        admissions = self.scheduler.dispatch(self.now_us)
        overtakes += [dict(admission.passed) for admission in admissions]
        return admissions

    def settle(self, name: str) -> bool:
        return self._same(self.scheduler.settle(name, self.now_us), self.oracle.settle(name, self.now_us))

    def cancel(self, name: str) -> bool:
        return self._same(self.scheduler.cancel(name, self.now_us) is not None, self.oracle.cancel(name))

    def prefilled(self, name: str) -> bool:
        return self._same(self.scheduler.prefilled(name, self.now_us), self.oracle.prefilled(name, self.now_us))

    def resize(self, name: str, tokens: int) -> bool:
        return self._same(self.scheduler.resize(name, tokens), self.oracle.resize(name, tokens))

    def charge(self, tier: int, tenant: str, weight: int, tokens: int) -> None:
        self.scheduler.charge(tier, tenant, weight, tokens)
        self.oracle.charge(tier, tenant, weight, tokens)

    def keep(self, name: str) -> bool:
        return self._same(self.scheduler.keep(name), self.oracle.keep(name))

    def requeue(self, name: str) -> bool:
        return self._same(self.scheduler.requeue(name, self.now_us), self.oracle.requeue(name, self.now_us))

    def hand_back(self, name: str, barred: tuple[str, ...] = ()) -> bool:
        lease = next((request for request in self.oracle.held() if request.id == name), None)
        overtaken_us = None if lease is None else self.oracle.overtaken_at_us(lease)
        self.scheduler.bar(name, barred)
        did = self.scheduler.hand_back(name, self.now_us, overtaken_us)
        return self._same(did, self.oracle.hand_back(name, self.now_us, barred))

    def hold_back(self, for_us: int) -> None:
        self.scheduler.hold_back(self.now_us + for_us)
        self.oracle.hold_back(self.now_us + for_us)

    def pause(self, *, is_paused: bool) -> None:
        self.scheduler.is_paused = self.oracle.is_paused = is_paused

    def _same(self, did: bool, should: bool) -> bool:
        assert did == should
        return did


def random_offer(luck: random.Random) -> dict:
    return {
        "tokens": luck.choice([12, 30, 30, 60]),
        "requests": luck.choice([1, 3, 4, 20]),
        "prefill": luck.choice([5, 10, 10, 20, UNLIMITED]),
        "speed": luck.choice([1000, 1000, 1000, 500, 1300]),
        "takes_new": luck.random() < 0.9,
        "ramp_us": luck.choice([0, 0, 0, 40]),
    }


WEIGHTS = {"a": 1, "b": 2, "c": 4}


def random_ticket(luck: random.Random, twins: Twins) -> dict:
    tokens = luck.randint(1, luck.choice([4, 20, 40]))
    prompt = luck.randint(0, tokens)
    ids = sorted({*(offer.id for offer in twins.offers.values()), "gone#1"})
    hits = [(engine, luck.randint(0, prompt)) for engine in luck.sample(ids, luck.randint(0, min(2, len(ids))))]
    tenant = luck.choice("abc")
    return {
        "tier": luck.randrange(len(twins.policy.tiers)),
        "tokens": tokens,
        "requests": luck.choice([1, 1, 1, 2]),
        "tenant": tenant,
        "weight": WEIGHTS[tenant],
        "prompt": prompt,
        "hits": tuple(hits) if luck.random() < 0.5 else (),
        "barred": (luck.choice(NAMES),) if luck.random() < 0.1 else (),
    }


def hot_ticket(luck: random.Random, twins: Twins) -> dict:
    """One whose whole prompt one of few engines has, which is mostly busy: many such wait until they lose patience."""
    prompt = luck.randint(4, 10)
    ids = sorted(offer.id for offer in twins.offers.values())[:2]
    hits = ((luck.choice(ids), prompt),) if ids else ()
    return {**random_ticket(luck, twins), "tokens": prompt + luck.randint(0, 4), "prompt": prompt, "hits": hits}


OFTEN = {
    "submit": 8,
    "settle": 4,
    "prefilled": 4,
    "cancel": 1,
    "resize": 0.4,
    "charge": 0.8,
    "hand back": 0.7,
    "requeue": 1,
    "keep": 0.3,
    "hold back": 0.1,
    "release": 0.2,
    "pause": 0.1,
    "time": 3,
    "engine": 0.6,
    "drain": 0.4,
    "resume": 0.4,
    "gone": 0.3,
    "cap": 0.4,
    "raise cap": 0.4,
}


def some_time(twins: Twins, luck: random.Random) -> int:
    """Some microseconds: few, a claimant's patience, or until just before or when time alone changes a decision."""
    chance = luck.random()
    if chance < 0.15:
        return PATIENCE_US
    change_us = twins.scheduler.next_change_us(twins.now_us) if chance < 0.35 else None
    if change_us is None:
        return luck.choice(MOMENTS)
    return max(0, change_us - twins.now_us - luck.choice([0, 0, 1]))


def operate(twins: Twins, luck: random.Random, ticket: Callable[[random.Random, Twins], dict] = random_ticket) -> str:
    """One random operation on both."""
    what = luck.choices(list(OFTEN), list(OFTEN.values()))[0]
    oracle = twins.oracle
    held = [lease.id for lease in oracle.held()]
    someone = str(luck.randrange(twins.count + 1))
    lease = luck.choice(held) if held and luck.random() < 0.9 else someone
    waiting = [request.id for request in oracle.waiting()]
    name = luck.choice(NAMES)
    if what == "submit":
        twins.submit(**ticket(luck, twins))
    elif what == "settle":
        twins.settle(lease)
    elif what == "prefilled":
        twins.prefilled(lease)
    elif what == "cancel":
        claimants = [request.id for request in oracle.claimants()]
        twins.cancel(luck.choice(claimants or waiting or [someone]) if luck.random() < 0.5 else someone)
    elif what == "resize":
        twins.resize(lease, luck.randint(1, 20))
    elif what == "charge":
        tenant = luck.choice("abc")
        tokens = luck.choice([1, 7, 40, 40, 2**53])
        twins.charge(luck.randrange(len(twins.policy.tiers)), tenant, WEIGHTS[tenant], tokens)
    elif what == "hand back":
        if lease not in [request.id for request in oracle.held() if request.kept]:
            twins.hand_back(lease, (name,) if luck.random() < 0.3 else ())
    elif what == "requeue":
        for victim in [request.id for request in oracle.held() if request.chosen][:2]:
            twins.requeue(victim)
    elif what == "keep":
        twins.keep(lease)
    elif what == "hold back":
        twins.hold_back(luck.choice([0, 3, 20]))
    elif what == "release":
        twins.hold_back(0)
    elif what == "pause":
        twins.pause(is_paused=luck.random() < 0.3)
    elif what == "time":
        twins.now_us += some_time(twins, luck)
    elif what == "engine":
        twins.set_engine(name, **random_offer(luck))
    elif what in ("drain", "resume") and name in twins.offers:
        twins.set_engine(name, takes_new=what == "resume")
    elif what == "gone":
        twins.remove_engine(name)
    elif what == "cap":
        ids = oracle.known() or ["none#1"]
        engine = luck.choice(ids)
        twins.cap(engine, luck.randint(0, 3), luck.choice([5, 30]))
    elif what == "raise cap":
        capped = sorted(oracle.caps)  # some have ended
        twins.raise_cap(luck.choice(capped or ["none#1"]), luck.randint(1, 2))
    return what
