"""The lease runtime: leases that wait, run and end by one scheduler, on the clock of one event loop.

It connects a scheduler with its leases and its timer. The local pool has one for as long as it lives; a replica that
has lost its store has one for its part of the pool (`redis.partition`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sidecar.core.tickets import Gain
from sidecar.policy.rules import PoolRules
from sidecar.pools.base import Ask, Grant, Lease, TenantUse
from sidecar.pools.clock import Clock
from sidecar.pools.stats import TierUsage, served_by_name
from sidecar.scheduling import Admission, Rule, Scheduler, Wait
from sidecar.scheduling.gain import GainFigures
from sidecar.scheduling.gain_scheduler import GainScheduler
from sidecar.scheduling.ticket import Ticket

_NONE: Mapping[str, Any] = {}

MOST_ADMITTED = 16
"""Requests that are admitted in one tick of the event loop: 20 to 200 us each."""


def grant_of(
    names: Sequence[str], wait: Wait, at_us: int, level: int, passed: Sequence[tuple[int, Rule]] = ()
) -> Grant:
    """A wait that ended at `at_us` at an aged `level`. `names` are the tiers', most important first."""
    ahead = served_by_name(names, wait.served_ahead) if any(wait.served_ahead) else {}
    overtaken = {names[tier]: rule.value for tier, rule in passed} if passed else {}
    return Grant(at_us, wait.queue_wait_us, wait.starvation_us, wait.overtaken_at_us, ahead, level, overtaken)


def figures_of(gain: Gain) -> GainFigures:
    """As the old order has them."""
    due_us = getattr(gain, "deadline_us", max(0, gain.start_by_us))
    return GainFigures(gain.weight, gain.tokens, gain.cost_us, due_us, gain.start_by_us, gain.slack_us)


class LeaseRuntime:
    """Belongs to the event loop of its first wait. After every change it admits whatever the rules let in.

    Two exceptions. Of many leases that change their size, 200 a second in one process, each shrinks by little: what
    that lets in is decided once a tick of the event loop. And where more requests can be admitted at one time than
    `most_admitted`, as in a pool that has grown, the others are admitted in the next ticks: `is_unfinished` until then.

    `on_admitted` is called with the tier and the moment of every admission.
    """

    def __init__(self, rules: PoolRules, clock: Clock, on_admitted: Callable[[int, int], None] | None = None) -> None:
        self.scheduler = self.new_scheduler(rules)
        self.waiting: dict[str, Lease] = {}
        self._preemptible: dict[str, Lease] = {}  # leases that may be preempted
        self._clock = clock
        self._on_admitted = on_admitted
        self._names = tuple(tier.name for tier in rules.tiers)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_us = 0
        self._soon: asyncio.Handle | None = None
        self.is_unfinished = False

    def new_scheduler(self, rules: PoolRules) -> Scheduler:
        """The scheduler of this runtime."""
        return GainScheduler(rules) if rules.is_by_gain else Scheduler(rules)

    def most_admitted(self) -> int:
        """How many requests are admitted in one tick of the event loop."""
        return MOST_ADMITTED

    def submit(self, lease: Lease) -> None:
        """Puts a request in its tier's queue, to the front where it returns. `dispatch` admits it at the earliest."""
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
        )
        self._appraise(ticket, ask)
        self.waiting[lease.ticket_id] = lease

    def admit_at_once(self, lease: Lease, now_us: int) -> bool:
        """Admits a new request where there is room and none waits. Else False, and nothing changes: `submit` is due."""
        ask, scheduler = lease.ask, self.scheduler
        if self.waiting or not scheduler.admit_at_once(lease.ticket_id, ask, now_us):
            return False
        tier = ask.tier
        if scheduler.rules.tiers[tier].preemptible:
            self._preemptible[lease.ticket_id] = lease
        if self._on_admitted is not None:
            self._on_admitted(tier, now_us)
        lease.grant = Grant(now_us, 0, 0, None, _NONE, tier, _NONE)  # as `granted`: no one waits for it
        return True

    def _appraise(self, ticket: Ticket, ask: Ask) -> None:
        if ask.gain is not None and isinstance(self.scheduler, GainScheduler):
            self.scheduler.appraise(ticket, figures_of(ask.gain))

    def dispatch(self, now_us: int) -> None:
        """Admits every request that the rules let in now; for the first that they do not, leases are preempted."""
        left = self.most_admitted()
        while left and (admissions := self.scheduler.dispatch(now_us, 1)):
            self._admit(admissions[0], now_us)  # its size may be another now, and the next sees it
            left -= 1
        self.is_unfinished = not left and bool(self.waiting)
        if self.is_unfinished:
            self._decide_again()
        elif self.waiting:
            for victim in self.scheduler.preempt(now_us):
                self._choose(victim.id)
            self._wake_in_time(now_us)

    def cancel(self, lease: Lease, now_us: int) -> Wait | None:
        """Takes a waiting request out of its queue. None, and nothing changes, where it does not wait."""
        wait = self.scheduler.cancel(lease.ticket_id, now_us)
        if wait is not None:
            del self.waiting[lease.ticket_id]
        return wait

    def end(self, lease: Lease, now_us: int) -> Grant | None:
        """Gives a lease back, or ends a wait and returns how it had gone."""
        if self._preemptible:
            self._preemptible.pop(lease.ticket_id, None)
        wait = None if self.scheduler.settle(lease.ticket_id, now_us) else self.cancel(lease, now_us)
        if self.waiting:
            self.dispatch(now_us)
        return None if wait is None else grant_of(self._names, wait, now_us, lease.ask.tier)

    def resize(self, lease: Lease, freed_tokens: int) -> None:
        """A lease holds what its ask says, so many tokens less. Admits later in this tick whatever that lets in."""
        is_held = self.scheduler.resize(lease.ticket_id, lease.ask.tokens)
        if is_held and freed_tokens > 0 and self.waiting:
            self._decide_again()

    def charge(self, lease: Lease, tokens: int) -> None:
        """See `Lease.charge_tenant`. No request is admitted earlier for it."""
        self.scheduler.charge(lease.tier, lease.ask.tenant, lease.ask.weight, tokens)

    def keep(self, lease: Lease) -> None:
        """A lease is not to be preempted any more. Where it had been chosen, another one may be."""
        if self._preemptible.pop(lease.ticket_id, None) and self.scheduler.keep(lease.ticket_id) and self.waiting:
            self.dispatch(self._clock())

    def requeue(self, lease: Lease, now_us: int) -> bool:
        """A chosen lease gives its room back and waits again. False, and nothing changes, where it was not chosen here.

        `dispatch` admits it at the earliest.
        """
        if self._preemptible.pop(lease.ticket_id, None) is None or not self.scheduler.requeue(lease.ticket_id, now_us):
            return False
        self.waiting[lease.ticket_id] = lease
        return True

    def hand_back(self, lease: Lease, now_us: int) -> bool:
        """No engine has taken the request of a lease: it waits again. False, and nothing changes, where the lease was
        granted elsewhere. `dispatch` admits it at the earliest.
        """
        assert lease.grant is not None
        if not self.scheduler.hand_back(lease.ticket_id, now_us, lease.grant.overtaken_at_us):
            return False
        self._preemptible.pop(lease.ticket_id, None)
        self.waiting[lease.ticket_id] = lease
        return True

    def pause(self, *, is_paused: bool) -> None:
        """Admits no request from now on, or admits again: at once those that the rules let in."""
        self.scheduler.is_paused = is_paused
        if not is_paused:
            self.dispatch(self._clock())

    def hold_back(self, for_us: int) -> None:
        """Admits one request at a time for so long."""
        now_us = self._clock()
        self.scheduler.hold_back(now_us + for_us)
        self.dispatch(now_us)

    def queued(self, tier: int) -> int:
        """The requests of a tier that wait."""
        return self.scheduler.queued(tier)[1]

    def use_of(self, tenant: str) -> TenantUse:
        """See `Pool.use_of`."""
        return TenantUse(*self.scheduler.use_of(tenant))

    def displaced(self, ask: Ask, places: int) -> Lease | None:
        """The waiting request whose place in a full queue a new one takes: see `Scheduler.displaced`."""
        ticket = self.scheduler.displaced(ask.tier, ask.tenant, ask.weight, places)
        return None if ticket is None else self.waiting[ticket.id]

    def usage(self) -> list[TierUsage]:
        """What every tier holds and has waiting."""
        scheduler = self.scheduler
        return [TierUsage(*scheduler.held(tier), *scheduler.queued(tier)) for tier in range(len(self._names))]

    def oldest(self) -> list[Grant | None]:
        """How the oldest request of every tier has waited so far; None where none waits."""
        now_us = self._clock()
        return [
            None if wait is None else grant_of(self._names, wait, now_us, level)
            for level, wait in enumerate(self.scheduler.oldest(now_us))
        ]

    def stop(self) -> None:
        """Stops the timers: without a change nothing is admitted any more."""
        self._stop_timer()
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None

    def _admit(self, admission: Admission, now_us: int) -> None:
        ticket = admission.ticket
        lease = self.waiting.pop(ticket.id)
        if self.scheduler.rules.tiers[ticket.tier].preemptible:
            self._preemptible[ticket.id] = lease
        if self._on_admitted is not None:
            self._on_admitted(ticket.tier, now_us)
        lease.granted(grant_of(self._names, admission.wait, now_us, admission.level, admission.passed))

    def _choose(self, ticket_id: str) -> None:
        lease = self._preemptible[ticket_id]
        lease.chosen(lease.returns)

    def _wake_in_time(self, now_us: int) -> None:
        change_us = self.scheduler.next_change_us(now_us)
        if change_us is None or (self._timer is not None and self._timer_at_us <= change_us):
            return
        self._stop_timer()
        self._timer_at_us = change_us
        self._timer = asyncio.get_running_loop().call_later((change_us - now_us) / 1e6, self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _decide_again(self) -> None:
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._decide_soon)

    def _decide_soon(self) -> None:
        self._soon = None
        if self.waiting:
            self.dispatch(self._clock())

    def _on_timer(self) -> None:
        self._timer = None
        self.dispatch(self._clock())
