"""The pool of several engines, in one process: the local pool with a scheduler that chooses the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from sidecar.events import Obstacle
from sidecar.policy.model import Policy
from sidecar.policy.rules import PoolRules
from sidecar.pools.base import Ask, Lease
from sidecar.pools.clock import Clock, monotonic_us
from sidecar.pools.engine_reports import change_sizes, engine_obstacle, engine_state, placed_on
from sidecar.pools.engines import WEIGHT_PERCENT, EngineOffer, EngineState
from sidecar.pools.local import LocalPool
from sidecar.pools.runtime import MOST_ADMITTED, LeaseRuntime, grant_of
from sidecar.scheduling import Admission
from sidecar.scheduling.fleet_scheduler import FleetScheduler, RulesOf
from sidecar.scheduling.gain_fleet_scheduler import GainFleetScheduler
from sidecar.scheduling.rate_limit import RateLimiter


class EngineRuntime(LeaseRuntime):
    """What every lease runtime of several engines does: leases name their engines. See `LeaseRuntime`."""

    scheduler: FleetScheduler

    def most_admitted(self) -> int:
        """See `LeaseRuntime.most_admitted`: half as many, because each is placed on an engine, too."""
        return MOST_ADMITTED // 2

    def submit(self, lease: Lease) -> None:
        """See `LeaseRuntime.submit`."""
        ask = lease.ask
        ticket = self.scheduler.submit(
            lease.ticket_id,
            tier=ask.tier,
            tokens=ask.tokens,
            requests=ask.requests,
            tenant=ask.tenant,
            weight=ask.weight,
            now_us=lease.entered_us,
            returns=lease.returns,
            prompt=ask.prompt,
            hits=ask.hits,
            barred=ask.barred,
        )
        self._appraise(ticket, ask)
        self.waiting[lease.ticket_id] = lease

    def hand_back(self, lease: Lease, now_us: int) -> bool:
        """See `LeaseRuntime.hand_back`."""
        self.scheduler.bar(lease.ticket_id, lease.ask.barred)
        return super().hand_back(lease, now_us)

    def prefilled(self, lease: Lease) -> None:
        """A lease's engine has prefilled its prompt."""
        now_us = self._clock()
        if self.scheduler.prefilled(lease.ticket_id, now_us) and self.waiting:
            self.dispatch(now_us)

    def _admit(self, admission: Admission, now_us: int) -> None:
        ticket = admission.ticket
        lease = self.waiting.pop(ticket.id)
        if self.scheduler.rules.tiers[ticket.tier].preemptible:
            self._preemptible[ticket.id] = lease
        if self._on_admitted is not None:
            self._on_admitted(ticket.tier, now_us)
        grant = grant_of(self._names, admission.wait, now_us, admission.level, admission.passed)
        since_us = ticket.placing.claimed_us
        placed = placed_on(ticket.placing.found, lease.ask, 0 if since_us is None else now_us - since_us)
        lease.granted(msgspec.structs.replace(grant, engine=admission.engine, placed=placed))


def new_fleet_scheduler(rules_of: RulesOf, weight_percent: int, *, is_by_gain: bool) -> FleetScheduler:
    """The scheduler of several engines for an order."""
    kind = GainFleetScheduler if is_by_gain else FleetScheduler
    return kind(rules_of, weight_percent)


class FleetRuntime(EngineRuntime):
    """The lease runtime of a pool of several engines. See `LeaseRuntime`."""

    def __init__(
        self, policy: Policy, weight_percent: int, clock: Clock, on_admitted: Callable[[int, int], None]
    ) -> None:
        self._policy = policy
        self._weight_percent = weight_percent
        super().__init__(policy.rules, clock, on_admitted)

    def new_scheduler(self, rules: PoolRules) -> FleetScheduler:  # noqa: ARG002  # sizes are those of the engines
        """See `LeaseRuntime.new_scheduler`."""
        policy = self._policy
        return new_fleet_scheduler(policy.rules_of, self._weight_percent, is_by_gain=policy.rules.is_by_gain)


class FleetPool(LocalPool):
    """See `LocalPool` and `EnginePool`. `weight_percent` is the weight of a predicted hit."""

    _runtime: FleetRuntime

    def __init__(
        self,
        policy: Policy,
        clock: Clock = monotonic_us,
        *,
        weight_percent: int = WEIGHT_PERCENT,
        allowances: RateLimiter | None = None,
    ) -> None:
        self._weight_percent = weight_percent
        self._offers: Sequence[EngineOffer] = ()
        super().__init__(policy, clock, allowances=allowances)
        self._size()

    def _new_runtime(self, policy: Policy, clock: Clock) -> FleetRuntime:
        return FleetRuntime(policy, self._weight_percent, clock, self._places.admitted)

    def set_engines(self, offers: Sequence[EngineOffer]) -> None:
        """See `EnginePool.set_engines`."""
        self._offers = offers
        self._runtime.scheduler.set_engines(offers, self.now_us())
        self._size()
        self._look_again()

    def cap_engine(self, engine: str, for_s: float, refused: int = 1) -> None:
        """See `EnginePool.cap_engine`."""
        now_us, scheduler = self.now_us(), self._runtime.scheduler
        held = scheduler.held_by(engine)
        scheduler.cap(engine, max(0, held - refused), now_us + round(for_s * 1e6), now_us)
        self._runtime.dispatch(now_us)

    def raise_cap(self, engine: str, requests: int) -> None:
        """See `EnginePool.raise_cap`."""
        self._runtime.scheduler.raise_cap(engine, requests)
        self._runtime.dispatch(self.now_us())

    def engines(self) -> Sequence[EngineState]:
        """See `EnginePool.engines`."""
        return self._runtime.scheduler.engines(self.now_us())

    def prefilled(self, lease: Lease) -> None:
        """See `LeaseOwner.prefilled`."""
        self._runtime.prefilled(lease)

    def drain_engine(self, name: str, *, drains: bool) -> None:
        """See `EnginePool.drain_engine`: the next offers say it."""

    def change_weight(self, weight_percent: int) -> None:
        """See `EnginePool.change_weight`."""
        self._weight_percent = weight_percent

    def change_policy(self, policy: Policy) -> None:
        """See `Pool.change_policy`. The pool's size is that of its engines."""
        self._sizes.policy = policy
        self._runtime.scheduler.change_rules_of(policy.rules_of, self._weight_percent)
        self._size()
        self._look_again()

    def change_rules(self, rules: PoolRules) -> None:
        """See `Pool.change_rules`: nothing changes, because the engines say how large the pool is."""

    def state(self) -> Mapping[str, object]:
        """See `Pool.state`; with the engines."""
        engines = [engine_state(engine) for engine in self.engines()]  # first: it brings the pool's size up to date
        no_engine_fits_s = self._runtime.scheduler.blocked_us(self.now_us()) / 1e6
        return {**super().state(), "engines": engines, "no_engine_fits_s": round(no_engine_fits_s, 3)}

    def obstacle(self, ask: Ask) -> tuple[Obstacle, str]:
        """See `Pool.obstacle`."""
        of_pool = super().obstacle(ask)
        found = None if self._paused is not None else engine_obstacle(self.engines(), ask, of_pool)
        return found or of_pool

    def _size(self) -> None:
        change_sizes(self._sizes, self._offers)
