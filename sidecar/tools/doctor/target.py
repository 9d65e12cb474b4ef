"""The examined server, and how it gets requests: streams of a few tokens, on a path that it serves."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sidecar.tools.loadgen import Planned, Seen, play

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
COUNT = "count slowly from one to two hundred"
PATIENCE_S = 10.0
"""For the answer to a single request, even from an engine that works on other clients' requests."""


class Clock:
    """How much of the time that was allowed is left."""

    def __init__(self, allowed_s: float) -> None:
        self._ends_s = time.monotonic() + allowed_s

    @property
    def left_s(self) -> float:
        """Seconds, never negative."""
        return max(0.0, self._ends_s - time.monotonic())


@dataclass(frozen=True, slots=True)
class ExaminedServer:
    """A server, a model that it serves, and the headers that every request needs, such as the one with a key.

    `ignores_end` says whether requests ask for an answer of a fixed length, which not every server knows how to.
    """

    url: str
    model: str
    headers: Mapping[str, str]
    path: str = CHAT
    ignores_end: bool = True

    def request(
        self,
        name: str,
        tokens: int,
        members: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        text: str = COUNT,
    ) -> Planned:
        """A stream of `tokens` tokens. `name` starts the prompt: no two share a prefix in the engine's cache."""
        prompt = f"{name}: {text}"
        body: dict[str, Any] = {"model": self.model, "max_tokens": tokens, "stream": True, "temperature": 0}
        body |= {"messages": [{"role": "user", "content": prompt}]} if self.path == CHAT else {"prompt": prompt}
        body |= {"ignore_eos": True} if self.ignores_end else {}
        body |= members or {}
        return Planned(0.0, self.path, {**self.headers, **(headers or {})}, json.dumps(body).encode())

    async def ask(self, planned: Planned, clock: Clock) -> Seen:
        """Sends one request by itself."""
        return (await self.send([planned], min(PATIENCE_S, clock.left_s)))[0]

    async def send(self, planned: Sequence[Planned], timeout_s: float) -> Sequence[Seen]:
        """Sends requests all at once."""
        return await play([self.url], planned, timeout_s=timeout_s)
