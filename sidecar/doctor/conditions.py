"""The four things that must be true before a priority acts, each with what was seen of it and what would mend it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from sidecar.doctor import advice, evidence
from sidecar.doctor.burst import Burst
from sidecar.doctor.fieldpath import Check
from sidecar.doctor.judging import Effect
from sidecar.doctor.probing import Probed
from sidecar.doctor.queueing import Queueing, seems_switched_off
from sidecar.doctor.survey import Survey

SEEN = (Effect.BY_PRIORITY, Effect.INVERTED)
"""Effects that show that the field arrives and is used."""


class State(str, Enum):
    """What is known of a condition."""

    WORKS = "works"
    BROKEN = "broken"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Condition:
    """One of the four. `fix` is what to change, None where nothing is broken or nobody knows."""

    name: str
    state: State
    evidence: str
    fix: str | None = None


def conditions(survey: Survey, probed: Probed) -> Sequence[Condition]:
    """All four, in the order in which a request meets them."""
    return (
        _field_path(survey, probed),
        _scheduler(survey, probed),
        _queueing(survey, probed),
        _direction(survey, probed),
    )


def read_only(survey: Survey) -> Sequence[Condition]:
    """What can be said of the four without a request."""
    facts, name = survey.facts, survey.engine.value
    schema = "its schema has the field" if facts.has_field else "no page tells"
    field = Condition("field path", State.UNKNOWN, f"{schema}; whether it gets there takes a request")
    if facts.has_field is False:
        field = Condition(
            "field path", State.BROKEN, "/openapi.json has no `priority` for chat", advice.refused(survey.engine)
        )
    scheduler = Condition("scheduler policy", State.UNKNOWN, f"no page of {name} tells; a burst would show it")
    if facts.by_priority is not None:
        scheduler = _said(survey)
    direction = Condition("direction", State.UNKNOWN, "takes a burst to see")
    if facts.is_inverted:
        direction = Condition("direction", State.BROKEN, _inverted_by(survey), advice.inverted(survey.engine, facts))
    waiting = survey.gauges.waiting
    now = "no gauge to read" if waiting is None else f"{waiting} wait in the engine now"
    return (field, scheduler, Condition("real queueing", State.UNKNOWN, now), direction)


def _field_path(survey: Survey, probed: Probed) -> Condition:
    name, first = "field path", probed.checks[0]
    if first.refusal is not None:
        return Condition(name, State.BROKEN, first.evidence, advice.refused(survey.engine))
    if probed.is_door:
        return _tiers(probed, first)
    used = probed.mixed[-1].plan.way if probed.mixed else None
    if probed.effect in SEEN:
        assert used is not None
        return Condition(name, State.WORKS, f"the {used.title} changes the order in which requests are served")
    if probed.compared is not None and probed.compared.judgment.effect in SEEN:
        other = probed.compared.plan.way
        assert used is not None
        assert other is not None
        seen = f"the {other.title} changes the order, the same values as {used.title} do not"
        return Condition(name, State.BROKEN, seen, advice.dropped(survey.engine, used, other, survey.facts))
    if _makes_no_difference(survey, probed):
        where = survey.facts.source("by_priority")
        seen = (
            f"{where} says that the queue goes by priority, yet the {first.way.title} makes no difference: it is lost"
        )
        return Condition(name, State.BROKEN, f"{seen} or replaced on its way", advice.unread(survey.engine, first.way))
    if first.arrives is not None:
        state = State.WORKS if first.arrives else State.BROKEN
        mend = None if first.arrives else advice.unread(survey.engine, first.way)
        return Condition(name, state, first.evidence, mend)
    others = "".join(f"; {one.evidence}" for one in probed.checks[1:])
    return Condition(name, State.UNKNOWN, first.evidence + others)


def _shows_nothing(survey: Survey, probed: Probed) -> bool:
    """Whether requests had to wait for the engine, and their order has nothing to do with their priorities."""
    return probed.effect is Effect.NONE and probed.queueing(survey) in (Queueing.INSIDE, Queueing.BOUNDED)


def _makes_no_difference(survey: Survey, probed: Probed) -> bool:
    """The same, of an engine that says that it goes by priority."""
    return bool(survey.facts.by_priority) and not probed.is_door and _shows_nothing(survey, probed)


def _tiers(probed: Probed, first: Check) -> Condition:
    """At one of our own sidecars: the tiers that it gave for the three asks."""
    name = "field path"
    if not probed.mixed:
        return Condition(name, State.UNKNOWN, first.evidence)
    given = probed.mixed[-1].tiers
    shown = ", ".join("/".join(names) if names else "none" for names in given)
    if len({name for names in given for name in names}) < len(given):
        more = "give a key with --key whose tenant may ask for the best tier: a sidecar clamps what a key may not have"
        return Condition(name, State.BROKEN, f"asked for three tiers by {first.way.title}, got {shown}", more)
    return Condition(name, State.WORKS, f"{first.way.title} = 1, 0.5, 0 gives the tiers {shown}")


def _scheduler(survey: Survey, probed: Probed) -> Condition:
    name = "scheduler policy"
    seen = next((burst for burst in _judged(probed) if burst.judgment.effect in SEEN), None)
    if seen is not None:
        return Condition(name, State.WORKS, evidence.order(seen, probed.control))
    if probed.effect is Effect.UNCLEAR:
        fix = "look whether only some of several replicas or data-parallel ranks go by priority, then run this again"
        return Condition(
            name, State.UNKNOWN, f"the order is unclear: {evidence.order(probed.mixed[-1], probed.control)}", fix
        )
    arrives = any(one.arrives is not False and one.refusal is None for one in probed.checks)
    if _shows_nothing(survey, probed) and arrives and not _makes_no_difference(survey, probed):
        mend = None if probed.is_door else advice.scheduler(survey.engine)
        return Condition(name, State.BROKEN, evidence.order(probed.mixed[-1], probed.control), mend)
    if survey.facts.by_priority is not None and not probed.is_door:
        return _said(survey)
    return Condition(name, State.UNKNOWN, "nothing that could show it has happened")


def _said(survey: Survey) -> Condition:
    """What the engine says of its scheduler."""
    facts, name = survey.facts, "scheduler policy"
    where = facts.source("by_priority")
    if facts.by_priority:
        return Condition(name, State.WORKS, f"{where} says that the queue goes by priority; not seen to")
    return Condition(name, State.BROKEN, f"{where} says that the queue is first come", advice.scheduler(survey.engine))


def _queueing(survey: Survey, probed: Probed) -> Condition:
    name = "real queueing"
    if not probed.mixed:
        return Condition(name, State.UNKNOWN, "no burst was sent, for the field gets nowhere")
    burst, where = probed.mixed[-1], probed.queueing(survey)
    is_seen = any(one.judgment.effect in SEEN for one in _judged(probed))
    if is_seen or where in (Queueing.INSIDE, Queueing.BOUNDED):
        return Condition(name, State.WORKS, evidence.waits(burst, probed))
    if where is Queueing.BEFORE:
        fix = (
            "something in front of the engine lets only so many requests through, and orders them itself: raise its "
            "limit, or let the sidecar be what holds requests back"
        )
        shown = f"but not inside the engine, whose own gauge showed {burst.waiting_inside} at most"
        seen = f"{evidence.waits(burst, probed)}, {shown}"
        return Condition(name, State.BROKEN, seen, fix)
    if not probed.is_door and seems_switched_off(burst, survey.engine):
        seen = f"{evidence.too_little(probed)}; the gauge of the router's queue stayed at 0"
        return Condition(name, State.UNKNOWN, seen, advice.scheduler(survey.engine))
    return Condition(name, State.UNKNOWN, evidence.too_little(probed), evidence.more(survey, burst))


def _direction(survey: Survey, probed: Probed) -> Condition:
    name = "direction"
    effects = [burst.judgment.effect for burst in _judged(probed)]
    if Effect.INVERTED in effects[:1]:
        fix = advice.inverted(survey.engine, survey.facts)
        if effects[1:] == [Effect.BY_PRIORITY]:
            first, other = probed.mixed[-1].plan.way, probed.compared.plan.way if probed.compared else None
            assert first is not None
            assert other is not None
            return Condition(
                name, State.BROKEN, f"by {first.title} the least important go first, by {other.title} they go last", fix
            )
        return Condition(name, State.BROKEN, _inverted_by(survey), fix)
    if Effect.BY_PRIORITY in effects:
        return Condition(name, State.WORKS, "the more important go first, with the values that the sidecar sends")
    if Effect.INVERTED in effects:
        return Condition(name, State.BROKEN, _inverted_by(survey), advice.inverted(survey.engine, survey.facts))
    if survey.facts.is_inverted:
        return Condition(name, State.BROKEN, _inverted_by(survey), advice.inverted(survey.engine, survey.facts))
    return Condition(name, State.UNKNOWN, "no order to see")


def _inverted_by(survey: Survey) -> str:
    if survey.facts.is_inverted:
        return f"{survey.facts.source('is_inverted')} says that lower numbers go first"
    return "the least important are served first"


def _judged(probed: Probed) -> Sequence[Burst]:
    return [*probed.mixed[-1:], *([probed.compared] if probed.compared is not None else [])]
