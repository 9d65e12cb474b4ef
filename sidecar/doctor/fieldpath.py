"""Whether a field gets through: a request with a right value, and one with a value that nobody who reads it may accept.

A 400 to the wrong value tells that the field arrived at a reader. A 200 tells that it did not: something in between
dropped it, or the engine has no such field. Headers that engines ignore when they cannot read them tell nothing either
way; there only the order of a burst does.
"""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.doctor.target import Clock, Target
from sidecar.doctor.ways import Way
from sidecar.load import Seen

_MIDDLE = 1  # no request is harmed by a value in the middle, whatever the direction


@dataclass(frozen=True, slots=True)
class Check:
    """What became of the field.

    `refusal` is the answer to a right value where that was an error, None where it was accepted. `arrives` is None
    where it cannot be told.
    """

    way: Way
    refusal: str | None
    arrives: bool | None

    @property
    def evidence(self) -> str:
        """One clause for people."""
        if self.refusal is not None:
            return f"a request with the {self.way.title} is refused: {self.refusal}"
        if self.arrives is None:
            return (
                f"the {self.way.title} is accepted; engines ignore a bad value there, so its arrival cannot be probed"
            )
        shown = f"{self.way.title} = {self.way.invalid!r}"
        return (
            f"{shown} is refused with 400, so it arrives"
            if self.arrives
            else f"{shown} is accepted, so nobody reads it"
        )


async def check(way: Way, target: Target, clock: Clock) -> Check:
    """Sends one or two requests of one token each."""
    fine = await _sent(way, way.values[_MIDDLE], target, clock)
    if fine.error is not None:
        return Check(way, fine.error, None)
    if way.invalid is None:
        return Check(way, None, None)
    wrong = await _sent(way, way.invalid, target, clock)
    return Check(way, None, _tells(wrong))


async def _sent(way: Way, value: object, target: Target, clock: Clock) -> Seen:
    return await target.ask(target.request("field", 1, way.members(value), way.headers(value)), clock)


def _tells(wrong: Seen) -> bool | None:
    if wrong.error is None:
        return False
    return True if wrong.status in (400, 422) else None
