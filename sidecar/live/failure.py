"""What went wrong with a request behind its admission, in words."""

from __future__ import annotations

from sidecar.events import Outcome
from sidecar.live.quantities import seconds
from sidecar.live.story import Ended, Story
from sidecar.telemetry.failures import what_failed


def failure(story: Story) -> str | None:
    """Half a sentence; None where nothing went wrong, or where it was the door that turned the request away."""
    ended = story.ended
    if ended is None or story.refused is not None:
        return None
    what = _what(ended)
    if what is None or story.admitted is None:
        return what
    return f"{what}, {seconds(ended.settled_at_s - story.admitted.admitted_at_s)} after it was admitted"


def _what(ended: Ended) -> str | None:
    if ended.outcome == Outcome.CLIENT_LEFT:
        return "the client hung up"
    return what_failed(ended.outcome, ended.status, ended.error)
