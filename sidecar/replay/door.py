"""What the door before an engine says of each request in its answer: how it waited, and how much of that it starved."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sidecar.load import Seen

REQUEST_ID_HEADERS = ("x-admission-id", "x-request-id")
_TIMING, _WAIT = "server-timing", "x-admission-wait-ms"
_admission = re.compile(r"(?:^|,\s*)admission;dur=(\d+(?:\.\d+)?)").search
_starved = re.compile(r"(?:^|,\s*)starved;dur=(\d+(?:\.\d+)?)").search


class DoorWait(NamedTuple):
    """One request's wait for admission, in seconds. `starvation_s` is of it what came behind the first overtaking."""

    queue_wait_s: float
    starvation_s: float


@dataclass(frozen=True, slots=True)
class DoorSums:
    """What the door says of some requests together: of how many, and their seconds in sum."""

    requests: int
    queue_wait_s: float
    starvation_s: float


def door_wait(headers: Mapping[str, str]) -> DoorWait | None:
    """What an answer's headers say, to the microsecond; None where there is no door."""
    if _WAIT not in headers:
        return None
    timing = headers.get(_TIMING, "")
    waited, starved = _admission(timing), _starved(timing)
    return DoorWait(_seconds(waited), _seconds(starved))


def request_id(headers: Mapping[str, str]) -> str | None:
    """By which the door knows the request: `sidecar explain --request` takes it. None where there is no door."""
    if _WAIT not in headers:
        return None
    return next((headers[name] for name in REQUEST_ID_HEADERS if name in headers), None)


def sums(seen: Iterable[Seen]) -> DoorSums | None:
    """Over all answers, refusals too; None where there is no door."""
    waits = [wait for one in seen if (wait := door_wait(one.headers)) is not None]
    if not waits:
        return None
    return DoorSums(len(waits), sum(wait.queue_wait_s for wait in waits), sum(wait.starvation_s for wait in waits))


def _seconds(found: re.Match[str] | None) -> float:
    return 0.0 if found is None else float(found[1]) / 1000
