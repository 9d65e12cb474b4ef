"""The clients of a run: they send each request when its time has come, whatever became of the others."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import aiohttp
import msgspec
from yarl import URL

from sidecar.demo.arrivals import Arrival, Stream

ANSWER_WITHIN_S = 60.0
DOOR_SEED = 1
"""Of the choice among several doors, so that every demo of the same arrivals spreads them alike."""
_ID = re.compile(rb'"id": ?"[a-z]+-(\w+)"')
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


@dataclass(slots=True)
class Progress:
    """How far a run is."""

    sent: int = 0
    answered: int = 0
    failed: int = 0
    is_over: bool = False

    @property
    def under_way(self) -> int:
        """Requests that have no complete answer yet."""
        return self.sent - self.answered - self.failed


Asking = Callable[[Stream], tuple[Mapping[str, str], Mapping[str, object]]]
"""A request's headers and additional body members: what the three runs differ in."""


async def play(
    ports: Sequence[int], arrivals: Sequence[Arrival], asking: Asking, report: Callable[[float, Progress], None]
) -> list[Seen]:
    """Sends all arrivals to servers on loopback and returns what came back, in the same order.

    Among several servers each request goes to one by chance, so that they get uneven parts, as behind a load balancer
    that knows nothing of them. `report` is called about four times a second with the seconds since the start.
    """
    progress = Progress()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=ANSWER_WITHIN_S)
    doors = list(enumerate(URL(f"http://127.0.0.1:{port}/v1/chat/completions") for port in ports))
    rng = random.Random(DOOR_SEED)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        began = time.monotonic()
        reporter = asyncio.ensure_future(_report(began, progress, report))
        tasks: list[asyncio.Task[Seen]] = []
        for arrival in arrivals:
            await asyncio.sleep(began + arrival.at_s - time.monotonic())
            tasks.append(asyncio.ensure_future(_send(session, rng.choice(doors), arrival, asking, progress)))
            progress.sent += 1
        seen = await asyncio.gather(*tasks)
        reporter.cancel()
        progress.is_over = True
        report(time.monotonic() - began, progress)
    return list(seen)


async def _report(began: float, progress: Progress, report: Callable[[float, Progress], None]) -> None:
    while True:
        report(time.monotonic() - began, progress)
        await asyncio.sleep(0.25)


async def _send(
    session: aiohttp.ClientSession, to: tuple[int, URL], arrival: Arrival, asking: Asking, progress: Progress
) -> Seen:
    door, url = to
    headers, members = asking(arrival.stream)
    body = msgspec.json.encode(
        {
            "model": "emulated",
            "messages": [{"role": "user", "content": _prompt(arrival.prompt_tokens)}],
            "max_tokens": arrival.output_tokens,
            "stream": True,
            **members,
        }
    )
    sent = time.monotonic()
    try:
        async with session.post(url, data=body, headers={"content-type": "application/json", **headers}) as response:
            first, ttft_s = await _first_chunk(response, sent)
            async for _ in response.content.iter_any():
                pass
    except (aiohttp.ClientError, asyncio.TimeoutError):  # in Python 3.10 not yet the builtin TimeoutError
        progress.failed += 1
        return Seen(arrival, None, 0.0, None, door)
    succeeded = response.status == 200
    progress.answered += succeeded
    progress.failed += not succeeded
    found = _ID.search(first)
    return Seen(
        arrival=arrival,
        ttft_s=ttft_s if succeeded else None,
        door_wait_s=float(response.headers.get("x-admission-wait-ms", 0)) / 1000,
        request_id=found.group(1).decode() if found else None,
        door=door,
    )


async def _first_chunk(response: aiohttp.ClientResponse, sent: float) -> tuple[bytes, float]:
    """The first bytes of the answer, which come with the first token, and how long they took."""
    chunk = await response.content.readany()
    return chunk, time.monotonic() - sent


def _prompt(tokens: int) -> str:
    """Text of about that many tokens, at the usual four bytes each."""
    size = tokens * 4
    return (_TEXT * (size // len(_TEXT) + 1))[:size]
