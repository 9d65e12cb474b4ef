"""What went wrong with a request behind its admission, in words."""

from __future__ import annotations

from sidecar.live.quantities import seconds
from sidecar.live.story import Ended, Story

_WORDS = {
    "ResponseCut": "the engine broke off in the middle of its answer",
    "incomplete_response": "the answer ended before it was complete",
    "engine_unreachable": "the engine could not be reached, or broke off before it answered",
    "engine_timeout": "the engine did not answer in time",
    "CancelledError": "the server stopped before the answer was complete",
}
"""By what `Settled.error` has."""


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
    if ended.outcome == "client_left":
        return "the client hung up"
    if ended.outcome == "failed":
        return _WORDS.get(ended.error or "", f"the app around the engine failed with {ended.error or 'an error'}")
    if ended.status is not None and ended.status >= 400:
        return f"answered with an error, status {ended.status}"
    return None
