"""Guarded tiers of a run: their pool hears which requests met the objective, and the shares that it decides are kept.

A request is reported as one of HTTP is (`admission.slo_report`), by what happens in the engines instead of what the
sidecar sees of it. No miss is a first token that an idle engine would not have in time, nor a request that was
preempted, or whose client has left.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import msgspec

from sidecar.admission.policy_snapshot import objective_for
from sidecar.admission.slo_report import SloReport
from sidecar.gain.token_deadlines import Objective
from sidecar.policy.model import Policy
from sidecar.policy.tier import Tier
from sidecar.pools import Lease, Pool
from sidecar.scheduling.guarded import DECIDE_EVERY_US
from sidecar.tools.simulate.load import Request
from sidecar.tools.simulate.play import SimulatedEngines

CHECKED_AFTER_S = 0.25
"""A first token that is overdue is noticed so much later, as by the product's watchdog."""


class GuardResult(msgspec.Struct, frozen=True):
    """One guarded tier. `met` is the share of its requests that met the objective, of those that were counted.

    Less important tiers may fill the pool to a share of it: on average over the run, at least, and at its end. They
    generated `tokens_below`. `is_in_vain`: at the end the objective was missed, and less important work was not why.
    """

    hold: float
    met: float | None
    share_mean: float
    share_least: float
    share_end: float
    is_in_vain: bool
    tokens_below: int


class _GuardedTier:
    """One guarded tier: its objective, and its share so far, as an integral over time."""

    def __init__(self, tier: Tier, objective: Objective) -> None:
        self.tier, self.objective = tier, objective
        self.share = self.least = 1.0
        self.share_us = 0.0
        self.tokens_below = 0


class FollowedRequest:
    """One request of a guarded tier, from its arrival on."""

    def __init__(self, guards: SimulatedGuards, request: Request, objective: Objective, report: SloReport) -> None:
        self._guards, self._request, self._objective, self._report = guards, request, objective, report
        self._lease: Lease | None = None
        self._timer = guards.stage.loop.call_later(objective.ttft_us / 1e6, self._check)

    def entered(self, lease: Lease | None) -> None:
        """The pool has taken it."""
        self._lease = lease
        if lease is not None and lease.grant is None:
            self._report.queued(partial(self._guards.pool.obstacle, lease.ask))

    def first_token(self) -> None:
        """Its first token came."""
        self._timer.cancel()
        self._first(is_missed=self._guards.stage.loop.now_us >= self._report.due_us)

    def preempted(self) -> None:
        """More important work has its room now."""
        self._report.excuse()

    def finished(self) -> None:
        """Its answer is complete."""
        request = self._request
        assert request.first_us is not None
        later_us = self._guards.stage.loop.now_us - request.first_us
        self._report.complete(is_slow=later_us > (request.output - 1) * self._objective.tpot_us)

    def ended(self, *, is_abandoned: bool) -> None:
        """It gets no answer."""
        self._timer.cancel()
        if not is_abandoned and self._report.ends(self._guards.stage.loop.now_us):
            self._first(is_missed=True)

    def _check(self) -> None:
        loop = self._guards.stage.loop
        if self._report.is_overdue(loop.now_us, waits=self._lease is None or self._lease.grant is None):
            self._first(is_missed=True)
        elif not self._report.is_first_known:
            self._timer = loop.call_later(CHECKED_AFTER_S, self._check)

    def _first(self, *, is_missed: bool) -> None:
        idle_us = self._guards.stage.model.idle_first_us(self._request.prompt)
        if is_missed and idle_us >= self._objective.ttft_us:
            self._report.excuse()
        self._report.first_token(is_missed=is_missed)


class SimulatedGuards:
    """The guarded tiers of a policy, in one run."""

    def __init__(self, policy: Policy, pool: Pool, stage: SimulatedEngines) -> None:
        self.pool, self.stage = pool, stage
        self._tiers: dict[int, _GuardedTier] = {}
        for tier in policy.tiers:
            objective = objective_for(tier)
            if tier.hold and objective is not None:
                self._tiers[tier.level] = _GuardedTier(tier, objective)
        self._began_us = self._looked_us = -1

    def follow(self, request: Request) -> FollowedRequest | None:
        """Follows a request that comes now; None where its tier is not guarded."""
        self._look()
        guarded = self._tiers.get(request.tier)
        if guarded is None:
            return None
        note = partial(self.pool.note_slo, request.tier, request.tenant)
        objective = guarded.objective
        return FollowedRequest(self, request, objective, SloReport(note, request.at_us + objective.ttft_us))

    def finished(self, request: Request) -> None:
        """An answer is complete."""
        self._look()
        for level, guarded in self._tiers.items():
            if level < request.tier:
                guarded.tokens_below += request.output

    def _look(self) -> None:
        """At the shares, as often as they change."""
        now_us = self.stage.loop.now_us
        if not self._tiers or 0 <= now_us - self._looked_us < DECIDE_EVERY_US:
            return
        if self._looked_us < 0:
            self._began_us = self._looked_us = now_us
        for guarded, figures in zip(self._tiers.values(), self.pool.guards(), strict=True):
            guarded.share = figures.share
            guarded.least = min(guarded.least, figures.share)
            guarded.share_us += figures.share * (now_us - self._looked_us)
        self._looked_us = now_us

    def results(self) -> Mapping[str, GuardResult]:
        """The guarded tiers by name, at the end of the run."""
        found, lasted_us = {}, self._looked_us - self._began_us
        for guarded, figures in zip(self._tiers.values(), self.pool.guards(), strict=True):
            counted = figures.met + figures.missed
            found[guarded.tier.name] = GuardResult(
                hold=float(guarded.tier.hold),
                met=figures.met / counted if counted else None,
                share_mean=guarded.share_us / lasted_us if lasted_us else figures.share,
                share_least=min(guarded.least, figures.share),
                share_end=figures.share,
                is_in_vain=figures.is_in_vain,
                tokens_below=guarded.tokens_below,
            )
        return found
