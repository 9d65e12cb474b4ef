"""Baselines: every request goes to an engine when it comes, and only the engine orders its own queue.

Each request goes to the engine with the fewest that are not over, the first of equals, but for the three baselines that
are routers (their rules are below): `round-robin`, `least-requests` and `cache-aware`. Before one engine they would
all be `engine-fcfs`. Where an order needs the length
of an answer it has what the product has: the median that was learned of its tenant so far, and the policy's
`default_output_tokens` before that.

- `engine-fcfs`: first come, first served, the default of vLLM, SGLang and TensorRT-LLM; the routers' engines, too.
- `engine-priority`: strict priority by tier, then arrival: vLLM's `--scheduling-policy priority`.
- `edf`: the earliest deadline of a first token first (Liu and Layland, J. ACM 1973).
- `sjf`: the least expected engine time first (for LLMs: Fu et al., arXiv 2408.15792).
- `density`: the most expected weight of tokens for the expected engine time first (weighted shortest processing time:
  Smith, Naval Research Logistics Quarterly 1956). Lateness does not count.
- `vtc`: the weighted virtual token counter (Sheng et al., OSDI 2024), tiers as clients, an output token as two input
  tokens as there, with a counter for each engine.

In each of them what runs is preempted only where the KV cache is full: the last in the engine's order first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from sidecar.gain.token_deadlines import Objective
from sidecar.lengths.estimator import LengthEstimator, LengthKey
from sidecar.policy.model import Policy
from sidecar.tools.simulate.load import Request
from sidecar.tools.simulate.play import ABANDONED, SimulatedEngines
from sidecar.tools.step_model.engine import StepEngine
from sidecar.tools.step_model.kv_cache import BlockHash
from sidecar.tools.step_model.queue import JobQueue, KeyQueue

# -- Routing of the baselines: to which engine a request is sent when it comes. None of them looks at tiers or
# deadlines.
#
# - `FewestRequests`: the engine with the fewest requests that are not over, the first of equals.
# - `RoundRobin`: each engine in turn, as `RoundRobinPolicy` of lightseekorg/smg (the SGLang router) does.
# - `LeastRequests`: the fewest, equals in turn: nginx's `least_conn`, Envoy's `LEAST_REQUEST` with all hosts as
#   choices.
# - `CacheAware`: `CacheAwarePolicy` of lightseekorg/smg with its defaults, on blocks of tokens, not on characters.
#   Where the largest number of requests exceeds the smallest by more than 64 and by more than the factor 1.5, the
#   engine with the fewest gets the request. Else the engine that first got the longest known prefix, where that is
#   more than 0.3 of the prompt. Else the one with the fewest. Nothing is evicted: no trace here has the 67,108,864
#   characters for that.

CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5


class Routing(Protocol):
    """One rule, for one run."""

    def select(self, request: Request, running: Sequence[int]) -> int:
        """The number of the engine for a request that comes; `running` are the requests that each has not ended."""


class FewestRequests:
    """See above."""

    def select(self, request: Request, running: Sequence[int]) -> int:
        """See `Routing`."""
        del request
        return running.index(min(running))


class RoundRobin:
    """See above."""

    def __init__(self) -> None:
        self._next = 0

    def select(self, request: Request, running: Sequence[int]) -> int:
        """See `Routing`."""
        del request
        engine = self._next % len(running)
        self._next = engine + 1
        return engine


class LeastRequests:
    """See above."""

    def __init__(self) -> None:
        self._next = 0

    def select(self, request: Request, running: Sequence[int]) -> int:
        """See `Routing`."""
        del request
        count = len(running)
        engine = min(range(count), key=lambda number: (running[number], (number - self._next) % count))
        self._next = (engine + 1) % count
        return engine


class CacheAware:
    """See above."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._known: dict[tuple[int, BlockHash], tuple[int, int]] = {}
        """By the number of the block before it and its hash: a block's own number, and the engine that first got it."""

    def select(self, request: Request, running: Sequence[int]) -> int:
        """See `Routing`."""
        most, least = max(running), min(running)
        engine = running.index(least)
        if most - least <= BALANCE_ABS_THRESHOLD or most <= BALANCE_REL_THRESHOLD * least:
            blocks, owner = self._match(request.blocks)
            if owner is not None and blocks * self._block_tokens > CACHE_THRESHOLD * request.prompt:
                engine = owner
        self._insert(request.blocks, engine)
        return engine

    def _match(self, blocks: Sequence[BlockHash]) -> tuple[int, int | None]:
        """How many blocks are known from the beginning, and the engine that first got the last of them."""
        node, owner = 0, None
        for count, block in enumerate(blocks):
            found = self._known.get((node, block))
            if found is None:
                return count, owner
            node, owner = found
        return len(blocks), owner

    def _insert(self, blocks: Sequence[BlockHash], engine: int) -> None:
        node = 0
        for block in blocks:
            node, _ = self._known.setdefault((node, block), (len(self._known) + 1, engine))


NAMES = ("engine-fcfs", "engine-priority", "edf", "sjf", "density", "vtc")
ROUTERS = ("round-robin", "least-requests", "cache-aware")
_KEY = LengthKey("/v1/chat/completions", None, "plain")
_OUTPUT_WEIGHT = 2


class VtcQueue:
    """The clients' queues of one engine: the one with the smallest counter is next."""

    def __init__(self, weights: Sequence[int]) -> None:
        self.engine: StepEngine[Request] | None = None
        self._weights = weights
        self._counters = [0.0] * len(weights)
        self._waiting: list[deque[Request]] = [deque() for _ in weights]
        self._charged: dict[Request, int] = {}
        self._last = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    def push(self, job: Request) -> None:
        """See `JobQueue`. A client that had none waiting has no credit from before."""
        mine = self._waiting[job.tier]
        if not mine:
            others = [self._counters[level] for level, queue in enumerate(self._waiting) if queue]
            floor = min(others) if others else self._counters[self._last]
            self._counters[job.tier] = max(self._counters[job.tier], floor)
        if job.preemptions:
            mine.appendleft(job)
        else:
            mine.append(job)

    def peek(self) -> Request:
        """See `JobQueue`."""
        self._charge()
        levels = [level for level, queue in enumerate(self._waiting) if queue]
        return self._waiting[min(levels, key=lambda level: self._counters[level])][0]

    def pop(self) -> Request:
        """See `JobQueue`. Its prompt is charged, the first time."""
        job = self.peek()
        self._waiting[job.tier].popleft()
        self._last = job.tier
        if not job.preemptions:
            self._counters[job.tier] += job.prompt / self._weights[job.tier]
            self._charged[job] = 0
        return job

    def remove(self, job: Request) -> bool:
        """See `JobQueue`. What was charged for it stays charged."""
        self._charged.pop(job, None)
        mine = self._waiting[job.tier]
        if job not in mine:
            return False
        mine.remove(job)
        return True

    def _charge(self) -> None:
        """Charges what was generated since the last time."""
        assert self.engine is not None
        for job, charged in list(self._charged.items()):
            length = self.engine.length(job)
            self._counters[job.tier] += _OUTPUT_WEIGHT * (length - charged) / self._weights[job.tier]
            if length >= job.output:
                del self._charged[job]
            else:
                self._charged[job] = length


class BaselineAdmission:
    """See `play.SimulatedAdmission`."""

    def __init__(self, name: str, policy: Policy, objectives: Mapping[int, Objective], stage: SimulatedEngines) -> None:
        self._policy, self._stage, self._objectives = policy, stage, objectives
        self._estimator = LengthEstimator()
        own = "engine-fcfs" if name in ROUTERS else name
        self._key: Callable[[Request], float] = getattr(self, f"_{own.replace('-', '_')}")
        self._routing = _routing(name, stage)
        self._open = [0] * len(stage.engines)
        self._count = 0
        for engine in stage.engines:
            if isinstance(engine.queue, VtcQueue):
                engine.queue.engine = engine

    def arrives(self, request: Request) -> None:
        """See `Admission`."""
        self._count += 1
        request.place = (self._key(request),), self._count
        engine = self._routing.select(request, self._open)
        self._open[engine] += 1
        self._stage.send(request, engine)

    def leaves(self, request: Request) -> None:
        """See `Admission`."""
        request.has_left = True
        self._stage.abort(request)

    def first_token(self, request: Request) -> None:
        """See `Admission`."""

    def reached(self, request: Request) -> None:
        """See `Admission`."""

    def finished(self, request: Request) -> None:
        """See `Admission`."""
        assert request.engine is not None
        self._open[request.engine] -= 1
        self._estimator.learn(request.tenant, _KEY, request.output, is_censored=False)

    def removed(self, request: Request) -> None:
        """See `Admission`: its client has left."""
        assert request.engine is not None
        self._open[request.engine] -= 1
        self._stage.engines[request.engine].queue.remove(request)  # a queue that counts what runs forgets it
        self._stage.refuse(request, ABANDONED)

    def _engine_fcfs(self, request: Request) -> float:
        del request
        return 0.0

    _vtc = _engine_fcfs

    def _engine_priority(self, request: Request) -> float:
        return float(request.tier)

    def _edf(self, request: Request) -> float:
        objective = self._objectives.get(request.tier)
        return math.inf if objective is None else float(request.at_us + objective.ttft_us)

    def _sjf(self, request: Request) -> float:
        return self._cost_us(request, self._estimate(request))

    def _density(self, request: Request) -> float:
        tokens = self._estimate(request)
        objective = self._objectives.get(request.tier)
        return -(0 if objective is None else objective.weight) * tokens / self._cost_us(request, tokens)

    def _estimate(self, request: Request) -> int:
        found = self._estimator.estimate(request.tenant, _KEY, 0.5)
        return max(1, self._policy.tiers[request.tier].default_output_tokens if found is None else found.tokens)

    def _cost_us(self, request: Request, tokens: int) -> float:
        model = self._stage.model
        prefill_us = model.step_us / model.chunk_tokens + model.step_us_per_prefill_token
        return prefill_us * request.prompt + tokens * model.cost_us_per_output_token


def names(engines: int) -> Sequence[str]:
    """The baselines that differ before so many engines."""
    return NAMES if engines == 1 else (*NAMES, *ROUTERS)


def _routing(name: str, stage: SimulatedEngines) -> Routing:
    if name == "round-robin":
        return RoundRobin()
    if name == "least-requests":
        return LeastRequests()
    return CacheAware(stage.model.block_tokens) if name == "cache-aware" else FewestRequests()


def new_queue(name: str, policy: Policy, objectives: Mapping[int, Objective]) -> Callable[[], JobQueue[Request]]:
    """The queue of each engine."""
    if name != "vtc":
        return KeyQueue
    weights = [1 if (found := objectives.get(tier.level)) is None else found.weight for tier in policy.tiers]
    return lambda: VtcQueue(weights)
