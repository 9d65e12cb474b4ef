"""Guarded tiers of a run: their pool hears which requests met the objective, and the shares that it decides are kept.

A request is reported as one of HTTP is (`admission.slo_follower`), by what happens in the engines instead of what the
sidecar sees of it. No miss is a first token that an idle engine would not have in time, nor a request that was
preempted, or whose client has left.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import msgspec

from sidecar.admission.policy_snapshot import objective_for
from sidecar.admission.slo import SloFollower
from sidecar.gain.token_deadlines import Objective
from sidecar.policy.model import Policy
from sidecar.policy.tier import Tier
from sidecar.pools import Pool
from sidecar.scheduling.guard import DECIDE_EVERY_US
from sidecar.tools.simulate.load import Request
from sidecar.tools.simulate.play import SimulatedEngines


class GuardResult(msgspec.Struct, frozen=True):
    """One guarded tier. `met` is the share of its requests that met the objective, of those that were counted.

    Less important tiers may fill the pool to a share of it: on average over the run, at least, and at its end. They
    generated `tokens_below`. `is_in_vain`: the objective was missed for a time, and less important work was not why.
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
        self.is_in_vain = False


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

    def follow(self, request: Request) -> SloFollower | None:
        """Follows a request that comes now; None where its tier is not guarded."""
        self._look()
        guarded = self._tiers.get(request.tier)
        if guarded is None:
            return None
        note = partial(self.pool.note_slo, request.tier, request.tenant)
        objective = guarded.objective

        def is_too_long() -> bool:
            return self.stage.model.idle_first_us(request.prompt) >= objective.ttft_us

        return SloFollower(self.pool, objective, request.at_us, note, is_too_long)

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
            guarded.is_in_vain |= figures.is_in_vain
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
                is_in_vain=guarded.is_in_vain,
                tokens_below=guarded.tokens_below,
            )
        return found
