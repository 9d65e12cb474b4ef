"""The stages of a request: the table, the diagram, and what a defect would do."""

from __future__ import annotations

import itertools
import re

import pytest

from sidecar.middleware import stages
from sidecar.middleware.request import RequestHandler
from sidecar.middleware.stages import NEXT_STAGES, IllegalTransition, Stage
from tests.support.middleware import SMALL, App, Caller, Guarded, policy

DRAWN = {
    (Stage.READING, Stage.WAITING),
    (Stage.READING, Stage.OVER),
    (Stage.WAITING, Stage.RUNNING),
    (Stage.WAITING, Stage.OVER),
    (Stage.RUNNING, Stage.WAITING),
    (Stage.RUNNING, Stage.FOLLOWED),
    (Stage.RUNNING, Stage.OVER),
    (Stage.FOLLOWED, Stage.OVER),
}
"""The arrows of the diagram in the module's docstring."""


def handler() -> RequestHandler:
    """One that has done nothing yet but enter its first stage."""
    required = RequestHandler.__struct_fields__[: -len(RequestHandler.__struct_defaults__)]
    return RequestHandler(*(None for _ in required))  # type: ignore[arg-type]  # the stages use none of them


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Stage, Stage)), ids=lambda stage: stage.name)
def test_a_stage_follows_another_only_where_the_diagram_has_an_arrow(before: Stage, after: Stage) -> None:
    one = handler()
    one.stage = before
    if (before, after) in DRAWN:
        one.advance(after)
        assert one.stage is after
        return
    with pytest.raises(IllegalTransition, match=f"{before.name} -> {after.name}"):
        one.advance(after)
    assert one.stage is before


def test_every_stage_has_a_row_and_is_drawn_and_all_lead_to_the_end() -> None:
    assert len(NEXT_STAGES) == len(Stage)
    drawn = set(re.findall(r"\b[A-Z]{4,}\b", (stages.__doc__ or "").split("NEXT_STAGES")[0]))
    assert drawn == {stage.name for stage in Stage}
    for stage in Stage:
        reached = {stage}
        for _ in Stage:
            reached |= {after for before in reached for after in NEXT_STAGES[before]}
        assert Stage.OVER in reached


@pytest.mark.anyio
async def test_a_request_goes_through_the_stages_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Stage] = []
    advance = RequestHandler.advance

    def recorded(self: RequestHandler, stage: Stage) -> None:
        advance(self, stage)
        entered.append(stage)

    monkeypatch.setattr(RequestHandler, "advance", recorded)
    guarded = Guarded(App(), policy())
    await Caller(guarded.sidecar, SMALL).run()
    assert entered == [Stage.WAITING, Stage.RUNNING, Stage.OVER]
    entered.clear()
    await Caller(guarded.sidecar, b"no JSON").run()
    assert entered == [Stage.OVER]
    await guarded.nothing_left()
