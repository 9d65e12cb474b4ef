"""Every request in the tests of this process keeps to the diagram of `sidecar.admission.request.Stage`."""

from __future__ import annotations

from typing import Any

from sidecar.admission.request import RequestHandler
from sidecar.admission.turn import Stage

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

wrong: list[str] = []
"""The steps that the diagram does not have, since a test last looked: a server may hide the error."""
entered: list[Stage] = []
"""The stages that requests entered, since a test last cleared it."""


class StepsOfTheDiagram:
    """In place of `RequestHandler.stage`: lets a request enter only a stage that may follow its present one."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def __get__(self, handler: RequestHandler | None, owner: type) -> Any:
        return self if handler is None else self._stored.__get__(handler, owner)

    def __set__(self, handler: RequestHandler, stage: Stage) -> None:
        before = self._before(handler)
        if before is None and stage is Stage.READING:
            self._stored.__set__(handler, stage)
            return
        if (before, stage) not in DRAWN:
            wrong.append(f"{before.name if before is not None else None} -> {stage.name}")
            raise AssertionError(wrong[-1])
        entered.append(stage)
        self._stored.__set__(handler, stage)

    def _before(self, handler: RequestHandler) -> Stage | None:
        try:
            return self._stored.__get__(handler, type(handler))  # type: ignore[no-any-return]
        except AttributeError:
            return None  # it is being made


def check_every_step() -> None:
    """From now on; once a process."""
    stored = RequestHandler.__dict__["stage"]
    if not isinstance(stored, StepsOfTheDiagram):
        RequestHandler.stage = StepsOfTheDiagram(stored)  # type: ignore[assignment]
