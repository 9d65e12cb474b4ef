"""Objectives of the tiers in a replay: attainment, gain and goodput, from what the clients saw.

Three forms, because each answers another question:

- over all *offered* requests: the part that met its tier's `ttft` and `tpot`, and the token-level gain (TDG). A request
  that failed met nothing and earned nothing, so a server does not look better for refusing;
- goodput as `vllm bench serve --goodput` computes it (vllm/benchmarks/serve.py): complete answers a second whose TTFT
  and mean time per later token are within the objective. The latter is 0 for an answer of one token;
- goodput as AIPerf does (its metric `good_request_count`, by the second): the same of time_to_first_token and
  inter_token_latency, but an answer of one token has no inter-token latency, and is not good.

A client keeps the times of an answer's first and last token. For the gain the others are taken as evenly spaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sidecar.gain.token_deadlines import Objective
from sidecar.tools.loadgen import Seen


@dataclass(frozen=True, slots=True)
class ObjectiveFigures:
    """One tier, or all tiers with an objective together. Goodputs are requests a second.

    `tdg` is the gain that was earned, as a part of what could be; each token counts by its tier's weight. None where
    there was nothing to earn.
    """

    requests: int
    met: int
    tdg: float | None
    goodput_vllm: float
    goodput_aiperf: float


@dataclass(frozen=True, slots=True)
class RunObjectives:
    """The tiers that have an objective, and all of them together."""

    tiers: Mapping[str, ObjectiveFigures]
    total: ObjectiveFigures


@dataclass(frozen=True, slots=True)
class _Judged:
    is_met: bool
    is_good_for_aiperf: bool
    earned: int
    attainable: float


def run_objectives(
    seen: Sequence[Seen], objectives: Mapping[str, Objective], duration_s: float
) -> RunObjectives | None:
    """The figures of a run that lasted so long. None where no tier of its requests has an objective."""
    means = {tier: _mean_tokens(seen, tier) for tier in objectives}
    judged: dict[str, list[_Judged]] = {}
    for one in seen:
        tier = one.planned.label
        if tier in objectives:
            judged.setdefault(tier, []).append(_judge(one, objectives[tier], means[tier]))
    if not judged:
        return None
    tiers = {tier: _figures(judged[tier], duration_s) for tier in objectives if tier in judged}
    return RunObjectives(tiers, _figures([one for tier in judged.values() for one in tier], duration_s))


def _judge(one: Seen, objective: Objective, mean_tokens: float) -> _Judged:
    if not one.is_complete or one.ttft_s is None:
        # An answer that does not stream shows no first token: no benchmark counts it as good.
        tokens = one.output_tokens if one.is_complete else max(one.output_tokens, mean_tokens)
        return _Judged(is_met=False, is_good_for_aiperf=False, earned=0, attainable=objective.weight * tokens)
    ttft_us, tpot_us = one.ttft_s * 1e6, None if one.tpot_s is None else one.tpot_s * 1e6
    is_met = ttft_us <= objective.ttft_us and (tpot_us or 0) <= objective.tpot_us
    late_us, slower_us = ttft_us - objective.ttft_us, (tpot_us or 0) - objective.tpot_us
    in_time = sum(late_us + token * slower_us < 0 for token in range(one.output_tokens))
    return _Judged(
        is_met, is_met and tpot_us is not None, objective.weight * in_time, objective.weight * one.output_tokens
    )


def _figures(judged: Sequence[_Judged], duration_s: float) -> ObjectiveFigures:
    attainable = sum(one.attainable for one in judged)
    met = sum(one.is_met for one in judged)
    return ObjectiveFigures(
        requests=len(judged),
        met=met,
        tdg=sum(one.earned for one in judged) / attainable if attainable else None,
        goodput_vllm=met / duration_s if duration_s > 0 else 0.0,
        goodput_aiperf=sum(one.is_good_for_aiperf for one in judged) / duration_s if duration_s > 0 else 0.0,
    )


def _mean_tokens(seen: Iterable[Seen], tier: str) -> float:
    """The length that a failed answer would have had: the mean of its tier's complete ones, 1 without one."""
    lengths = [one.output_tokens for one in seen if one.planned.label == tier and one.is_complete]
    return sum(lengths) / len(lengths) if lengths else 1.0


def lines(found: RunObjectives | None) -> Sequence[str]:
    """The figures in sentences, none without objectives."""
    if found is None:
        return []
    tiers = "; ".join(f"{tier} {_show(figures)}" for tier, figures in found.tiers.items())
    total = found.total
    return [
        f"Objectives over all {total.requests} requests offered: {_show(total)}. By tier: {tiers}.",
        f"Goodput {total.goodput_vllm:.2f} requests/s as vLLM's benchmark defines it, "
        f"{total.goodput_aiperf:.2f} as AIPerf does.",
    ]


def _show(figures: ObjectiveFigures) -> str:
    gain = "" if figures.tdg is None else f", TDG {figures.tdg:.1%}"
    return f"{figures.met / figures.requests:.1%} met{gain}"
