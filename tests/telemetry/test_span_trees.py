"""Whatever happens to a request: the children of a span lie in it, follow one another, and never add up to more."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan

from sidecar.events import (
    Admitted,
    Event,
    Obstacle,
    Outcome,
    Preempted,
    Queued,
    Refused,
    Replayed,
    ReplayReason,
    Settled,
)
from sidecar.telemetry.spans.links import WaitSoFar
from tests.telemetry.span_stories import ARRIVAL_US, Tracing, classified, parent_id, received, span_id

REPORT = "a long wait is reported"
SECONDS = st.integers(0, 5_000_000)
CLOCKS = st.integers(0, 20_000)
"""How much earlier than it is reported here a thing happened, and by how much the clocks of a store differ."""


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[int, Event | str]]:
    """What happens to one request, each with the moment in which this process hears of it."""
    now_us = 40
    heard: list[tuple[int, Event | str]] = [(now_us, classified(preemptible=True))]

    def passes() -> int:
        nonlocal now_us
        now_us += draw(SECONDS)
        return now_us

    def wait_until(at_us: int) -> tuple[int, int, int | None, dict[str, int]]:
        """The figures of a wait since the arrival, as a store with a clock of its own has them."""
        wait_us = max(1, at_us - 40 + draw(CLOCKS) - draw(CLOCKS))
        if not draw(st.booleans()):
            return wait_us, 0, None, {}
        starved_us = draw(st.integers(0, wait_us + draw(CLOCKS)))
        return wait_us, starved_us, ARRIVAL_US + at_us - starved_us, {"high": 900}

    def waits(obstacle: Obstacle) -> None:
        heard.append((now_us, Queued(ARRIVAL_US + now_us, obstacle, "no room")))
        heard.extend((passes(), REPORT) for _ in range(draw(st.integers(0, 2))))

    is_waiting = draw(st.booleans())
    if is_waiting:
        waits(Obstacle.NO_ROOM)
    for _ in range(draw(st.integers(0, 3))):
        at_us = max(0, passes() - draw(CLOCKS))
        figures = wait_until(at_us) if is_waiting else (0, 0, None, {})
        heard.append((now_us, Admitted(ARRIVAL_US + at_us, *figures, 3, engine="b#1")))
        passes()
        if draw(st.booleans()):
            heard.append((now_us, Replayed(ARRIVAL_US + now_us, "b#1", draw(st.sampled_from(ReplayReason)))))
        is_unreached = draw(st.booleans())
        heard.append((now_us, Preempted(ARRIVAL_US + now_us, ARRIVAL_US + at_us, 1, is_unreached)))
        waits(Obstacle.PREEMPTED)
        is_waiting = True
    was_admitted = any(isinstance(event, Admitted) for _, event in heard)
    at_us = max(0, passes() - draw(CLOCKS))
    figures = wait_until(at_us) if is_waiting else (0, 0, None, {})
    if draw(st.booleans()):
        heard.append((now_us, Admitted(ARRIVAL_US + at_us, *figures, 3)))
        heard.append((passes(), Settled(ARRIVAL_US + now_us, Outcome.COMPLETED, 200, 7, None, None, None)))
        return heard
    left = Refused(ARRIVAL_US + at_us, "queue_timeout", "too long", 503, *figures)
    if was_admitted:
        heard.append((now_us, Settled(ARRIVAL_US + now_us, Outcome.FAILED, 503, 0, None, None, left.code, left)))
    else:
        heard.append((now_us, left))
    return heard


def played(story: Sequence[tuple[int, Event | str]]) -> Sequence[ReadableSpan]:
    tracing = Tracing()
    observation: Any = tracing.observer.received(received())
    for now_us, event in story:
        if isinstance(event, str):
            observation.spans.report_wait(lambda _, at=now_us: WaitSoFar(ARRIVAL_US + at, {}))
        else:
            observation.on_event(event)
    return tracing.exporter.get_finished_spans()


def interval(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def faults(spans: Sequence[ReadableSpan]) -> list[str]:
    """What is wrong with a finished tree."""
    found = []
    ids = {span_id(span) for span in spans}
    roots = [span.name for span in spans if parent_id(span) not in ids]
    if roots != ["admission"]:
        found.append(f"roots: {roots}")
    for parent in spans:
        begins, ends = interval(parent)
        if ends < begins:
            found.append(f"{parent.name} ends before it begins")
        children = [(*interval(child), child.name) for child in spans if parent_id(child) == span_id(parent)]
        found += [f"{name} is not within {parent.name}" for since, to, name in children if since < begins or to > ends]
        if sum(to - since for since, to, _ in children) > ends - begins:
            found.append(f"the children of {parent.name} add up to more than it")
        phases = sorted(child for child in children if child[2] != "admission.waiting")
        for before, after in pairwise(phases):
            if after[0] < before[1]:
                found.append(f"{before[2]} and {after[2]} overlap")
    return found


@given(stories())
def test_children_lie_in_their_span_and_follow_one_another(story: Any) -> None:
    spans = played(story)
    assert faults(spans) == []
    reports = sum(event == REPORT for _, event in story)
    assert sum(span.name == "admission.waiting" for span in spans) == reports


def test_a_tree_that_is_wrong_is_found() -> None:
    spans = played([(0, classified()), (9, Settled(ARRIVAL_US + 9, Outcome.FAILED, 503, 0, None, None, "x"))])
    assert faults(spans) == []
    assert faults([*spans, *spans]) != []
