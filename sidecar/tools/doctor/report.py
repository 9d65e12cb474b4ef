"""Report of an examination: as text (verdict, conditions, advice), and as data with every figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sidecar.tools.doctor.burst import Burst
from sidecar.tools.doctor.conditions import ConditionState
from sidecar.tools.doctor.examination import Examination, Finding
from sidecar.tools.doctor.recommendation import Recommendation
from sidecar.tools.doctor.several_engines import ExaminedEngine, capacity, cells
from sidecar.tools.text import table, wrapped

_NAME, _STATE = 18, 9


def report(examination: Examination) -> str:
    """The whole text, without a line's end at its end."""
    parts = [
        headline(examination),
        "\n".join(
            _wrap(one.evidence, f"  {one.name:<{_NAME}}{one.state.value:<{_STATE}}") for one in examination.conditions
        ),
        _section("what to do", steps(examination)),
        for_the_policy("capacity for the policy", examination.capacity),
        for_the_policy("slo for an interactive tier", examination.slo),
        _section("notes", _notes(examination)),
    ]
    return "\n\n".join(part for part in parts if part)


def headline(examination: Examination) -> str:
    """The verdict in one line."""
    survey, place = examination.survey, examination.options.url
    who = f"{survey.name} at {place}"
    if examination.probed is not None and examination.probed.is_sidecar:
        who = f"an admission sidecar at {place}, in front of {survey.name}"
    match examination.state:
        case ConditionState.WORKS:
            return f"WORKS: {who} serves what is important first"
        case ConditionState.BROKEN:
            broken = [one.name for one in examination.conditions if one.state is ConditionState.BROKEN]
            return f"BROKEN: {who}: {', '.join(broken) if broken else 'the policy does not fit the engine'}"
        case ConditionState.UNKNOWN:
            unknown = [one.name for one in examination.conditions if one.state is ConditionState.UNKNOWN]
            why = "nothing was sent" if examination.probed is None else f"{', '.join(unknown)} could not be seen"
            return f"UNKNOWN: {who}: {why}"


def mistakes(examination: Examination) -> Sequence[str]:
    """Defects, and differences of policy and engine, each with what to change."""
    broken = [one.fix for one in examination.conditions if one.fix is not None and one.state is ConditionState.BROKEN]
    return list(dict.fromkeys([*broken, *(f"{one.text}: {one.fix}" for one in examination.findings)]))


def steps(examination: Examination) -> Sequence[str]:
    """Changes to make, most urgent first, each once."""
    fixes = [*mistakes(examination)]
    fixes += [one.fix for one in examination.conditions if one.fix is not None and one.state is ConditionState.UNKNOWN]
    if examination.kept_from is not None:
        fixes.append(examination.kept_from)
    return list(dict.fromkeys(fixes))


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(_wrap(line, "  ") for line in lines)]) if lines else ""


def for_the_policy(title: str, found: Recommendation | None) -> str:
    """All of it is YAML, so that it can be copied in one piece."""
    if found is None:
        return ""
    return "\n".join([title, f"  {found.yaml}", _wrap(found.reason, "  # ", "  # ")])


def _notes(examination: Examination) -> Sequence[str]:
    survey, probed = examination.survey, examination.probed
    notes = [f"could not be read: {line}" for line in survey.unread]
    if survey.others:
        notes.append(f"{survey.others} requests of other clients were there when this began")
    if probed is not None and probed.is_sidecar:
        notes.append(
            "measured through admission, by tiers: the sidecar removes engine priorities that clients send; for the "
            "engine's own verdict point --upstream at the engine"
        )
    notes += _cache_report(examination)
    if examination.sends is not None:
        notes.append(f"the policy sends {examination.sends}")
    if examination.bursts:
        notes.append(spent(examination))
    return notes


def _cache_report(examination: Examination) -> Sequence[str]:
    """Where prompts are found in a cache, and no answer says so."""
    survey = examination.survey
    option = survey.engine.advice.cache_report
    if option is None or examination.reports_cached_tokens is not False or not survey.facts.caches_prefixes:
        return []
    return [
        f"{survey.engine.title} has a prefix cache, but its answers do not say how much of a prompt was found there: "
        f"start it with {option}"
    ]


def report_of_several(engines: Sequence[ExaminedEngine], found: Sequence[Finding]) -> str:
    """The engines of a policy together: a table, what to do, and the `capacity` that fits all."""
    parts = ["\n".join(["engines together", *table(cells(engines), left=range(7), indent="  ")])]
    if found:
        parts.append(_section("what to do about the engines together", [f"{one.text}: {one.fix}" for one in found]))
    common = capacity(engines)
    if common is not None:
        parts.append("\n".join(["capacity of each, for `engines` of the policy", f"  {common.yaml}"]))
    return "\n\n".join(parts)


def spent(examination: Examination) -> str:
    """Cost of the examination for the engine."""
    requests = sum(burst.plan.requests for burst in examination.bursts)
    tokens = sum(one.output_tokens for burst in examination.bursts for one in burst.seen)
    refused = sum(len(burst.refused) for burst in examination.bursts)
    took_s = sum(max(one.end_s for one in burst.seen) for burst in examination.bursts)
    lost = f"; {refused} were refused" if refused else ""
    bursts = f"{len(examination.bursts)} burst{'s' * (len(examination.bursts) != 1)}"
    return f"sent {requests} requests in {bursts}, {tokens:,} tokens, {took_s:.1f} s{lost}"


def _wrap(text: str, head: str, below: str | None = None) -> str:
    return "\n".join(wrapped(text, head=head, below=below))


def figures(examination: Examination) -> dict[str, Any]:
    """Records, mappings and lists that can be written as JSON."""
    survey, probed = examination.survey, examination.probed
    identified = survey.identity.engine
    return {
        "verdict": examination.state.value,
        "headline": headline(examination),
        "upstream": examination.options.url,
        "is_sidecar": probed is not None and probed.is_sidecar,
        "engine": survey.engine.name,
        "identity": {**asdict(survey.identity), "engine": identified and identified.name},
        "facts": {"engine": survey.engine.name, **asdict(survey.facts)},
        "gauges_before": survey.gauges,
        "unread": survey.unread,
        "conditions": examination.conditions,
        "findings": examination.findings,
        "steps": steps(examination),
        "capacity": examination.capacity,
        "slo": examination.slo,
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
        "ttft_p50_s_by_level": [None if s is None or math.isinf(s) else s for s in judgment.medians_s],
        "requests_seen": [
            {"level": level, "ttft_s": one.ttft_s, "end_s": one.end_s, "status": one.status, "error": one.error}
            for level, one in zip(burst.plan.levels(), burst.seen, strict=True)
        ],
    }
