"""A small engine with continuous batching, as an ASGI app: one step at a time, in a thread of its own.

A step first fills free places from the queue, one prompt each, and then generates a token for every place. The queue is
in order of arrival or, where the engine has a priority of its own, by the `priority` of a request as vLLM reads it:
lower is more important.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from starlette.types import Receive, Scope, Send


class Model(Protocol):
    """What computes. Both methods return when the device is done, so that a step's time is the device's."""

    def prefill(self, place: int, prompt: Sequence[int]) -> int:
        """Reads a prompt into a place. Returns the first token."""

    def decode(self, places: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
        """Takes the last token of each place. Returns the next ones."""


@dataclass(slots=True)
class Running:
    """One request in the engine."""

    prompt: Sequence[int]
    output_tokens: int
    tokens: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    generated: int = 0
    last: int = 0
    is_gone: bool = False


@dataclass(slots=True)
class DeviceTime:
    """How the device spent its time, in seconds, from its first step on.

    `steps` are (begin, end).
    """

    steps: list[tuple[float, float]] = field(default_factory=list)
    most_waiting: int = 0

    @property
    def busy_s(self) -> float:
        """The time of all steps."""
        return sum(end - begin for begin, end in self.steps)

    @property
    def idle_share(self) -> float:
        """The part of the time between the first and the last step in which the device had nothing to do."""
        if not self.steps:
            return 0.0
        whole = self.steps[-1][1] - self.steps[0][0]
        return 1 - self.busy_s / whole if whole else 0.0


class Engine:
    """Serves `POST /v1/completions` with a prompt of token ids, as a stream. `places` are computed together."""

    def __init__(self, model: Model, places: int, *, by_priority: bool) -> None:
        self.time = DeviceTime()
        self._model = model
        self._by_priority = by_priority
        self._free = list(range(places))
        self._running: dict[int, Running] = {}
        self._waiting: list[tuple[int, int, Running]] = []
        self._arrivals = count()
        self._reason = asyncio.Event()
        self._thread = ThreadPoolExecutor(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # the signature of ASGI
        """Serves one request to its end."""
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        asked = json.loads(body)
        sequence = Running(asked["prompt"], asked["max_tokens"])
        priority = asked.get("priority", 0) if self._by_priority else 0
        heapq.heappush(self._waiting, (priority, next(self._arrivals), sequence))
        self.time.most_waiting = max(self.time.most_waiting, len(self._waiting))
        self._reason.set()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        try:
            for _ in range(sequence.output_tokens):
                token = await sequence.tokens.get()
                await send({"type": "http.response.body", "body": b'data: {"t": %d}\n\n' % token, "more_body": True})
        finally:
            sequence.is_gone = True
        usage = {"usage": {"prompt_tokens": len(sequence.prompt), "completion_tokens": sequence.output_tokens}}
        last = b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n"
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def run(self) -> None:
        """Makes steps while there is work, and waits for some. Cancel it to end it."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                if not self._waiting and not self._running:
                    self._reason.clear()
                    await self._reason.wait()
                await asyncio.sleep(0)  # requests that are admitted now come along
                begun = self._take()
                places = list(self._running)
                began_s = time.perf_counter()
                made = await loop.run_in_executor(self._thread, self._step, begun, places)
                ended_s = time.perf_counter()
                self.time.steps.append((began_s, ended_s))
                self._deliver(made)
        finally:
            self._thread.shutdown(wait=True)

    def _take(self) -> Sequence[int]:
        """Gives free places to the first in the queue. Returns those places."""
        begun = []
        while self._free and self._waiting:
            sequence = heapq.heappop(self._waiting)[2]
            if not sequence.is_gone:
                place = self._free.pop()
                self._running[place] = sequence
                begun.append(place)
        return begun

    def _step(self, begun: Sequence[int], places: Sequence[int]) -> dict[int, int]:
        """One step on the device, in its thread. Returns the token that each place made."""
        new = set(begun)
        made = {place: self._model.prefill(place, self._running[place].prompt) for place in begun}
        going = [place for place in places if place not in new]
        if going:
            tokens = self._model.decode(going, [self._running[place].last for place in going])
            made |= dict(zip(going, tokens, strict=True))
        return made

    def _deliver(self, made: dict[int, int]) -> None:
        for place, token in made.items():
            sequence = self._running[place]
            sequence.last, sequence.generated = token, sequence.generated + 1
            sequence.tokens.put_nowait(token)
            if sequence.generated >= sequence.output_tokens or sequence.is_gone:
                del self._running[place]
                self._free.append(place)
