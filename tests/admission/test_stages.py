"""The stages of a request: the diagram, and the check of every test's requests against it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import pytest

from sidecar.admission.request import RequestHandler, Stage
from tests.support.middleware import SMALL, App, Caller, Guarded, policy
from tests.support.stages import DRAWN, StepsOfTheDiagram, entered, wrong


def handler(stage: Stage) -> RequestHandler:
    """One that has done nothing yet but enter a stage."""
    made = RequestHandler.__new__(RequestHandler)
    RequestHandler.__dict__["stage"]._stored.__set__(made, stage)
    return made


@pytest.fixture
def own_wrong_steps() -> Iterator[list[str]]:
    yield wrong
    wrong.clear()


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Stage, Stage)), ids=lambda stage: stage.name)
def test_a_step_that_is_not_drawn_would_be_found(before: Stage, after: Stage, own_wrong_steps: list[str]) -> None:
    assert isinstance(RequestHandler.__dict__["stage"], StepsOfTheDiagram)
    one = handler(before)
    if (before, after) in DRAWN:
        one.stage = after
        assert one.stage is after
        return
    with pytest.raises(AssertionError, match=f"{before.name} -> {after.name}"):
        one.stage = after
    assert one.stage is before
    assert own_wrong_steps == [f"{before.name} -> {after.name}"]


def test_every_stage_is_drawn_and_all_lead_to_the_end() -> None:
    drawn = set(re.findall(r"\b[A-Z]{4,}\b", Stage.__doc__ or ""))
    assert drawn == {stage.name for stage in Stage}
    for stage in Stage:
        reached = {stage}
        for _ in Stage:
            reached |= {after for before, after in DRAWN if before in reached}
        assert Stage.OVER in reached


@pytest.mark.anyio
async def test_a_request_goes_through_the_stages_in_order() -> None:
    guarded = Guarded(App(), policy())
    entered.clear()
    await Caller(guarded.sidecar, SMALL).run()
    assert entered == [Stage.WAITING, Stage.RUNNING, Stage.OVER]
    entered.clear()
    await Caller(guarded.sidecar, b"no JSON").run()
    assert entered == [Stage.OVER]
    await guarded.nothing_left()
