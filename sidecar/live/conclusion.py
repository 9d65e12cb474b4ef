"""The sentence that says first what everything else only supports: how a request fared, and why."""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.live.story import Asked, Group, InTheWay, TurnedAway, Waited


def conclusion(
    state: str, asked: Asked | None, in_the_way: InTheWay | None, wait: Waited | None, refused: TurnedAway | None
) -> str:
    """How it fared up to now. `wait` is None where it did not have to."""
    if wait is None:
        return _without_wait(state, asked, refused)
    has = "has waited" if state == "waiting" else "waited"
    so_far = " so far" if state == "waiting" else ""
    starved = f", of which {seconds(wait.starvation_s)} starved" if wait.starvation_s else ""
    sentence = f"{has} {seconds(wait.queue_wait_s)}{so_far}{starved}: {_reason(in_the_way, wait)}"
    return sentence if refused is None else f"{sentence}; then {_turned_away(refused)}"


def seconds(length_s: float) -> str:
    """A length of time with as many figures as matter."""
    if length_s < 0.0995:
        return f"{length_s * 1000:.3g} ms"
    return f"{length_s:.2f} s" if length_s < 9.995 else f"{length_s:.1f} s" if length_s < 99.95 else f"{length_s:.0f} s"


def counted(number: int, noun: str) -> str:
    """A number with its noun in the singular or the plural."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _without_wait(state: str, asked: Asked | None, refused: TurnedAway | None) -> str:
    if refused is not None:
        return f"{_turned_away(refused)}, without a wait"
    if state == "arriving":
        return "is being read" if asked is None else "is being taken in"
    return "admitted at once, without a wait"


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
