"""The sentence that says first what everything else only supports: how a request fared, and why."""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.live.failure import failure
from sidecar.live.quantities import counted, seconds
from sidecar.live.story import GaveWay, Group, InTheWay, Story, TurnedAway, Waited


def conclusion(story: Story) -> str:
    """How it fared up to now: what went wrong first, then the wait. Asks for everything but the conclusion."""
    fared = _preempted(story) if story.preempted else _waited(story)
    broken = failure(story)
    return fared if broken is None else f"{broken}; {fared}"


def _waited(story: Story) -> str:
    wait = story.wait
    if wait is None:
        return _without_wait(story)
    has = "has waited" if story.state == "waiting" else "waited"
    so_far = " so far" if story.state == "waiting" else ""
    starved = f", of which {seconds(wait.starvation_s)} starved" if wait.starvation_s else ""
    sentence = f"{has} {seconds(wait.queue_wait_s)}{so_far}{starved}: {_reason(story.in_the_way, wait)}"
    return sentence if story.refused is None else f"{sentence}; then {_turned_away(story.refused)}"


def _without_wait(story: Story) -> str:
    if story.refused is not None:
        return f"{_turned_away(story.refused)}, without a wait"
    if story.state == "arriving":
        return "is being read" if story.asked is None else "is being taken in"
    return "admitted at once, without a wait"


def _preempted(story: Story) -> str:
    """One that had to begin anew: attempt by attempt, then who went ahead in all that time."""
    *before, last = story.preempted
    is_waiting = story.state == "waiting"
    parts = [_at_first(story.preempted[0])]
    parts += [f"{_gave_way(each)}; waited again for {seconds(each.waited_again_s)}" for each in before]
    again = "has waited again" if is_waiting else "waited again"
    parts.append(f"{_gave_way(last)}; {again} for {seconds(last.waited_again_s)}{' so far' if is_waiting else ''}")
    overtook = [] if story.wait is None else [group for group in story.wait.groups if group.came_later]
    if overtook:
        parts.append(_went_ahead(overtook))
    if story.refused is not None:
        parts.append(f"then {_turned_away(story.refused)}")
    return "; ".join(parts)


def _at_first(first: GaveWay) -> str:
    return f"waited {seconds(first.queue_wait_s)}" if first.queue_wait_s else "admitted at once"


def _gave_way(attempt: GaveWay) -> str:
    return f"preempted after {seconds(attempt.engine_s)} at the engine: its room went to a more important request"


def _turned_away(refused: TurnedAway) -> str:
    if refused.status is None:
        return refused.message
    return f"refused with {refused.status} {refused.code}: {refused.message}"


def _reason(in_the_way: InTheWay | None, wait: Waited) -> str:
    overtook = [group for group in wait.groups if group.came_later]
    if overtook:
        return _went_ahead(overtook)
    if wait.starvation_s:
        unseen = " and ".join(f"{each.tokens:,} tokens of tier {each.tier}" for each in wait.unseen)
        return f"{unseen or 'others'} went ahead, {wait.unseen[0].where}" if wait.unseen else "others went ahead"
    came_first = sum(group.requests for group in wait.groups)
    way = "there was no room" if in_the_way is None else in_the_way.explanation
    if came_first:
        return f"{way}; nobody overtook it, {counted(came_first, 'request')} that had come earlier went first"
    return f"{way}; nobody went ahead of it"


def _went_ahead(overtook: Sequence[Group]) -> str:
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
