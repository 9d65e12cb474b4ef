"""Figures of a run, over all requests that were offered: docs/tools.md#simulate has the definitions.

TDG is the weight of the tokens that came before their deadlines, divided by the weight of all tokens of all requests
that were offered, also of those that were refused or abandoned: their lengths are in the trace. A request met its
objective where its first token was in time, and the mean time of the later ones at most `tpot`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import lt
from typing import Any, NamedTuple

import msgspec

from sidecar.gain.token_deadlines import Objective
from sidecar.tools.simulate.guarded import GuardResult
from sidecar.tools.simulate.load import Request
from sidecar.tools.simulate.play import ABANDONED, Played


class Times(msgspec.Struct, frozen=True):
    """Times in seconds; None where no request had any."""

    p50: float | None
    p99: float | None
    max: float | None


class TierResult(msgspec.Struct, frozen=True):
    """One tier of a run. `slo` and `tdg` are None for a tier without an objective, or without requests.

    `abandoned` requests are those whose clients left before a first token; they are not `refused`.
    """

    requests: int
    slo: float | None
    tdg: float | None
    ttft_s: Times
    queue_wait_s: Times
    refused: int
    abandoned: int
    tokens: int


class RunResult(msgspec.Struct, frozen=True):
    """One run. `order` is that of the policy, `engine` for a baseline. `queue_wait_s` runs until an engine begins.

    `utilization` is the part of the engines' KV caches that was held, on average until the last answer ended, and
    `busy` the part of that time in which they computed. `guarded` has the tiers whose SLO is held: none for a baseline.
    """

    policy: str
    order: str
    seed: int
    scale: float
    tdg: float | None
    slo: float | None
    weighted_slo: float | None
    tiers: Mapping[str, TierResult]
    utilization: float
    busy: float
    tokens_per_s: float
    preemptions: int
    guarded: Mapping[str, GuardResult] = {}


class JudgedRequest(NamedTuple):
    """One request against its tier's objective: the tokens in time, and whether it was met."""

    in_time: int
    is_met: bool


def judged(request: Request, ends_us: Sequence[int], objective: Objective) -> JudgedRequest:
    """Compares each token of a complete answer with its deadline. `ends_us` are the ends of its engine's steps."""
    due_us = request.at_us + objective.ttft_us
    in_time = count = last_us = 0
    for begin, end in request.stretches:
        moments = ends_us[begin:end]
        first_due_us = due_us + count * objective.tpot_us
        dues = range(first_due_us, first_due_us + len(moments) * objective.tpot_us, objective.tpot_us)
        in_time += sum(map(lt, moments, dues))
        count += len(moments)
        last_us = moments[-1] if moments else last_us
    first_us = request.first_us
    is_met = first_us is not None and first_us < due_us and last_us - first_us <= (count - 1) * objective.tpot_us
    return JudgedRequest(in_time, is_met)


def result(
    played: Played,
    tiers: Sequence[str],
    objectives: Mapping[int, Objective],
    *,
    name: str,
    order: str,
    seed: int,
    scale: float,
    guarded: Mapping[str, GuardResult] | None = None,
) -> RunResult:
    """The figures of a run."""
    sums = [_Sums(objectives.get(level)) for level in range(len(tiers))]
    for one in played.offered:
        assert one.end_us is not None, "every request has an end"
        ends_us = () if one.engine is None else played.engines[one.engine].ends_us
        sums[one.tier].add(one, ends_us)
    measured = [one for one in sums if one.objective is not None and one.requests]
    elapsed_us, engines = max(played.end_us, 1), played.engines
    return RunResult(
        policy=name,
        order=order,
        seed=seed,
        scale=scale,
        tdg=_part(sum(one.earned for one in measured), sum(one.attainable for one in measured)),
        slo=_part(sum(one.met for one in measured), sum(one.requests for one in measured)),
        weighted_slo=_part(
            sum(one.weight * one.met for one in measured), sum(one.weight * one.requests for one in measured)
        ),
        tiers={tier: one.result() for tier, one in zip(tiers, sums, strict=True) if one.requests},
        utilization=sum(one.held_token_us / one.model.kv_tokens for one in engines) / elapsed_us / len(engines),
        busy=sum(one.busy_us for one in engines) / elapsed_us / len(engines),
        tokens_per_s=sum(one.tokens for one in sums) * 1e6 / elapsed_us,
        preemptions=sum(one.preemptions for one in engines),
        guarded=guarded or {},
    )


class _Sums:
    def __init__(self, objective: Objective | None) -> None:
        self.objective = objective
        self.weight = 0 if objective is None else objective.weight
        self.requests = self.met = self.earned = self.attainable = self.refused = self.abandoned = self.tokens = 0
        self.ttft_us: list[int] = []
        self.wait_us: list[int] = []

    def add(self, one: Request, ends_us: Sequence[int]) -> None:
        self.requests += 1
        self.attainable += self.weight * one.output
        if one.refusal is not None or one.first_us is None or one.started_us is None:
            has_left = one.refusal == ABANDONED
            self.abandoned += has_left
            self.refused += not has_left
            waited_until_us = one.started_us if has_left and one.started_us is not None else one.end_us
            self.wait_us.append((waited_until_us or 0) - one.at_us)
            return
        self.tokens += one.output
        self.ttft_us.append(one.first_us - one.at_us)
        self.wait_us.append(one.started_us - one.at_us)
        if self.objective is not None:
            in_time, is_met = judged(one, ends_us, self.objective)
            self.earned += self.weight * in_time
            self.met += is_met

    def result(self) -> TierResult:
        has = self.objective is not None
        return TierResult(
            requests=self.requests,
            slo=_part(self.met, self.requests) if has else None,
            tdg=_part(self.earned, self.attainable) if has else None,
            ttft_s=_times(self.ttft_us),
            queue_wait_s=_times(self.wait_us),
            refused=self.refused,
            abandoned=self.abandoned,
            tokens=self.tokens,
        )


def _part(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _times(found: list[int]) -> Times:
    """Quantiles as the nearest rank."""
    if not found:
        return Times(None, None, None)
    found.sort()
    p50, p99 = (found[math.ceil(q * len(found)) - 1] / 1e6 for q in (0.50, 0.99))
    return Times(p50, p99, found[-1] / 1e6)


# -- Keys of a policy that a simulation uses.

_OF_A_PART = ("capacity.learn", "engines.affinity", "engines.capacity", "engines.prefill")
USED = frozenset(("aging", "fair", "max_preemptions", "order", "tiers", *_OF_A_PART))
"""What the pool, the scheduler, the placement and the learned lengths of a run read. Of `engines.capacity` that is
`learn` alone, and nothing else of it makes a difference: the pool is as large as the engines of the run."""
_PARTS = frozenset(("capacity", "engines"))
_Path = tuple[str, ...]


def unused_keys(data: Mapping[str, Any]) -> list[str]:
    """The keys of a policy's file that no run uses, in their order."""
    return [name for name in dict.fromkeys(map(_name, _leaves(data))) if name not in USED]


def _name(path: _Path) -> str:
    """The key at the top of the file, or the one in it where some of its keys are used and some not."""
    if path[2:3] == ("hours",):  # a run has no hour of the day
        return "hours"
    return ".".join(path[:2] if path[0] in _PARTS else path[:1])


def _leaves(value: object, path: _Path = ()) -> Iterator[_Path]:
    """The path of every value of a file that holds no other."""
    if isinstance(value, Mapping) and (value or not path):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    else:
        yield path
