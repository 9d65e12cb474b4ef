"""The four conditions for a priority to have an effect, each with its evidence and its remedy.

A remedy names the exact flag, field or header of the engine, in one sentence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from sidecar.engines import Engine
from sidecar.engines.base import Facts
from sidecar.tools.doctor.burst import Burst, seems_switched_off
from sidecar.tools.doctor.judgment import Effect, Judgment
from sidecar.tools.doctor.probe import Check, Probed
from sidecar.tools.doctor.recommendation import Queueing
from sidecar.tools.doctor.survey import Survey
from sidecar.tools.doctor.target import PriorityField

SEEN = (Effect.BY_PRIORITY, Effect.INVERTED)
"""Effects that show that the field arrives and is used."""


class ConditionState(str, Enum):
    """State of a condition."""

    WORKS = "works"
    BROKEN = "broken"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Condition:
    """One of the four. `fix` is what to change, None where nothing is broken or no remedy is known."""

    name: str
    state: ConditionState
    evidence: str
    fix: str | None = None


def _works(name: str, evidence: str) -> Condition:
    return Condition(name, ConditionState.WORKS, evidence)


def _broken(name: str, evidence: str, fix: str | None) -> Condition:
    return Condition(name, ConditionState.BROKEN, evidence, fix)


def _unknown(name: str, evidence: str, fix: str | None = None) -> Condition:
    return Condition(name, ConditionState.UNKNOWN, evidence, fix)


def conditions(survey: Survey, probed: Probed) -> Sequence[Condition]:
    """All four, in the order in which a request meets them."""
    return (
        _field_path(survey, probed),
        _scheduler(survey, probed),
        _queueing(survey, probed),
        _direction(survey, probed),
    )


def read_only(survey: Survey) -> Sequence[Condition]:
    """The four conditions as far as they are known without a request."""
    facts, name = survey.facts, survey.engine.name
    schema = "its schema has the field" if facts.has_field else "no page says"
    field = _unknown("field path", f"{schema}; whether it gets there takes a request")
    if facts.has_field is False:
        field = _broken("field path", "/openapi.json has no `priority` for chat", survey.engine.advice.refused)
    scheduler = _unknown("scheduler policy", f"no page of {name} says so; a burst would show it")
    if facts.by_priority is not None:
        scheduler = _scheduler_condition(survey)
    direction = _unknown("direction", "takes a burst to see")
    if facts.is_inverted:
        direction = _broken("direction", _inverted_by(survey), inverted(survey.engine, facts))
    waiting = survey.gauges.waiting
    now = "no gauge to read" if waiting is None else f"{waiting} wait in the engine now"
    return (field, scheduler, _unknown("real queueing", now), direction)


def _field_path(survey: Survey, probed: Probed) -> Condition:
    name, first = "field path", probed.checks[0]
    if first.refusal is not None:
        return _broken(name, first.evidence, survey.engine.advice.refused)
    if probed.is_sidecar:
        return _tiers(probed, first)
    used = probed.mixed[-1].plan.way if probed.mixed else None
    if probed.effect in SEEN:
        assert used is not None
        return _works(name, f"the {used.title} changes the order in which requests are served")
    if probed.compared is not None and probed.compared.judgment.effect in SEEN:
        other = probed.compared.plan.way
        assert used is not None
        assert other is not None
        seen = f"the {other.title} changes the order, the same values as {used.title} do not"
        return _broken(name, seen, dropped(survey.engine, used, other, survey.facts))
    if _makes_no_difference(survey, probed):
        where = survey.facts.source("by_priority")
        seen = f"{where} says that the queue uses priority, yet the {first.way.title} makes no difference: it is lost"
        return _broken(name, f"{seen} or replaced on its way", unread(survey.engine, first.way))
    if first.arrives is not None:
        state = ConditionState.WORKS if first.arrives else ConditionState.BROKEN
        mend = None if first.arrives else unread(survey.engine, first.way)
        return Condition(name, state, first.evidence, mend)
    others = "".join(f"; {one.evidence}" for one in probed.checks[1:])
    return _unknown(name, first.evidence + others)


def _shows_nothing(survey: Survey, probed: Probed) -> bool:
    """True if requests had to wait for the engine, and their order has nothing to do with their priorities."""
    return probed.effect is Effect.NONE and probed.queueing(survey) in (Queueing.INSIDE, Queueing.BOUNDED)


def _makes_no_difference(survey: Survey, probed: Probed) -> bool:
    """True if priority shows no effect at an engine that says that it uses priority."""
    return bool(survey.facts.by_priority) and not probed.is_sidecar and _shows_nothing(survey, probed)


def _tiers(probed: Probed, first: Check) -> Condition:
    """At one of our own sidecars: the tiers that it gave for the three asks."""
    name = "field path"
    if not probed.mixed:
        return _unknown(name, first.evidence)
    given = probed.mixed[-1].tiers
    shown = ", ".join("/".join(names) if names else "none" for names in given)
    if len({name for names in given for name in names}) < len(given):
        more = (
            "give a key (SIDECAR_API_KEY or --key-file) whose tenant may ask for the best tier: a sidecar clamps what "
            "a key may not have"
        )
        return _broken(name, f"asked for three tiers by {first.way.title}, got {shown}", more)
    return _works(name, f"{first.way.title} = 1, 0.5, 0 gives the tiers {shown}")


def _scheduler(survey: Survey, probed: Probed) -> Condition:
    name = "scheduler policy"
    seen = next((burst for burst in _select(probed) if burst.judgment.effect in SEEN), None)
    if seen is not None:
        return _works(name, order(seen, probed.control))
    if probed.effect is Effect.UNCLEAR:
        fix = "look whether only some of several replicas or data-parallel ranks use priority, then run this again"
        return _unknown(name, f"the order is unclear: {order(probed.mixed[-1], probed.control)}", fix)
    arrives = any(one.arrives is not False and one.refusal is None for one in probed.checks)
    if _shows_nothing(survey, probed) and arrives and not _makes_no_difference(survey, probed):
        mend = None if probed.is_sidecar else survey.engine.advice.scheduler
        return _broken(name, order(probed.mixed[-1], probed.control), mend)
    if survey.facts.by_priority is not None and not probed.is_sidecar:
        return _scheduler_condition(survey)
    return _unknown(name, "nothing that could show it has happened")


def _scheduler_condition(survey: Survey) -> Condition:
    """The engine's own statement about its scheduler."""
    facts, name = survey.facts, "scheduler policy"
    where = facts.source("by_priority")
    if facts.by_priority:
        return _works(name, f"{where} says that the queue uses priority; not seen to")
    return _broken(name, f"{where} says that the queue is first come", survey.engine.advice.scheduler)


def _queueing(survey: Survey, probed: Probed) -> Condition:
    name = "real queueing"
    if not probed.mixed:
        return _unknown(name, "no burst was sent, for the field gets nowhere")
    burst, where = probed.mixed[-1], probed.queueing(survey)
    is_seen = any(one.judgment.effect in SEEN for one in _select(probed))
    if is_seen or where in (Queueing.INSIDE, Queueing.BOUNDED):
        return _works(name, waits(burst, probed))
    if where is Queueing.BEFORE:
        fix = (
            "something in front of the engine lets only so many requests through, and orders them itself: raise its "
            "limit, or let the sidecar be what holds requests back"
        )
        shown = f"but not inside the engine, whose own gauge showed {burst.waiting_inside} at most"
        seen = f"{waits(burst, probed)}, {shown}"
        return _broken(name, seen, fix)
    if not probed.is_sidecar and seems_switched_off(burst, survey.engine):
        seen = f"{too_little(probed)}; the gauge of the router's queue stayed at 0"
        return _unknown(name, seen, survey.engine.advice.scheduler)
    return _unknown(name, too_little(probed), more(survey, burst))


def _direction(survey: Survey, probed: Probed) -> Condition:
    name = "direction"
    effects = [burst.judgment.effect for burst in _select(probed)]
    if Effect.INVERTED in effects[:1]:
        fix = inverted(survey.engine, survey.facts)
        if effects[1:] == [Effect.BY_PRIORITY]:
            first, other = probed.mixed[-1].plan.way, probed.compared.plan.way if probed.compared else None
            assert first is not None
            assert other is not None
            return _broken(name, f"by {first.title} the least important go first, by {other.title} they go last", fix)
        return _broken(name, _inverted_by(survey), fix)
    if Effect.BY_PRIORITY in effects:
        return _works(name, "the more important go first, with the values that the sidecar sends")
    if Effect.INVERTED in effects or survey.facts.is_inverted:
        return _broken(name, _inverted_by(survey), inverted(survey.engine, survey.facts))
    return _unknown(name, "no order to see")


def _inverted_by(survey: Survey) -> str:
    if survey.facts.is_inverted:
        return f"{survey.facts.source('is_inverted')} says that lower numbers go first"
    return "the least important are served first"


def _select(probed: Probed) -> Sequence[Burst]:
    return [*probed.mixed[-1:], *([probed.compared] if probed.compared is not None else [])]


IN_ORDER = 0.9
"""From this correlation with arrival on, requests are reported as served in the order in which they came."""


def order(burst: Burst, control: Burst | None) -> str:
    """In which order a burst was served."""
    judgment = burst.judgment
    text = f"first token after {_medians(judgment)} s from the most to the least important (medians of "
    text += f"{judgment.waited} that waited), rank correlation {_correlation(judgment)}"
    if control is not None and control.judgment.correlation is not None:
        text += f"; at equal priorities {control.judgment.correlation.value:+.2f}"
    arrival = judgment.by_arrival
    if judgment.effect is Effect.NONE and arrival is not None and arrival.value >= IN_ORDER:
        text += f"; served in the order of arrival ({arrival.value:+.2f})"
    return text


def waits(burst: Burst, probed: Probed) -> str:
    """How long requests waited, and for what."""
    alone_s, wait_s = probed.alone.ttft_s, burst.median_wait_s
    text = f"{burst.judgment.waited} of {len(burst.seen)} requests waited"
    if wait_s is not None and alone_s is not None:
        text += f", {_seconds(wait_s)} s to the first token (median) against {_seconds(alone_s)} s alone"
    text += f"; {burst.at_once} ran at once"
    if probed.is_sidecar:
        return text + f", {burst.held_at_sidecar} were held at the sidecar"
    return text + (f", up to {burst.waiting_inside} waited in the engine" if burst.waiting_inside else "")


def too_little(probed: Probed) -> str:
    """Why a burst says nothing."""
    tried = ", ".join(str(burst.plan.requests) for burst in probed.mixed)
    burst = probed.mixed[-1]
    if burst.is_refused:
        return f"{len(burst.refused)} of {len(burst.seen)} requests were refused: {burst.refused[0].error}"
    if burst.is_cut:
        served = f"{burst.judgment.served} of the {burst.judgment.waited} that waited"
        return f"not enough time: {served} were served within {burst.allowed_s:.0f} s"
    waited = f"{burst.judgment.waited} waited and {burst.at_once} ran at once"
    return f"not enough load: of {tried} requests at once, {waited}"


def more(survey: Survey, burst: Burst) -> str:
    """How to make it say something."""
    if burst.is_refused:
        return "run this again when the engine is less busy, or with a smaller burst (--requests)"
    if burst.is_cut:
        return "run this with a longer --timeout, such as 300s"
    least = max(2 * burst.plan.requests, (survey.gauges.max_running or 0) + 40)
    return f"run this while the engine is busy, or with --requests {least} --timeout 120s"


def _medians(judgment: Judgment) -> str:
    return " / ".join("none" if median is None else _seconds(median) for median in judgment.medians_s)


def _correlation(judgment: Judgment) -> str:
    found = judgment.correlation
    if found is None:
        return "none to speak of"
    return f"{found.value:+.2f} (95%: {found.low:+.2f} to {found.high:+.2f})"


def _seconds(seconds: float) -> str:
    if math.isinf(seconds):
        return "more"  # than the burst was given
    return f"{seconds:.2f}" if seconds < 100 else f"{seconds:.0f}"


def dropped(engine: type[Engine], way: PriorityField, other: PriorityField, facts: Facts) -> str:
    """One way shows nothing, another works."""
    since = engine.header_since
    if way.is_header and since is not None and is_before(facts.version, since):
        return f"{engine.name} reads the {way.title} from {since} on, this is {facts.version}: {_instead(other)}"
    if way.is_header and engine.header_switch is not None:
        switch = f"set {engine.header_switch} for {engine.title}"
        return f"{switch} and let every proxy in between pass {way.path[0]}, or {_instead(other)}"
    what = f"the {way.title} unchanged"
    instead = f", or {_instead(other)}" if len(engine.carriers) > 1 else ""
    return f"let every proxy between here and the engine pass {what}{instead}"


def unread(engine: type[Engine], way: PriorityField) -> str:
    """A wrong value is accepted: the field is not read."""
    return (
        f"let every proxy between here and the engine pass the {way.title} unchanged, and see that the engine's "
        f"version has it ({engine.name})"
    )


def inverted(engine: type[Engine], facts: Facts) -> str:
    """The order is the wrong way round."""
    if engine.advice.inverted is not None and facts.is_inverted:
        return engine.advice.inverted
    return (
        f"{engine.name} itself serves {engine.direction()} numbers first, and that is what the sidecar sends: find the "
        "proxy, plugin or flag that turns them round, and take it out"
    )


def is_before(version: str | None, other: str) -> bool:
    """True if a version is older than another; False where it cannot be read."""
    found = _numbers(version or "")
    return bool(found) and found < _numbers(other)


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version such as 0.32.0+cpu or 1.4.0rc1; empty where it does not start with one."""
    parts: list[int] = []
    for part in version.split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def _instead(other: PriorityField) -> str:
    return f"write `forward_priority: {'header' if other.is_header else 'body'}` into the policy"
