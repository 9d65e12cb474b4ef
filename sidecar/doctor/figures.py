"""An examination for a machine: everything that the text says, and every figure behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sidecar.doctor.burst import Burst
from sidecar.doctor.examination import Examination
from sidecar.doctor.report import headline, steps


def figures(examination: Examination) -> dict[str, Any]:
    """Records, mappings and lists that can be written as JSON."""
    survey, probed = examination.survey, examination.probed
    return {
        "verdict": examination.state.value,
        "headline": headline(examination),
        "upstream": examination.options.url,
        "is_sidecar": probed is not None and probed.is_door,
        "engine": survey.engine.value,
        "identity": survey.identity,
        "facts": survey.facts,
        "gauges_before": survey.gauges,
        "unread": survey.unread,
        "conditions": examination.conditions,
        "findings": examination.findings,
        "steps": steps(examination),
        "capacity": examination.capacity,
        "policy_sends": examination.sends,
        "fields": [
            {"way": one.way.title, "values": one.way.values, "refusal": one.refusal, "arrives": one.arrives}
            for one in (probed.checks if probed is not None else ())
        ],
        "alone_ttft_s": probed.alone.ttft_s if probed is not None else None,
        "waited": probed.queueing(survey).value if probed is not None else None,
        "bursts": [_burst(burst) for burst in examination.bursts],
    }


def _burst(burst: Burst) -> dict[str, Any]:
    judgment, way = burst.judgment, burst.plan.way
    return {
        "way": None if way is None else way.title,
        "requests": burst.plan.requests,
        "output_tokens": sum(one.output_tokens for one in burst.seen),
        "seed": burst.plan.seed,
        "effect": judgment.effect.value,
        "waited": judgment.waited,
        "refused": len(burst.refused),
        "errors": sorted({one.error for one in burst.seen if one.error is not None}),
        "ran_at_once": burst.at_once,
        "waiting_inside": burst.waiting_inside,
        "running_inside": burst.running_inside,
        "correlation": judgment.correlation,
        "correlation_with_arrival": judgment.by_arrival,
        "p_value": judgment.p_value,
        "ttft_p50_s_by_level": [_finite(median) for median in judgment.medians_s],
        "requests_seen": _requests(burst),
    }


def _requests(burst: Burst) -> Sequence[dict[str, Any]]:
    return [
        {"level": level, "ttft_s": one.ttft_s, "end_s": one.end_s, "status": one.status, "error": one.error}
        for level, one in zip(burst.plan.levels(), burst.seen, strict=True)
    ]


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value
