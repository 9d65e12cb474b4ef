"""Figures of a replay, from its clients' results: by tier and in total."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sidecar.gain.token_deadlines import Objective
from sidecar.tools.loadgen import Correlation, Distribution, Seen, spearman, starvation_s

# -- Objectives of the tiers in a replay: attainment, gain and goodput, from what the clients saw.
#
# Three forms, because each answers another question:
#
# - over all *offered* requests: the part that met its tier's `ttft` and `tpot`, and the token-level gain (TDG). A
#   request that failed met nothing and earned nothing, so a server does not look better for refusing;
# - goodput as `vllm bench serve --goodput` computes it (vllm/benchmarks/serve.py): complete answers a second whose
#   TTFT and mean time per later token are within the objective. The latter is 0 for an answer of one token;
# - goodput as AIPerf does (its metric `good_request_count`, by the second): the same of time_to_first_token and
#   inter_token_latency, but an answer of one token has no inter-token latency, and is not good.
#
# A client keeps the times of an answer's first and last token. For the gain the others are taken as evenly spaced.


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


@dataclass(frozen=True, slots=True)
class TtftOfAll:
    """Percentiles of TTFT over all requests, in seconds. A failed one counts as infinite: None is never."""

    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class TierFigures:
    """One tier in one run. Distributions are of its complete answers, None where there was nothing to measure.

    `answered` is how many those are. `ttft_of_all_s` is over all its requests instead. `queue_wait_s` is reported by
    the sidecar, and None without one. `starvation_s` is how long a request waited for its first token after one that
    was sent later had its own: what clients see, with or without a sidecar. `door` is what the sidecar reports of all
    answers, refusals included, None without one.
    """

    requests: int
    answered: int
    failed: int
    output_tokens_per_s: float
    ttft_s: Distribution | None
    ttft_of_all_s: TtftOfAll | None
    tpot_s: Distribution | None
    queue_wait_s: Distribution | None
    starvation_s: Distribution | None
    door: DoorSums | None


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run. `duration_s` is from the first request sent to the last answer's end.

    `correlation` is that of importance with time to first token: negative where the more important come first. `errors`
    counts failures by their message. `latest_s` is how far the client itself fell behind its schedule, `stalled_s` the
    longest time for which it did not run at all: what was measured is no more exact than that. `prompt_tokens_asked`
    and `_counted` are the mean of what was planned and of what usage reports. `objectives` are there where the policy
    gives tiers of the run an `slo` with `ttft` and `tpot`.
    """

    name: str
    title: str
    requests: int
    failed: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    correlation: Correlation | None
    tiers: Mapping[str, TierFigures]
    errors: Mapping[str, int]
    latest_s: float
    stalled_s: float
    prompt_tokens_asked: float | None
    prompt_tokens_counted: float | None
    objectives: RunObjectives | None = None


def measure(
    name: str,
    title: str,
    tiers: Sequence[str],
    seen: Sequence[Seen],
    asked: Sequence[int | None],
    *,
    stalled_s: float = 0.0,
    objectives: Mapping[str, Objective] | None = None,
) -> RunFigures:
    """The figures of a run. `tiers` is the ladder, most important first; `asked` the prompt tokens of every request.

    `objectives` are the tiers' own, by name.
    """
    duration_s = max(one.end_s for one in seen) - min(one.sent_s for one in seen)
    starved_s = _starvation(seen)
    complete = [one for one in seen if one.is_complete]
    levels = {tier: level for level, tier in enumerate(tiers)}
    timed = [(levels[one.planned.label], one.ttft_s) for one in complete if one.ttft_s is not None]
    both = [(one.prompt_tokens, size) for one, size in zip(seen, asked, strict=True) if one.prompt_tokens and size]
    return RunFigures(
        name=name,
        title=title,
        requests=len(seen),
        failed=len(seen) - len(complete),
        duration_s=duration_s,
        requests_per_s=_rate(len(complete), duration_s),
        output_tokens_per_s=_rate(sum(one.output_tokens for one in complete), duration_s),
        correlation=spearman([-level for level, _ in timed], [ttft_s for _, ttft_s in timed]),
        tiers={tier: figures for tier in tiers if (figures := _tier(tier, seen, starved_s, duration_s))},
        errors=dict(Counter(one.error for one in seen if one.error is not None).most_common()),
        latest_s=max(one.sent_s - one.planned.at_s for one in seen if one.planned.after is None),
        stalled_s=stalled_s,
        prompt_tokens_asked=_mean([size for _, size in both]),
        prompt_tokens_counted=_mean([counted for counted, _ in both]),
        objectives=run_objectives(seen, objectives or {}, duration_s),
    )


def starvation_by_request(seen: Sequence[Seen]) -> Sequence[float | None]:
    """Of every request, in their order; None where no token came."""
    starved_s = _starvation(seen)
    return [starved_s.get(index) for index in range(len(seen))]


def _tier(tier: str, seen: Sequence[Seen], starved_s: Mapping[int, float], duration_s: float) -> TierFigures | None:
    mine = [(index, one) for index, one in enumerate(seen) if one.planned.label == tier]
    complete = [(index, one) for index, one in mine if one.is_complete]
    if not mine:
        return None
    return TierFigures(
        requests=len(mine),
        answered=len(complete),
        failed=len(mine) - len(complete),
        output_tokens_per_s=_rate(sum(one.output_tokens for _, one in complete), duration_s),
        ttft_s=_distribution([one.ttft_s for _, one in complete]),
        ttft_of_all_s=_ttft_of_all([one for _, one in mine]),
        tpot_s=_distribution([one.tpot_s for _, one in complete]),
        queue_wait_s=_distribution([wait.queue_wait_s for _, one in complete if (wait := door_wait(one.headers))]),
        starvation_s=_distribution([starved_s.get(index) for index, _ in complete]),
        door=sums(one for _, one in mine),
    )


def _starvation(seen: Sequence[Seen]) -> Mapping[int, float]:
    """By position among all. A request that got no token overtook none, and its own waiting never ended."""
    served = [(index, one.sent_s, one.first_token_s) for index, one in enumerate(seen) if one.first_token_s is not None]
    starved_s = starvation_s([sent_s for _, sent_s, _ in served], [first_s for _, _, first_s in served])
    return {index: seconds for (index, _, _), seconds in zip(served, starved_s, strict=True)}


def _distribution(values: Sequence[float | None]) -> Distribution | None:
    return Distribution.of([value for value in values if value is not None])


def _ttft_of_all(seen: Sequence[Seen]) -> TtftOfAll | None:
    """None without a request whose time counts. An answer that does not stream has no time to first token."""
    values = [one.ttft_s if one.is_complete else math.inf for one in seen]
    found = _distribution(values)
    return None if found is None else TtftOfAll(_finite(found.p50), _finite(found.p95), _finite(found.p99))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _rate(number: float, duration_s: float) -> float:
    return number / duration_s if duration_s > 0 else 0.0


def _mean(values: Sequence[int]) -> float | None:
    return sum(values) / len(values) if values else None


REQUEST_ID_HEADERS = ("x-admission-id", "x-request-id")
_TIMING, _WAIT, _MODE = "server-timing", "x-admission-wait-ms", "x-admission-mode"
_admission = re.compile(r"(?:^|,\s*)admission;dur=(\d+(?:\.\d+)?)").search
_starved = re.compile(r"(?:^|,\s*)starved;dur=(\d+(?:\.\d+)?)").search


class DoorWait(NamedTuple):
    """One request's wait for admission, in seconds. `starvation_s` is the part of it after the first overtaking."""

    queue_wait_s: float
    starvation_s: float


@dataclass(frozen=True, slots=True)
class DoorSums:
    """Sums of the sidecar's reports: the number of requests, and their seconds."""

    requests: int
    queue_wait_s: float
    starvation_s: float


def door_wait(headers: Mapping[str, str]) -> DoorWait | None:
    """The wait in an answer's headers, to the microsecond; None without a sidecar."""
    if _WAIT not in headers:
        return None
    timing = headers.get(_TIMING, "")
    waited, starved = _admission(timing), _starved(timing)
    return DoorWait(_seconds(waited), _seconds(starved))


def request_id(headers: Mapping[str, str]) -> str | None:
    """The request's id for `sidecar explain --request`. None without a sidecar."""
    if _WAIT not in headers and _MODE not in headers:  # a sidecar that observes says no wait
        return None
    return next((headers[name] for name in REQUEST_ID_HEADERS if name in headers), None)


def sums(seen: Iterable[Seen]) -> DoorSums | None:
    """Over all answers, refusals included; None without a sidecar."""
    waits = [wait for one in seen if (wait := door_wait(one.headers)) is not None]
    if not waits:
        return None
    return DoorSums(len(waits), sum(wait.queue_wait_s for wait in waits), sum(wait.starvation_s for wait in waits))


def _seconds(found: re.Match[str] | None) -> float:
    return 0.0 if found is None else float(found[1]) / 1000
