"""Comparison of policies and baselines on the same arrivals, over several seeds; and the highest rate of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import mean, stdev
from typing import Any

import msgspec

from sidecar.admission.policy_snapshot import objective_for
from sidecar.gain.token_deadlines import Objective
from sidecar.policy.model import Policy
from sidecar.tools.replay.trace import Trace
from sidecar.tools.simulate.baselines import BaselineAdmission, new_queue
from sidecar.tools.simulate.figures import RunResult, result
from sidecar.tools.simulate.load import Assign, Request, load
from sidecar.tools.simulate.play import SimulatedAdmission, SimulatedEngines, VirtualLoop, play
from sidecar.tools.simulate.product import ProductAdmission
from sidecar.tools.step_model.model import EngineModel
from sidecar.tools.step_model.queue import KeyQueue

TARGETS = (0.90, 0.99)
CLOSE = 1.02
"""A rate is found to 2%: less than what other seeds change."""
MOST_DOUBLINGS = 10
_T = (0.0, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for 95% by degrees of freedom; above nine the last, which is a little too wide."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that all runs have in common. Clients leave after `patience_s` without a first token; None: none
    leaves.
    """

    trace: Trace
    model: EngineModel
    engines: int
    mix: Mapping[str, float] | None
    by: Assign
    scale: float
    seeds: int
    patience_s: float | None = None


@dataclass(frozen=True, slots=True)
class ComparedPolicy:
    """One policy, or one baseline on the tiers and objectives of a policy. `written` is what the policy's file says."""

    name: str
    policy: Policy
    written: Mapping[str, Any] = field(default_factory=dict)
    baseline: bool = False

    @property
    def order(self) -> str:
        """Of the tickets that wait; `engine` where none waits before the engines."""
        return "engine" if self.baseline else self.policy.order.value

    @property
    def objectives(self) -> Mapping[int, Objective]:
        """The objectives of its tiers, by level; without those that have none."""
        found = {tier.level: objective_for(tier) for tier in self.policy.tiers}
        return {level: objective for level, objective in found.items() if objective is not None}


def offered_tiers(setting: Setting, candidate: ComparedPolicy) -> set[int]:
    """The levels that get requests in the run of the first seed. Raises BadTier where a row names another tier."""
    return {one.tier for one in _load(setting, candidate, 1, setting.scale)}


def _load(setting: Setting, candidate: ComparedPolicy, seed: int, scale: float) -> list[Request]:
    tiers = [tier.name for tier in candidate.policy.tiers]
    block_tokens = setting.model.block_tokens
    return load(setting.trace, tiers, setting.mix, by=setting.by, scale=scale, block_tokens=block_tokens, seed=seed)


def run(setting: Setting, candidate: ComparedPolicy, seed: int, scale: float) -> RunResult:
    """One run. The same for the same arguments."""
    policy, objectives = candidate.policy, candidate.objectives
    tiers = [tier.name for tier in policy.tiers]
    offered = _load(setting, candidate, seed, scale)
    loop = VirtualLoop()
    with loop.running():
        queue = new_queue(candidate.name, policy, objectives) if candidate.baseline else KeyQueue
        stage = SimulatedEngines(setting.model, setting.engines, loop, queue)
        admission: SimulatedAdmission = (
            BaselineAdmission(candidate.name, policy, objectives, stage)
            if candidate.baseline
            else ProductAdmission(policy, stage)
        )
        patience_us = None if setting.patience_s is None else round(setting.patience_s * 1e6)
        played = play(offered, stage, admission, patience_us)
    guarded = admission.guarded() if isinstance(admission, ProductAdmission) else {}
    return result(
        played,
        tiers,
        objectives,
        name=candidate.name,
        order=candidate.order,
        seed=seed,
        scale=scale,
        guarded=guarded,
    )


class Rate(msgspec.Struct, frozen=True):
    """The highest scale at which the share `target` of every tier's requests met its objective, on average over the
    seeds. None where none of the scales that were tried did. `requests_per_s` are those of the trace at that scale.
    With `is_bound` it is the highest that was tried, and a higher one may do as well.
    """

    policy: str
    order: str
    target: float
    scale: float | None
    requests_per_s: float | None
    is_bound: bool


def find_rates(setting: Setting, candidate: ComparedPolicy) -> list[Rate]:
    """The rates of one candidate. It takes attainment to fall as the rate rises, as it does but for chance."""
    known: dict[float, float] = {}

    def attained(scale: float) -> float:
        if scale not in known:
            runs = [run(setting, candidate, seed, scale) for seed in range(1, setting.seeds + 1)]
            shares = [[one.tiers[name].slo for one in runs if name in one.tiers] for name in runs[0].tiers]
            known[scale] = min(mean(found) for tier in shares if (found := [one for one in tier if one is not None]))
        return known[scale]

    rows = setting.trace.rows
    duration_s = max(row.at_s or 0.0 for row in rows) or 1.0
    found = []
    for target in TARGETS:
        scale, is_bound = _highest(lambda tried, target=target: attained(tried) >= target, setting.scale)  # type: ignore[misc]
        per_s = None if scale is None else len(rows) * scale / duration_s
        found.append(Rate(candidate.name, candidate.order, target, scale, per_s, is_bound))
    return found


def _highest(holds: Callable[[float], bool], start: float) -> tuple[float | None, bool]:
    """The highest that holds, to 2%, and whether none was found that does not.

    It doubles or halves at most ten times from `start` to find where to look.
    """
    low = high = start
    if holds(start):
        for _ in range(MOST_DOUBLINGS):
            low, high = high, high * 2
            if not holds(high):
                break
        else:
            return high, True
    else:
        for _ in range(MOST_DOUBLINGS):
            low, high = low / 2, low
            if holds(low):
                break
        else:
            return None, False
    while high > low * CLOSE:
        middle = sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, False


def interval(found: Sequence[float | None]) -> tuple[float, float] | None:
    """The mean over the seeds and the half of its 95% confidence interval; None where there is no figure."""
    values = [one for one in found if one is not None]
    if not values:
        return None
    if len(values) == 1:
        return values[0], 0.0
    return mean(values), _T[min(len(values) - 1, len(_T) - 1)] * stdev(values) / sqrt(len(values))


def by_policy(results: Sequence[RunResult]) -> list[list[RunResult]]:
    """The runs of each policy, in their order."""
    found: dict[tuple[str, str], list[RunResult]] = {}
    for one in results:
        found.setdefault((one.policy, one.order), []).append(one)
    return list(found.values())


def shown(values: Sequence[float | None]) -> str:
    """A share with its interval."""
    found = interval(values)
    if found is None:
        return "-"
    return f"{found[0]:.3f}" if len(values) == 1 else f"{found[0]:.3f} ±{found[1]:.3f}"


def seconds(values: Sequence[float | None]) -> str:
    """The mean of times."""
    found = interval(values)
    return "-" if found is None else f"{found[0]:.2f}"
