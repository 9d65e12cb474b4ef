"""One examination from the first page read to the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from sidecar.doctor import sizing
from sidecar.doctor.burst import Burst
from sidecar.doctor.capacity import Recommendation, recommend
from sidecar.doctor.comparing import Finding, compare, harm, sent
from sidecar.doctor.conditions import Condition, State, conditions, read_only
from sidecar.doctor.probing import Probe, Probed, Say
from sidecar.doctor.queueing import Queueing
from sidecar.doctor.survey import CannotLook, Survey, survey
from sidecar.doctor.target import Clock, Target
from sidecar.doctor.ways import LEVELS, Way, door, ways_to
from sidecar.load.pages import HttpPages
from sidecar.policy.policy import EngineName, Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asks for. `most` bounds the requests of a burst, `allowed_s` the whole probe.

    `engine` and `model` are None where they are to be read. `force` probes even where that throws out requests of
    somebody else.
    """

    url: str
    policy: Policy | None = None
    engine: EngineName | None = None
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
    def state(self) -> State:
        """Works only where all four were seen to; broken as soon as one is."""
        states = {condition.state for condition in self.conditions}
        if State.BROKEN in states or any(finding.is_broken for finding in self.findings):
            return State.BROKEN
        return State.WORKS if states == {State.WORKS} and self.probed is not None else State.UNKNOWN

    @property
    def bursts(self) -> Sequence[Burst]:
        """All that were sent."""
        return self.probed.bursts if self.probed is not None else ()


async def examine(options: Options, say: Say) -> Examination:
    """Examines a server. `say` is told what is about to be sent. Raises CannotLook."""
    async with aiohttp.ClientSession() as session:
        pages = HttpPages(session, options.url, options.headers)
        found = await survey(pages, options.engine)
        reason = harm(found) if not options.force else None
        if options.reads_only or reason is not None:
            return _concluded(options, found, None, reason)
        model = options.model if options.model is not None else found.identity.model
        if model is None:
            raise CannotLook(f"{options.url}/v1/models lists no model; name one with --model")
        say(_announcement(options, found))
        probe = Probe(found, pages, options.most, Clock(options.allowed_s), say)
        probed = await probe.run(Target(options.url, model, options.headers), _ways(options, found), _door(options))
        return _concluded(options, found, probed)


def _ways(options: Options, found: Survey) -> Sequence[Way]:
    """With the policy's carrier and ladder, where it is a policy for this engine."""
    policy = options.policy
    if policy is None or policy.engine is not found.engine:
        return ways_to(found.engine, None, LEVELS)
    return ways_to(found.engine, policy.carrier, max(LEVELS, len(policy.tiers)))


def _door(options: Options) -> Way:
    return door() if options.policy is None else door(options.policy.tier_header.decode("latin-1"))


def _announcement(options: Options, found: Survey) -> str:
    others = found.others
    beside = f"; {others} requests of somebody else are there, which makes the figures worse" if others else ""
    known = found.gauges.max_running
    size = sizing.first_size(known, options.most)
    return (
        f"{found.name} at {options.url}: will send bursts of short requests, the first of {size}, none of more than "
        f"{options.most}, for answers of at most {sizing.MOST_TOKENS * sizing.LONGEST_ANSWER} tokens, all within "
        f"{options.allowed_s:g} s (--read-only sends none){beside}"
    )


def _concluded(options: Options, found: Survey, probed: Probed | None, kept_from: str | None = None) -> Examination:
    last = probed.mixed[-1] if probed is not None and probed.mixed else None
    where = Queueing.TOO_LITTLE if probed is None else probed.queueing(found)
    is_door = probed is not None and probed.is_door
    return Examination(
        options=options,
        survey=found,
        probed=probed,
        conditions=read_only(found) if probed is None else conditions(found, probed),
        findings=() if is_door else compare(options.policy, found),
        capacity=None if is_door else recommend(found.gauges, last, where, found.others),
        sends=sent(options.policy) if options.policy is not None else None,
        kept_from=kept_from,
    )
