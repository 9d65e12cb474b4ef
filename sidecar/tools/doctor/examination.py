"""One examination, from the first page read to the verdict and the recommended `capacity`.

With a policy, its statements about the engine are compared with the engine's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from sidecar.engines import Engine, NoPriorityEngine
from sidecar.policy.model import Policy
from sidecar.policy.rules import UNLIMITED
from sidecar.server.unix_address import connector_to
from sidecar.tools.doctor import probe as sizing
from sidecar.tools.doctor.burst import Burst
from sidecar.tools.doctor.conditions import Condition, ConditionState, conditions, is_before, read_only
from sidecar.tools.doctor.probe import PROMPT_TOKENS, Probe, Probed, Say, measured, recommended_slo
from sidecar.tools.doctor.recommendation import Queueing, Recommendation, recommend
from sidecar.tools.doctor.survey import Survey, survey
from sidecar.tools.doctor.target import LEVELS, Clock, ExaminedServer, PriorityField, sidecar_tier, ways_to
from sidecar.tools.loadgen.pages import HttpPages


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the user. `most` bounds the requests of a burst, `allowed_s` the whole probe.

    `engine` and `model` are None where they are to be read. `force` probes even where that throws out requests of
    other clients.
    """

    url: str
    policy: Policy | None = None
    engine: type[Engine] | None = None
    model: str | None = None
    headers: Mapping[str, str]
    most: int = sizing.MOST_REQUESTS
    allowed_s: float = 60.0
    reads_only: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Everything that was found. `probed` is None where nothing was sent; `sends` is what the policy's ladder sends."""

    options: Options
    survey: Survey
    probed: Probed | None
    conditions: Sequence[Condition]
    findings: Sequence[Finding]
    capacity: Recommendation | None
    sends: str | None
    kept_from: str | None = None

    @property
    def state(self) -> ConditionState:
        """Works only where all four were seen to; broken as soon as one is."""
        states = {condition.state for condition in self.conditions}
        if ConditionState.BROKEN in states or any(finding.is_broken for finding in self.findings):
            return ConditionState.BROKEN
        return (
            ConditionState.WORKS
            if states == {ConditionState.WORKS} and self.probed is not None
            else ConditionState.UNKNOWN
        )

    @property
    def reports_cached_tokens(self) -> bool | None:
        """True if answers say how much of a prompt was cached. SGLang's pages say it, of vLLM only its answers."""
        reported = self.survey.facts.reports_cached_tokens
        if reported is None and self.probed is not None and self.probed.alone.prompt_tokens is not None:
            return self.probed.alone.cached_tokens is not None
        return reported

    @property
    def slo(self) -> Recommendation | None:
        """The `slo` that an interactive tier can be held to; None where the idle engine was not seen."""
        speed = None if self.probed is None else measured(self.probed.idle)
        return None if speed is None else recommended_slo(speed)

    @property
    def bursts(self) -> Sequence[Burst]:
        """All that were sent."""
        return self.probed.bursts if self.probed is not None else ()


async def examine(options: Options, say: Say) -> Examination:
    """Examines a server. `say` gets a line about what is about to be sent. Raises CannotLook."""
    async with aiohttp.ClientSession(connector=connector_to(options.url)) as session:
        pages = HttpPages(session, options.url, options.headers)
        found = await survey(pages, options.engine)
        reason = harm(found) if not options.force else None
        if options.reads_only or reason is not None:
            return _conclude(options, found, None, reason)
        model = found.served_model(options.url, options.model)
        say(_announcement(options, found))
        probe = Probe(found, pages, options.most, Clock(options.allowed_s), say)
        tier = sidecar_tier() if options.policy is None else sidecar_tier(options.policy.tier_header.decode("latin-1"))
        probed = await probe.run(ExaminedServer(options.url, model, options.headers), _ways(options, found), tier)
        return _conclude(options, found, probed)


def _ways(options: Options, found: Survey) -> Sequence[PriorityField]:
    """With the policy's carrier and ladder, where it is a policy for this engine."""
    policy = options.policy
    if policy is None or policy.engine is not found.engine:
        return ways_to(found.engine, None, LEVELS)
    return ways_to(found.engine, policy.carrier, max(LEVELS, len(policy.tiers)))


def _announcement(options: Options, found: Survey) -> str:
    known = found.gauges.max_running
    size = sizing.first_size(known, options.most)
    return (
        f"{found.name} at {options.url}: will send bursts of short requests, the first of {size}, none of more than "
        f"{options.most}, for answers of at most {sizing.MOST_TOKENS * sizing.LONGEST_ANSWER} tokens, and "
        f"{sizing.IDLE_PROMPTS} prompts of {PROMPT_TOKENS:,} tokens, each alone, all within "
        f"{options.allowed_s:g} s (--read-only sends none){found.beside}"
    )


def _conclude(options: Options, found: Survey, probed: Probed | None, kept_from: str | None = None) -> Examination:
    last = probed.mixed[-1] if probed is not None and probed.mixed else None
    where = Queueing.TOO_LITTLE if probed is None else probed.queueing(found)
    is_sidecar = probed is not None and probed.is_sidecar
    return Examination(
        options=options,
        survey=found,
        probed=probed,
        conditions=read_only(found) if probed is None else conditions(found, probed),
        findings=() if is_sidecar else compare(options.policy, found),
        capacity=None if is_sidecar else recommend(found.gauges, last, where, found.others),
        sends=sent(options.policy) if options.policy is not None else None,
        kept_from=kept_from,
    )


@dataclass(frozen=True, slots=True)
class Finding:
    """Where they differ, and what to write instead. `is_broken`: no priority can act like this."""

    text: str
    fix: str
    is_broken: bool = False


def compare(policy: Policy | None, survey: Survey) -> Sequence[Finding]:
    """All findings, those that break everything first. Without a policy only what the engine itself should not do."""
    found = [*(_policy_findings(policy, survey) if policy is not None else ()), *_engine_findings(survey)]
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


def _policy_findings(policy: Policy, survey: Survey) -> Iterator[Finding]:
    name, engine = policy.engine.name, survey.engine
    if policy.engine is NoPriorityEngine:
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
    yield from _aliases(policy, survey)


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


def _aliases(policy: Policy, survey: Survey) -> Iterator[Finding]:
    served = survey.identity.models
    for alias, one in policy.aliases.items() if served and not policy.models else ():
        if one.model not in served:
            yield Finding(
                f"the alias {alias} is {one.model}, which the engine does not serve: it lists {', '.join(served)}",
                f"write one of these names as `aliases: {{{alias}: {{as: NAME}}}}`, or serve {one.model} there",
            )


def _engine_findings(survey: Survey) -> Iterator[Finding]:
    facts, option, title = survey.facts, survey.engine.advice.default_priority, survey.engine.title
    if option is not None and facts.by_priority and facts.default_priority is None:
        harm = ", and any that has one throws them out while they run" if facts.preempts_beyond is not None else ""
        yield Finding(
            f"{title} runs without {option}: requests without a priority come last of all{harm}",
            f"start {title} with {option} 0",
        )
