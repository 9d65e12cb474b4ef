"""What the clients of a run send, and what each of them saw."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from sidecar import load
from sidecar.demo.arrivals import Arrival, Stream
from sidecar.load import Planned, Progress

ANSWER_WITHIN_S = 60.0
DOOR_SEED = 1
"""Of the choice among several doors, so that every demo of the same arrivals spreads them alike."""
PATH = "/v1/chat/completions"
_TEXT = "the queue serves a token under load while every tenant waits for some work before lunch and then goes home "


@dataclass(frozen=True, slots=True)
class Seen:
    """What one client saw. `ttft_s` is None where no answer came; `request_id` is the engine's own.

    `door` is the position of the server that was asked among the run's.
    """

    arrival: Arrival
    ttft_s: float | None
    door_wait_s: float
    request_id: str | None
    door: int = 0


Asking = Callable[[Stream], tuple[Mapping[str, str], Mapping[str, object]]]
"""A request's headers and additional body members: what the three runs differ in."""


async def play(
    ports: Sequence[int], arrivals: Sequence[Arrival], asking: Asking, report: Callable[[float, Progress], None]
) -> list[Seen]:
    """Sends all arrivals to servers on loopback, each to one by chance, and returns what came back, in the same order.

    `report` is called about four times a second with the seconds since the start.
    """
    seen = await load.play(
        [f"http://127.0.0.1:{port}" for port in ports],
        [_planned(arrival, asking) for arrival in arrivals],
        timeout_s=ANSWER_WITHIN_S,
        report=report,
        pick=random.Random(DOOR_SEED),
    )
    return [_seen(arrival, one) for arrival, one in zip(arrivals, seen, strict=True)]


def _planned(arrival: Arrival, asking: Asking) -> Planned:
    headers, members = asking(arrival.stream)
    body = {
        "model": "emulated",
        "messages": [{"role": "user", "content": _prompt(arrival.prompt_tokens)}],
        "max_tokens": arrival.output_tokens,
        "stream": True,
        **members,
    }
    return Planned(arrival.at_s, PATH, headers, msgspec.json.encode(body))


def _seen(arrival: Arrival, seen: load.Seen) -> Seen:
    """The engine's own id is what follows the API's prefix in that of the answer."""
    return Seen(
        arrival=arrival,
        ttft_s=seen.ttft_s if seen.is_complete else None,
        door_wait_s=float(seen.headers.get("x-admission-wait-ms", 0)) / 1000,
        request_id=None if seen.request_id is None else seen.request_id.rpartition("-")[2],
        door=seen.url_index,
    )


def _prompt(tokens: int) -> str:
    """Text of about that many tokens, at the usual four bytes each."""
    size = tokens * 4
    return (_TEXT * (size // len(_TEXT) + 1))[:size]
