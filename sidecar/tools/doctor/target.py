"""The examined server, and how it gets requests: streams of a few tokens, on a path that it serves."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sidecar.apis import Api
from sidecar.engines import Engine
from sidecar.engines.base import Carrier, Priority
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


# -- Priority fields: the headers and body fields that carry a priority to a server, and the values to send.
#
# The first one of an engine is the one that its adapter uses, with the adapter's values. The others locate a fault:
# where the body field works and the header does not, something in between drops the header.

LEVELS = 3
"""Enough to separate an order from a mere head start of one class, and few enough to have many requests of each."""


@dataclass(frozen=True, slots=True)
class PriorityField:
    """One way for a priority to travel.

    `values` are sent for the levels, the most important first. `path` leads to a member of the body, or is one header's
    name. `invalid` is a value that every reader of this field refuses with a 400, so that a 200 shows that no one
    does; None where even the engine ignores what it cannot read.
    """

    path: tuple[str, ...]
    is_header: bool
    values: tuple[Priority, ...]
    invalid: Any = None

    @property
    def title(self) -> str:
        """As an operator calls it."""
        return f"header {self.path[0]}" if self.is_header else f"body field {'.'.join(self.path)}"

    def headers(self, value: object) -> Mapping[str, str]:
        """The headers that carry a value."""
        return {self.path[0]: str(value)} if self.is_header else {}

    def members(self, value: object) -> Mapping[str, Any]:
        """The body's members that carry a value."""
        if self.is_header:
            return {}
        for name in reversed(self.path):
            value = {name: value}
        assert isinstance(value, dict)
        return value


def ways_to(engine: type[Engine], carrier: Carrier | None, tiers: int) -> Sequence[PriorityField]:
    """How a priority can travel to an engine in the chat API, the adapter's own way first; none for no engine.

    `carrier` is the policy's choice, `tiers` the length of its ladder, of which the first, the middle and the last are
    sent.
    """
    if not engine.carriers:
        return ()
    ours = _way(engine, carrier, tiers)
    others = [_way(engine, other, tiers) for other in engine.carriers]
    if engine.other_member is not None:
        others.append(PriorityField(engine.other_member, False, ours.values, engine.invalid_member))
    return (ours, *(way for way in others if way.path != ours.path))


def sidecar_tier(header: str = "x-priority") -> PriorityField:
    """How a tier is asked for at one of our own sidecars: a number in [0, 1], which it maps to its ladder."""
    return PriorityField((header,), is_header=True, values=(1, 0.5, 0), invalid="no-such-tier")


def levels_sent(tiers: int) -> Sequence[int]:
    """The levels of a ladder that are sent: its first, its middle and its last."""
    return (0, (tiers - 1) // 2, tiers - 1)


def _way(engine: type[Engine], carrier: Carrier | None, tiers: int) -> PriorityField:
    """The engine's own, as the sidecar sends it."""
    own = engine(carrier)
    values = tuple(own.priority(level, tiers) for level in levels_sent(tiers))
    headers = own.forward(Api.CHAT, values[0]).headers
    if headers:
        return PriorityField((headers[0][0].decode(),), True, values, engine.invalid_header)
    return PriorityField(("priority",), False, values, engine.invalid_member)
