"""Engines of a run that come and go as Kubernetes decides by examples/kubernetes/scaling/hpa.yaml.

The rule is the HorizontalPodAutoscaler's (https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/).
Every 15 s it reads a figure that is up to 15 s old, and recommends `ceil(ready * figure / target)` engines, or as many
as there are within a tolerance of a tenth. It grows to the least that it recommended within the window of `scaleUp`,
and shrinks to the most within that of `scaleDown`. From none it goes to one as soon as the figure is not 0, as KEDA
does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import yaml

from sidecar.policy.model import Policy
from sidecar.pools.engines import EngineOffer
from sidecar.pools.stats import SmoothedDemand
from sidecar.tools.simulate.play import SimulatedEngines
from sidecar.tools.simulate.product import ProductAdmission
from sidecar.tools.step_model.engine import StepEngine
from sidecar.tools.step_model.queue import KeyQueue

HPA = Path(__file__).parents[3] / "examples" / "kubernetes" / "scaling" / "hpa.yaml"
SYNC_S, SAMPLE_S, TOLERANCE = 15, 5, 0.1
"""A sidecar looks every 2 s: that would cost more than the rest of the simulation."""
STARTS_S, KNOWN_AFTER_S = 180, 10
"""From a new pod to its model being loaded; and from then to the pool knowing of it, by DNS and its pages."""


class Scaling(NamedTuple):
    """The settings of an autoscaler."""

    least: int
    most: int
    target: float
    up_s: int
    down_s: int


def of_the_example() -> Scaling:
    """What the file says."""
    spec = yaml.safe_load(HPA.read_text(encoding="utf-8"))["spec"]
    (metric,) = spec["metrics"]
    milli = metric["external"]["target"]["value"]
    assert milli.endswith("m")
    windows = [spec["behavior"][way]["stabilizationWindowSeconds"] for way in ("scaleUp", "scaleDown")]
    return Scaling(spec["minReplicas"], spec["maxReplicas"], int(milli[:-1]) / 1000, *windows)


@dataclass(eq=False)
class _Pod:
    """An engine that is ready from `ready_s` on. `number` is None until the pool knows of it."""

    ready_s: int = -KNOWN_AFTER_S
    number: int | None = None


class Autoscaler:
    """The engines of one run: `changes` has when there were how many, those that start included."""

    def __init__(self, scaling: Scaling, policy: Policy, stage: SimulatedEngines) -> None:
        self.admission = ProductAdmission(policy, stage)
        self.changes = [(0, scaling.least)]
        self._scaling, self._stage, self._prefill = scaling, stage, policy.engines.prefill
        self._pods = [_Pod(number=number) for number in range(scaling.least)]  # the oldest first
        self._demand, self._figure, self._scraped = SmoothedDemand(), 0.0, 0.0
        self._recommended: deque[tuple[int, int]] = deque()
        self._use_known()
        self._tick()

    @property
    def turns(self) -> int:
        """How often the number fell after it had grown, or the reverse."""
        grows = [after > before for (_, before), (_, after) in pairwise(self.changes)]
        return sum(before != after for before, after in pairwise(grows))

    @property
    def most(self) -> int:
        """The most engines that there were."""
        return max(count for _, count in self.changes)

    def _tick(self) -> None:
        now_s = self._stage.loop.now_us // 1_000_000
        for pod in self._pods:
            if pod.number is None and pod.ready_s + KNOWN_AFTER_S <= now_s:
                pod.number = len(self._stage.engines)
                self._stage.engines.append(StepEngine(self._stage.model, KeyQueue()))
                self._use_known()
        demand = self.admission._pool.demand()
        self._figure = self._demand.note(demand, self._stage.loop.now_us)
        if now_s % SYNC_S == 0:
            self._scale(self._decide(now_s), now_s)
            self._scraped = self._figure
        self._stage.loop.call_later(SAMPLE_S, self._tick)

    def _decide(self, now_s: int) -> int:
        scaling, present = self._scaling, len(self._pods)
        if not present:
            return int(self._scraped > 0)
        ratio, ready = self._scraped / scaling.target, sum(pod.ready_s <= now_s for pod in self._pods)
        found = present if abs(ratio - 1) <= TOLERANCE else math.ceil(ratio * ready)
        least = max(scaling.least, int(self._scraped > 0))  # KEDA alone goes to none, while nothing is wanted
        self._recommended.append((now_s, min(max(found, least), scaling.most)))
        while self._recommended[0][0] <= now_s - scaling.down_s:
            self._recommended.popleft()
        least = min(count for at_s, count in self._recommended if at_s > now_s - scaling.up_s)
        most = max(count for _, count in self._recommended)
        return min(max(present, least), most)

    def _scale(self, count: int, now_s: int) -> None:
        if count != len(self._pods):
            self.changes.append((now_s, count))
            new = range(count - len(self._pods))
            self._pods = self._pods[:count] + [_Pod(now_s + STARTS_S) for _ in new]  # the youngest end first
            self._use_known()

    def _use_known(self) -> None:
        model, numbers = self._stage.model, [pod.number for pod in self._pods if pod.number is not None]
        self.admission._pool.set_engines(_offers(numbers, model.kv_tokens, model.max_sequences, self._prefill))


def _offers(numbers: Sequence[int], tokens: int, requests: int, prefill: int) -> list[EngineOffer]:
    return [EngineOffer(f"e{number}#1", tokens, requests, prefill) for number in numbers]
