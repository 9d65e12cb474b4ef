"""What went wrong with an admitted request, in the words of the log and of `sidecar explain` alike."""

from __future__ import annotations

from sidecar.events import Outcome

_WORDS = {
    "ResponseCut": "the engine broke off in the middle of its answer",
    "incomplete_response": "the answer ended before it was complete",
    "engine_unreachable": "the engine could not be reached, or broke off before it answered",
    "engine_timeout": "the engine did not answer in time",
    "CancelledError": "the server stopped before the answer was complete",
}
"""By what `Settled.error` has."""


def what_failed(outcome: str, status: int | None, error: str | None) -> str | None:
    """A clause that says how a settled request failed; None where it did not fail, and where its client left.

    `outcome` is the value of an `Outcome`, or one that another replica, of another version, has written.
    """
    if outcome == Outcome.FAILED:
        return _WORDS.get(error or "", f"the app around the engine failed with {error or 'an error'}")
    if outcome == Outcome.COMPLETED and status is not None and status >= 400:
        return _WORDS.get(error or "", f"answered with an error, status {status}")
    return None
