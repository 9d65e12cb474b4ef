"""Steps of one request's story, and the requests that went ahead of it, in words: for the terminal and for the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from sidecar.durations import exact_duration
from sidecar.explain.document import AdmittedAhead, Explanation, RequestFacts, SizeDetails, WaitDetails
from sidecar.explain.phrases import chosen, not_served
from sidecar.telemetry.ahead import counted, times
from sidecar.telemetry.request_record import failure_description

# -- Wording of a request's size: the tokens that it entered with, where they come from, and how its lease moved.

MAXIMUM = "maximum"


def entered(story: Explanation) -> str | None:
    """The tokens that it entered with, and why so many, in a sentence; None where no output length is learned."""
    asked, size = story.asked, story.size
    if asked is None or size is None:
        return None
    prompt = f"prompt {size.prompt_tokens:,}"
    if size.bytes_per_token is not None:
        prompt += f" (at {size.bytes_per_token:.1f} bytes a token)"
    output = f"{size.output_tokens:,}" if size.sequences == 1 else f"{size.sequences:,} x {size.output_tokens:,}"
    parts = f"{prompt}, output {output} ({_source(story, asked, size)})"
    return f"{_verb(story)} {counted(asked.tokens, 'token')}: {parts}{_overlap(asked, size)}{_old_rule(asked, size)}"


def _verb(story: Explanation) -> str:
    if story.dry_run is not None:
        return "It would have entered with"
    return "It asked for" if story.admitted is None and not story.preempted else "It entered with"


def _source(story: Explanation, asked: RequestFacts, size: SizeDetails) -> str:
    of = f"tenant {asked.tenant} on {story.path}, {_model(asked)}, bucket `{size.bucket}`"
    part, answers = f"{100 * size.quantile:.4g}%", counted(size.samples, "answer")
    match size.source:
        case "own":
            return f"{part} of {answers} of {of}"
        case "tenants":
            return (
                f"{part} of the answers of the median tenant, of {answers} on {story.path}; "
                f"too few are known of tenant {asked.tenant} itself, {_model(asked)}, bucket `{size.bucket}`"
            )
        case "maximum":
            most = "its max_tokens" if asked.max_output_tokens is not None else "the most that the policy assumes"
            return f"{most}: too few answers are known of {of}"
        case other:
            return f"{other}, {answers} of {of}"


def _model(asked: RequestFacts) -> str:
    return "no model" if asked.model is None else f"model {asked.model}"


def _overlap(asked: RequestFacts, size: SizeDetails) -> str:
    text = f", counted at {size.overlap:.3g} because requests end at different times" if size.overlap < 1 else ""
    plain = size.prompt_tokens + size.sequences * size.output_tokens
    is_cut = math.floor(plain * size.overlap) > asked.tokens
    return f"{text}, and no more than one request of its tier may hold" if is_cut else text


def _old_rule(asked: RequestFacts, size: SizeDetails) -> str:
    if size.source == MAXIMUM and size.overlap >= 1:
        return ""
    rule = "max_tokens" if asked.max_output_tokens is not None else "the output that the policy assumes"
    return f"; {rule} would have held {size.most_tokens:,}"


def moved(story: Explanation) -> str | None:
    """Sentence on what its lease held at its end and what it really used; None where that is not known."""
    size, ended = story.size, story.ended
    if size is None or ended is None or size.held_tokens is None:
        return None
    grew = f" after it grew {times(size.growths)}" if size.growths else ", and never grew"
    by = "by the engine's count" if ended.output_tokens is not None else "by our estimate"
    output = "" if ended.output_tokens is None else f", {ended.output_tokens:,} of them output"
    return f"It held {size.held_tokens:,} at its end{grew}. It really used {ended.tokens_used:,}{output}, {by}"


Clock = Callable[[float], str]
"""How a moment, in seconds since 1970, is written."""

GROUP_HEADS = ("tier", "", "because", "requests", "tokens")
ONE_HEADS = ("admitted", "after", "tier", "tenant", "tokens", "arrived", "request")


class Step(NamedTuple):
    """One line of the story. `request_id` is the other request that it is about, None where it is about none."""

    label: str
    text: str
    request_id: str | None = None


def calendar_time(at_s: float) -> str:
    """A moment as local calendar time with milliseconds."""
    return datetime.fromtimestamp(at_s).astimezone().isoformat(timespec="milliseconds")


def steps(story: Explanation, clock: Clock = calendar_time) -> Iterator[Step]:
    """Steps of the request, in the order in which they happened."""
    yield from _who(story)
    if story.trace_id is not None:
        yield Step("trace", f"{story.trace_id}, span {story.span_id}")
    yield Step("arrived", clock(story.arrived_at_s))
    if story.in_the_way is not None:
        at = _at(story, story.in_the_way.found_at_s, clock)
        yield Step("had to wait", f"{at}: {story.in_the_way.explanation}")
    met: list[tuple[float, Step]] = []
    for attempt in story.preempted:
        lost = f"{exact_duration(attempt.engine_s)} at the engine are lost"
        to_engine = "" if attempt.engine is None else f", to engine {attempt.engine}"
        met.append((attempt.admitted_at_s, Step("admitted", to_engine)))
        if attempt.replay is not None:
            step = Step("waited again", f": {not_served(attempt)}")
        elif attempt.is_unreached:
            step = Step("waited again", ": no connection to the engine could be made")
        else:
            step = Step("preempted", f": {lost}; its room went to a more important request")
        met.append((attempt.preempted_at_s, step))
    if story.wait is not None and story.wait.overtaken_at_s is not None:
        by = story.wait.overtaken_by
        overtaken = Step("overtaken", f" {_by(by, clock)}", None if by is None else by.request_id)
        met.append((story.wait.overtaken_at_s, overtaken))
    for at_s, step in sorted(met, key=lambda pair: pair[0]):
        yield step._replace(text=f"{_at(story, at_s, clock)}{step.text}")
    yield from _how_it_ended(story, clock)


def _who(story: Explanation) -> Iterator[Step]:
    asked = story.asked
    if asked is None:
        yield Step("asked by", _asker_before_tier(story))
        return
    clamped = f"; {asked.clamped_from} was asked for, which is more than it may have" if asked.clamped_from else ""
    lowered = (
        f"; {asked.downgraded_from} within its tenant's limits, which it was over" if asked.downgraded_from else ""
    )
    risen = f"; it rose from {asked.risen_from}, as its deadline came near" if asked.risen_from else ""
    user = "" if asked.user is None else f", user {asked.user}" if asked.user else ", no user named"
    yield Step("asked by", f"tenant {asked.tenant}{_with_key(asked.key)}{user}")
    yield Step("tier", f"{asked.tier}, by {_SOURCES.get(asked.source, asked.source)}{clamped}{lowered}{risen}")
    model = "" if asked.model is None else f" of {asked.model}"
    kind = f"{asked.api}{model}, {'streamed' if asked.stream else 'not streamed'}"
    yield Step("holds", f"{counted(asked.tokens, 'token')} and {counted(asked.requests, 'sequence')} ({kind})")
    if (sized := entered(story)) is not None:
        yield Step("sized", sized)


def _asker_before_tier(story: Explanation) -> str:
    """Who asked, of a request that has no tier."""
    if story.dry_run is not None:
        return "not known: enforcing would have refused it before its tier was known"
    if story.refused is None:
        return "not known yet"
    tenant, tier = story.refused.tenant, story.refused.tier
    if tenant is None:
        return "not known: it ended before its key was known"
    return f"tenant {tenant}{_with_key(story.refused.key)}, tier {tier}; it ended before it entered the pool"


def _with_key(name: str | None) -> str:
    return "" if name is None else f" with key {name}"


_SOURCES = {
    "body": "its body",
    "header": "its header",
    "endpoint": "its endpoint",
    "key": "its tenant",
    "engine": "the engine's own priority field",
    "service_tier": "its body's service_tier",
    "default": "the policy's default",
}


def _by(ahead: AdmittedAhead | None, clock: Clock) -> str:
    if ahead is None:
        return "by a request that is not known here"
    return (
        f"by request {ahead.request_id} of tier {ahead.tier} (tenant {ahead.tenant}, {counted(ahead.tokens, 'token')}, "
        f"which arrived at {clock(ahead.arrived_at_s)}): {ahead.because}"
    )


def _how_it_ended(story: Explanation, clock: Clock) -> Iterator[Step]:
    admitted, refused, ended = story.admitted, story.refused, story.ended
    if admitted is not None:
        sent = "no priority" if admitted.engine_priority is None else f"priority {admitted.engine_priority:g}"
        aged = "" if admitted.aged_to is None else f", aged to the rank of {admitted.aged_to}"
        at = _at(story, admitted.admitted_at_s, clock)
        yield Step("admitted", f"{at} at level {admitted.level}{aged}; {sent} sent to the engine")
        if admitted.engine is not None:
            yield Step("engine", chosen(admitted.engine))
    elif refused is None:
        yield Step("now", f"{_at(story, story.told_at_s, clock)}: {story.state}")
    if story.answered is not None:
        at = _at(story, story.answered.first_byte_at_s, clock)
        yield Step("first byte", f"{at}, status {story.answered.status}")
    if ended is not None and refused is None:
        status = "" if ended.status is None else f", status {ended.status}"
        failed = failure_description(ended.outcome, ended.status, ended.error)
        error = "" if failed is None or ended.error is None else f", {failed}"
        used = counted(ended.tokens_used, "token")
        cached = "" if ended.cached_tokens is None else f", {ended.cached_tokens:,} from the engine's prefix cache"
        at = _at(story, ended.settled_at_s, clock)
        yield Step("settled", f"{at}: {ended.outcome}{status}{error}, {used} used{cached}")
        if (how := moved(story)) is not None:
            yield Step("lease", how)
    elif admitted is not None:
        yield Step("now", f"{_at(story, story.told_at_s, clock)}: still running")
    if refused is not None:
        what = refused.code if refused.status is None else f"{refused.status} {refused.code}"
        at = _at(story, refused.refused_at_s, clock)
        yield Step("refused" if refused.status else "left", f"{at}: {what}: {refused.message}")


def _at(story: Explanation, at_s: float, clock: Clock) -> str:
    return f"{clock(at_s)}, after {exact_duration(at_s - story.arrived_at_s)}"


def admitted_meanwhile(wait: WaitDetails) -> str:
    """How many were admitted during a wait."""
    requests, tokens = sum(g.requests for g in wait.groups), sum(g.tokens for g in wait.groups)
    if not requests and not wait.unseen:
        return "No request was admitted while it waited."
    return f"Admitted while it waited: {counted(requests, 'request')}, {counted(tokens, 'token')}"


def group_rows(wait: WaitDetails) -> Sequence[Sequence[str]]:
    """Rows of requests that went ahead, by tier and reason, under `GROUP_HEADS`."""
    came = {True: "overtook", False: "came first"}
    return [[g.tier, came[g.came_later], g.because, f"{g.requests:,}", f"{g.tokens:,}"] for g in wait.groups]


def unknown_lines(wait: WaitDetails) -> Sequence[str]:
    """Lines on requests that went ahead, too, and are not known here."""
    return [f"and {counted(each.tokens, 'token')} of tier {each.tier}, {each.where}" for each in wait.unseen]


def one_row(story: Explanation, ahead: AdmittedAhead, clock: Clock = calendar_time) -> Sequence[str]:
    """One of those that went ahead, under `ONE_HEADS`."""
    since_s = ahead.arrived_at_s - story.arrived_at_s
    arrived = f"{exact_duration(abs(since_s))} {'later' if ahead.came_later else 'earlier'}"
    after = exact_duration(ahead.admitted_at_s - story.arrived_at_s)
    tokens = f"{ahead.tokens:,}"
    return [clock(ahead.admitted_at_s), after, ahead.tier, ahead.tenant, tokens, arrived, ahead.request_id]
