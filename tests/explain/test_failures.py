"""What went wrong comes first, in words; and one that was preempted is described attempt by attempt."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.cli.explain_request import text
from sidecar.events import (
    Admitted,
    Classified,
    Event,
    FirstByte,
    Obstacle,
    Outcome,
    Preempted,
    Queued,
    Received,
    Settled,
)
from sidecar.explain.builder import ExplanationBuilder
from sidecar.explain.document import Explanation
from sidecar.telemetry.journal import Journal
from tests.support.each import each
from tests.telemetry.span_stories import begin

SECOND = 1_000_000
ADMITTED = Admitted(SECOND, 0, 0, None, {}, 2)


def reported(*events: Event, now_s: float = 60, ahead: bool = False) -> Explanation:
    """The story of a batch request that came at 1 s; with `ahead`, of an important one that came and went in at 5 s."""
    journal = Journal(now_us=lambda: round(now_s * SECOND))
    tell = begin(journal, Received(SECOND, 10**18, "POST", "/v1/completions", [], "mine"), None)
    tell(Classified(SECOND, "batch", "acme", "key", None, "chat", "m", 1, False, 5, 1))
    for event in events:
        tell(event)
    if ahead:
        other = begin(journal, Received(5 * SECOND, 10**18, "POST", "/", [], "important"), None)
        other(Classified(5 * SECOND, "high", "acme", "key", None, "chat", "m", 1, False, 9, 1))
        other(Admitted(5 * SECOND, 0, 0, None, {}, 0, {"batch": "level"}))
    return ExplanationBuilder(journal, lambda: ("high", "batch"), "lab", is_shared=False).explain("mine")


def settled(outcome: Outcome, status: int | None, error: str | None, at_s: float = 3.5) -> Settled:
    return Settled(round(at_s * SECOND), outcome, status, 10, None, None, error)


@each(
    ("end", "said"),
    [
        ((Outcome.FAILED, 200, "ResponseCut"), "the engine broke off in the middle of its answer"),
        ((Outcome.FAILED, 200, "incomplete_response"), "the answer ended before it was complete"),
        ((Outcome.FAILED, None, "CancelledError"), "the server stopped before the answer was complete"),
        ((Outcome.FAILED, None, "ZeroDivisionError"), "the app around the engine failed with ZeroDivisionError"),
        ((Outcome.FAILED, None, None), "the app around the engine failed with an error"),
        ((Outcome.CLIENT_LEFT, 200, None), "the client disconnected"),
        ((Outcome.COMPLETED, 502, None), "answered with an error, status 502"),
        ((Outcome.COMPLETED, 400, None), "answered with an error, status 400"),
    ],
)
def test_what_went_wrong_comes_first(end: tuple[Any, ...], said: str) -> None:
    story = reported(ADMITTED, FirstByte(2 * SECOND, 200), settled(*end))
    assert story.conclusion == f"{said}, 2.50 s after it was admitted; admitted at once, without a wait"


def test_what_went_wrong_comes_before_a_wait_too() -> None:
    waited = Admitted(3 * SECOND, 2 * SECOND, 0, None, {}, 2)
    no_room = Queued(SECOND, Obstacle.NO_ROOM, "no room")
    story = reported(no_room, waited, settled(Outcome.FAILED, 200, "ResponseCut"))
    assert story.conclusion == (
        "the engine broke off in the middle of its answer, 0.50 s after it was admitted; "
        "waited 2.00 s: no room; no request went ahead of it"
    )


def test_what_went_well_says_nothing_of_that() -> None:
    assert reported(ADMITTED, settled(Outcome.COMPLETED, 200, None)).conclusion == "admitted at once, without a wait"


# -- preempted


def preempted(at_s: float, admitted_s: float, times: int = 1) -> tuple[Event, Event]:
    at_us = round(at_s * SECOND)
    return (
        Preempted(at_us, round(admitted_s * SECOND), times),
        Queued(at_us, Obstacle.PREEMPTED, "its room went to a more important request"),
    )


def again(at_s: float, overtaken_s: float | None = None) -> Admitted:
    at_us = round(at_s * SECOND)
    overtaken_us = None if overtaken_s is None else round(overtaken_s * SECOND)
    return Admitted(
        at_us,
        at_us - SECOND,
        0 if overtaken_us is None else at_us - overtaken_us,
        overtaken_us,
        {},
        1,
        engine_priority=7,
    )


def test_one_that_was_preempted_says_when_and_why_and_how_long_it_waited_again() -> None:
    end = settled(Outcome.COMPLETED, 200, None, 9)
    story = reported(ADMITTED, *preempted(4.2, 1), again(5.3, 5), end, ahead=True)
    assert story.conclusion == (
        "admitted at once; preempted after 3.20 s at the engine: its room went to a more important request; "
        "waited again for 1.10 s; 1 request of tier high went ahead because high is more important"
    )
    assert story.state == "completed"
    assert (story.wait.queue_wait_s, story.wait.starvation_s) == (4.3, 0.3)
    assert story.in_the_way is None
    (attempt,) = story.preempted
    assert (attempt.queue_wait_s, attempt.engine_s, attempt.waited_again_s) == (0, 3.2, 1.1)
    lines = [line.split()[0] for line in text(story).splitlines() if line and not line.startswith(" ")]
    assert lines[5:11] == ["arrived", "admitted", "preempted", "overtaken", "admitted", "settled"]
    assert "at the engine are lost; its room went to a more important request" in text(story)


def test_who_was_admitted_while_it_ran_did_not_go_ahead_of_it() -> None:
    served = Admitted(10 * SECOND, 9 * SECOND, 2 * SECOND, 8 * SECOND, {"high": 9}, 1, engine_priority=7)
    story = reported(ADMITTED, *preempted(8, 1), served, settled(Outcome.COMPLETED, 200, None, 11), ahead=True)
    assert story.conclusion.endswith("; waited again for 2.00 s")
    assert (story.wait.groups, story.wait.unseen, story.wait.overtaken_by) == ([], [], None)


def test_one_that_was_preempted_twice_tells_of_both() -> None:
    first = Admitted(3 * SECOND, 2 * SECOND, 0, None, {}, 2)
    events = (Queued(SECOND, Obstacle.NO_ROOM, "no room"), first, *preempted(6, 3), again(8), *preempted(9, 8, 2))
    story = reported(*events, again(12), settled(Outcome.FAILED, 200, "ResponseCut", 13))
    assert story.conclusion == (
        "the engine broke off in the middle of its answer, 1.00 s after it was admitted; waited 2.00 s; "
        "preempted after 3.00 s at the engine: its room went to a more important request; waited again for 2.00 s; "
        "preempted after 1.00 s at the engine: its room went to a more important request; waited again for 3.00 s"
    )
    assert story.in_the_way.obstacle == "no_room"


def test_one_that_waits_again_says_how_long_by_now() -> None:
    story = reported(ADMITTED, *preempted(4, 1), now_s=6.5)
    assert story.state == "waiting"
    assert story.conclusion.endswith("a more important request; has waited again for 2.50 s so far")
    assert story.admitted is None


NOT_AGAIN = (
    "then refused with 503 queue_timeout: it waited again: its room had gone to another request, "
    "or the engine could not be reached"
)


@pytest.mark.parametrize(
    ("end", "state", "said"),
    [
        (settled(Outcome.FAILED, 503, "queue_timeout", 9), "refused", NOT_AGAIN),
        (
            settled(Outcome.CLIENT_LEFT, None, "client_left", 9),
            "abandoned",
            "then the client disconnected while the request waited again, preempted",
        ),
    ],
)
def test_one_that_was_not_admitted_again_says_how_its_wait_ended(end: Settled, state: str, said: str) -> None:
    story = reported(ADMITTED, *preempted(4, 1), end)
    assert story.state == state
    assert story.conclusion == (
        "admitted at once; preempted after 3.00 s at the engine: its room went to a more important request; "
        f"waited again for 5.00 s; {said}"
    )
    assert "settled" not in text(story)
