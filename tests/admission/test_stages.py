"""The stages of a request: the diagram, and the check of every test's requests against it."""

from __future__ import annotations

import re

import pytest

from sidecar.admission.turn import Stage
from tests.support.middleware import SMALL, App, Caller, Guarded, policy
from tests.support.stages import DRAWN, entered


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
