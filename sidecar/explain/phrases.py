"""Wording of an explanation: its conclusion, the rule by which another request went first, and what failed."""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.durations import exact_duration
from sidecar.events import Admitted, Classified, Outcome, Verdict
from sidecar.explain.document import (
    AheadGroup,
    AttemptDetails,
    DryRunDetails,
    Ending,
    EngineChoice,
    Explanation,
    ObstacleDetails,
    RefusalDetails,
    WaitDetails,
)
from sidecar.telemetry.request_record import RequestRecord, failure_description


def conclusion(story: Explanation) -> str:
    """How it fared up to now: what went wrong first, then the wait. Asks for everything but the conclusion."""
    fared = _preempted(story) if story.preempted else _waited(story)
    broken = failure(story)
    return fared if broken is None else f"{broken}; {fared}"


def _waited(story: Explanation) -> str:
    wait = story.wait
    if wait is None:
        return _without_wait(story)
    has = "has waited" if story.state == "waiting" else "waited"
    so_far = " so far" if story.state == "waiting" else ""
    starved = f", of which {exact_duration(wait.starvation_s)} starved" if wait.starvation_s else ""
    sentence = f"{has} {exact_duration(wait.queue_wait_s)}{so_far}{starved}: {_reason(story.in_the_way, wait)}"
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
    """What enforcing would have done to a request that passed."""
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


def _preempted(story: Explanation) -> str:
    """One that had to begin anew: attempt by attempt, then who went ahead in all that time."""
    *before, last = story.preempted
    is_waiting = story.state == "waiting"
    parts = [_at_first(story.preempted[0])]
    parts += [f"{_gave_way(each)}; waited again for {exact_duration(each.waited_again_s)}" for each in before]
    again = "has waited again" if is_waiting else "waited again"
    parts.append(
        f"{_gave_way(last)}; {again} for {exact_duration(last.waited_again_s)}{' so far' if is_waiting else ''}"
    )
    overtook = [] if story.wait is None else [group for group in story.wait.groups if group.came_later]
    if overtook:
        parts.append(_went_ahead(overtook))
    if story.refused is not None:
        parts.append(f"then {_turned_away(story.refused)}")
    return "; ".join(parts)


def _at_first(first: AttemptDetails) -> str:
    return f"waited {exact_duration(first.queue_wait_s)}" if first.queue_wait_s else "admitted at once"


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
    engine = f"engine {attempt.engine}"
    return {
        "unreached": f"no connection to {engine} could be made",
        "full": f"{engine} said that it was full",
        "crashed": f"{engine} crashed before it answered",
        "broken": f"{engine} broke the connection before it answered",
    }.get(attempt.replay or "", f"{engine} did not serve it ({attempt.replay})")


def chosen(choice: EngineChoice) -> str:
    """Why it got its engine: the room there, the predicted hits, and the wait for it."""
    parts = [choice.engine]
    if choice.held_tokens is not None and choice.held_requests is not None:
        tokens = _of(choice.held_tokens, choice.capacity_tokens, "tokens")
        requests = _of(choice.held_requests, choice.capacity_requests, "requests")
        sent = f", {choice.unprefilled_tokens:,} of them not prefilled" if choice.unprefilled_tokens else ""
        parts.append(f"it held {tokens}{sent}, and {requests}")
        parts.append(_hits(choice))
    if choice.claimed_s:
        parts.append(f"for {exact_duration(choice.claimed_s)} the request claimed an engine that had no room for it")
    return "; ".join(parts)


def _hits(choice: EngineChoice) -> str:
    others = ", ".join(f"{name} {hit:,}" for name, hit in choice.other_hits.items())
    beside = f" (others: {others})" if others else ""
    if not choice.hit:
        return f"of the prompt's {choice.prompt_tokens:,} tokens it was predicted to have none{beside}"
    return f"it was predicted to have {choice.hit:,} of the prompt's {choice.prompt_tokens:,} tokens{beside}"


def _of(held: int, most: int | None, noun: str) -> str:
    return f"{held:,} {noun}" if most is None else f"{held:,} of {most:,} {noun}"


def _turned_away(refused: RefusalDetails, *, at_once: bool = False) -> str:
    if refused.status is None:
        return f"{refused.message}; it had not waited" if at_once else refused.message
    return f"refused{' at once' if at_once else ''} with {refused.status} {refused.code}: {refused.message}"


def _reason(in_the_way: ObstacleDetails | None, wait: WaitDetails) -> str:
    overtook = [group for group in wait.groups if group.came_later]
    if overtook:
        return _went_ahead(overtook)
    if wait.starvation_s:
        unseen = " and ".join(f"{each.tokens:,} tokens of tier {each.tier}" for each in wait.unseen)
        return f"{unseen or 'others'} went ahead, {wait.unseen[0].where}" if wait.unseen else "others went ahead"
    came_first = sum(group.requests for group in wait.groups)
    way = "there was no room" if in_the_way is None else in_the_way.explanation
    tokens = sum(each.tokens for each in wait.unseen)
    if tokens:  # `unseen` has one place for all its tiers
        seen = f"{counted(came_first, 'request')} known here and " if came_first else ""
        return f"{way}; no request overtook it; {seen}{tokens:,} tokens went first, {wait.unseen[0].where}"
    if came_first:
        return f"{way}; no request overtook it, {counted(came_first, 'request')} that had come earlier went first"
    return f"{way}; no request went ahead of it"


def _went_ahead(overtook: Sequence[AheadGroup]) -> str:
    most = overtook[0]
    of_tier = [group for group in overtook if group.tier == most.tier]
    others = sum(group.requests for group in overtook if group.tier != most.tier)
    requests = counted(sum(group.requests for group in of_tier), "request")
    if len(of_tier) == 1:
        reasons = f" because {most.because}"
    else:
        reasons = ": " + ", ".join(f"{group.requests:,} because {group.because}" for group in of_tier)
    also = f"; so did {counted(others, 'request')} of other tiers" if others else ""
    return f"{requests} of tier {most.tier} went ahead{reasons}{also}"


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


CLAIM = "claim"
TURN, FAIR_SHARE, BEHIND = "turn", "fair_share", "behind"
"""Rules that no event reports: it came earlier; the tenants of one tier take turns; others of its tier were first."""


def rule_of(ahead: RequestRecord, waiter: RequestRecord) -> str:
    """The rule by which `ahead` was admitted before `waiter`: one of the scheduler's, or one of the three here.

    The scheduler reports no rule within one tier. There its tenants take turns; but of several engines a request that
    has claimed one takes part in no turn, and of one tenant's requests only a claim lets a later one go first.
    """
    classified, admitted, waiting = _tiers(ahead, waiter)
    if ahead.arrived_us <= waiter.arrived_us:
        return TURN
    if classified.tier == waiting.tier:
        is_claim = classified.tenant == waiting.tenant or _had_claimed(waiter, admitted.at_us)
        return CLAIM if admitted.engine is not None and is_claim else FAIR_SHARE
    return admitted.passed.get(waiting.tier, BEHIND)


def _had_claimed(waiter: RequestRecord, at_us: int) -> bool:
    """Whether it waited for an engine that it had claimed then. Not known before it is admitted."""
    admitted = waiter.admitted
    if admitted is None or admitted.placed is None or not admitted.placed.claimed_us:
        return False
    return admitted.at_us - admitted.placed.claimed_us <= at_us


def because(rule: str, ahead: RequestRecord, waiter: RequestRecord, tiers: Sequence[str]) -> str:
    """The rule as half a sentence. `tiers` are the names of the policy's, most important first."""
    classified, admitted, waiting = _tiers(ahead, waiter)
    by, tier = classified.tier, waiting.tier
    return {
        TURN: f"{by} came earlier" if by != tier else "they came earlier",
        FAIR_SHARE: f"the tenants of {tier} take turns by their share",
        BEHIND: f"others of {tier} stood before it, and had come later than {by}",
        "always_first": f"{by} always goes first",
        "reserve": f"{by} held less than its reserve",
        "reserve_turn": f"{by} held less than its reserve, and it was its turn",
        "gain": f"{by} earned more in that time, or its deadline was nearer",
        "level": _rank(by, tier, admitted.level, tiers),
        "limit": f"{tier} was at its limit",
        "passed_over": f"{tier} asked for more than the reserves of the others leave",
        CLAIM: f"{tier if by != tier else 'it'} waited for its own engine",
    }.get(rule, f"of the rule {rule}")


def aged_to(tier: str, level: int, tiers: Sequence[str]) -> str | None:
    """The tier with which a request of `tier` ranked by the time it had waited, None where that is its own."""
    return tiers[max(level, 0)] if tier in tiers and level < tiers.index(tier) else None


def _rank(by: str, tier: str, level: int, tiers: Sequence[str]) -> str:
    risen_to = aged_to(by, level, tiers)
    if tier in tiers and by in tiers and tiers.index(by) > tiers.index(tier) and risen_to is not None:
        return f"{by} had waited so long that it ranked with {risen_to}"
    return f"{by} is more important"


def _tiers(ahead: RequestRecord, waiter: RequestRecord) -> tuple[Classified, Admitted, Classified]:
    assert ahead.classified is not None
    assert ahead.admitted is not None
    assert waiter.classified is not None
    return ahead.classified, ahead.admitted, waiter.classified


def counted(number: int, noun: str) -> str:
    """A number with its noun in the singular or the plural."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
