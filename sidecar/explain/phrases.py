"""Wording of an explanation: its conclusion, the attempts that were taken back, and what failed."""

from __future__ import annotations

from sidecar.durations import exact_duration
from sidecar.events import Outcome, Verdict
from sidecar.explain.document import (
    AttemptDetails,
    DryRunDetails,
    Ending,
    EngineChoice,
    Explanation,
    RefusalDetails,
)
from sidecar.telemetry.ahead import went_ahead, why_it_waited
from sidecar.telemetry.request_record import REPLAYED_BECAUSE, failure_description


def conclusion(story: Explanation) -> str:
    """How it fared up to now: what went wrong first, then the wait. Asks for everything but the conclusion."""
    fared = _describe_preempted(story) if story.preempted else _describe_wait(story)
    broken = failure(story)
    return fared if broken is None else f"{broken}; {fared}"


def _describe_wait(story: Explanation) -> str:
    wait = story.wait
    if wait is None:
        return _without_wait(story)
    obstacle = None if story.in_the_way is None else story.in_the_way.explanation
    reason = why_it_waited(obstacle, wait.groups, wait.unseen, is_starved=wait.starvation_s > 0)
    has, so_far = ("has waited", " so far") if story.state == "waiting" else ("waited", "")
    starved = f", of which {exact_duration(wait.starvation_s)} starved" if wait.starvation_s else ""
    sentence = f"{has} {exact_duration(wait.queue_wait_s)}{so_far}{starved}: {reason}"
    if story.admitted is not None and story.admitted.engine is not None and story.admitted.engine.claimed_s:
        sentence += f"; for {exact_duration(story.admitted.engine.claimed_s)} of it, it waited for its own engine"
    return sentence if story.refused is None else f"{sentence}; then {_turned_away(story.refused)}"


def _without_wait(story: Explanation) -> str:
    if story.dry_run is not None:
        return f"passed at once (mode: observe); {_enforcing(story.dry_run, story)}"
    if story.refused is not None:
        return _turned_away(story.refused, at_once=True)
    if story.state == "arriving":
        return "is being read" if story.asked is None else "is being taken in"
    return "admitted at once, without a wait"


def _enforcing(dry_run: DryRunDetails, story: Explanation) -> str:
    """Sentence on what enforcing would have done to a request that passed."""
    starved = f", of which {exact_duration(dry_run.starvation_s)} starved" if dry_run.starvation_s else ""
    waited = f"after a wait of {exact_duration(dry_run.queue_wait_s)}{starved}" if dry_run.queue_wait_s else "at once"
    match dry_run.verdict:
        case None:
            if story.ended is not None:
                return "enforcing had not decided when it ended"
            return "enforcing would not have admitted it yet"
        case Verdict.ADMITTED.value:
            return f"enforcing would have admitted it {waited}"
        case Verdict.REFUSED.value:
            return f"enforcing would have refused it {waited}: {dry_run.code}"
        case Verdict.ABANDONED.value:
            return "enforcing, its client would have disconnected before it was admitted"
        case _:
            return f"what enforcing would have done is not known: {dry_run.code}"


def _describe_preempted(story: Explanation) -> str:
    """One that had to begin anew: attempt by attempt, then who went ahead in all that time."""
    *before, last = story.preempted
    is_waiting = story.state == "waiting"
    first_s = story.preempted[0].queue_wait_s
    parts = [f"waited {exact_duration(first_s)}" if first_s else "admitted at once"]
    parts += [f"{_gave_way(each)}; waited again for {exact_duration(each.waited_again_s)}" for each in before]
    again = "has waited again" if is_waiting else "waited again"
    parts.append(
        f"{_gave_way(last)}; {again} for {exact_duration(last.waited_again_s)}{' so far' if is_waiting else ''}"
    )
    overtook = [] if story.wait is None else [group for group in story.wait.groups if group.came_later]
    if overtook:
        parts.append(went_ahead(overtook))
    if story.refused is not None:
        parts.append(f"then {_turned_away(story.refused)}")
    return "; ".join(parts)


def _gave_way(attempt: AttemptDetails) -> str:
    if attempt.replay is not None:
        return not_served(attempt)
    if attempt.is_unreached:
        return "no connection to the engine could be made"
    return (
        f"preempted after {exact_duration(attempt.engine_s)} at the engine: its room went to a more important request"
    )


def not_served(attempt: AttemptDetails) -> str:
    """Why an engine of several did not serve an attempt."""
    why = REPLAYED_BECAUSE.get(attempt.replay or "", f"the engine did not serve it ({attempt.replay})")
    return why.replace("the engine", f"engine {attempt.engine}")


def chosen(choice: EngineChoice) -> str:
    """Why it got its engine: the room there, the predicted hits, and the wait for it."""
    parts = [choice.engine]
    if choice.held_tokens is not None and choice.held_requests is not None:
        tokens = _part(choice.held_tokens, choice.capacity_tokens, "tokens")
        requests = _part(choice.held_requests, choice.capacity_requests, "requests")
        sent = f", {choice.unprefilled_tokens:,} of them not prefilled" if choice.unprefilled_tokens else ""
        parts.append(f"it held {tokens}{sent}, and {requests}")
        parts.append(_hits(choice))
    if choice.claimed_s:
        parts.append(f"for {exact_duration(choice.claimed_s)} the request stood in line for an engine")
    return "; ".join(parts)


def _hits(choice: EngineChoice) -> str:
    others = ", ".join(f"{name} {hit:,}" for name, hit in choice.other_hits.items())
    beside = f" (others: {others})" if others else ""
    if not choice.hit:
        return f"of the prompt's {choice.prompt_tokens:,} tokens it was predicted to have none{beside}"
    return f"it was predicted to have {choice.hit:,} of the prompt's {choice.prompt_tokens:,} tokens{beside}"


def _part(held: int, most: int | None, noun: str) -> str:
    return f"{held:,} {noun}" if most is None else f"{held:,} of {most:,} {noun}"


def _turned_away(refused: RefusalDetails, *, at_once: bool = False) -> str:
    if refused.status is None:
        return f"{refused.message}; it had not waited" if at_once else refused.message
    return f"refused{' at once' if at_once else ''} with {refused.status} {refused.code}: {refused.message}"


def failure(story: Explanation) -> str | None:
    """Half a sentence; None where nothing went wrong, or where the request was refused."""
    ended = story.ended
    if ended is None or story.refused is not None:
        return None
    what = _what(ended)
    if what is None or story.admitted is None:
        return what
    return f"{what}, {exact_duration(ended.settled_at_s - story.admitted.admitted_at_s)} after it was admitted"


def _what(ended: Ending) -> str | None:
    if ended.outcome == Outcome.CLIENT_LEFT:
        return "the client disconnected"
    return failure_description(ended.outcome, ended.status, ended.error)
