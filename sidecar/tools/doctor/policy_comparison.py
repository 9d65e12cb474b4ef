"""Comparison of a policy's statements about the engine with the engine's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sidecar.engines import NoEngine
from sidecar.policy.model import Policy
from sidecar.policy.rules import UNLIMITED
from sidecar.tools.doctor.conditions import is_before
from sidecar.tools.doctor.priority_fields import ways_to
from sidecar.tools.doctor.survey import Survey


@dataclass(frozen=True, slots=True)
class Finding:
    """Where they differ, and what to write instead. `is_broken`: no priority can act like this."""

    text: str
    fix: str
    is_broken: bool = False


def compare(policy: Policy | None, survey: Survey) -> Sequence[Finding]:
    """All findings, those that break everything first. Without a policy only what the engine itself should not do."""
    found = [*(_of_policy(policy, survey) if policy is not None else ()), *_of_engine(survey)]
    return sorted(found, key=lambda finding: not finding.is_broken)


def harm(survey: Survey) -> str | None:
    """Effect of a probe on other clients' requests, None where it would just add to them."""
    preempts = survey.facts.preempts_beyond is not None and survey.facts.default_priority is None
    engine = survey.engine
    if preempts and survey.others:
        return (
            f"{survey.others} requests of other clients are there, and this {engine.title} (without "
            f"{engine.advice.default_priority}) would throw those that have no priority out for the probe's; probe "
            "when it is idle, or with --force"
        )
    return None


def sent(policy: Policy) -> str:
    """The priorities that the policy's tiers send to the engine."""
    dialect = policy.engine(policy.carrier)
    values = (f"{tier.name} {dialect.priority(tier.level, len(policy.tiers))}" for tier in policy.tiers)
    ways = ways_to(policy.engine, policy.carrier, len(policy.tiers))
    return f"by {ways[0].title}: {', '.join(values)}" if ways else "nothing: the policy's engine is none"


def _of_policy(policy: Policy, survey: Survey) -> Iterator[Finding]:
    name, engine = policy.engine.name, survey.engine
    if policy.engine is NoEngine:
        yield Finding(
            "the policy says `engine: none`: the engine is sent no priority",
            f"write `engine: {engine.name}` to have it order what waits inside it",
        )
        return
    if policy.engine is not engine:
        yield Finding(
            f"the policy says `engine: {name}`, but {engine.name} answers ({survey.identity.where} says so)",
            f"write `engine: {engine.name}` into the policy",
            is_broken=True,
        )
        return
    yield from _carrier(policy, survey)
    yield from _capacity(policy, survey)
    yield from _spread(policy, survey)


def _carrier(policy: Policy, survey: Survey) -> Iterator[Finding]:
    way, since = ways_to(policy.engine, policy.carrier, len(policy.tiers))[0], policy.engine.header_since
    if way.is_header and since is not None and is_before(survey.facts.version, since):
        yield Finding(
            f"the policy forwards by {way.title}, which {survey.engine.name} reads from {since} on, and this is "
            f"{survey.facts.version}",
            "write `forward_priority: body` into the policy, or update the engine",
            is_broken=True,
        )
    elif way.is_header and policy.engine.header_switch is not None:
        yield Finding(
            f"the policy forwards by {way.title}, which {policy.engine.title} does not read by default",
            f"set {policy.engine.header_switch} for it, or write `forward_priority: body`",
        )


def _capacity(policy: Policy, survey: Survey) -> Iterator[Finding]:
    gauges, rules = survey.gauges, policy.rules
    if gauges.kv_tokens is not None and UNLIMITED > rules.tokens > gauges.kv_tokens:
        yield Finding(
            f"capacity.tokens is {rules.tokens:,}, but the engine's KV cache holds {gauges.kv_tokens:,}",
            f"write `tokens: {gauges.kv_tokens * 95 // 100}`, or `from: engine`: what is beyond waits in the engine",
        )
    if gauges.max_running is not None and UNLIMITED > rules.requests > gauges.max_running:
        yield Finding(
            f"capacity.requests is {rules.requests:,}, but the engine runs {gauges.max_running:,} at once",
            f"write `requests: {gauges.max_running}`, or `from: engine`: what is beyond waits inside the engine",
        )


def _spread(policy: Policy, survey: Survey) -> Iterator[Finding]:
    beyond = survey.facts.preempts_beyond
    if beyond is None:
        return
    dialect, tiers = policy.engine(policy.carrier), len(policy.tiers)
    values = [dialect.priority(tier.level, tiers) for tier in policy.tiers]
    span, title, known = max(values) - min(values), policy.engine.title, policy.engine.advice
    if span > beyond:
        yield Finding(
            f"the policy's priorities span {span}, and {title} throws out running requests for a difference above "
            f"{beyond}",
            f"start {title} with {known.threshold} {span}, or with {known.no_preemption}",
        )


def _of_engine(survey: Survey) -> Iterator[Finding]:
    facts, option, title = survey.facts, survey.engine.advice.default_priority, survey.engine.title
    if option is not None and facts.by_priority and facts.default_priority is None:
        harm = ", and any that has one throws them out while they run" if facts.preempts_beyond is not None else ""
        yield Finding(
            f"{title} runs without {option}: requests without a priority come last of all{harm}",
            f"start {title} with {option} 0",
        )
